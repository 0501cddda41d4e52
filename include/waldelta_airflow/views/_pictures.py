"""Pictures of histories: a pipeline's last runs, its lag and its WAL.

The macros of pictures.html draw them as SVG without scripts, with a description in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import Any, NamedTuple

from waldelta.monitoring.run_history import MOST_POINTS, Point, RunLine, thin_out
from waldelta.monitoring.table_list import TableChanges
from waldelta.pipeline.lag import Lag
from waldelta.quantities import counted
from waldelta.slot.health import Forecast
from waldelta_airflow.views._render import bytes_of, duration, number

_WIDTH, _HEIGHT = 1000, 100
_SPARK = (96, 26)
# A bar of no changes can still be seen and selected.
_LEAST = 6
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


class Bar(NamedTuple):
    """A run as a bar: its parts from below, each with a class, its top and height in percent."""

    run: Any
    text: str
    parts: Sequence[tuple[str, str, str]]

    @classmethod
    def of(cls, run: Any, text: str, share: float, parts: Iterable[tuple[str, float]]) -> Bar:
        """Returns the bar of a run with this share of the highest bar, of which each class has a
        share.
        """
        top, height, drawn = float(_HEIGHT), max(_LEAST, share * _HEIGHT), []
        for name, part in parts:
            top -= height * part
            if part:
                drawn.append((name, f"{top:.1f}", f"{height * part:.1f}"))
        return cls(run, text, drawn)


def chart(
    label: str,
    points: Sequence[Point],
    text_of: Callable[[float], str],
    ceiling: Callable[[float], float],
    limit: tuple[str, float] | None = None,
    until: datetime | None = None,
) -> dict[str, Any]:
    """Returns one measure over time, as the macro ``chart`` draws it; {} if nothing is to be drawn.

    A failed run is a dot that links to its page. ``limit`` is a line above the measure, with its
    name and value. Between the last point and ``until`` the measure isn't known.
    """
    if len(points) < 2:
        return {}
    drawn = thin_out(points, MOST_POINTS)
    first, last = drawn[0].at, until or drawn[-1].at
    seconds, worst = (last - first).total_seconds() or 1.0, max(p.value for p in drawn)
    name, bound = limit or ("", 0.0)
    top = ceiling(max(worst, bound))

    def x(at: datetime) -> str:
        return f"{(at - first).total_seconds() / seconds * _WIDTH:.1f}"

    def y(value: float) -> str:
        return f"{_HEIGHT - value / top * _HEIGHT:.1f}"

    limited = f"{name}: {text_of(bound)}"
    unknown = f", not known since {drawn[-1].at:%Y-%m-%d %H:%M}" if until else ""
    return {
        "label": f"{label} from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC: at most"
        f" {text_of(worst)}, at last {text_of(drawn[-1].value)}{unknown}"
        + (f"; {limited}" if limit else ""),
        "rows": [(text_of(value) if value else "0", y(value)) for value in (top, top / 2, 0)],
        "line": " ".join(f"{x(p.at)},{y(p.value)}" for p in drawn),
        "known": x(drawn[-1].at),
        "is_known": until is None,
        "limit": (limited, y(bound)) if limit else None,
        "failed": [
            (p, text_of(p.value), x(p.at), y(p.value)) for p in drawn if p.status == "failed"
        ],
        "times": [first + timedelta(seconds=seconds * n / 4) for n in range(5)],
        "form": next(form for longest, form in _TIMES if seconds <= longest),
    }


def sparkline(values: Sequence[float]) -> str:
    """Returns the points of a small line without axes; a constant line is in the middle."""
    if len(values) < 2:
        return ""
    top = max(*values, 2 * median(values)) or 1.0
    last, (width, height) = len(values) - 1, _SPARK
    return " ".join(
        f"{n / last * (width - 4) + 2:.1f},{height - 3 - v / top * (height - 6):.1f}"
        for n, v in enumerate(values)
    )


def ceiling_of_seconds(worst: float) -> float:
    """Returns the next round duration that isn't shorter."""
    return next((step * 2.0 for step in _STEPS if worst <= step * 2), worst)


def ceiling_of_bytes(worst: float) -> float:
    """Returns the next power of two that isn't less."""
    return 2.0 ** max(10, math.ceil(math.log2(max(worst, 1))))


def run_bars(runs: Sequence[RunLine]) -> Iterator[Bar]:
    """Yields runs as high as their changes, oldest first; ``runs`` are newest first."""
    most = max((run.changes for run in runs), default=0) or 1
    for run in reversed(runs):
        text = f"{run.status}, {counted(run.changes, 'change')}, {duration(run.seconds)}"
        yield Bar.of(run, text, run.changes / most, _parts(run))


def _parts(run: RunLine) -> Iterator[tuple[str, float]]:
    """Yields the shares of a run's time by stage; a failed or unfinished run has one part."""
    if run.status != "succeeded":
        yield run.status, 1.0
        return
    seconds = {name: getattr(run, f"{name}_seconds") or 0.0 for name in _STAGES}
    total = sum(seconds.values())
    for stage, part in seconds.items():
        yield stage, part / total if total else float(stage == "apply")


def row_bars(runs: Sequence[TableChanges]) -> Iterator[Bar]:
    """Yields what runs did to a table, oldest first; ``runs`` are newest first."""
    most = max((run.operations.written for run in runs), default=0) or 1
    for run in reversed(runs):
        counts = [(kind, getattr(run.operations, kind)) for kind in _KINDS]
        written = run.operations.written
        text = ", ".join(f"{number(count)} {kind}" for kind, count in counts)
        parts = [(kind, count / (written or 1)) for kind, count in counts]
        yield Bar.of(run, text, written / most, parts)


def lag_chart(
    points: Sequence[Point], upto: datetime | None = None, at: datetime | None = None
) -> dict[str, Any]:
    """Returns a chart of the lag before each run, and of the current lag.

    The current lag is the time from ``upto``, up to which the lake is complete, until ``at``.
    """
    if at is not None and (behind := Lag.since(upto, at).seconds) is not None:
        points = (*points, Point(at, behind))
    return chart("behind, in time", points, duration, ceiling_of_seconds)


def wal_chart(
    runs: Sequence[RunLine], forecast: Forecast | None, until: datetime | None = None
) -> dict[str, Any]:
    """Returns the WAL that the slot kept at the end of each run, with its limit if that is near.

    Until ``until`` it isn't known.
    """
    points = [
        Point(run.at, float(run.retained_bytes), run.status, run.run_id, run.verb)
        for run in reversed(runs)
        if run.retained_bytes is not None
    ]
    worst, limit = max((point.value for point in points), default=0.0), None
    if points and forecast and (of := points[-1].value + forecast.remaining_bytes) < _MUCH * worst:
        limit = forecast.limit, of
    return chart("WAL kept by the slot", points, bytes_of, ceiling_of_bytes, limit, until)
