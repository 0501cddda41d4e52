"""Profile: how many rows a target has and how its columns are distributed, measured beside the check.

Of a small target by Arrow, of another by the statistics in its log, which cost no scan and know no mean; a full check measures all
of it among the aggregates that it asks anyway (``lake_expectations``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import functions as F

from spark_jobs.identifier import quote
from spark_jobs.small_target import is_small, row_count
from waldelta.lake import SPARKS_TIMESTAMPS, files_of
from waldelta.ledger_rows import TableState
from waldelta.profiles import ColumnProfile

if TYPE_CHECKING:
    from pyspark.sql import Column

# Of wide tables the first ones.
_MOST_COLUMNS = 100
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")

Measured = tuple[int, list[ColumnProfile]]


def profiled_columns(state: TableState) -> list[tuple[str, bool]]:
    """The columns that are measured, and whether they are numbers; a key's say nothing by their distribution."""
    keys = set(state.key_columns)
    columns = [column for column in state.columns if column.name not in keys][:_MOST_COLUMNS]
    return [(column.name, column.spark_type.lower().startswith(_NUMBERS)) for column in columns]


def profile_here(table: DeltaTable, columns: Sequence[tuple[str, bool]]) -> Measured | None:
    """A mirror's profile without Spark; None where its log doesn't tell. Raises what delta-rs and Arrow raise."""
    files = files_of(table)
    names = set(files.column_names)
    # Counted in the file's statistics, though they are no rows any more.
    if any(name.startswith("deletion_vector") and files[name].null_count < len(files) for name in names):
        return None
    rows = row_count(files)
    if rows is None:
        return None
    if is_small(files):
        dataset = table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS)
        held = dataset.to_table(columns=[name for name, _ in columns])
        return len(held), [_of_values(held[name], name, is_number=number) for name, number in columns]
    return rows, [_of_statistics(files, rows, name, is_number=number) for name, number in columns]


def _of_values(values: pa.ChunkedArray, name: str, *, is_number: bool) -> ColumnProfile:
    nulls = values.null_count / len(values) if len(values) else None
    if not is_number or values.null_count == len(values):
        return ColumnProfile(name, nulls)
    numbers = values.cast(pa.float64())
    finite = numbers.filter(pc.is_finite(numbers).fill_null(False))
    if not len(finite):
        return ColumnProfile(name, nulls)
    ends = pc.min_max(finite).as_py()
    return ColumnProfile(name, nulls, pc.mean(finite).as_py(), pc.stddev(finite).as_py(), ends["min"], ends["max"])


def _of_statistics(files: pa.Table, rows: int, name: str, *, is_number: bool) -> ColumnProfile:
    count, least, most = f"null_count.{name}", f"min.{name}", f"max.{name}"
    nulls = None
    if rows and count in files.column_names and not files[count].null_count:
        nulls = pc.sum(files[count]).as_py() / rows
    if not is_number or least not in files.column_names or most not in files.column_names:
        return ColumnProfile(name, nulls)
    # A file of nulls alone has neither.
    low, high = _finite(pc.min(files[least]).as_py()), _finite(pc.max(files[most]).as_py())
    return ColumnProfile(name, nulls, least=low, most=high)


def profile_aggregate(columns: Sequence[Sequence[Any]]) -> Column:
    """The same as one aggregate of Spark's, to be read by ``read_profile``."""
    asked = [F.count(F.lit(1))]
    for name, is_number in columns:
        column = F.col(quote(name))
        asked.append(F.count(column))
        if is_number:
            double = column.cast("double")
            finite = F.when(F.abs(double) < float("inf"), double)  # NaN is the greatest here
            asked += [F.avg(finite), F.stddev_pop(finite), F.min(finite), F.max(finite)]
    return F.struct(*(value.alias(f"v{k}") for k, value in enumerate(asked)))


def read_profile(columns: Sequence[Sequence[Any]], values: Sequence[Any]) -> Measured:
    """The profile from the values of the aggregate."""
    rows, found, at = int(values[0]), [], 1
    for name, is_number in columns:
        nulls = (rows - values[at]) / rows if rows else None
        numbers = [_finite(value) for value in values[at + 1 : at + 5]] if is_number else []
        found.append(ColumnProfile(name, nulls, *numbers))
        at += 5 if is_number else 1
    return rows, found


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and isfinite(value) else None
