"""Arrow schemas and Spark's types as SQL names them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from waldelta.spark_sql import quote


def ddl(schema: pa.Schema) -> str:
    """Returns an Arrow schema as DDL text."""
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = from_arrow_schema(schema, prefer_timestamp_ntz=True).fields
    return ", ".join(f"{quote(field.name)} {sql_type(field.dataType)}" for field in fields)


def sql_type(kind: Any) -> str:
    """Returns a DataType as SQL names it, with quoted fields and without the collation of a string.

    >>> from pyspark.sql.types import ArrayType, IntegerType, StructType
    >>> sql_type(ArrayType(StructType().add("order no", IntegerType())))
    'array<struct<`order no`: int>>'
    """
    if (name := kind.typeName()) == "struct":
        fields = ", ".join(f"{quote(f.name)}: {sql_type(f.dataType)}" for f in kind.fields)
        return f"struct<{fields}>"
    if name == "array":
        return f"array<{sql_type(kind.elementType)}>"
    if name == "map":
        return f"map<{sql_type(kind.keyType)}, {sql_type(kind.valueType)}>"
    return str(kind.simpleString())
