"""Histories as pictures: what stands at their axes."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from waldelta.monitoring.run_history import LagPoint
from waldelta.pipeline.lag import Lag
from waldelta_airflow.views._plot import Measure, ceiling_of_seconds, lag_plot

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEHIND = Measure("behind", lambda point: point.lag.seconds, str, ceiling_of_seconds)


@pytest.mark.parametrize(
    "span",
    [timedelta(seconds=50), timedelta(minutes=3), timedelta(minutes=4), timedelta(days=7)],
    ids=str,
)
def test_moments_below_a_plot_tell_apart(span):
    """Of a demo's first minutes as of a week."""
    points = [LagPoint(BEGAN + span * n / 4, f"r{n}", "succeeded", Lag(30.0)) for n in range(5)]
    text = str(lag_plot(points, BEHIND, lambda point: point.run_id))
    moments = re.findall(r">([-0-9: ]+:\d\d)</text>", text)
    assert len(moments) == len(set(moments)) == 5
