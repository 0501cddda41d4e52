"""Profile: a target's row count and the distribution of its columns, measured during the check.

Arrow measures small targets, and every target whose rows are all judged, batch by batch. After few
changes a larger target's profile comes from the statistics in its log, which cost no scan and have
no mean. Spark measures what Arrow can't read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.lake import TargetVersion, by_row_group, row_count
from waldelta.lake.ledger import ColumnProfile, TableState
from waldelta.spark_sql import quote
from waldelta.types import stored_type

# Of wide tables only the first columns are measured.
_MOST_COLUMNS = 100
_ROWS_AT_ONCE = 1 << 16

Measured = tuple[int, list[ColumnProfile]]


def profiled_columns(state: TableState) -> list[tuple[str, bool]]:
    """Returns the measured columns and whether they are numbers.

    Key columns are left out, because their distribution has no meaning.
    """
    keys = set(state.key_columns)
    columns = [column for column in state.columns if column.name not in keys][:_MOST_COLUMNS]
    return [(c.name, stored_type(c.type_name, c.spark_type).is_number) for c in columns]


def profile_in_driver(table: TargetVersion, columns: Sequence[tuple[str, bool]]) -> Measured | None:
    """Returns a mirror's profile without Spark; None where its log has no statistics.

    Raises what delta-rs and Arrow raise.
    """
    if table.has_deletion_vectors:
        return None
    files = table.files
    rows = row_count(files)
    if rows is None:
        return None
    if table.is_small:
        return profile_by_values(table, columns)
    return rows, [_of_statistics(files, rows, name, is_number=number) for name, number in columns]


def profile_by_values(table: TargetVersion, columns: Sequence[Sequence[Any]]) -> Measured:
    """Returns a mirror's profile from its values, with a few batches in memory at a time.

    Raises what delta-rs and Arrow raise.
    """
    dataset = table.dataset()
    files = table.files
    # Nulls are counted from the statistics where all files have them, without reading values.
    counts = {name: f"null_count.{name}" for name, is_number in columns if not is_number}
    told = {
        name: int(pc.sum(files[count]).as_py() or 0)
        for name, count in counts.items()
        if count in files.column_names and not files[count].null_count
    }
    read = {name: _Values(is_number) for name, is_number in columns if name not in told}
    scanner = by_row_group(dataset).scanner(
        list(read), batch_size=_ROWS_AT_ONCE, batch_readahead=2, fragment_readahead=1
    )
    rows = 0
    for batch in scanner.to_batches():
        rows += batch.num_rows
        for values, column in zip(read.values(), batch.columns, strict=True):
            values.add(column)
    found = []
    for name, _ in columns:
        seen = read.get(name)
        nulls = told[name] if seen is None else seen.nulls
        found.append(
            ColumnProfile(
                name, nulls / rows if rows else None, *(seen.statistics() if seen else ())
            )
        )
    return rows, found


class _Values:
    """Aggregates a column's values batch by batch; values that aren't finite are ignored.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances (1979).
    """

    def __init__(self, is_number: bool) -> None:
        self.nulls, self._is_number = 0, is_number
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._least, self._most = inf, -inf

    def add(self, column: pa.Array) -> None:
        self.nulls += column.null_count
        if not self._is_number:
            return
        numbers = column.drop_null().cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        numbers = numbers[np.isfinite(numbers)]
        if not (count := len(numbers)):
            return
        mean = float(numbers.mean())
        apart, total = mean - self._mean, self._count + count
        self._squares += (
            float(((numbers - mean) ** 2).sum()) + apart**2 * self._count * count / total
        )
        self._mean, self._count = self._mean + apart * count / total, total
        self._least, self._most = (
            min(self._least, float(numbers.min())),
            max(self._most, float(numbers.max())),
        )

    def statistics(self) -> tuple[float, ...]:
        """Returns mean, population standard deviation, minimum and maximum; nothing without
        numbers.
        """
        return (
            (self._mean, sqrt(self._squares / self._count), self._least, self._most)
            if self._count
            else ()
        )


def _of_statistics(files: pa.Table, rows: int, name: str, *, is_number: bool) -> ColumnProfile:
    count, least, most = f"null_count.{name}", f"min.{name}", f"max.{name}"
    nulls = None
    if rows and count in files.column_names and not files[count].null_count:
        nulls = pc.sum(files[count]).as_py() / rows
    if not is_number or least not in files.column_names or most not in files.column_names:
        return ColumnProfile(name, nulls)
    # A file with only nulls has neither bound.
    low, high = _finite(pc.min(files[least]).as_py()), _finite(pc.max(files[most]).as_py())
    return ColumnProfile(name, nulls, least=low, most=high)


def measure_profile(frame: DataFrame, columns: Sequence[Sequence[Any]]) -> Measured:
    """Returns the profile of a frame, by one Spark aggregate."""
    asked = [F.count(F.lit(1))]
    for name, is_number in columns:
        column = F.col(quote(name))
        asked.append(F.count(column))
        if is_number:
            double = column.cast("double")
            finite = F.when(F.abs(double) < float("inf"), double)  # Spark sorts NaN above infinity.
            asked += [F.avg(finite), F.stddev_pop(finite), F.min(finite), F.max(finite)]
    (row,) = frame.agg(*(value.alias(f"v{k}") for k, value in enumerate(asked))).collect()
    values = iter(row)
    rows = int(next(values))
    profiles = []
    for name, is_number in columns:
        nulls = (rows - next(values)) / rows if rows else None
        numbers = [_finite(value) for value in islice(values, 4 if is_number else 0)]
        profiles.append(ColumnProfile(name, nulls, *numbers))
    return rows, profiles


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and isfinite(value) else None
