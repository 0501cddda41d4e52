"""The demo's source after load and replay."""

from pathlib import Path

import pytest

from demo.flights import load
from demo.replay import prepare
from waldelta.config import load_pipeline_file

pytestmark = pytest.mark.pg


def test_flights_enter_leave_and_move_within_the_filter(database):
    """Every way across the row filter occurs, also there and back within one transaction."""
    load(database.conninfo, 40_000)
    prepare(database.conninfo)
    published = "('JFK', 'EWR')"
    ways = database.execute(f"""
        select origin in {published}, coalesce(over_origin, to_origin) in {published}, count(*),
               count(*) filter (where over_hour = move_hour),
                 count(*) filter (where to_month <> month)
        from replay.plan where move_hour is not null group by 1, 2""")
    assert {(before, after) for before, after, *_ in ways} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    assert sum(count for _, _, _, count, _ in ways) > 10
    assert sum(count for _, _, _, _, count in ways) > 10


def test_pipeline_file_takes_its_lake_from_the_environment(monkeypatch, lake):
    """The demo's file is valid in any clone; without the variable the error names it."""
    path = Path(__file__).parents[3] / "include/pipelines/flights.yml"
    monkeypatch.setenv("WALDELTA_LAKE", lake)
    assert load_pipeline_file(path).target.root == lake
    monkeypatch.delenv("WALDELTA_LAKE")
    with pytest.raises(Exception, match="environment variable WALDELTA_LAKE is not set"):
        load_pipeline_file(path)
