"""Names, texts and schemas as Spark SQL takes them."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema


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


def ddl(schema: pa.Schema) -> str:
    """An Arrow schema as the text of a DDL."""
    fields = from_arrow_schema(schema, prefer_timestamp_ntz=True).fields
    return ", ".join(f"{quote(field.name)} {field.dataType.simpleString()}" for field in fields)
