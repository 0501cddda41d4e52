"""Splits a filter's text into tokens, by sqlglot, and describes positions in it.

sqlglot takes a fifth of a second to load, which most idle checks would spend for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from waldelta.errors import FilterNotTranslatable

if TYPE_CHECKING:
    from sqlglot.tokenizer_core import Token

DIALECT = "postgres"


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a filter; raises FilterNotTranslatable where a quote isn't closed."""
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        return sqlglot.tokenize(text, read=DIALECT)
    except SqlglotError as err:
        raise FilterNotTranslatable(text, place(text, len(text)), "a quote is not closed") from err


def place(text: str, offset: int) -> str:
    """Return line and column of an offset, and the text that begins at it.

    >>> place("a > 1 and\\n b >>> 2", 11)
    "line 2, column 2 (near 'b >>> 2')"
    """
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    near = text[offset : offset + 20].partition("\n")[0]
    return f"line {line}, column {column}" + (f" (near {near!r})" if near else " (its end)")
