"""Rows that don't meet an expectation are the ones that Great Expectations counts, whatever their
values are.
"""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions as F

from tests.integration.check.test_quality import COLUMNS, DDL, FILTER, GOOD, Scene
from waldelta.config.expectation_files import OwnExpectation
from waldelta.lake import target_uri
from waldelta.lake.ledger import ColumnState
from waldelta.row_filter import EnumType
from waldelta.stages.check._quick_check import is_met_by_spark, row_conditions
from waldelta.stages.check.check import check
from waldelta.stages.check.check_run import RunOutcome
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, kind_of
from waldelta.stages.check.suite.row_kinds import NO_TEXT
from waldelta.stages.check.suite.target_facts import SourceRules

pytestmark = pytest.mark.spark

ROWS = [
    (1, "JFK", "1.50", None),
    (2, "LGA", None, None),
    (3, None, "-3.00", None),
    (4, "", "0.00", None),
    (5, "jfk x", "99.99", None),
    (6, None, None, None),
    (2**53 + 1, None, None, None),
]
EXPECTATIONS = [
    ("expect_column_values_to_not_be_null", {"column": "origin"}),
    ("expect_column_values_to_not_be_null", {"column": "origin", "mostly": 0.5}),
    ("ExpectColumnValuesToBeNull", {"column": "origin"}),
    ("expect_column_values_to_be_between", {"column": "amount", "min_value": 0}),
    (
        "expect_column_values_to_be_between",
        {
            "column": "amount",
            "min_value": 0,
            "max_value": 1.5,
            "strict_min": True,
            "strict_max": True,
        },
    ),
    ("expect_column_values_to_be_between", {"column": "amount", "max_value": 0, "mostly": 0.4}),
    ("expect_column_values_to_be_between", {"column": "id", "min_value": "1.5", "max_value": "4"}),
    ("expect_column_values_to_be_between", {"column": "id", "max_value": 2**53}),
    ("expect_column_values_to_be_in_set", {"column": "origin", "value_set": ["JFK", "LGA"]}),
    ("expect_column_values_to_be_in_set", {"column": "id", "value_set": [1, 2, 3]}),
    ("expect_column_values_to_not_be_in_set", {"column": "origin", "value_set": ["", "LGA"]}),
    ("expect_column_values_to_be_in_set", {"column": "origin", "value_set": ["JFK", None]}),
    ("expect_column_values_to_not_be_in_set", {"column": "origin", "value_set": ["LGA", None]}),
    ("expect_column_values_to_match_regex", {"column": "origin", "regex": "^[A-Z]{3}$"}),
    ("expect_column_values_to_not_match_regex", {"column": "origin", "regex": "x"}),
    (
        "expect_column_value_lengths_to_be_between",
        {"column": "origin", "min_value": 1, "max_value": 3},
    ),
    ("expect_column_value_lengths_to_equal", {"column": "origin", "value": 3}),
    ("expect_column_pair_values_to_be_equal", {"column_A": "id", "column_B": "_wd_lsn"}),
    ("expect_column_pair_values_a_to_be_greater_than_b", {"column_A": "amount", "column_B": "id"}),
    (
        "expect_column_pair_values_a_to_be_greater_than_b",
        {"column_A": "id", "column_B": "_wd_lsn", "or_equal": True},
    ),
    ("expect_target_rows_to_satisfy", {"condition": "amount > 0", "meaning": "positive"}),
    (
        "expect_target_rows_to_satisfy",
        {"condition": "amount > 0", "meaning": "positive", "mostly": 0.2},
    ),
]
# Of a column that is text in the lake, as a numeric without limits is.
OF_TEXT = [
    {"column": "amount", **bounds}
    for bounds in ({"min_value": 0}, {"max_value": "10"}, {"min_value": "2020-01-01"})
]
OTHERS = [
    ("expect_column_values_to_be_unique", {"column": "id"}),
    (
        "expect_column_values_to_be_between",
        {"column": "id", "min_value": 0, "row_condition": "id > 3", "condition_parser": "spark"},
    ),
    ("expect_column_values_to_be_between", {"column": "id", "min_value": {"$PARAMETER": "least"}}),
    ("expect_column_values_to_be_in_set", {"column": "id"}),
    ("expect_column_values_to_be_between", {"column": "id"}),
    ("frobnicate", {}),
]


def own_file(expectations):
    lines = [
        f"  - {{type: {kind}, kwargs: {json.dumps(kwargs)}, severity: warning}}"
        for kind, kwargs in expectations
    ]
    return "expectations:\n" + "\n".join(lines)


@pytest.fixture
def lake(runner, tmp_path):
    return Scene(runner, tmp_path)


