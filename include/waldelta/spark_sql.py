"""Names, texts and schemas as Spark SQL takes them."""

from __future__ import annotations


def quote(name: str) -> str:
    """Returns a quoted identifier, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """Returns a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def path(uri: str) -> str:
    """Returns a Delta table by its location."""
    return f"delta.{quote(uri)}"


def parquet(folder: str) -> str:
    """Returns the Parquet files of a folder, as a relation."""
    return f"parquet.{quote(folder)}"
