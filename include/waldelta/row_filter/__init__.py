"""Row filters: any expression that PostgreSQL allows in one, understood without Spark.

``parse`` reads what an engineer wrote and, once ``_analyze`` has let PostgreSQL analyze it, the
analyzed text; ``resolve`` gives every part its type and finds its ``_signatures``, or refuses it
with its place. What Spark makes of the result stands in
``waldelta.row_filter.spark.translate``.
"""

from waldelta.row_filter._analyze import refused_filter, resolve_filter
from waldelta.row_filter.analyzed_filter import Collation, RowFilter, published_filter
from waldelta.row_filter.parse.syntax import FilterText, parse_row_filter

__all__ = [
    "Collation",
    "FilterText",
    "RowFilter",
    "parse_row_filter",
    "published_filter",
    "refused_filter",
    "resolve_filter",
]
