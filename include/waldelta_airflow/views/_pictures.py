"""The pictures of a pipeline: its last runs, the slot's WAL, and the way of its changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from waldelta.config import PipelineFile
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.run_history import LagPoint, RunLine
from waldelta.monitoring.status import LastSlot, wal_per_hour
from waldelta.monitoring.table_list import RunRows
from waldelta.pipeline.lag import Lag
from waldelta.quantities import counted, size
from waldelta.slot.health import Forecast
from waldelta_airflow.views._plot import (
    Bar,
    Measure,
    Point,
    bars,
    ceiling_of_bytes,
    ceiling_of_seconds,
    chart,
)
from waldelta_airflow.views._render import bytes_of, duration, number, run_name, url

_SECONDS = Measure("behind, in time", duration, ceiling_of_seconds)
_WAL = Measure("WAL kept by the slot", bytes_of, ceiling_of_bytes)
# A limit that exceeds the highest value by this factor isn't drawn: it would press the line to the
# ground.
_MUCH = 5
_STAGES = ("land", "apply", "check")
_KINDS = ("inserted", "updated", "deleted")


def run_strip(base: str, name: str, runs: Sequence[RunLine], at: datetime) -> Markup:
    """Returns runs as bars as high as their changes; ``runs`` are newest first."""
    most = max((run.changes for run in runs), default=0) or 1
    drawn = [
        Bar(
            url(base, "p", name, "run", run.verb, run.run_id),
            f"{run_name(run.run_id, at).striptags()}: {run.status},"
            f" {counted(run.changes, 'change')}, {duration(run.seconds)}",
            run.changes / most,
            list(_parts(run)),
        )
        for run in reversed(runs)
    ]
    return bars(drawn, f"the last {counted(len(drawn), 'run')}, oldest first")


def _parts(run: RunLine) -> Iterator[tuple[str, float]]:
    """Yields the shares of a run's time by stage; a failed or unfinished run has one part."""
    if run.status != "succeeded":
        yield run.status, 1.0
        return
    seconds = {name: getattr(run, f"{name}_seconds") or 0.0 for name in _STAGES}
    total = sum(seconds.values())
    for stage, part in seconds.items():
        yield stage, part / total if total else float(stage == "apply")


def rows_strip(base: str, name: str, runs: Sequence[RunRows], at: datetime) -> Markup:
    """Returns what runs did to a table as bars; ``runs`` are newest first."""
    most = max((run.operations.written for run in runs), default=0) or 1
    drawn = []
    for run in reversed(runs):
        counts = {kind: getattr(run.operations, kind) for kind in _KINDS}
        told = ", ".join(f"{number(count)} {kind}" for kind, count in counts.items())
        drawn.append(
            Bar(
                url(base, "p", name, "run", run.verb, run.run_id),
                f"{run_name(run.run_id, at).striptags()}: {told}",
                run.operations.written / most,
                [(kind, count / (run.operations.written or 1)) for kind, count in counts.items()],
            )
        )
    return bars(drawn, f"rows by run, the last {counted(len(drawn), 'run')}, oldest first")


def lag_chart(
    base: str,
    name: str,
    points: Sequence[LagPoint],
    upto: datetime | None = None,
    at: datetime | None = None,
) -> Markup:
    """Returns the lag before each run, with links to failed runs; then that ``at`` a time, of a
    lake that is complete up to ``upto``.
    """
    drawn = [
        Point(p.at, behind, p.status, p.run_id, url(base, "p", name, "run", "consume", p.run_id))
        for p in points
        if (behind := p.lag.seconds) is not None
    ]
    if at is not None and (behind := Lag.since(upto, at).seconds) is not None:
        drawn.append(Point(at, behind))
    return chart(drawn, _SECONDS)


def wal_chart(
    base: str,
    name: str,
    runs: Sequence[RunLine],
    forecast: Forecast | None,
    until: datetime | None = None,
) -> Markup:
    """Returns the WAL that the slot kept at the end of each run, with its limit if that is near.

    Until ``until`` it isn't known.
    """
    points = [
        Point(
            run.at,
            float(run.retained_bytes),
            run.status,
            run.run_id,
            url(base, "p", name, "run", run.verb, run.run_id),
        )
        for run in reversed(runs)
        if run.retained_bytes is not None
    ]
    limit = points[-1].value + forecast.remaining_bytes if points and forecast else None
    worst = max((point.value for point in points), default=0.0)
    limit = limit if limit is not None and limit < _MUCH * worst else None
    return chart(points, _WAL, limit, until)


@dataclass(frozen=True, slots=True)
class Place:
    """A place that changes pass through; ``rate`` is what reaches it in an hour."""

    label: str
    value: str
    note: str = ""
    rate: str = ""
    state: str = ""


def flow(
    pipeline: PipelineFile,
    glance: Glance,
    slot: LastSlot,
    hours: int,
    consumers: Sequence[str],
) -> list[Place]:
    """Returns the way of changes from the source to ``consumers``, DAGs that read the targets."""
    wal = wal_per_hour(glance.runs)
    landed = sum(run.changes for run in glance.runs)
    return [
        Place(
            "source",
            pipeline.source.conn_id,
            counted(len(pipeline.source.publications), "publication"),
        ),
        Place(
            "slot",
            f"{size(slot.retained_bytes)} of WAL" if slot.retained_bytes is not None else "–",
            pipeline.source.slot,
            f"{bytes_of(wal)} of WAL/h" if wal is not None else "",
            slot.mark if slot.mark in ("failed", "warning") else "",
        ),
        Place(
            "change log",
            counted(landed, "change"),
            f"in {hours} h",
            _rate(landed, hours, "change"),
        ),
        Place(
            "targets",
            counted(len(glance.tables), "table"),
            f"{glance.changed_tables} changed in {hours} h",
            _rate(glance.operations.written + glance.copied, hours, "row"),
        ),
        Place(
            "consumers",
            counted(len(consumers), "DAG"),
            ", ".join(consumers[:3]) + (" …" if len(consumers) > 3 else "")
            or "none is scheduled on its assets",
        ),
    ]


def _rate(count: int, hours: int, one: str) -> str:
    return f"{counted(round(count / hours), one)}/h"
