"""The Spark session and how tasks run: the first package that may import PySpark."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.spark.session import deferred_session, open_session, spark_session
    from waldelta.spark.session_pool import SessionPool
    from waldelta.spark.tasks import run_tasks

__all__ = ["SessionPool", "deferred_session", "open_session", "run_tasks", "spark_session"]
__getattr__ = lazy_exports(
    __name__,
    session="deferred_session open_session spark_session",
    session_pool="SessionPool",
    tasks="run_tasks",
)
