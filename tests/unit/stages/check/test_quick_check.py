"""The quick check of a small target by Arrow: what it says is met, and what it leaves to Spark."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from tests.unit.stages.check.suite.test_kinds_plan import HELD, state
from waldelta.config.expectation_files import OwnSuite, OwnSuiteFile
from waldelta.lake import Lake
from waldelta.row_filter import EnumType
from waldelta.stages.check._quick_check import (
    are_changes_met,
    is_met_in_driver,
    quick_outcomes,
    quick_profile,
    row_conditions,
    written_since,
)
from waldelta.stages.check.check_run import has_page
from waldelta.stages.check.constraints.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import SuitePlan, plan_suite
from waldelta.stages.check.suite.profile_drift import Before
from waldelta.stages.check.suite.target_facts import CheckedTarget, SourceRules
from waldelta.stages.check.suite.target_kinds import AsBefore

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("mood", pa.string()),
        ("n", pa.decimal128(9, 2)),
        ("_wd_raw", pa.map_(pa.string(), pa.string())),
    ]
)
COLUMNS = [
    ("id", "bigint", "bigint", True),
    ("mood", "mood", "string", False),
    ("n", "numeric(9,2)", "decimal(9,2)", True),
]
LABELS = SourceRules(enums={"mood": EnumType("mood", ("sad", "ok"))})
FINE = [(1, "ok", Decimal(1), None), (2, None, Decimal(2), None)]
CASES = [
    ("all met", FINE, LABELS, True),
    ("no rows", [], LABELS, True),
    ("a key twice", [*FINE, (2, "ok", Decimal(3), None)], LABELS, False),
    ("a key that is null", [*FINE, (None, "ok", Decimal(3), None)], LABELS, False),
    ("no label of the enum", [*FINE, (3, "happy", Decimal(3), None)], LABELS, False),
    ("null where NaN stands verbatim", [*FINE, (3, "ok", None, [("n", "NaN")])], LABELS, True),
    ("null where it could stand", [*FINE, (3, "ok", None, [("mood", "NaN")])], LABELS, False),
    (
        "a text as long as declared",
        FINE,
        SourceRules(declared=[DeclaredType("mood", "character varying(2)", 1043, 6)]),
        True,
    ),
    (
        "a longer one",
        [*FINE, (3, "sad", Decimal(3), None)],
        SourceRules(declared=[DeclaredType("mood", "character(2)", 1042, 6)]),
        False,
    ),
    (
        "bits that are too few",
        FINE,
        SourceRules(declared=[DeclaredType("mood", "bit(3)", 1560, 3)]),
        False,
    ),
    (
        "no numeric of that precision",
        FINE,
        SourceRules(declared=[DeclaredType("mood", "numeric(50,2)", 1700, ((50 << 16) | 2) + 4)]),
        False,
    ),
    ("no row that lacks a value", FINE, SourceRules(unknown_rows=0), True),
    ("rows that do, in quarantine", FINE, SourceRules(unknown_rows=1), False),
    ("a condition in SQL", FINE, SourceRules([CheckConstraint("c", "(id > 0)")]), True),
    ("one that isn't met", FINE, SourceRules([CheckConstraint("c", "(id > 1)")]), False),
    (
        "one for Spark",
        FINE,
        SourceRules([CheckConstraint("c", "(id >= ((1)::bigint - id))")]),
        False,
    ),
]


def looked(tmp_path, rows, rules=None, own=None, columns=COLUMNS):
    write_deltalake(
        str(tmp_path),
        pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA),
    )
    table, plan = table_at(str(tmp_path)).open(), plan_suite(state(columns), HELD, own, rules)
    return quick_outcomes(table, plan, lambda: is_met_in_driver(table, plan))


@pytest.mark.parametrize(
    ("rows", "rules", "is_met"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_met(tmp_path, rows, rules, is_met):
    """Nothing is said of what isn't met for certain: Spark looks, and Great Expectations tells."""
    found = looked(tmp_path, rows, rules)
    assert (found is not None) is is_met
    assert all(outcome.success for outcome in found or ())


@pytest.mark.parametrize(
    "column", [("n", "numeric(9,2)", "decimal(10,2)", True), ("gone", "text", "string", False)]
)
def test_other_columns_than_recorded(tmp_path, column):
    """Of another type, or missing."""
    assert looked(tmp_path, FINE, columns=[*COLUMNS[:2], column]) is None


