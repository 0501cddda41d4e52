"""Row filters: understands any expression that PostgreSQL allows in one, without Spark.

``parse`` reads a filter as written and, once PostgreSQL has analyzed it by ``_analyze``, the
analyzed text. ``resolve`` gives every part its type and its ``_signatures`` row, or refuses it with
its position. ``waldelta.row_filter.spark.translate`` turns the result into Spark SQL.
"""

from waldelta.row_filter.analyzed_filter import (
    Collation,
    EnumType,
    RowFilter,
    published_filter,
    refused_filter,
    resolve_filter,
)
from waldelta.row_filter.parse import parse_row_filter

__all__ = [
    "Collation",
    "EnumType",
    "RowFilter",
    "parse_row_filter",
    "published_filter",
    "refused_filter",
    "resolve_filter",
]
