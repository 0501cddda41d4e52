"""What a suite's evaluation finds by Arrow, and what it leaves to Spark."""

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.data.suites import HELD, state
from waldelta.changes.stage.net_files import small_rows
from waldelta.config.expectation_files import OwnExpectation, OwnSuite, OwnSuiteFile
from waldelta.errors import SparkUnreachable
from waldelta.lake import Lake, by_row_group
from waldelta.row_filter import EnumType
from waldelta.stages.check.check_run import CheckHistory, has_page
from waldelta.stages.check.constraints.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.evaluate import (
    SuiteEvaluation,
    _drop_costly_expectations,
    _with_profile,
    written_since,
)
from waldelta.stages.check.measure.profile import ProfileBounds
from waldelta.stages.check.measure.references import CheckedTarget
from waldelta.stages.check.suite.expectation import SourceRules, TargetRows
from waldelta.stages.check.suite.kinds import KINDS, plan_suite
from waldelta.stages.check.suite.sql_conditions import listed

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
SPARK = "spark"
KEY, ROWS = "expect_target_key_to_be_unique", "expect_target_rows_to_satisfy"
NOT_NULL = "expect_column_values_to_not_be_null"
IN_SET = "expect_column_values_to_be_in_set"
LENGTHS = "expect_column_value_lengths_to_be_between"
LENGTH, BETWEEN = "expect_column_value_lengths_to_equal", "expect_column_values_to_be_between"
AS_BEFORE = "expect_target_to_be_as_before"
# Rows, rules, and the failing rows by the expectation, or that only Spark finds out.
CASES = [
    ("all met", FINE, LABELS, {}),
    ("no rows", [], LABELS, {}),
    ("a key twice", [*FINE, (2, "ok", Decimal(3), None)], LABELS, {KEY: 2}),
    ("a key that is null", [*FINE, (None, "ok", Decimal(3), None)], LABELS, {NOT_NULL: 1}),
    ("no label of the enum", [*FINE, (3, "happy", Decimal(3), None)], LABELS, {IN_SET: 1}),
    ("null where NaN stands verbatim", [*FINE, (3, "ok", None, [("n", "NaN")])], LABELS, {}),
    ("null where it could stand", [*FINE, (3, "ok", None, [("mood", "x")])], LABELS, {ROWS: 1}),
    ("a text as long as declared", FINE,
     SourceRules(declared=[DeclaredType("mood", "character varying(2)", 1043, 6)]), {}),
    ("a longer one", [*FINE, (3, "sad", Decimal(3), None)],
     SourceRules(declared=[DeclaredType("mood", "character(2)", 1042, 6)]), {LENGTHS: 1}),
    ("bits that are too few", FINE, SourceRules(declared=[DeclaredType("mood", "bit(3)", 1560, 3)]),
     {"expect_column_value_lengths_to_equal": 1}),
    ("no numeric of that precision", FINE,
     SourceRules(declared=[DeclaredType("mood", "numeric(50,2)", 1700, ((50 << 16) | 2) + 4)]),
     {"expect_column_values_to_match_regex": 1}),
    ("no row that lacks a value", FINE, SourceRules(unknown_rows=0), {}),
    ("rows that do, in quarantine", FINE, SourceRules(unknown_rows=1),
     {"expect_target_to_know_all_values": None}),
    ("a condition in SQL", FINE, SourceRules([CheckConstraint("c", "(id > 0)")]), {}),
    ("one that isn't met", FINE, SourceRules([CheckConstraint("c", "(id > 1)")]), {ROWS: 1}),
    ("one for Spark", FINE, SourceRules([CheckConstraint("c", "(id >= ((1)::bigint - id))")]),
     SPARK),
]  # fmt: skip


def write(folder, rows, mode="error"):
    held = [dict(zip(SCHEMA.names, row, strict=True)) for row in rows]
    write_deltalake(str(folder), pa.Table.from_pylist(held, SCHEMA), mode=mode)
    return table_at(str(folder))


class NoSpark:
    """A runner for what needs no session."""

    def spark(self):
        raise SparkUnreachable("it isn't needed")


def outcomes_of(place, plan, *, met=None, decided=()):
    """The evaluation of a suite by Arrow; raises SparkUnreachable where that needs Spark.

    It is the same of rows that were read into memory before.
    """
    evaluation = _evaluated(place, plan, None, met, decided)
    if met is None:
        in_memory = _evaluated(place, plan, small_rows(place.open()), met, decided)
        assert (in_memory.outcomes, in_memory.omitted) == (evaluation.outcomes, evaluation.omitted)
    return evaluation


