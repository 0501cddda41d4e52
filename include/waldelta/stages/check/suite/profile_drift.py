"""Profile anomalies: where a target's profile departs from those of earlier runs, by median and
MAD, which outliers don't move. Pure.

A statistic departs when its distance from the median of earlier ones exceeds ``factor`` × 1.4826 ×
MAD, and also a minimum distance. So a statistic that never changed may change a little: see
docs/reference/expectations.md, Anomalies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import TypeAlias

from waldelta.config.quality import Drift
from waldelta.lake.ledger import ColumnProfile
from waldelta.lake.ledger.check_records import Profile
from waldelta.quantities import counted
from waldelta.stages.check.measure.profile import Measured

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
