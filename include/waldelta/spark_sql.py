"""Names, texts and schemas as Spark SQL takes them."""

from __future__ import annotations

from collections.abc import Sequence


def quote(name: str) -> str:
    """Returns a quoted identifier, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """Returns a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def parquet(folder: str) -> str:
    """Returns the Parquet files of a folder, as a relation."""
    return f"parquet.{quote(folder)}"


def insert_clause(columns: Sequence[tuple[str, str]]) -> str:
    """Returns the INSERT of a MERGE, for pairs of column and value."""
    return (
        f"insert ({', '.join(n for n, _ in columns)}) values ({', '.join(v for _, v in columns)})"
    )
