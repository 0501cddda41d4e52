"""Downloads the jars of Delta, and of the object stores in WALDELTA_STORES, into the project's
cache.

``python -m demo.jars`` is a step of ``make setup``.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from demo.java import java_home
from waldelta.errors import ConfigError
from waldelta.spark.jars import fetch_jars

CACHE = Path(__file__).resolve().parents[2] / ".cache"
STORES_VARIABLE = "WALDELTA_STORES"


def main(folder: Path = CACHE / "jars") -> int:
    """Fetch the jars that are missing; 0 when all are there."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["JAVA_HOME"] = str(java_home())
    named = os.environ.get(STORES_VARIABLE, "").split(",")
    try:
        fetch_jars(folder, [name.strip() for name in named if name.strip()])
    except ConfigError as err:
        print(err, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
