"""``python -m spark_jobs VERB FILE``."""

from __future__ import annotations

import sys

from spark_jobs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
