"""Rows that don't meet an expectation are those that Great Expectations counts, for any value."""

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal
from random import Random

import pytest

from tests.integration.check.test_quality import FILTER, GOOD, Scene
from tests.support.bookkeeping import table_at
from waldelta.config.expectation_files import OwnExpectation, TargetColumns
from waldelta.lake import target_uri
from waldelta.row_filter import EnumType
from waldelta.stages.check.check import check
from waldelta.stages.check.check_run import RunOutcome
from waldelta.stages.check.evaluate import count_written
from waldelta.stages.check.great_expectations.own_expectations import why_refused
from waldelta.stages.check.great_expectations.run_suite import _item, build_suite, judge_frame
from waldelta.stages.check.suite.expectation import PlannedExpectation, RowCondition, SourceRules
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, kind_of, row_conditions
from waldelta.stages.check.suite.spark_conditions import count_rows

pytestmark = pytest.mark.spark

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


def outcomes_of(counts, planned):
    """Success, number of failing rows and page details of each, as the evaluator has them."""
    found = {}
    for number, of_all in counts.items():
        outcome = kind_of(planned[number].type).outcome(planned[number], of_all)
        item = _item(outcome, build_suite("t", SuitePlan("t", (planned[number],))).expectations[0])
        found[number] = item.success, item.result
    return found


def shown_conditions(planned):
    """The conditions, with the columns that they read as examples."""
    return {n: replace(c, example_columns=c.columns) for n, c in row_conditions(planned).items()}


COMPARED = (
    "element_count",
    "unexpected_count",
    "unexpected_percent",
    "missing_count",
    "missing_percent",
    "unexpected_percent_total",
    "unexpected_percent_nonmissing",
)


def random_rows(random, count):
    texts = ["JFK", "LGA", "jfk x", "", "AB1", "A\nB", "ÄÖÜ", "x" * 9, None]
    return [
        (
            n,
            random.choice([1, 2, 3, 50, -7, None]),
            random.choice([1, 2, 3, None]),
            random.choice(texts),
            random.choice(texts),
            random.choice([0.5, -1.0, float("nan"), None]),
            random.choice([Decimal("1.50"), Decimal("-2.00"), Decimal("10.01"), None]),
            random.choice([date(2026, 1, 1), date(2025, 12, 31), None]),
        )
        for n in range(count)
    ]


COLUMNS_OF_ANY = "id bigint, a int, b int, s string, t string, f double, d decimal(9,2), e date"
OF_ANY = [
    ("expect_column_values_to_not_be_null", {"column": "s"}),
    ("expect_column_values_to_not_be_null", {"column": "s", "mostly": 0.5}),
    ("expect_column_values_to_be_null", {"column": "a"}),
    ("expect_column_values_to_be_between", {"column": "a", "min_value": 2, "max_value": "50"}),
    ("expect_column_values_to_be_between", {"column": "a", "min_value": 1, "strict_min": True}),
    ("expect_column_values_to_be_between", {"column": "a", "max_value": 2, "mostly": 0.6}),
    ("expect_column_values_to_be_between", {"column": "f", "min_value": 0}),
    ("expect_column_values_to_be_between", {"column": "d", "min_value": -2, "max_value": "1.5"}),
    ("expect_column_values_to_be_between", {"column": "d", "min_value": 0.1, "strict_max": True}),
    ("expect_column_values_to_be_between", {"column": "e", "min_value": "2026-01-01"}),
    ("expect_column_values_to_be_in_set", {"column": "e", "value_set": [date(2026, 1, 1)]}),
    ("expect_column_values_to_be_in_set", {"column": "s", "value_set": ["it's", "ÄÖÜ", "A\nB"]}),
    ("expect_column_values_to_be_in_set", {"column": "s", "value_set": ["JFK", "LGA"]}),
    ("expect_column_values_to_be_in_set", {"column": "a", "value_set": [1, 2, 99_999_999_999]}),
    ("expect_column_values_to_be_in_set", {"column": "s", "value_set": ["JFK", None]}),
    ("expect_column_values_to_not_be_in_set", {"column": "s", "value_set": ["", "LGA"]}),
    ("expect_column_values_to_match_regex", {"column": "s", "regex": "^[A-Z]{3}$"}),
    ("expect_column_values_to_match_regex", {"column": "s", "regex": "(?i)jfk"}),
    ("expect_column_values_to_match_regex", {"column": "s", "regex": r"^\w+.?\w*$"}),
    ("expect_column_values_to_not_match_regex", {"column": "s", "regex": "x|B"}),
    ("expect_column_value_lengths_to_be_between", {"column": "s", "min_value": 1, "max_value": 3}),
    ("expect_column_value_lengths_to_equal", {"column": "s", "value": 3}),
    ("expect_column_pair_values_to_be_equal", {"column_A": "a", "column_B": "b"}),
    ("expect_column_pair_values_to_be_equal", {"column_A": "s", "column_B": "t"}),
    *(
        (
            f"expect_column_pair_values_{kind}",
            {"column_A": "a", "column_B": "b", "ignore_row_if": ignore},
        )
        for kind in ("to_be_equal", "a_to_be_greater_than_b")
        for ignore in ("both_values_are_missing", "either_value_is_missing", "neither")
    ),
    ("expect_column_pair_values_a_to_be_greater_than_b", {"column_A": "s", "column_B": "t"}),
    (
        "expect_column_pair_values_a_to_be_greater_than_b",
        {"column_A": "a", "column_B": "b", "or_equal": True},
    ),
]


