"""The history of runs: one line each, their results, and the lake's lag at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.config.parse_text import parse_json
from waldelta.lake.ledger import Ledger, Run, now, of_run

# The verbs that bring changes into the lake.
LANDING = ("consume",)
# A chart has no more points.
MOST_POINTS = 300
# The latest run of a verb is searched this far back first.
_LATELY = timedelta(days=1)
_COLUMNS = (
    "at",
    "run_id",
    "verb",
    "status",
    "run_type",
    "start_lsn",
    "end_lsn",
    "changes",
    "seconds",
    "as_of",
    "lag_before_bytes",
    "lag_bytes",
    "retained_bytes",
    "wal_status",
    "applied",
    "land_seconds",
    "apply_seconds",
    "check_seconds",
)


@dataclass(frozen=True, slots=True)
class RunLine(Run):
    """What the ledger has of a run in one line; ``at`` is its latest event.

    ``seconds`` is the sum of its stages' durations. ``as_of``: the run landed everything that the
    source had committed then; None for verbs and runs that landed nothing. ``came_to_apply``:
    whether the run recorded which targets have everything that landed, which a run that failed
    before didn't.
    """

    came_to_apply: bool = True

    @property
    def has_landed(self) -> bool:
        """Whether the run landed anything; one that landed only a part has no ``as_of``."""
        return self.as_of is not None or self.end_lsn is not None


class Point(NamedTuple):
    """A value of a run, and how the run ended."""

    at: datetime
    value: float
    status: str = ""
    run_id: str = ""
    verb: str = "consume"


def read_runs(
    ledger: Ledger, since: datetime | None = None, run_id: str | None = None
) -> list[RunLine]:
    """Returns the runs with an event since then, newest first, or those of one id.

    Runs in progress have what their last stage recorded.
    """
    return lines_of(scan_runs(ledger, since, run_id))


def scan_runs(ledger: Ledger, since: datetime | None = None, run_id: str | None = None) -> pa.Table:
    """Returns read_runs() as Arrow, of which lines_of() makes lines: a history has many."""
    where = None if run_id is None else pc.field("run_id") == run_id
    rows = ledger.table(Run).scan(_COLUMNS, since, where)
    # The groups keep the rows' order, so "last" is the latest event's value.
    grouped = rows.group_by(["verb", "run_id"], use_threads=False).aggregate(
        [(name, "last") for name in _COLUMNS if name not in ("verb", "run_id")]
    )
    names = [name.removesuffix("_last") for name in grouped.column_names]
    return grouped.rename_columns(names).sort_by([("at", "descending")])


def lines_of(runs: pa.Table) -> list[RunLine]:
    """Returns the lines of some of the runs of scan_runs()."""
    return [_line(row) for row in runs.to_pylist()]


def latest_run(ledger: Ledger, verb: str, since: datetime | None = None) -> RunLine | None:
    """Returns the run of a verb with the latest event since then."""
    of_verb = pc.field("verb") == verb
    # Most verbs ran lately, and the whole history is long; a part of it is read as fast as a day.
    for start in (now() - _LATELY, None) if since is None else (since,):
        rows = ledger.table(Run).scan(("run_id", "at"), start, of_verb)
        if rows.num_rows:
            lines = read_runs(ledger, rows["at"][-1].as_py(), rows["run_id"][-1].as_py())
            return next(line for line in lines if line.verb == verb)
    return None


def next_success(ledger: Ledger, run: RunLine) -> str | None:
    """Returns the id of the first run of the same verb that succeeded after a run, or None."""
    is_later = (pc.field("verb") == run.verb) & (pc.field("run_id") != run.run_id)
    is_later &= pc.field("status") == "succeeded"
    rows = ledger.table(Run).scan(("run_id",), run.at, is_later)
    return str(rows["run_id"][0]) if rows.num_rows else None


def _line(row: dict[str, Any]) -> RunLine:
    applied = row.pop("applied")
    is_over = row["status"] == "succeeded"
    is_applied = is_over if applied is None else applied
    return RunLine(applied=is_applied, came_to_apply=applied is not None or is_over, **row)


Results = Callable[[RunLine], dict[str, Any]]


def read_result(
    ledger: Ledger, verb: str, run_id: str, since: datetime | None = None
) -> dict[str, Any] | None:
    """Returns the latest result of a run, or None; ``since`` shortens the search."""
    rows = ledger.table(Run).scan(("at", "result"), since, of_run(run_id, verb))
    return parse_result(rows["result"][-1].as_py()) if rows.num_rows else None


def parse_result(text: str | None) -> dict[str, Any]:
    """Returns a result from the ledger's text; empty when it isn't JSON of a run."""
    try:
        result = parse_json(text or "{}")
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def results_of(ledger: Ledger) -> Results:
    """Returns a function that reads each run's result once."""
    read = cache(partial(read_result, ledger))
    return lambda run: read(run.verb, run.run_id, run.at) or {}


