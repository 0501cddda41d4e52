"""Names as Spark SQL takes them."""

from __future__ import annotations


def quote(name: str) -> str:
    """An identifier, whatever it contains."""
    return "`" + name.replace("`", "``") + "`"


def path(uri: str) -> str:
    """A Delta table by its location."""
    return f"delta.{quote(uri)}"
