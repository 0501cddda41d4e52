"""What Spark's Python workers have: their Python, and the versions of packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tasks of one query: enough that each executor gets some, since each task takes a moment.
_TASKS: Final = 64
_SECONDS_PER_TASK: Final = 0.1


@dataclass(frozen=True, slots=True)
class Workers:
    """The Python workers of one host; ``versions`` has None for a missing package."""

    host: str
    python: str
    versions: dict[str, str | None]
    has_waldelta: bool


def read_workers(spark: SparkSession, packages: Sequence[str]) -> list[Workers]:
    """Ask the workers of every executor that takes a task; they need nothing but PySpark for it."""
    from pyspark.sql.functions import udf

    # Arrow is one of the packages that they may lack.
    ask = udf(_question(tuple(packages), _SECONDS_PER_TASK), "string", useArrow=False)
    answers = spark.range(0, _TASKS, 1, _TASKS).select(ask("id").alias("answer")).distinct()
    workers = [Workers(**json.loads(row.answer)) for row in answers.collect()]
    return sorted(workers, key=lambda one: (one.host, one.python))


def _question(packages: tuple[str, ...], seconds: float) -> Any:
    """Returns a function that is sent as it is: a worker that lacks this package can't import it
    from there.
    """

    def answer(_: int) -> str:
        import importlib.util
        import json
        import platform
        import socket
        import time
        from importlib.metadata import PackageNotFoundError, version

        def installed(name: str) -> str | None:
            try:
                return version(name)
            except PackageNotFoundError:
                return None

        time.sleep(seconds)
        return json.dumps(
            {
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "versions": {name: installed(name) for name in packages},
                "has_waldelta": importlib.util.find_spec("waldelta") is not None,
            }
        )

    return answer
