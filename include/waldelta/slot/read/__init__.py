"""Reads the slot: the read request, the read window, and what PostgreSQL can't decode."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.slot.read.peek import peek_error
    from waldelta.slot.read.read_request import ReadRequest

__all__ = ["ReadRequest", "peek_error"]
__getattr__ = lazy_exports(__name__, peek="peek_error", read_request="ReadRequest")