def test_own_expectations_are_sparks(tmp_path):
    """Whatever their arguments are."""
    item = {
        "type": "expect_column_values_to_not_be_null",
        "kwargs": {"column": "mood", "mostly": 0.1},
    }
    own = OwnSuiteFile(tmp_path, OwnSuite.model_validate({"expectations": [item]}))
    assert looked(tmp_path, FINE, own=own) is None


@pytest.mark.parametrize(("origin", "expected"), [("catalog", True), ("own", False)])
def test_only_the_targets_own_key_is_measured(origin, expected):
    """An engineer may expect that other columns are unique too: Great Expectations counts them."""
    kwargs = {"columns": ["mood"]}
    planned = PlannedExpectation(
        "expect_target_key_to_be_unique", kwargs, "critical", origin, "unique"
    )
    assert (row_conditions(SuitePlan("public.t", (planned,))) is not None) is expected


@pytest.mark.parametrize("rows", [2, 5, None])
def test_drift_that_nothing_was_measured_of_is_not_judged(tmp_path, rows):
    """It is neither as before nor otherwise, which is told; measured, it is one of both."""
    write_deltalake(uri := str(tmp_path), pa.table({"id": range(rows or 2), "n": range(rows or 2)}))
    if rows is None:
        next(tmp_path.glob("*.parquet")).unlink()
    columns = [("id", "bigint", "bigint", True), ("n", "bigint", "bigint", False)]
    before = Before(10, {"rows": (2, 4)}, {})
    plan = plan_suite(state(columns), ["id", "n"], None, None, before)
    found = quick_profile(table_at(uri).open(), plan)
    if rows == 5:
        assert found is None
        return
    measured, left = found
    assert (measured is None) is (rows is None)
    assert [planned.type for planned in left.expectations].count(AsBefore.type) == (
        0 if rows is None else 2
    )
    assert [reason.split(":")[0] for reason in left.omitted] == (["drift"] if rows is None else [])


def test_a_table_that_is_not_small(tmp_path, monkeypatch):
    """It is read in tasks."""
    monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 1)
    assert looked(tmp_path, FINE, LABELS) is None


@pytest.mark.parametrize(
    ("changes", "rows", "expected"),
    [(10_000, 100_009, False), (10_001, 100_009, True), (10_001, 100_010, False),
     (100_000, 100_000, False), (None, 100_000, False), (None, 100_001, True)]
)  # fmt: skip
def test_large_targets_with_more_changes_than_a_tenth_get_pages(tmp_path, changes, rows, expected):
    uri = str(tmp_path)
    write_deltalake(uri, pa.table({"id": pa.array(range(rows), pa.int64())}))
    write_deltalake(uri, pa.table({"id": pa.array([1], pa.int64())}), mode="overwrite")
    assert has_page(changes, table_at(uri), 0) is expected
    assert has_page(10_001, table_at(uri), 9)


CHANGES = [case for case in CASES if case[0] != "a key twice"] + [
    ("a key that an unchanged row has", [(10, "ok", Decimal(3), None)], LABELS, False),
    ("a key twice among the changed", [*FINE, (2, "ok", Decimal(3), None)], LABELS, False),
    ("a null in a column that may have none", [(3, "ok", None, None)], LABELS, False),
]


@pytest.mark.parametrize(
    ("rows", "rules", "is_met"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_of_a_large_target_the_files_written_since_are_read(tmp_path, rows, rules, is_met):
    """What an older file has isn't looked at: it was met before."""
    held = pa.Table.from_pylist([{"id": 10, "mood": "was not judged"}], SCHEMA)
    write_deltalake(str(tmp_path), held)
    write_deltalake(
        str(tmp_path),
        pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA),
        mode="append",
    )
    place = table_at(str(tmp_path))
    plan, table = plan_suite(state(COLUMNS), HELD, None, rules), place.open()
    assert are_changes_met(CheckedTarget(state(COLUMNS), 1, place), table, plan, 0) is is_met


def test_more_rows_than_one_process_reads_are_sparks(tmp_path, monkeypatch):
    write_deltalake(str(tmp_path), pa.table({"id": pa.array([1], pa.int64())}))
    write_deltalake(str(tmp_path), pa.table({"id": pa.array([2, 3], pa.int64())}), mode="append")
    place = table_at(str(tmp_path))
    assert written_since(place.open(), 0).to_table()["id"].to_pylist() == [2, 3]
    monkeypatch.setattr("waldelta.stages.check._quick_check._MOST_REWRITTEN_ROWS", 0)
    assert written_since(place.open(), 0) is None
    monkeypatch.undo()
    on_spark = Lake(str(tmp_path.parent), on_spark=True)
    place = replace(place, lake=on_spark)
    assert written_since(place.open(), 0) is None
