"""Parses a filter's text and PostgreSQL's analyzed expression trees."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.row_filter.parse.parse import parse_analysed, walk

__all__ = ["parse_analysed", "walk"]
__getattr__ = lazy_exports(__name__, parse="parse_analysed walk")