@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(n, marks=pytest.mark.nightly("more random rows")) for n in range(2, 9))],
)
def test_both_engines_count_what_great_expectations_counts(runner, tmp_path, seed):
    """Of random rows, for each kind: failing and judged rows, shares and success are the same."""
    random = Random(seed)
    items = random.sample(OF_ANY, 9)
    planned = {
        number: PlannedExpectation(kind, dict(kwargs), "critical", "own", f"{kind} {number}")
        for number, (kind, kwargs) in enumerate(items)
    }
    rows = random_rows(random, random.choice([0, 1, 30, 200]))
    frame = runner.spark().createDataFrame(rows, COLUMNS_OF_ANY)
    uri = (tmp_path / "t").as_uri()
    frame.write.format("delta").save(uri)
    frame = runner.spark().read.format("delta").load(uri)
    theirs = judge_frame("t", SuitePlan("t", tuple(planned.values())), frame)
    conditions = shown_conditions(planned)
    ours = outcomes_of(count_rows(frame, conditions), planned)
    arrows = outcomes_of(count_written(table_at(uri).open().dataset(), conditions), planned)
    assert ours.keys() == planned.keys()
    assert len(arrows) >= len(planned) // 2, arrows
    for number, their in enumerate(theirs):
        expected = their.success, {name: their.details.get(name) for name in COMPARED}
        for found in (ours, arrows):
            if number in found:
                success, details = found[number]
                got = success, {name: details.get(name) for name in COMPARED}
                if not rows:  # Great Expectations has no counts then.
                    assert success == their.success
                    continue
                assert got == expected, (items[number], found is ours)
                values = details.get("partial_unexpected_list", [])
                assert len(values) == min(5, their.unexpected_count)


@pytest.mark.parametrize("kind", ["string", "boolean"])
@pytest.mark.parametrize("bounds", [{"min_value": 0}, {"max_value": "2020-01-01"}], ids=str)
def test_a_text_is_not_compared_with_bounds(kind, bounds):
    """A numeric without limits is text in the lake; its order would be another one."""
    item = OwnExpectation(
        type="expect_column_values_to_be_between", kwargs={"column": "amount", **bounds}
    )
    (why,) = why_refused(item, TargetColumns({"amount": kind}, has_key=True), is_built=False)
    assert "doesn't compare a text or boolean with bounds" in why


def test_every_kind_of_single_rows_is_compared():
    """A new kind needs an entry above."""
    known = {kind for kind, _ in OF_ANY} | {"expect_target_rows_to_satisfy"}
    assert known == {kind.type for kind in KINDS.values() if kind.scope == "row"}


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize(("kind", "kwargs"), OTHERS)
def test_others_are_left_to_it(kind, kwargs):
    """What isn't of single rows, filters rows first, or lacks an argument."""
    planned = PlannedExpectation(kind, kwargs, "critical", "own", kind)
    assert kind_of(kind).row_condition(planned) is None


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
    ("expect_column_values_to_not_be_null",
     {"column": "amount", "row_condition": "id < 2", "condition_parser": "spark"}, 1),
    ("expect_target_rows_to_satisfy",
     {"condition": "amount > 0 or map_contains_key(_wd_raw, 'amount')", "meaning": "m"}, 2),
]  # fmt: skip


