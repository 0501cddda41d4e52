"""Names, texts and schemas as Spark SQL takes them."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Any

# Other names of types, of Spark's and in Delta's log.
_SYNONYMS = {
    "integer": "int",
    "long": "bigint",
    "short": "smallint",
    "byte": "tinyint",
    "real": "float",
}


def quote(name: str) -> str:
    """Returns a quoted identifier, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def quote_in_template(name: str) -> str:
    """Returns a quoted identifier for a text whose names in braces are replaced later."""
    return quote(name).replace("{", "{{").replace("}", "}}")


def string(text: str) -> str:
    """Returns a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def literal(value: Any) -> str:
    """Returns a value as Spark SQL writes it; raises TypeError for a value of another kind.

    >>> [literal(value) for value in (None, True, -2, 0.5, float("nan"), "it's")]
    ['null', 'true', '-2', '0.5D', "double('nan')", "'it\\\\'s'"]
    >>> literal(date(2026, 1, 2)), literal(Decimal("1.50"))
    ("date'2026-01-02'", '1.50BD')
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value}D" if isfinite(value) else f"double('{value}')"
    if isinstance(value, (int, Decimal)):
        return f"{value:f}BD" if isinstance(value, Decimal) else str(value)
    if isinstance(value, date):
        return f"{'timestamp' if isinstance(value, datetime) else 'date'}'{value}'"
    if isinstance(value, str):
        return string(value)
    raise TypeError(f"{type(value).__name__} has no literal in Spark SQL")


def parquet(folder: str) -> str:
    """Returns the Parquet files of a folder, as a relation."""
    return f"parquet.{quote(folder)}"


@lru_cache(4096)
def simple_type(type_name: str) -> str:
    """Returns a type as Spark's simpleString writes it, without a Spark query per column.

    >>> simple_type("MAP<STRING, INTEGER>"), simple_type("decimal(12, 2)"), simple_type("long")
    ('map<string,int>', 'decimal(12,2)', 'bigint')
    """
    close = re.sub(r"\s*([,<>:()])\s*", r"\1", type_name.strip().lower())
    return re.sub(r"\w+", lambda word: _SYNONYMS.get(word[0], word[0]), close)
