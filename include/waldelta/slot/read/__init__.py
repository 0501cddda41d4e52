"""Reads the slot: the read request, the read window, and what PostgreSQL can't decode."""

from waldelta.slot.read.peek import peek_error
from waldelta.slot.read.read_request import ReadRequest

__all__ = ["ReadRequest", "peek_error"]