def test_values_that_the_lake_does_not_hold_are_no_nulls(runner, lake):
    """By Great Expectations, and by what judges many tables at once without looking at rows."""
    lake.target(RAW_ROWS, row_filter=None)
    lake.own(own_file([(kind, kwargs) for kind, kwargs, _ in OF_NULLS]))
    (verdict,) = lake.check().tables
    found = [o for o in verdict.outcomes if o.planned.origin == "own"]
    assert [o.unexpected_count for o in found] == [count for *_, count in OF_NULLS]
    assert [o.success for o in found] == [False, False, True, False, False, False, False]
    frame = runner.spark().read.format("delta").load(target_uri(lake.root, "public", "t"))
    for outcome in found[:5]:
        kind = kind_of(outcome.planned.type)
        condition = kind.row_condition(outcome.planned)
        counted = count_rows(frame, {0: condition})[0]
        success = counted.are_few(outcome.planned.kwargs.get("mostly", 1))
        assert (counted.rows, success) == (outcome.unexpected_count, outcome.success), outcome
        assert kind.depends_on(outcome.planned) == "row"
    (told,) = [text for text in verdict.omitted if "amount" in text]
    assert (
        told
        == "expect_column_values_to_not_be_null on amount (expectations[5]): values of amount that"
        " only _wd_raw has count as null: use no argument but mostly"
    )


def test_values_of_a_few_failing_expectations_are_looked_up(runner, monkeypatch):
    """Each takes a query, and thousands may fail at once; a gate needs all that fail."""
    monkeypatch.setattr("waldelta.stages.check.suite.spark_conditions._MOST_SHOWN", 2)
    frame = runner.spark().range(2)
    conditions = {
        number: RowCondition(f"id >= {least}", ("id",), example_columns=("id",))
        for number, least in enumerate((5, 0, 5, 5))
    }
    counts = count_rows(frame, conditions)
    assert [of.rows for of in counts.values()] == [2, 0, 2, 2]
    assert [len(of.examples) for of in counts.values()] == [2, 0, 2, 0]
    assert [len(of.examples) for of in count_rows(frame, conditions, None).values()] == [2, 0, 2, 2]


def test_a_condition_on_a_field_of_a_struct_is_counted(runner):
    """Its text names the field like a column, and a row that fails is shown without it."""
    frame = runner.spark().sql(
        "select id, named_struct('color', if(id = 1, null, 'red')) as attrs from range(3)"
    )
    kwargs = {"condition": "attrs.color is not null", "meaning": "m"}
    planned = {
        0: PlannedExpectation("expect_target_rows_to_satisfy", kwargs, "critical", "own", "")
    }
    (found,) = count_rows(frame, shown_conditions(planned)).values()
    assert (found.rows, found.examples) == (1, ({"attrs": {"color": None}},))


def quickly(lake, run_id="run", rules=None):
    left = RunOutcome(written=frozenset({"public.t"}), rules=rules or {})
    return check(lake.runner, lake.pipeline(), lake.ledger, run_id, None, left)


OWN = (
    "expectations: [{type: expect_column_values_to_be_between, kwargs: {column: id, min_value: 1}}]"
)


def test_a_check_of_a_run_finds_all_met(lake, monkeypatch):
    """Of rows, keys and columns, results kept; nothing is rendered, and GX isn't asked."""
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
    verdicts = lake.check(left=RunOutcome(written=frozenset(tables))).tables
    assert len(verdicts) == 4
    for verdict in verdicts:
        assert {o.success for o in verdict.outcomes} == {True}
        assert len(verdict.outcomes) >= 4
        assert verdict.page is None


def test_a_check_of_a_run_of_a_small_table_needs_no_spark(lake, monkeypatch):
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
    monkeypatch.setattr("waldelta.stages.check.evaluate.count_by_spark", None)
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


def test_a_check_of_a_run_after_others(lake):
    """It leads to its own page, or to the reports that there are."""
    lake.target([*GOOD, (4, "LGA", "1", None)])
    report = quickly(lake)
    assert report.location == str(report.tables[0].page)
    lake.target(table="public.u")
    report = check(
        lake.runner, lake.pipeline(), lake.ledger, "second", ["public.u"],
        RunOutcome(written=frozenset({"public.u"})),
    )  # fmt: skip
    assert report.location == str(lake.docs / "index.html")


def test_a_label_that_the_enum_lacks(lake):
    """Counted by Arrow, described by Great Expectations."""
    lake.target(row_filter=None)
    rules = {"public.t": SourceRules(enums={"origin": EnumType("o", ("LGA",))})}
    (failure,) = quickly(lake, rules=rules).failures
    assert "origin has labels of text only (3 rows)" in failure
