"""Arrow schemas as Spark's DDL strings."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from waldelta.spark_sql import quote


def ddl(schema: pa.Schema) -> str:
    """Return an Arrow schema as DDL text."""
    fields = from_arrow_schema(schema, prefer_timestamp_ntz=True).fields
    return ", ".join(f"{quote(field.name)} {field.dataType.simpleString()}" for field in fields)