@pytest.mark.soak("every kind on both evaluators")
def test_they_count_what_great_expectations_counts(runner, lake):
    """Every kind that is known, on nulls, empty texts and numbers at the bounds; and none of what
    it can't evaluate.
    """
    lake.target(ROWS, row_filter=None)
    numeric = ColumnState("amount", 1700, -1, "numeric", "string", not_null=False)
    lake.target(
        ROWS[2:4], "public.u", DDL.replace("decimal(12,2)", "string"), None, [*COLUMNS[:2], numeric]
    )
    lake.own(own_file(EXPECTATIONS))
    lake.own(
        own_file([("expect_column_values_to_be_between", kwargs) for kwargs in OF_TEXT]),
        "public.u.yml",
    )
    numbers, texts = lake.check().tables
    found = [o for o in numbers.outcomes if o.planned.origin == "own"]
    (refused,) = (o.error for o in texts.outcomes if o.error is not None)
    assert str(refused).count(NO_TEXT) == len(OF_TEXT)
    frame = runner.spark().read.format("delta").load(target_uri(lake.root, "public", "u"))
    for kwargs in OF_TEXT:
        condition = kind_of("expect_column_values_to_be_between").row_condition(kwargs)
        with pytest.raises(Exception, match=NO_TEXT):
            frame.agg(F.count(F.when(condition.unexpected, 1))).first()
    frame = runner.spark().read.format("delta").load(target_uri(lake.root, "public", "t"))
    for (kind, kwargs), outcome in zip(EXPECTATIONS, found, strict=True):
        condition = kind_of(kind).row_condition(OwnExpectation(type=kind, kwargs=kwargs).kwargs)
        assert condition is not None, kind
        row = frame.agg(
            F.count(F.when(condition.unexpected, 1)), F.count(F.when(condition.judged, 1))
        ).first()
        success = not row[0] or row[1] - row[0] >= condition.mostly * row[1]
        assert (row[0], success) == (outcome.unexpected_count, outcome.success), (kind, kwargs)
    nulls = [
        o.unexpected_count
        for (_, kwargs), o in zip(EXPECTATIONS, found, strict=True)
        if None in kwargs.get("value_set", ())
    ]
    assert nulls == [3, 1]
    known = {
        "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")
        for kind, _ in EXPECTATIONS
    }
    assert known == {kind.type for kind in KINDS.values() if kind.scope == "row"}


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize(("kind", "kwargs"), OTHERS)
def test_others_are_left_to_it(kind, kwargs):
    """What isn't of single rows, filters rows first, or lacks an argument."""
    assert kind_of(kind).row_condition(kwargs) is None


RAW_ROWS = [
    (1, "JFK", None, {"amount": "NaN"}),
    (2, "LGA", "1.50", None),
    (3, None, None, None),
    (4, "JFK", None, None),
]
OF_NULLS = [
    ("expect_column_values_to_not_be_null", {"column": "amount"}, 2),
    ("ExpectColumnValuesToBeNull", {"column": "amount"}, 2),
    ("expect_column_values_to_not_be_null", {"column": "amount", "mostly": 0.5}, 2),
    ("expect_column_values_to_be_null", {"column": "Amount", "mostly": 0.6}, 2),
    ("expect_column_values_to_not_be_null", {"column": "origin"}, 1),
    (
        "expect_column_values_to_not_be_null",
        {"column": "amount", "row_condition": "id < 2", "condition_parser": "spark"},
        1,
    ),
    (
        "expect_target_rows_to_satisfy",
        {"condition": "amount > 0 or map_contains_key(_wd_raw, 'amount')", "meaning": "m"},
        2,
    ),
]


def test_values_that_the_lake_does_not_hold_are_no_nulls(runner, lake):
    """By Great Expectations, and by what tells the same for many tables at once, which need not
    look at rows again.
    """
    lake.target(RAW_ROWS, row_filter=None)
    lake.own(own_file([(kind, kwargs) for kind, kwargs, _ in OF_NULLS]))
    (verdict,) = lake.check().tables
    found = [o for o in verdict.outcomes if o.planned.origin == "own"]
    assert [o.unexpected_count for o in found] == [count for *_, count in OF_NULLS]
    assert [o.success for o in found] == [False, False, True, False, False, False, False]
    frame = runner.spark().read.format("delta").load(target_uri(lake.root, "public", "t"))
    for outcome in found[:5]:
        kind = kind_of(outcome.planned.type)
        condition = kind.row_condition(outcome.planned.kwargs)
        rows, judged = frame.agg(
            F.count(F.when(condition.unexpected, 1)), F.count(F.when(condition.judged, 1))
        ).first()
        success = not rows or judged - rows >= condition.mostly * judged
        assert (rows, success) == (outcome.unexpected_count, outcome.success), outcome
        assert kind.depends_on(outcome.planned) == "row"
    (told,) = [text for text in verdict.omitted if "amount" in text]
    assert (
        told
        == "expect_column_values_to_not_be_null on amount (expectations[5]): values of amount that"
        " only _wd_raw has count as null: use no argument but mostly"
    )


