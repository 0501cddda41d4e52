"""Plots of histories: SVG without scripts, coloured by the stylesheet, with a description in
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from markupsafe import Markup

from waldelta.monitoring.run_history import LagPoint, thin_out

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 150, 62, 8, 10, 22
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 26
_MOST_POINTS = 300
# The label at the middle of a time axis, in seconds. The axis ends at twice as much, so at most at
# two weeks.
_STEPS = (
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)
# Time formats by the plot's length in seconds, so that the five times below a plot differ.
_TIMES = ((4 * 60, "%H:%M:%S"), (2 * 86400, "%H:%M"), (math.inf, "%m-%d %H:%M"))


@dataclass(frozen=True, slots=True)
class Measure:
    """What is drawn: a point's value, its label, its text form, and the end of its axis."""

    label: str
    value: Callable[[LagPoint], float | None]
    text_of: Callable[[float], str]
    ceiling: Callable[[float], float]


def lag_plot(
    points: Sequence[LagPoint], measure: Measure, link: Callable[[LagPoint], str]
) -> Markup:
    """Returns one measure over time; empty when there is nothing to draw.

    Failed runs are crosses that link to the run.
    """
    text_of = measure.text_of
    drawn = [
        (p, v)
        for p in thin_out(points, _MOST_POINTS, measure.value)
        if (v := measure.value(p)) is not None
    ]
    if len(drawn) < 2:
        return Markup("")
    first, last = drawn[0][0].at, drawn[-1][0].at
    worst = max(v for _, v in drawn)
    top = measure.ceiling(worst)
    plot = _Frame(first, (last - first).total_seconds() or 1.0, top)
    told = (
        f"{measure.label} from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC: at most"
        f" {text_of(worst)}, at last {text_of(drawn[-1][1])}"
    )
    line = " ".join(f"{plot.x(p.at):.1f},{plot.y(v):.1f}" for p, v in drawn)
    area = f"{plot.x(first):.1f},{plot.y(0):.1f} {line} {plot.x(last):.1f},{plot.y(0):.1f}"
    parts = [
        Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            _WIDTH, _HEIGHT, told
        ),
        *_axes(plot, top, text_of),
        Markup('<polygon class="area" points="{}"/><polyline class="line" points="{}"/>').format(
            area, line
        ),
        *(_cross(plot, p, v, link(p), text_of(v)) for p, v in drawn if p.status == "failed"),
        Markup("</svg>"),
    ]
    return Markup("").join(parts)


def sparkline(values: Sequence[float | None], caption: str) -> Markup:
    """Returns a small line without axes."""
    known = [(n, v) for n, v in enumerate(values) if v is not None]
    if len(known) < 2:
        return Markup("")
    # A constant line is drawn in the middle.
    top = max(*(v for _, v in known), 2 * median(v for _, v in known)) or 1.0
    last = len(values) - 1
    width, height = _SPARK_WIDTH, _SPARK_HEIGHT
    line = " ".join(
        f"{n / last * (width - 4) + 2:.1f},{height - 3 - v / top * (height - 6):.1f}"
        for n, v in known
    )
    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        ' aria-label="{caption}"><title>{caption}</title>'
        '<polyline class="line" points="{line}"/></svg>'
    ).format(w=width, h=height, caption=caption, line=line)


class _Frame:
    """Maps times and values to positions in the picture."""

    def __init__(self, first: datetime, seconds: float, top: float) -> None:
        self.first, self.seconds, self.top = first, seconds, top

    def x(self, at: datetime) -> float:
        """Returns pixels from the left."""
        return _LEFT + (at - self.first).total_seconds() / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Returns pixels from the top."""
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)


def ceiling_of_seconds(worst: float) -> float:
    """Returns the next round duration that isn't shorter."""
    return next((step * 2.0 for step in _STEPS if worst <= step * 2), worst)


def ceiling_of_bytes(worst: float) -> float:
    """Returns the next power of two that isn't less."""
    return 2.0 ** max(10, math.ceil(math.log2(max(worst, 1))))


def _axes(plot: _Frame, top: float, text_of: Callable[[float], str]) -> Iterator[Markup]:
    for value in (0, top / 2, top):
        y = plot.y(value)
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>').format(
            _LEFT, _WIDTH - _RIGHT, y=y
        )
        yield Markup('<text class="axis" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
            _LEFT - 6, y + 4, text_of(value) if value else "0"
        )
    form = next(form for longest, form in _TIMES if plot.seconds <= longest)
    for n in range(5):
        at = plot.first + timedelta(seconds=plot.seconds * n / 4)
        anchor = "start" if n == 0 else "end" if n == 4 else "middle"
        yield Markup('<text class="axis" x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
            plot.x(at), _HEIGHT - 6, anchor, f"{at:{form}}"
        )


def _cross(plot: _Frame, point: LagPoint, value: float, link: str, text: str) -> Markup:
    x, y = plot.x(point.at), plot.y(value)
    return Markup(
        '<a href="{}" aria-label="{}"><title>{}</title><circle class="touch" cx="{:.1f}"'
        ' cy="{:.1f}" r="7"/><path class="cross" d="M{:.1f} {:.1f}l8 8m0 -8l-8 8"/></a>'
    ).format(
        link, f"failed run {point.run_id}", f"failed: {point.run_id}, {text}", x, y, x - 4, y - 4
    )
