"""Profile: a target's row count and the distribution of its columns, measured during the check.

Arrow measures small targets, and every target whose rows are all judged, batch by batch. After few
changes a larger target's profile comes from the statistics in its log, which cost no scan and have
no mean. Spark measures what Arrow can't read.

Where a profile departs from those of earlier runs is a profile anomaly, by median and MAD, which
outliers don't move. A statistic departs when its distance from the median of earlier ones exceeds
``factor`` × 1.4826 × MAD, and also a minimum distance. So a statistic that never changed may change
a little: see docs/reference/expectations.md, Anomalies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite, sqrt
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.config.quality import Drift
from waldelta.lake import TargetVersion, by_row_group, row_count
from waldelta.lake.ledger import ColumnProfile, TableState
from waldelta.lake.ledger.check_records import Profile
from waldelta.quantities import counted
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


def profile_by_statistics(
    table: TargetVersion, columns: Sequence[Sequence[Any]]
) -> Measured | None:
    """Returns a mirror's profile without reading rows; None where its log has no statistics.

    Raises what delta-rs and Arrow raise.
    """
    if table.has_deletion_vectors:
        return None
    files = table.files
    rows = row_count(files)
    if rows is None:
        return None
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


# Scales the MAD of a normal distribution to its standard deviation.
_NORMAL = 1.4826
# With so few rows, a share or a mean has no meaning.
_FEWEST_ROWS = 100
_FEW_MORE_ROWS = 10

# By name of a statistic: the range that is not an anomaly.
Bounds: TypeAlias = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Before:
    """Bounds of the row count and of each column's statistics, from earlier runs.

    They are empty while there are too few runs.
    """

    runs: int
    rows: Bounds
    columns: Mapping[str, Bounds]


def bounds_of(history: Sequence[Profile], wanted: Drift) -> Before:
    """Returns the bounds of each statistic by its latest measurements.

    A statistic measured by fewer than ``after_runs`` runs has none. Statistics that only full
    checks measure go back farther: each uses the latest runs that measured it.
    """
    latest = history[-wanted.of_runs :]
    if len(latest) < wanted.after_runs:
        return Before(len(latest), {}, {})
    middle = median(profile.rows for profile in latest)
    floor = wanted.tolerance * middle + _FEW_MORE_ROWS
    rows = {"rows": _around([float(profile.rows) for profile in latest], floor, wanted)}
    columns: dict[str, Bounds] = {}
    if middle >= _FEWEST_ROWS:
        by_name: dict[str, list[ColumnProfile]] = {}
        for profile in history:
            for column in profile.columns:
                by_name.setdefault(column.name, []).append(column)
        columns = {name: found for name, of in by_name.items() if (found := _of_column(of, wanted))}
    return Before(len(latest), rows, columns)


def _of_column(history: Sequence[ColumnProfile], wanted: Drift) -> Bounds:
    found: Bounds = {}
    spans = [c.most - c.least for c in history if c.most is not None and c.least is not None][
        -wanted.of_runs :
    ]
    deviations = [c.deviation for c in history if c.deviation is not None][-wanted.of_runs :]
    span, deviation = (median(values) if values else 0.0 for values in (spans, deviations))
    for name, floor in (
        ("nulls", wanted.tolerance / 5),
        ("mean", wanted.tolerance * deviation),
        ("least", span),
        ("most", span),
    ):
        told = [
            value for c in history if (value := getattr(c, name)) is not None and isfinite(value)
        ]
        values = told[-wanted.of_runs :]
        if len(values) >= wanted.after_runs:
            # Where all values were equal, up to half more or half less is no anomaly.
            least = (
                0.0 if name == "nulls" else wanted.tolerance * abs(median(values)) * (floor == 0)
            )
            found[name] = _around(values, max(floor, least), wanted)
    return found


def _around(values: Sequence[float], floor: float, wanted: Drift) -> tuple[float, float]:
    middle = median(values)
    mad = median(abs(value - middle) for value in values)
    width = max(wanted.factor * _NORMAL * mad, floor)
    return middle - width, middle + width


def find_departures(
    measured: Measured,
    part: str,
    bounds: Mapping[str, Mapping[str, Sequence[float]]],
) -> list[str]:
    """Returns the departures of the row count (``part`` rows) or of columns.

    They have no values of columns, which must not appear in a log.
    """
    rows, columns = measured
    if part == "rows":
        low, high = bounds.get("rows", {}).get("rows", (float("-inf"), float("inf")))
        return (
            []
            if low <= rows <= high
            else [f"{counted(rows, 'row')}, in earlier runs {max(0.0, low):,.0f} to {high:,.0f}"]
        )
    if rows < _FEWEST_ROWS:
        return []
    found = []
    for column in columns:
        of_column = bounds.get(column.name, {})
        for name, words in _WORDS.items():
            low, high = of_column.get(name, (float("-inf"), float("inf")))
            value = getattr(column, name)
            if value is not None and isfinite(value) and not low <= value <= high:
                found.append(f"{column.name}: {words}")
    return found


_WORDS = {
    "nulls": "different share of nulls",
    "mean": "different mean",
    "least": "different minimum",
    "most": "different maximum",
}