def quickly(lake, run_id="run", rules=None):
    left = RunOutcome(quick=frozenset({"public.t"}), rules=rules or {})
    return check(lake.runner, lake.pipeline(), lake.ledger, run_id, None, left)


OWN = (
    "expectations: [{type: expect_column_values_to_be_between, kwargs: {column: id, min_value: 1}}]"
)


def test_a_quick_check_finds_all_met(lake, monkeypatch):
    """Of rows, keys and columns, with the results kept as of any check; nothing is rendered, and
    Great Expectations isn't asked.
    """
    monkeypatch.setattr("waldelta.stages.check.check.import_great_expectations", None)
    tables = {
        f"public.t{len(filtered or '')}_{len(own)}": (filtered, own)
        for filtered in (FILTER, None)
        for own in (OWN, "")
    }
    for table, (row_filter, own) in tables.items():
        lake.target(table=table, row_filter=row_filter)
        if own:
            lake.own(own, f"{table}.yml")
    verdicts = lake.check(left=RunOutcome(quick=frozenset(tables))).tables
    assert len(verdicts) == 4
    for verdict in verdicts:
        assert {o.success for o in verdict.outcomes} == {True}
        assert len(verdict.outcomes) >= 4
        assert verdict.page is None


def test_a_quick_check_of_a_small_table_needs_no_spark(lake, monkeypatch):
    """Nulls and keys are looked for in its files."""
    from waldelta.lake.ledger import ColumnState, TableState, now

    lake.target([(1, "JFK", "1.50", None), (2, "JFK", "0.00", None)], row_filter=None)
    columns = [
        ColumnState("id", 20, -1, "bigint", "bigint", not_null=True),
        ColumnState("origin", 25, -1, "text", "string", not_null=True),
        ColumnState("amount", 1700, 786438, "numeric(12,2)", "decimal(12,2)", not_null=True),
    ]
    lake.ledger.append(
        TableState(now(), "sync", "public.t", 1, "synced", key_columns=["id"], columns=columns)
    )
    monkeypatch.setattr("waldelta.stages.check._quick_check.is_met_by_spark", None)
    rules = {"public.t": SourceRules(enums={"origin": EnumType("o", ("JFK", "LGA"))})}
    (verdict,) = quickly(lake, rules=rules).tables
    assert verdict.page is None
    assert len(verdict.outcomes) == 7
    lake.target([(1, "JFK", "1", None)], row_filter=None)
    lake.ledger.append(
        TableState(now(), "sync", "public.t", 1, "synced", key_columns=["id"], columns=columns)
    )
    monkeypatch.undo()
    report = quickly(lake)
    assert report.failures == (
        "public.t: expect_target_key_to_be_unique: key (id) is unique (2 rows)",
    )


@pytest.mark.parametrize(
    ("condition", "is_met"),
    [("id < 3", True), ("id < 3 or current_date() < date '2000-01-01'", False)],
)
def test_rows_from_before_are_judged_again_where_the_day_decides(runner, condition, is_met):
    """They met it then; what depends on a row alone it meets for ever."""
    frame = runner.spark().createDataFrame([(9, 1), (1, 5)], "id bigint, _wd_lsn bigint")
    planned = PlannedExpectation(
        "expect_target_rows_to_satisfy", {"condition": condition}, "critical", "own", "m"
    )
    plan = SuitePlan("public.t", (planned,))
    assert is_met_by_spark(frame, plan, row_conditions(plan), {}, since=5) is is_met


def test_a_quick_check_after_others(lake):
    """It leads to its own page, or to the reports that there are."""
    lake.target([*GOOD, (4, "LGA", "1", None)])
    report = quickly(lake)
    assert report.location == str(report.tables[0].page)
    lake.target(table="public.u")
    report = check(
        lake.runner,
        lake.pipeline(),
        lake.ledger,
        "second",
        ["public.u"],
        RunOutcome(quick=frozenset({"public.u"})),
    )
    assert report.location == str(lake.docs / "index.html")


def test_a_label_that_the_enum_lacks(lake):
    """Found by Arrow, told by Great Expectations."""
    lake.target(row_filter=None)
    rules = {"public.t": SourceRules(enums={"origin": EnumType("o", ("LGA",))})}
    (failure,) = quickly(lake, rules=rules).failures
    assert "origin has labels of text only (3 rows)" in failure