def _evaluated(place, plan, in_memory, met, decided):
    target, table = CheckedTarget(state(COLUMNS), place.open().version, place), place.open()
    if in_memory is not None:
        table.hold(in_memory)
    types = {listed(name): kind for name, kind in table.spark_types.items()}
    with ThreadPoolExecutor() as background:
        run = SimpleNamespace(
            background=background, decided={plan.table: decided}, history=CheckHistory()
        )
        rows = TargetRows(target, NoSpark(), types, table=table, met=met, in_memory=in_memory)
        evaluation = SuiteEvaluation(run, rows, plan)
        outcomes = evaluation.evaluate()
    return SimpleNamespace(outcomes=outcomes, omitted=evaluation.omitted)


def failing(evaluation):
    return {o.planned.type: o.unexpected_count for o in evaluation.outcomes if not o.success}


def failing_or_spark(*given, **named):
    try:
        return failing(outcomes_of(*given, **named))
    except SparkUnreachable:
        return SPARK


@pytest.mark.parametrize(
    ("rows", "rules", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_fails(tmp_path, rows, rules, expected):
    plan = plan_suite(state(COLUMNS), HELD, None, rules)
    assert failing_or_spark(write(tmp_path, rows), plan) == expected


def example(key, **values):
    return {"key": {"id": key}, "values": values}


# Rows, rules, and examples of the rows that fail.
EXAMPLES = {
    "none": (FINE, LABELS, []),
    "a value": ([*FINE, (3, "happy", Decimal(3), None)], LABELS, [example("3", mood="happy")]),
    "a key that is null": ([*FINE, (None, "ok", Decimal(3), None)], LABELS, [example(None)]),
    "a long value": ([(3, "x" * 1000, Decimal(3), None)], LABELS, [example("3", mood="x" * 200)]),
    "markup": ([(3, "<b>", Decimal(3), None)], LABELS, [example("3", mood="<b>")]),
    "many": ([(n, "no", Decimal(3), None) for n in range(9)], LABELS,
     [example(str(n), mood="no") for n in range(5)]),
    "a condition": (FINE, SourceRules([CheckConstraint("c", "(id > 1)")]), [example("1")]),
    "no single rows": ([*FINE, FINE[0]], LABELS, []),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "rules", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples_of_failing_rows(tmp_path, rows, rules, expected):
    """They have the key, and the values that the expectation reads."""
    plan = plan_suite(state(COLUMNS), HELD, None, rules)
    outcomes = outcomes_of(write(tmp_path, rows), plan).outcomes
    assert [json.loads(text) for one in outcomes for text in one.examples] == expected


def test_failing_rows_are_counted_and_shown_by_one_scan(tmp_path, monkeypatch):
    """Also where one has its five rows before another has any."""
    rows = [(n, "no", Decimal(3), None) for n in range(9)]
    conditions = [CheckConstraint(f"c{n}", f"(id < {n})") for n in range(3, 9)]
    place, scans = write(tmp_path, rows), []

    def count(dataset):
        scans.append(dataset)
        return by_row_group(dataset)

    monkeypatch.setattr("waldelta.stages.check.evaluate._ROWS_AT_ONCE", 2)
    monkeypatch.setattr("waldelta.stages.check.evaluate.by_row_group", count)
    outcomes = outcomes_of(
        place, plan_suite(state(COLUMNS), HELD, None, SourceRules(conditions))
    ).outcomes
    found = [[json.loads(text)["key"]["id"] for text in one.examples] for one in outcomes]
    expected = [[str(key) for key in range(n, 9)][:5] for n in range(3, 9)]
    assert [ids for ids in found if ids] == expected
    assert len(scans) == 2  # Of the files, and of the rows in memory.


@pytest.mark.parametrize(
    ("column", "observed"),
    [
        (("n", "numeric(9,2)", "decimal(10,2)", True), "n is decimal(9,2), not decimal(10,2)"),
        (("gone", "text", "string", False), "gone is missing; n isn't recorded"),
    ],
)
def test_other_columns_than_recorded(tmp_path, column, observed):
    """Of another type, or missing."""
    plan = plan_suite(state([*COLUMNS[:2], column]), HELD)
    first, *_ = outcomes_of(write(tmp_path, FINE), plan).outcomes
    assert (first.success, first.observed) == (False, observed)


OWN = [
    ({"type": NOT_NULL, "kwargs": {"column": "mood", "mostly": 0.1}}, {}),
    ({"type": NOT_NULL, "kwargs": {"column": "mood", "mostly": 0.6}}, {NOT_NULL: 1}),
    ({"type": KEY, "kwargs": {"columns": ["n"]}}, {}),
    ({"type": ROWS, "kwargs": {"condition": "id > 1", "meaning": "m"}}, {ROWS: 1}),
    ({"type": ROWS, "kwargs": {"condition": "abs(id) > 1", "meaning": "m"}}, SPARK),
    ({"type": NOT_NULL, "kwargs": {"column": "MOOD"}}, SPARK),
    ({"type": "expect_column_values_to_be_unique", "kwargs": {"column": "id"}}, SPARK),
    # Spark sorts NaN above infinity, Great Expectations converts a text to a boolean, and a number
    # of more than 64 bits is none of Arrow's.
    ({"type": BETWEEN, "kwargs": {"column": "n", "max_value": float("nan")}}, SPARK),
    ({"type": BETWEEN, "kwargs": {"column": "id", "max_value": float("nan")}}, SPARK),
    ({"type": BETWEEN, "kwargs": {"column": "id", "min_value": 1, "strict_min": "no"}}, SPARK),
    ({"type": LENGTH, "kwargs": {"column": "mood", "value": 1 << 70}}, SPARK),
]


@pytest.mark.parametrize(("item", "expected"), OWN)
def test_own_expectations(tmp_path, item, expected):
    """Arrow counts what it is certain of; a name in other letters, too, is Spark's to resolve."""
    own = OwnSuiteFile(tmp_path, OwnSuite.model_validate({"expectations": [item]}))
    plan = plan_suite(state(COLUMNS), HELD, own)
    plan = replace(plan, expectations=plan.expectations[-1:])
    assert failing_or_spark(write(tmp_path, FINE), plan) == expected


def test_rows_that_an_operator_let_in(tmp_path):
    """They aren't what a gate is for, and it says so; other rows that fail it still fail."""
    item = {"type": NOT_NULL, "kwargs": {"column": "v"}, "gate": "stop"}
    own = OwnSuiteFile(tmp_path, OwnSuite.model_validate({"expectations": [item]}))
    plan = plan_suite(state([]), ["id", "v", "_wd_lsn"], own)
    plan = replace(plan, expectations=plan.expectations[-1:])
    rows = pa.table({"id": [1, 2, 3], "v": ["x", None, None], "_wd_lsn": [5, 6, 9]})
    write_deltalake(str(tmp_path), rows)
    place = table_at(str(tmp_path))
    assert failing(outcomes_of(place, plan, decided=[(5, 7)])) == {NOT_NULL: 2}
    evaluation = outcomes_of(place, plan, decided=[(5, 7), (9, 10)])
    assert failing(evaluation) == {}
    (told,) = evaluation.omitted
    assert told.endswith("not judged on rows that an operator accepted or released")
    (outcome,) = evaluation.outcomes
    assert outcome.verdict == outcome.observed == "accepted or released by an operator: 2 rows"


@pytest.mark.parametrize("rows", [2, 5, None])
def test_drift_that_nothing_was_measured_of_is_not_judged(tmp_path, rows):
    """It is neither as before nor otherwise, which is told; measured, it is one of both."""
    write_deltalake(uri := str(tmp_path), pa.table({"id": range(rows or 2), "n": range(rows or 2)}))
    columns = [("id", "bigint", "bigint", True), ("n", "bigint", "bigint", False)]
    plan = plan_suite(state(columns), ["id", "n"], None, None, ProfileBounds({"rows": (2, 4)}, {}))
    place = table_at(uri)
    target = CheckedTarget(state(columns), 0, place)
    # A target that lacks a column isn't measured.
    types = {} if rows is None else place.open().spark_types
    given = TargetRows(target, NoSpark(), types, table=place.open(), met=0)
    measured, left = _with_profile(given, plan)
    assert (measured.measured is None) is (rows is None)
    if rows is None:
        assert AS_BEFORE not in [planned.type for planned in left.expectations]
        assert [reason.split(":")[0] for reason in left.omitted] == ["drift"]
        return
    planned = next(p for p in left.expectations if p.type == AS_BEFORE)
    (outcome,) = KINDS[AS_BEFORE].outcomes([planned], measured)
    assert outcome.success is (rows == 2)


def own_conditions(count, first=0):
    """A file of so many conditions, each of which one row of FINE doesn't meet."""
    items = [
        OwnExpectation(type=ROWS, kwargs={"condition": f"id <> 1 or id < -{n}", "meaning": f"m{n}"})
        for n in range(first, first + count)
    ]
    return OwnSuiteFile("public.t.yml", OwnSuite(expectations=tuple(items)))


def test_twice_the_expectations_are_twice_the_work(tmp_path):
    """Ten thousand expectations take no longer, each, than a few."""
    place = write(tmp_path, FINE)

    def calls(count, first):
        calls = Counter()
        plan = plan_suite(state(COLUMNS), HELD, own_conditions(count, first))
        sys.setprofile(lambda frame, event, _: calls.update([event]))
        try:
            evaluation = outcomes_of(place, plan)
        finally:
            sys.setprofile(None)
        assert sum(not o.success for o in evaluation.outcomes) == count
        return calls["call"]

    calls(1, 0)
    few, many = calls(50, 1_000), calls(100, 2_000)
    assert many < 2.1 * few


@pytest.mark.parametrize(
    ("most", "refused"),
    [(10, None),
     (9, ("public.t: its 5 own expectations aren't judged on 2 rows, since that would take hours:"
          " write at most 4, such as one condition for several columns"))],
)  # fmt: skip
def test_more_than_an_hour_of_own_expectations_is_refused(tmp_path, monkeypatch, most, refused):
    """The rest of the suite is judged; an ordinary suite is, however many rows there are."""
    monkeypatch.setattr("waldelta.stages.check.evaluate._MANY_EXPECTATIONS", 2)
    monkeypatch.setattr("waldelta.stages.check.evaluate._MOST_JUDGED", most)
    table = write(tmp_path, FINE).open()
    plan = plan_suite(state(COLUMNS), HELD, own_conditions(5))
    bounded, few = (
        _drop_costly_expectations(plan, table),
        plan_suite(state(COLUMNS), HELD, own_conditions(2)),
    )
    assert bounded.refused == ((refused,) if refused else ())
    left = {p.origin for p in bounded.expectations}
    assert left == ({"catalog"} if refused else {"catalog", "own"})
    assert (_drop_costly_expectations(few, table), _drop_costly_expectations(plan, None)) == (
        few,
        plan,
    )
    if refused:
        first = replace(plan, refused=("the first",))
        assert _drop_costly_expectations(first, table).refused == ("the first", refused)


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
    ("a key that an unchanged row has", [(10, "ok", Decimal(3), None)], LABELS, {KEY: 2}),
    ("a key twice among the changed", [*FINE, (2, "ok", Decimal(3), None)], LABELS, {KEY: 2}),
    ("a null in a column that may have none", [(3, "ok", None, None)], LABELS, {ROWS: 1}),
]


@pytest.mark.parametrize(
    ("rows", "rules", "expected"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_after_changes_the_files_written_since_are_read(tmp_path, rows, rules, expected):
    """What an older file has isn't looked at while the newer ones meet all: it was met before."""
    write(tmp_path, [(10, None, Decimal(1), None)])
    place = write(tmp_path, rows, "append")
    plan = plan_suite(state(COLUMNS), HELD, None, rules)
    assert failing_or_spark(place, plan, met=0) == expected


def test_what_an_older_file_has_is_not_read_again(tmp_path, monkeypatch):
    """Nor are the commits since, which only Spark's count of changed rows needs."""
    monkeypatch.setattr("waldelta.stages.check.evaluate.changed_since", None)
    write(tmp_path, [(10, "was not judged", Decimal(1), None)])
    place, plan = write(tmp_path, FINE, "append"), plan_suite(state(COLUMNS), HELD, None, LABELS)
    assert failing(outcomes_of(place, plan, met=0)) == {}
    assert failing(outcomes_of(place, plan)) == {IN_SET: 1}
    # A report says how many rows fail, so all are counted once one does.
    place = write(tmp_path, [(11, "neither", Decimal(1), None)], "append")
    assert failing(outcomes_of(place, plan, met=1)) == {IN_SET: 2}


def test_more_rows_than_one_process_reads_are_sparks(tmp_path, monkeypatch):
    """Those of partitions, too, whose folders are percent-encoded in the log."""
    for keys in ([1], [2, 3]):
        rows = pa.table({"id": pa.array(keys, pa.int64()), "place": ["a/b ü"] * len(keys)})
        write_deltalake(str(tmp_path), rows, mode="append", partition_by=["place"])
    place = table_at(str(tmp_path))
    assert written_since(place.open(), 0).to_table()["id"].to_pylist() == [2, 3]
    monkeypatch.setattr("waldelta.stages.check.evaluate._MOST_ROWS", 0)
    assert written_since(place.open(), 0) is None


def test_runner_spark_leaves_all_rows_to_it(tmp_path):
    place = write(tmp_path, FINE)
    on_spark = replace(place, lake=Lake(str(tmp_path.parent), on_spark=True))
    plan = plan_suite(state(COLUMNS), HELD, None, LABELS)
    assert failing_or_spark(on_spark, plan) == SPARK
