"""Names, texts and schemas as Spark SQL takes them."""

from __future__ import annotations


def quote(name: str) -> str:
    """An identifier, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """A string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def path(uri: str) -> str:
    """A Delta table by its location."""
    return f"delta.{quote(uri)}"


def parquet(folder: str) -> str:
    """The Parquet files of a folder, as a relation."""
    return f"parquet.{quote(folder)}"
