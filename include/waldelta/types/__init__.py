"""Decides all that depends on a PostgreSQL type: one file per family of types."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.types.base import TargetType
    from waldelta.types.type_map import column_types, stored_type

__all__ = ["TargetType", "column_types", "stored_type"]
__getattr__ = lazy_exports(__name__, base="TargetType", type_map="column_types stored_type")
