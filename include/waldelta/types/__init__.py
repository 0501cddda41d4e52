"""Decides all that depends on a PostgreSQL type: one file per family of types."""

from waldelta.types.base import TargetType
from waldelta.types.type_map import column_types, stored_type

__all__ = ["TargetType", "column_types", "stored_type"]
