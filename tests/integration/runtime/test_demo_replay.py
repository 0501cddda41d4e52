"""The demo's source after load and replay, against the same year computed from the CSV files by
pandas alone.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from demo.flights import ALL_FLIGHTS, load, open_csv
from demo.replay import SEED, plan_slices, prepare, replay
from waldelta.config import load_pipeline_file

pytestmark = pytest.mark.pg

KEY = ["year", "month", "day", "carrier", "flight", "origin"]
NUMBER = KEY[:5]
ACTUAL = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"]


def read_csv(table):
    with open_csv(table) as file:
        return pd.read_csv(file, keep_default_na=False, na_values=["NA"])


@pytest.fixture(scope="module")
def year():
    """What happens to every flight of the CSV file, decided by the rules that replay.py states."""
    flights = read_csv("flights")
    flights["time_hour"] = pd.to_datetime(flights.time_hour)
    lottery = (
        flights.flight * 7919 + flights.day * 104729 + flights.month * 1299709 + SEED * 15485863
    ) % 1000
    alone = ~flights.duplicated(NUMBER, keep=False)
    flights["over"] = alone & lottery.between(12, 17)
    moves = alone & (lottery < 12)
    target = flights.origin.map({"LGA": "JFK", "JFK": "LGA"}).fillna(
        flights.day.mod(2).map({1: "JFK", 0: "LGA"}))  # fmt: skip
    flights["to_origin"] = flights.origin.where(~moves, target)
    date = pd.to_datetime(flights[["year", "month", "day"]])
    tomorrow = date + pd.Timedelta(days=1)
    flown = set(zip(date, flights.carrier, flights.flight, strict=True))
    free = pd.Series(
        [key not in flown for key in zip(tomorrow, flights.carrier, flights.flight, strict=True)]
    )
    late = alone & lottery.between(100, 299) & (tomorrow.dt.day == 1) & (flights.month < 12) & free
    flights["to_month"] = flights.month.where(~late, flights.month + 1)
    flights["to_day"] = flights.day.where(~late, 1)
    flights["to_time_hour"] = flights.time_hour.where(
        ~late, flights.time_hour + pd.Timedelta(hours=24)
    )
    flights["cancelled"] = flights.dep_time.isna()
    flights["again"] = flights.cancelled & (lottery % 20 == 5)
    return flights


def expected_flights(year):
    """The rows that must be there at the end."""
    flown = year[~year.cancelled].assign(time_hour=year.to_time_hour)
    again = year[year.again].assign(tailnum=None, **dict.fromkeys(ACTUAL))
    again["flight"] = again.flight.where(again.flight % 2 == 0, again.flight + 9000)
    final = pd.concat([flown.astype(object), again.astype(object)])
    return final.assign(origin=final.to_origin, month=final.to_month, day=final.to_day)


def read_table(database, table, columns):
    rows = database.execute(f"select {', '.join(columns)} from public.{table}")
    return pd.DataFrame(rows, columns=columns)


def assert_same(actual, expected, key):
    """Same rows, NULLs being equal, whatever the number types."""
    columns = list(actual.columns)
    frames = []
    for frame in (actual, expected[columns]):
        text = (
            frame.astype(object).where(frame.notna(), None).sort_values(key).reset_index(drop=True)
        )
        for column in columns:
            if pd.api.types.is_numeric_dtype(expected[column]) or column in ACTUAL:
                text[column] = pd.to_numeric(text[column]).astype(float)
        frames.append(text)
    pd.testing.assert_frame_equal(*frames, check_dtype=False)


@pytest.mark.soak("a whole year of the demo's data")
def test_the_year_ends_as_the_csv_files_say(database, year):
    """All flights with their actual times, minus the cancelled, moved as planned; in between, as
    scheduled.
    """
    loaded = load(database.conninfo)
    assert loaded.rows == {
        "airlines": 16,
        "airports": 1458,
        "planes": 3322,
        "weather": 13014,
        "flights": ALL_FLIGHTS,
    }
    assert database.execute(
        "select count(*) from flights where num_nonnulls(" + ", ".join(ACTUAL) + ") > 0"
    ) == [(0,)]
    prepare(database.conninfo)
    parts = [replay(database.conninfo, part) for part in plan_slices(3)]

    operations = sum((part.operations for part in parts), start=type(parts[0].operations)())
    moved = (year.to_origin != year.origin) | year.over | (year.to_month != year.month)
    updates = moved.sum() + year.over.sum() + (~year.cancelled).sum() + year.arr_time.notna().sum()
    assert operations["flights", "update"] == updates
    assert operations["flights", "delete"] == 8255
    assert operations["flights", "insert"] == year.again.sum() > 100
    assert operations["weather", "truncate"] == 1
    assert operations["airlines", "insert"] == 12
    assert operations["airlines", "delete"] == 10

    columns = [
        name
        for name in year.columns
        if name
        not in (
            "over",
            "to_origin",
            "to_month",
            "to_day",
            "to_time_hour",
            "cancelled",
            "again",
        )
    ]
    actual = read_table(database, "flights", columns)
    actual["time_hour"] = pd.to_datetime(actual.time_hour, utc=True)
    assert_same(actual, expected_flights(year), KEY)
    check_weather(database)
    check_planes(database)


def check_weather(database):
    """After the cut in August the months from April on remain; the first quarter is gone."""
    weather = read_csv("weather")
    weather["time_hour"] = pd.to_datetime(weather.time_hour)
    actual = read_table(database, "weather", list(weather.columns))
    actual["time_hour"] = pd.to_datetime(actual.time_hour, utc=True)
    assert_same(actual, weather[weather.month >= 4], ["origin", "time_hour"])


def check_planes(database):
    """Month by month: cabins, speeds, registrations; a remark grows only where an overhaul
    says so.
    """
    planes = read_csv("planes")
    planes["overhauls"] = 0
    for month in range(1, 13):
        planes.loc[planes.year % 12 == month - 1, "seats"] += 1
        planes.loc[planes.year % 24 == month, "overhauls"] += 1
        planes.loc[planes.year % 30 == month, "speed"] = 400 + month
        new = (planes.year % 36 == month) & ~planes.tailnum.str.startswith("X")
        planes.loc[new, "tailnum"] = "X" + planes.tailnum
    names = [name for name in planes.columns if name != "overhauls"]
    actual = read_table(database, "planes", names)
    actual["overhauls"] = [
        n for (n,) in database.execute("select regexp_count(remarks, 'overhaul') from planes")
    ]
    assert_same(actual, planes, ["tailnum"])
    assert planes.tailnum.str.startswith("X").sum() > 50
    assert database.execute("select count(*) from planes where length(remarks) < 2100") == [(0,)]


def test_flights_enter_leave_and_move_within_the_filter(database, year):
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


@pytest.mark.soak("a second size of the demo's data")
def test_a_small_demo_covers_the_whole_year_and_repeats_itself(database):
    """A thinned-out load keeps all twelve partitions, and the same seed makes the same
    operations.
    """
    outcomes = []
    for _ in range(2):
        loaded = load(database.conninfo, 3000)
        assert 2900 < loaded.rows["flights"] < 3100
        assert database.execute("select count(distinct tableoid) from flights") == [(12,)]
        prepare(database.conninfo)
        outcomes.append([replay(database.conninfo, part).operations for part in plan_slices(2)])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0]["flights", "delete"] > 0


def test_pipeline_file_takes_its_lake_from_the_environment(monkeypatch, lake):
    """The demo's file is valid in any clone; without the variable the error names it."""
    path = Path(__file__).parents[3] / "include/pipelines/flights.yml"
    monkeypatch.setenv("WALDELTA_LAKE", lake)
    assert load_pipeline_file(path).target.root == lake
    monkeypatch.delenv("WALDELTA_LAKE")
    with pytest.raises(Exception, match="environment variable WALDELTA_LAKE is not set"):
        load_pipeline_file(path)
