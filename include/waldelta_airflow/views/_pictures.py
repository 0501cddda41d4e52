"""Pictures of histories: a pipeline's last runs, lag and WAL, and the way of its changes.

They are SVG without scripts, coloured by the stylesheet, with a description in words: the templates
of pictures.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from statistics import median

from markupsafe import Markup

from waldelta.config import PipelineFile
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.run_history import MOST_POINTS, LagPoint, RunLine, thin_out
from waldelta.monitoring.status import LastSlot, wal_per_hour
from waldelta.monitoring.table_list import RunRows
from waldelta.pipeline.lag import Lag
from waldelta.quantities import counted, size
from waldelta.slot.health import Forecast
from waldelta_airflow.views._render import bytes_of, duration, number, picture, run_name, url

_WIDTH, _HEIGHT = 1000, 100
_SPARK = (96, 26)
# A bar of no changes can still be seen and selected.
_LEAST = 0.06
# The label at the middle of a time axis, in seconds. The axis ends at twice as much, so at most at
# two weeks.
_STEPS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
          172800, 604800)  # fmt: skip
# Time formats by the plot's length in seconds, so that the five times below a plot differ.
_TIMES = ((4 * 60, "%H:%M:%S"), (2 * 86400, "%H:%M"), (math.inf, "%m-%d %H:%M"))
# A limit that exceeds the highest value by this factor isn't drawn: it would press the line to the
# ground.
_MUCH = 5
_STAGES = ("land", "apply", "check")
_KINDS = ("inserted", "updated", "deleted")


@dataclass(frozen=True, slots=True)
class Measure:
    """How values are shown: their label, the text of one, and the end of their axis."""

    label: str
    text_of: Callable[[float], str]
    ceiling: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """A run's value; a failed run is a dot that links to ``href``."""

    at: datetime
    value: float
    status: str = ""
    name: str = ""
    href: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A run as a bar: its height from 0 to 1, divided by the shares of its classes."""

    href: str
    label: str
    height: float
    parts: Sequence[tuple[str, float]]

    @property
    def rects(self) -> Iterator[tuple[str, float, float]]:
        """Yields class, top and height of each part, the first at the bottom."""
        height, top = max(_LEAST, self.height) * _HEIGHT, float(_HEIGHT)
        for name, share in self.parts:
            top -= height * share
            yield name, top, height * share


def chart(
    points: Sequence[Point],
    measure: Measure,
    limit: float | None = None,
    until: datetime | None = None,
) -> Markup:
    """Returns one measure over time; empty when there is nothing to draw.

    ``limit`` is a line above it. Between the last point and ``until`` the measure isn't known.
    """
    if len(points) < 2:
        return Markup("")
    drawn, text_of = thin_out(points, MOST_POINTS, lambda point: point.value), measure.text_of
    first, last = drawn[0].at, until or drawn[-1].at
    seconds, worst = (last - first).total_seconds() or 1.0, max(p.value for p in drawn)
    top = measure.ceiling(max(worst, limit or 0))

    def x(at: datetime) -> str:
        return f"{(at - first).total_seconds() / seconds * _WIDTH:.1f}"

    def y(value: float) -> str:
        return f"{_HEIGHT - value / top * _HEIGHT:.1f}"

    label = (
        f"{measure.label} from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC: at most"
        f" {text_of(worst)}, at last {text_of(drawn[-1].value)}"
        f"{f', not known since {drawn[-1].at:%Y-%m-%d %H:%M}' if until else ''}"
    )
    return picture(
        "chart",
        label,
        rows=[(text_of(value) if value else "0", y(value)) for value in (top, top / 2, 0)],
        line=" ".join(f"{x(p.at)},{y(p.value)}" for p in drawn),
        known=x(drawn[-1].at),
        is_known=until is None,
        limit=y(limit) if limit else None,
        failed=[
            (f"failed: {p.name}, {text_of(p.value)}", p.href, x(p.at), y(p.value))
            for p in drawn
            if p.status == "failed"
        ],
        times=[first + timedelta(seconds=seconds * n / 4) for n in range(5)],
        form=next(form for longest, form in _TIMES if seconds <= longest),
    )


def bars(runs: Sequence[Bar], caption: str) -> Markup:
    """Returns runs as bars that link to them, oldest first."""
    return picture("bars", runs, caption)


def sparkline(values: Sequence[float | None], caption: str) -> Markup:
    """Returns a small line without axes."""
    known = [(n, v) for n, v in enumerate(values) if v is not None]
    if len(known) < 2:
        return Markup("")
    # A constant line is drawn in the middle.
    top = max(*(v for _, v in known), 2 * median(v for _, v in known)) or 1.0
    last, (width, height) = len(values) - 1, _SPARK
    line = " ".join(
        f"{n / last * (width - 4) + 2:.1f},{height - 3 - v / top * (height - 6):.1f}"
        for n, v in known
    )
    return picture("spark", line, caption)


def ceiling_of_seconds(worst: float) -> float:
    """Returns the next round duration that isn't shorter."""
    return next((step * 2.0 for step in _STEPS if worst <= step * 2), worst)


def ceiling_of_bytes(worst: float) -> float:
    """Returns the next power of two that isn't less."""
    return 2.0 ** max(10, math.ceil(math.log2(max(worst, 1))))


_SECONDS = Measure("behind, in time", duration, ceiling_of_seconds)
_WAL = Measure("WAL kept by the slot", bytes_of, ceiling_of_bytes)


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
    href = partial(_failed_run, base, name)
    drawn = [
        Point(p.at, behind, p.status, p.run_id, href(p, "consume"))
        for p in points
        if (behind := p.lag.seconds) is not None
    ]
    if at is not None and (behind := Lag.since(upto, at).seconds) is not None:
        drawn.append(Point(at, behind))
    return chart(drawn, _SECONDS)


def _failed_run(base: str, name: str, run: LagPoint | RunLine, verb: str) -> str:
    """Returns the address of a run's dot; only those that failed have one."""
    return url(base, "p", name, "run", verb, run.run_id) if run.status == "failed" else ""


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
    href = partial(_failed_run, base, name)
    points = [
        Point(run.at, float(run.retained_bytes), run.status, run.run_id, href(run, run.verb))
        for run in reversed(runs)
        if run.retained_bytes is not None
    ]
    limit = points[-1].value + forecast.remaining_bytes if points and forecast else None
    worst = max((point.value for point in points), default=0.0)
    limit = limit if limit is not None and limit < _MUCH * worst else None
    return chart(points, _WAL, limit, until)


@dataclass(frozen=True, slots=True)
class Place:
    """A place that changes pass through; ``rate`` is what reaches it in an hour, and ``at`` is when
    its value was read, if it isn't of the period that is shown.
    """

    label: str
    value: str
    note: str = ""
    rate: str = ""
    state: str = ""
    at: datetime | None = None


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
            slot.at,
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