def complete_upto(
    runs: Sequence[RunLine], idle_checked_at: datetime | None = None
) -> datetime | None:
    """Returns the time up to which the lake has all changes, by its runs, which are newest first.

    An idle check counts once all was applied. None when unknown.
    """
    landing = [run for run in runs if run.verb in LANDING]
    times = [run.as_of for run in landing if run.applied]
    if not landing or landing[0].applied:
        times.append(idle_checked_at)
    return max(filter(None, times), default=None)


def lag_points(runs: pa.Table, since: datetime | None = None) -> list[Point]:
    """Returns the lake's lag in seconds right before the changes of each run since then became
    readable: the worst that its readers saw. Runs without a known lag are left out.

    ``runs`` are those of scan_runs(); the points are oldest first. Of very many it returns those
    that thin_out() chooses for a chart.
    """
    rows = runs.filter(pc.field("verb").isin(LANDING))
    rows = rows.take(np.arange(rows.num_rows)[::-1])
    applied = pc.coalesce(rows["applied"], pc.equal(rows["status"], "succeeded"))
    landed = pc.cast(pc.if_else(applied, rows["as_of"], None), pa.int64())
    upto = np.maximum.accumulate(pc.fill_null(landed, 0).to_numpy())
    upto_then = np.concatenate([[0], upto])[: len(upto)]
    times = pc.cast(rows["at"], pa.int64()).to_numpy()
    values = np.where(upto_then > 0, np.maximum((times - upto_then) / 1e6, 0), np.nan)
    first = 0 if since is None else int(pc.sum(pc.less(rows["at"], since)).as_py() or 0)
    rows, values = rows.slice(first), values[first:]
    failed = pc.equal(rows["status"], "failed").to_numpy()
    numbers = _thin(np.nan_to_num(values), failed, MOST_POINTS)
    points = rows.take(pa.array(numbers, pa.int64())).select(("at", "status", "run_id")).to_pylist()
    return [
        Point(row["at"], float(age), row["status"], row["run_id"])
        for row, age in zip(points, values[numbers], strict=True)
        if not np.isnan(age)
    ]


def thin_out(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most this many points: of neighbours the highest value, and a failed one.

    No peak is lost.
    """
    values = np.array([point.value for point in points], float)
    failed = np.array([point.status == "failed" for point in points], bool)
    return [points[n] for n in _thin(values, failed, most)]


def _thin(values: np.ndarray, failed: np.ndarray, most: int) -> list[int]:
    """Returns the numbers of the points that thin_out() returns."""
    if len(values) <= most:
        return list(range(len(values)))
    size = -(-len(values) // (most // 2))
    peaks: set[int] = set()
    for first in range(0, len(values), size):
        part = slice(first, first + size)
        peaks |= {first + int(values[part].argmax())}
        if failed[part].any():
            peaks |= {first + int(failed[part].argmax())}
    return sorted(peaks)
