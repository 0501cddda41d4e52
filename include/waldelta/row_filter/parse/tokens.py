"""Splits a filter's text into tokens, by sqlglot.

sqlglot takes a fifth of a second to load, which most idle checks would spend for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter.parse.place import place

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
