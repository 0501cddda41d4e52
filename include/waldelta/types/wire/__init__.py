"""Turns PostgreSQL's binary formats into the texts of the output functions: one file per family."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.types.wire.wire_format import has_wire_format, text_of, wire_name

__all__ = ["has_wire_format", "text_of", "wire_name"]
__getattr__ = lazy_exports(__name__, wire_format="has_wire_format text_of wire_name")
