"""Describes positions in a filter, for messages."""

from __future__ import annotations


def place(text: str, offset: int) -> str:
    """Return line and column of an offset, and the text that begins at it.

    >>> place("a > 1 and\\n b >>> 2", 11)
    "line 2, column 2 (near 'b >>> 2')"
    """
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    near = text[offset : offset + 20].partition("\n")[0]
    return f"line {line}, column {column}" + (f" (near {near!r})" if near else " (its end)")
