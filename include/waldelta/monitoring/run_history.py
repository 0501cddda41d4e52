"""The history of runs: one line each, their results, and the lake's lag at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import pyarrow.compute as pc

from waldelta.config.parse_text import parse_json
from waldelta.lake.ledger import Ledger, Run, of_run
from waldelta.pipeline.lag import Lag

# The verbs that bring changes into the lake.
LANDING = ("consume",)
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


@dataclass(frozen=True, slots=True)
class LagPoint:
    """The lake's lag right before a run's changes became readable: the worst that its readers saw.

    Its bytes are the WAL that the slot had before the run.
    """

    at: datetime
    run_id: str
    status: str
    lag: Lag


class OfRun(Protocol):
    """A value of a run: when it ended, and how."""

    @property
    def at(self) -> datetime:
        """When the run ended."""

    @property
    def status(self) -> str:
        """How it ended."""


P = TypeVar("P", bound=OfRun)


def read_runs(
    ledger: Ledger, since: datetime | None = None, run_id: str | None = None
) -> list[RunLine]:
    """Returns the runs with an event since then, newest first, or those of one id.

    Runs in progress have what their last stage recorded.
    """
    chosen = None if run_id is None else pc.field("run_id") == run_id
    rows = ledger.table(Run).scan(_COLUMNS, since, chosen)
    if not rows.num_rows:
        return []
    # The groups keep the rows' order, so "last" is the latest event's value.
    grouped = rows.group_by(["verb", "run_id"], use_threads=False).aggregate(
        [(name, "last") for name in _COLUMNS if name not in ("verb", "run_id")]
    )
    grouped = grouped.rename_columns(
        [name.removesuffix("_last") for name in grouped.column_names]
    ).sort_by([("at", "descending")])
    return [_line(row) for row in grouped.to_pylist()]


def latest_run(ledger: Ledger, verb: str, since: datetime | None = None) -> RunLine | None:
    """Returns the run of a verb with the latest event since then."""
    rows = ledger.table(Run).scan(("run_id", "at"), since, pc.field("verb") == verb)
    if not rows.num_rows:
        return None
    lines = read_runs(ledger, rows["at"][-1].as_py(), rows["run_id"][-1].as_py())
    return next(line for line in lines if line.verb == verb)


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
    return parsed(rows["result"][-1].as_py()) if rows.num_rows else None


def parsed(text: str | None) -> dict[str, Any]:
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


def lag_points(runs: Sequence[RunLine]) -> list[LagPoint]:
    """Returns the lake's lag run by run, oldest first; ``runs`` are newest first."""
    points: list[LagPoint] = []
    upto: datetime | None = None
    for run in reversed([run for run in runs if run.verb in LANDING]):
        lag = Lag.since(upto, run.at, run.lag_before_bytes)
        points.append(LagPoint(run.at, run.run_id, run.status, lag))
        upto = max(filter(None, (upto, complete_upto([run]))), default=None)
    return points


def thin_out(
    points: Sequence[P],
    most: int,
    value: Callable[[P], float | None],
) -> list[P]:
    """Returns at most this many points: of neighbours the highest value, and a failed one.

    No peak is lost.
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    kept = []
    for n in range(0, len(points), size):
        chunk = points[n : n + size]
        highest = max(chunk, key=lambda point: value(point) or 0)
        failed = next((point for point in chunk if point.status == "failed"), highest)
        kept += sorted({id(p): p for p in (highest, failed)}.values(), key=lambda point: point.at)
    return kept
