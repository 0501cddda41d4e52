"""When a profile isn't as earlier ones: by median and MAD, with a floor for the unchanged."""

import random
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.data.suites import HELD, ID, state
from waldelta.changes.stage.net_files import small_rows
from waldelta.config.quality import Drift
from waldelta.lake import Lake
from waldelta.lake.ledger import ColumnProfile, Ledger
from waldelta.lake.ledger.check_records import Profile, keep_profiles, latest_profiles
from waldelta.stages.check.measure.profile import (
    bounds_of,
    find_departures,
    profile_by_statistics,
    profile_by_values,
    profile_in_memory,
)
from waldelta.stages.check.suite.kinds import kind_of, plan_suite

AT = datetime(2026, 1, 1, tzinfo=UTC)
WANTED = Drift()


def profile(rows, *columns, run="r"):
    return Profile(AT, run, "public.t", 1, rows, list(columns))


ROWS = [
    ("too few runs", [1000] * 9, 0, None),
    ("as always", [1000] * 20, 1000, None),
    ("a little more than never", [1000] * 20, 1400, None),
    ("emptied", [1000] * 20, 0, "0 rows, in earlier runs 490 to 1,510"),
    ("doubled", [1000] * 20, 2000, "2,000 rows, in earlier runs 490 to 1,510"),
    ("grows steadily", [1000 * k for k in range(1, 21)], 21_000, None),
    (
        "grew steadily, and is emptied",
        [100_000 + 100 * k for k in range(20)],
        0,
        "0 rows, in earlier runs 50,465 to 151,435",
    ),
    ("comes and goes", [0, 9000] * 10, 9000, None),
    ("one outlier among them", [1000] * 19 + [1_000_000], 3000,
     "3,000 rows, in earlier runs 490 to 1,510"),
    ("only the latest count", [5] * 30 + [1000] * 20, 1000, None),
    ("a handful", [3] * 20, 9, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("history", "rows", "told"), [c[1:] for c in ROWS], ids=[c[0] for c in ROWS]
)
def test_row_counts(history, rows, told):
    """What grows, comes and goes is as before; a jump isn't."""
    before = bounds_of([profile(count) for count in history], WANTED)
    assert find_departures((rows, []), "rows", {"rows": before.rows}) == ([told] if told else [])


def column(**values):
    return ColumnProfile("v", **values)


USUAL = {"nulls": 0.1, "mean": 50.0, "deviation": 10.0, "least": 0.0, "most": 100.0}
COLUMNS = [
    ("as always", USUAL, []),
    ("a few more nulls", USUAL | {"nulls": 0.19}, []),
    ("nearly all null", USUAL | {"nulls": 0.9}, ["v: different share of nulls"]),
    ("half a deviation", USUAL | {"mean": 54.9}, []),
    (
        "in cents, no longer in euros",
        {"nulls": 0.1, "mean": 5000.0, "deviation": 1000.0, "least": 0.0, "most": 10000.0},
        ["v: different mean", "v: different maximum"],
    ),
    ("a value below all others", USUAL | {"least": -101.0}, ["v: different minimum"]),
    ("nothing measured", {}, []),
    ("infinite", USUAL | {"mean": float("inf")}, []),
]


@pytest.mark.parametrize(("values", "told"), [c[1:] for c in COLUMNS], ids=[c[0] for c in COLUMNS])
def test_columns(values, told):
    """A column by its share of nulls, its mean and its ends."""
    before = bounds_of([profile(1000, column(**USUAL))] * 20, WANTED)
    assert find_departures((1000, [column(**values)]), "columns", before.columns) == told


def test_few_rows_say_nothing_of_columns():
    """Neither before nor now."""
    before = bounds_of([profile(99, column(**USUAL))] * 20, WANTED)
    assert before.columns == {}
    before = bounds_of([profile(1000, column(**USUAL))] * 20, WANTED)
    assert find_departures((99, [column(nulls=1.0)]), "columns", before.columns) == []


def test_a_mean_that_is_measured_seldom():
    """Needs as many runs of its own."""
    seldom = [profile(1000, column(nulls=0.1, mean=1.0, deviation=1.0))] * 9 + [
        profile(1000, column(nulls=0.1))
    ] * 11
    assert list(bounds_of(seldom, WANTED).columns["v"]) == ["nulls"]


def test_a_source_without_drift_is_quiet():
    """Over random walks of a living table, hardly a run is told of."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source, history, told = random.Random(seed), [], 0
    rows, mean = 100_000.0, 50.0
    for _ in range(1000):
        rows = max(1000.0, rows * (1 + source.gauss(0.002, 0.02)))
        mean += source.gauss(0, 0.2)
        now = column(
            nulls=min(1.0, max(0.0, 0.1 + source.gauss(0, 0.01))),
            mean=mean,
            deviation=10.0,
            least=0.0,
            most=100.0,
        )
        before = bounds_of(history, WANTED)
        told += bool(find_departures((int(rows), [now]), "rows", {"rows": before.rows}))
        told += bool(find_departures((int(rows), [now]), "columns", before.columns))
        history.append(profile(int(rows), now))
    assert told == 0


def test_what_only_full_checks_measure_goes_back_farther():
    """A mean that every fourth run has told of is judged as well as the row count."""
    full, quick = column(**USUAL), column(nulls=0.1)
    before = bounds_of([profile(1000, full if n % 4 == 0 else quick) for n in range(60)], WANTED)
    found = find_departures((1000, [column(**USUAL | {"mean": 70.0})]), "columns", before.columns)
    assert found == ["v: different mean"]


def by_arrow(table, columns):
    return profile_in_memory(small_rows(table), columns)


@pytest.mark.parametrize("measure", [profile_by_values, by_arrow])
def test_values_are_measured_as_numpy_does(tmp_path, measure):
    """Far numbers, nulls, what isn't finite, decimals."""
    chance = random.Random(5)
    values = [1e9 + chance.random() for _ in range(100)]
    held = pa.table(
        {
            "f": pa.array([None, float("inf"), float("nan"), *values]),
            "d": (
                pa.array([None, None, None, *values], pa.float64()).cast(
                    pa.decimal128(20, 6), safe=False
                )
            ),
            "i": pa.array([None, None, None, *range(2**53, 2**53 + 100)], pa.int64()),
            "c": pa.array([Decimal("0.85")] * 103, pa.decimal128(12, 2)),
            "o": pa.array([None, None, None, *[1.5e308] * 50, *[1.6e308] * 50]),
            "s": pa.array([None, None, "x", *["y"] * 100]),
        }
    )
    write_deltalake(str(tmp_path), held)
    columns = [("f", True), ("d", True), ("i", True), ("c", True), ("o", True), ("s", False)]
    rows, (f, d, i, c, o, s) = measure(table_at(str(tmp_path)).open(), columns)
    assert (rows, f.nulls * rows, d.nulls * rows, s.nulls * rows) == pytest.approx((103, 1, 3, 2))
    for one in (f, d):
        assert (one.mean, one.least, one.most) == pytest.approx(
            (np.mean(values), min(values), max(values)), abs=1e-5
        )
        assert one.deviation == pytest.approx(np.std(values), abs=1e-5)
    assert (i.least, i.mean) == (2.0**53, pytest.approx(2.0**53))
    # Bounds are wider where values don't deviate at all, and a sum may be too large for a double.
    assert (c.least, c.mean, c.deviation) == (0.85, pytest.approx(0.85), 0.0)
    assert (o.most, o.mean, o.deviation) == (1.6e308, None, None)


def test_it_is_planned_before_it_says_anything():
    """So that a full check measures; what isn't judged is no result."""
    table = state([ID, ("v", "integer", "int", False), ("w", "text", "string", False)])
    assert not [p for p in plan_suite(table, HELD).expectations if "earlier runs" in p.meaning]
    plan = plan_suite(table, HELD, bounds=bounds_of([], WANTED))
    asked = [p for p in plan.expectations if "earlier runs" in p.meaning]
    assert [
        (p.severity, p.kwargs["columns"], kind_of(p.type).is_judged(p.kwargs)) for p in asked
    ] == [("warning", [["v", True], ["w", False]], False)] * 2
    found = [find_departures((7, []), p.kwargs["part"], p.kwargs["bounds"]) for p in asked]
    assert found == [[], []]


@pytest.mark.parametrize("measure", [profile_by_values, by_arrow, profile_by_statistics])
def test_profile_of_a_target(tmp_path, measure):
    """Rows, nulls, least and most are the same; a mean needs the values."""
    schema = pa.schema(
        [("n", pa.int32()), ("f", pa.float64()), ("s", pa.string()), ("none", pa.int64())]
    )
    for rows in ([(1, float("nan"), "a", None), (2, 2.5, None, None)], [(6, -1.5, None, None)]):
        part = pa.Table.from_pylist(
            [dict(zip(schema.names, row, strict=True)) for row in rows], schema
        )
        write_deltalake(str(tmp_path), part, mode="append")
    rows, (n, f, s, none) = measure(
        table_at(str(tmp_path)).open(), [("n", True), ("f", True), ("s", False), ("none", True)]
    )
    assert rows == 3
    assert (n.nulls, n.least, n.most) == (0, 1, 6)
    assert n.mean == (None if measure is profile_by_statistics else 3)
    assert (f.least, f.most) in ((-1.5, 2.5), (None, None), (-1.5, None))
    assert s == ColumnProfile("s", pytest.approx(2 / 3))
    assert none == ColumnProfile("none", 1.0)


def test_the_latest_profiles_of_each_table(tmp_path):
    """But those of a run that is checked again; maintenance keeps so many of each."""
    ledger = Ledger(Lake(tmp_path.as_uri()))
    assert latest_profiles(ledger, ["public.t"], 5) == {}
    for k in range(7):
        ledger.append_all(
            [
                profile(k, column(nulls=0.5), run=f"r{k}"),
                Profile(AT, f"r{k}", "public.u", k, 10 * k),
            ]
        )
    found = latest_profiles(ledger, ["public.t"], 3, but="r6")
    assert {name: [p.rows for p in of] for name, of in found.items()} == {"public.t": [3, 4, 5]}
    assert found["public.t"][0].columns == [column(nulls=0.5)]


def test_pruning_keeps_the_latest(tmp_path, monkeypatch):
    """Of each table, however long ago."""
    monkeypatch.setattr("waldelta.lake.ledger.check_records.KEPT_PER_TABLE", 2)
    ledger = Ledger(Lake(tmp_path.as_uri()))
    for k in range(4):
        ledger.append_all([profile(k)])
    ledger.append_all([Profile(AT, "r", "public.u", 1, 9)])
    assert ledger.table(Profile).prune(keep_profiles) == 2
    found = latest_profiles(ledger, ["public.t", "public.u"], 9)
    assert {name: [p.rows for p in of] for name, of in found.items()} == {
        "public.t": [2, 3],
        "public.u": [9],
    }
