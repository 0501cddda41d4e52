"""Translates an analyzed row filter to Spark SQL that means the same."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.row_filter.spark.translate import spark_condition

__all__ = ["spark_condition"]
__getattr__ = lazy_exports(__name__, translate="spark_condition")
