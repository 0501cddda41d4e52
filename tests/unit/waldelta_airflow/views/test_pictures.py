"""Histories as pictures: what stands at their axes."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from waldelta.monitoring.run_history import Point, RunLine
from waldelta_airflow.views._pictures import ceiling_of_seconds, chart, run_bars
from waldelta_airflow.views._render import _templates, run_name, url

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


def draw(macro, *values):
    text = f'{{% from "pictures.html" import {macro} with context %}}{{{{ {macro}(*values) }}}}'
    page = {"name": "shop", "url": partial(url, ""), "run_name": partial(run_name, now=BEGAN)}
    return _templates().from_string(text).render(values=values, **page)


def draw_chart(points, limit=None):
    return draw("chart", chart("behind", points, str, ceiling_of_seconds, limit))


@pytest.mark.parametrize(
    "span",
    [timedelta(seconds=50), timedelta(minutes=3), timedelta(minutes=4), timedelta(days=7)],
    ids=str,
)
def test_moments_below_a_plot_tell_apart(span):
    """Of a demo's first minutes as of a week."""
    text = draw_chart([Point(BEGAN + span * n / 4, 30.0) for n in range(5)])
    moments = re.findall(r">([-0-9: ]+:\d\d)</time>", text)
    assert len(moments) == len(set(moments)) == 5


@pytest.mark.parametrize("changes, drawn", [(0, 6.0), (5, 50.0), (10, 100.0)])
def test_a_bar_is_as_high_as_its_changes_and_is_seen_without_any(changes, drawn):
    run = RunLine(BEGAN, "<r>", "consume", "succeeded", land_seconds=1.0, apply_seconds=3.0)
    runs = [RunLine(BEGAN, "r", "consume", "succeeded", changes=10)]
    bar = [*run_bars([replace(run, changes=changes), *runs])][-1]
    text = draw("bars", [bar], "the last")
    heights = [float(h) for h in re.findall(r'class="(?:land|apply)"[^>]*height="([.\d]+)"', text)]
    assert sum(heights) == pytest.approx(drawn, abs=0.1)
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)
    assert "<r>" not in text


def test_a_chart_has_room_for_its_limit_and_links_its_failed_runs():
    points = [Point(BEGAN, 1.0), Point(BEGAN + timedelta(hours=1), 2.0, "failed", "r")]
    text = draw_chart(points, ("budget", 50.0))
    assert re.search(r'class="limit" d="M0 16\.7H1000"', text)
    assert re.search(r'y="16\.7%"[^>]*>budget: 50\.0</text>', text)
    assert "; budget: 50.0" in re.search(r'aria-label="(behind[^"]*)"', text)[1]
    assert re.findall(r'href="([^"]+)"', text) == ["/p/shop/run/consume/r"]
