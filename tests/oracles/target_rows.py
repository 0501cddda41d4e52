"""The rows of a Delta table, read by delta-rs: a tenth of what a Spark query of a few rows costs.

Tests that are about what Spark reads, or about Delta features that delta-rs can't read, use Spark.
"""

from collections import Counter
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


def target_rows(job: Any, table: str, *columns: str) -> list[tuple]:
    """The rows of the target of this table in ``public``, as sorted tuples."""
    uri = job.lake.target(f"public.{table}").uri
    return sorted(map(tuple, read_target(uri, *columns)), key=repr)


def source_rows(database: Any, table: str, *columns: str, where: str = "true") -> list[tuple]:
    """The same of the source's rows, in its own order of columns unless they are named."""
    listed = ", ".join(columns) or "*"
    rows = database.execute(f"select {listed} from {table} where {where}")
    return sorted((tuple(_naive(value) for value in row) for row in rows), key=repr)


def _naive(value: Any) -> Any:
    return _local(value) if isinstance(value, datetime) and value.tzinfo else value


def assert_equal(ours: list, theirs: list, *what: Any) -> None:
    """Both have the same rows; a failure shows what only one of them has."""
    only_ours, only_theirs = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    assert ours == theirs, (what, {"only ours": only_ours, "only theirs": only_theirs})
