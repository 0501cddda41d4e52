"""The rows of a Delta table, read by delta-rs: a tenth of what a Spark query of a few rows costs.

Tests that are about what Spark reads, or about Delta features that delta-rs can't read, use Spark.
"""

from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import Row


def read_target(uri: str, *columns: str) -> list[Row]:
    """The rows, with these columns or all, in the Python types that Spark's ``collect`` returns."""
    table = DeltaTable(uri).to_pyarrow_table(columns=list(columns) or None)
    names = list(columns) or table.column_names
    values = [_values(table[name]) for name in names]
    return [Row(*names)(*row) for row in zip(*values, strict=True)]


def _values(column: pa.ChunkedArray) -> list[Any]:
    found = column.to_pylist(maps_as_pydicts="strict")
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        return [_local(value) for value in found]
    return found


def _local(value: datetime | None) -> datetime | None:
    return None if value is None else value.astimezone().replace(tzinfo=None)
