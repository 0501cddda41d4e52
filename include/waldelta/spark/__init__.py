"""The Spark session and how tasks run: the first package that may import PySpark."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.spark.runner import InProcess, OnSpark, Runner, RunnerPool, open_runner
    from waldelta.spark.session import open_session, spark_session

__all__ = [
    "InProcess",
    "OnSpark",
    "Runner",
    "RunnerPool",
    "open_runner",
    "open_session",
    "spark_session",
]
__getattr__ = lazy_exports(
    __name__,
    runner="InProcess OnSpark Runner RunnerPool open_runner",
    session="open_session spark_session",
)
