"""Histories as pictures: what stands at their axes."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from waldelta_airflow.views._pictures import Bar, Measure, Point, bars, ceiling_of_seconds, chart

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEHIND = Measure("behind", str, ceiling_of_seconds)


@pytest.mark.parametrize(
    "span",
    [timedelta(seconds=50), timedelta(minutes=3), timedelta(minutes=4), timedelta(days=7)],
    ids=str,
)
def test_moments_below_a_plot_tell_apart(span):
    """Of a demo's first minutes as of a week."""
    text = str(chart([Point(BEGAN + span * n / 4, 30.0) for n in range(5)], BEHIND))
    moments = re.findall(r">([-0-9: ]+:\d\d)</time>", text)
    assert len(moments) == len(set(moments)) == 5


@pytest.mark.parametrize("height, drawn", [(0.0, 6.0), (0.5, 50.0), (1.0, 100.0)])
def test_a_bar_is_as_high_as_its_changes_and_is_seen_without_any(height, drawn):
    text = str(bars([Bar("/run", "<r>", height, [("land", 0.25), ("apply", 0.75)])], "runs"))
    heights = [float(h) for h in re.findall(r'class="(?:land|apply)"[^>]*height="([.\d]+)"', text)]
    assert sum(heights) == pytest.approx(drawn, abs=0.1)
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)
    assert "<r>" not in text


def test_a_chart_has_room_for_its_limit_and_links_its_failed_runs():
    points = [Point(BEGAN, 1.0), Point(BEGAN + timedelta(hours=1), 2.0, "failed", "r", "/run/r")]
    text = str(chart(points, BEHIND, 50.0))
    assert re.search(r'class="limit" d="M0 16\.7H1000"', text)
    assert re.findall(r'href="([^"]+)"', text) == ["/run/r"]
