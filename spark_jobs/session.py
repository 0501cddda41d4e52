"""Re-exports ``spark_session`` for code outside this repository."""

from waldelta.spark import spark_session

__all__ = ["spark_session"]
