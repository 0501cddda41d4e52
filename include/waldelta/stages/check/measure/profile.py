"""Profile: a target's row count and the distribution of its columns, measured during the check.

Arrow measures small targets in memory, DataFusion every other target whose rows are all judged.
After few changes a larger target's profile comes from the statistics in its log, which cost no scan
and have no mean. Spark measures what only it reads.

Where a profile departs from those of earlier runs is a profile anomaly, by median and MAD, which
outliers don't move. A statistic departs when its distance from the median of earlier ones exceeds
``factor`` × 1.4826 × MAD, and also a minimum distance. So a statistic that never changed may change
a little: see docs/reference/expectations.md, Anomalies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from statistics import median
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.config.quality import Drift
from waldelta.lake import TargetVersion, row_count
from waldelta.lake.ledger import ColumnProfile, TableState
from waldelta.lake.ledger.check_records import Profile
from waldelta.quantities import counted
from waldelta.spark_sql import quote_in_template
from waldelta.stages.check.measure.failing_rows import Relation, rows_of

# Of wide tables only the first columns are measured.
_MOST_COLUMNS = 100

Measured = tuple[int, list[ColumnProfile]]


def profiled_columns(state: TableState) -> list[tuple[str, bool]]:
    """Returns the measured columns and whether they are numbers.

    Key columns are left out, because their distribution has no meaning.
    """
    keys = set(state.key_columns)
    columns = [column for column in state.columns if column.name not in keys][:_MOST_COLUMNS]
    return [(c.name, c.stored_as.is_number) for c in columns]


def profile_by_statistics(
    table: TargetVersion, columns: Sequence[Sequence[Any]]
) -> Measured | None:
    """Returns a mirror's profile without reading rows; None where its log has no statistics, or
    has them by the files' own column names.

    Raises what delta-rs and Arrow raise.
    """
    if table.has_deletion_vectors or table.maps_columns:
        return None
    files = table.files
    rows = row_count(files)
    if rows is None:
        return None
    return rows, [_of_statistics(files, rows, name, is_number=number) for name, number in columns]


def profile_by_values(table: Relation, columns: Sequence[Sequence[Any]]) -> Measured:
    """Returns the profile of rows by one aggregate, which reads a few batches at a time.

    Values that aren't finite have no part in the statistics. Raises what rows_of() raises.
    """
    # Nulls are counted from the statistics where all files have them, without reading values.
    nulls = _counted_nulls(table) if isinstance(table, TargetVersion) else {}
    aggregates = ["count(*)"]
    for name, is_number in columns:
        column = quote_in_template(name)
        aggregates.append(f"count(*) - {nulls[name]}" if name in nulls else f"count({column})")
        if is_number:
            double = f"cast({column} as double)"  # Both sort NaN above infinity.
            finite = f"case when abs({double}) < cast('Infinity' as double) then {double} end"
            aggregates += [f"{of}({finite})" for of in ("avg", "stddev_pop", "min", "max")]
    listed = ", ".join(f"{value} as v{k}" for k, value in enumerate(aggregates))
    (row,) = rows_of(f"select {listed} from {{target}}", target=table)  # noqa: S608 - quoted
    values = iter(row.values())
    rows, profiles = int(next(values)), []
    for name, is_number in columns:
        absent = (rows - next(values)) / rows if rows else None
        numbers = [_finite(value) for value in islice(values, 4 if is_number else 0)]
        profiles.append(ColumnProfile(name, absent, *numbers))
    return rows, profiles


def profile_in_memory(table: pa.Table, columns: Sequence[Sequence[Any]]) -> Measured:
    """Returns what profile_by_values() does, of rows in memory."""
    profiles = []
    for name, is_number in columns:
        column = table[name]
        numbers: list[float | None] = [None] * 4
        if is_number:
            doubles = column.cast(pa.float64(), safe=False)
            finite = doubles.filter(pc.is_finite(doubles))
            values = (pc.mean(finite), pc.stddev(finite), *pc.min_max(finite).values())
            numbers = [_finite(value.as_py()) for value in values]
            if numbers[2] is not None and numbers[2] == numbers[3]:
                # Of equal values, a mean is rounded, and so the deviation from it isn't 0.
                numbers[:2] = numbers[2], 0.0
        absent = column.null_count / len(table) if len(table) else None
        profiles.append(ColumnProfile(name, absent, *numbers))
    return len(table), profiles


def _counted_nulls(table: TargetVersion) -> dict[str, int]:
    """Returns the number of nulls of columns whose statistics have it for the rows of all files."""
    if table.has_deletion_vectors or table.maps_columns:
        return {}
    files, prefix = table.files, "null_count."
    return {
        name.removeprefix(prefix): int(pc.sum(files[name]).as_py() or 0)
        for name in files.column_names
        if name.startswith(prefix) and not files[name].null_count
    }


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


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


# Scales the MAD of a normal distribution to its standard deviation.
_NORMAL = 1.4826
# With so few rows, a share or a mean has no meaning.
_FEWEST_ROWS = 100
_FEW_MORE_ROWS = 10

# The range of each statistic, by its name, that isn't an anomaly.
Bounds: TypeAlias = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ProfileBounds:
    """Bounds of the row count and of each column's statistics, from earlier runs.

    They are empty while there are too few runs.
    """

    rows: Bounds
    columns: Mapping[str, Bounds]


def bounds_of(history: Sequence[Profile], drift: Drift) -> ProfileBounds:
    """Returns the bounds of each statistic by its latest measurements.

    A statistic measured by fewer than ``after_runs`` runs has none. Statistics that only full
    checks measure go back farther: each uses the latest runs that measured it.
    """
    latest = history[-drift.of_runs :]
    if len(latest) < drift.after_runs:
        return ProfileBounds({}, {})
    middle = median(profile.rows for profile in latest)
    floor = drift.tolerance * middle + _FEW_MORE_ROWS
    rows = {"rows": _around([float(profile.rows) for profile in latest], floor, drift)}
    columns: dict[str, Bounds] = {}
    if middle >= _FEWEST_ROWS:
        by_name: dict[str, list[ColumnProfile]] = {}
        for profile in history:
            for column in profile.columns:
                by_name.setdefault(column.name, []).append(column)
        columns = {
            name: bounds for name, of in by_name.items() if (bounds := _of_column(of, drift))
        }
    return ProfileBounds(rows, columns)


def _of_column(history: Sequence[ColumnProfile], drift: Drift) -> Bounds:
    bounds: Bounds = {}
    spans = [c.most - c.least for c in history if c.most is not None and c.least is not None][
        -drift.of_runs :
    ]
    deviations = [c.deviation for c in history if c.deviation is not None][-drift.of_runs :]
    span, deviation = (median(values) if values else 0.0 for values in (spans, deviations))
    for name, floor in (
        ("nulls", drift.tolerance / 5),
        ("mean", drift.tolerance * deviation),
        ("least", span),
        ("most", span),
    ):
        finite_values = [
            value for c in history if (value := getattr(c, name)) is not None and isfinite(value)
        ]
        values = finite_values[-drift.of_runs :]
        if len(values) >= drift.after_runs:
            # Where all values were equal, up to half more or half less is no anomaly.
            least = 0.0 if name == "nulls" else drift.tolerance * abs(median(values)) * (floor == 0)
            bounds[name] = _around(values, max(floor, least), drift)
    return bounds


def _around(values: Sequence[float], floor: float, drift: Drift) -> tuple[float, float]:
    middle = median(values)
    mad = median(abs(value - middle) for value in values)
    width = max(drift.factor * _NORMAL * mad, floor)
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
        bound = bounds.get("rows", {}).get("rows", (float("-inf"), float("inf")))
        usual = f"in earlier runs {max(0.0, bound[0]):,.0f} to {bound[1]:,.0f}"
        return [f"{counted(rows, 'row')}, {usual}"] if _departs(rows, bound) else []
    if rows < _FEWEST_ROWS:
        return []
    return [
        f"{column.name}: {words}"
        for column in columns
        for name, words in _WORDS.items()
        if _departs(getattr(column, name), bounds.get(column.name, {}).get(name))
    ]


def _departs(value: float | None, bound: Sequence[float] | None) -> bool:
    if value is None or bound is None or not isfinite(value):
        return False
    return not bound[0] <= value <= bound[1]


_WORDS = {
    "nulls": "different share of nulls",
    "mean": "different mean",
    "least": "different minimum",
    "most": "different maximum",
}
