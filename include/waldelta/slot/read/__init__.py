"""Reads the slot: the read request, the read window, and what PostgreSQL can't decode."""

from waldelta.slot.read.peek import ReadRequest, peek_error

__all__ = ["ReadRequest", "peek_error"]
