"""Kinds of expectations: how a suite is planned, what each depends on, and a new kind."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.data.suites import HELD, ID, state
from waldelta.config.expectation_files import OwnSuite, OwnSuiteFile
from waldelta.lake.ledger.check_records import ON_OTHERS
from waldelta.pipeline.targets.target_sources import to_text
from waldelta.row_filter import EnumType, RowFilter
from waldelta.stages.check.check_run import keep_other_data, suite_of
from waldelta.stages.check.constraints.constraints import CheckConstraint
from waldelta.stages.check.evaluate import count_written
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import (
    Argument,
    ExpectationKind,
    PlannedExpectation,
    RowCondition,
    SourceRules,
)
from waldelta.stages.check.suite.kinds import (
    KINDS,
    TargetKind,
    depends_on,
    kind_of,
    plan_suite,
    row_conditions,
)


class SmallKeys(ExpectationKind):
    """Every key is small."""

    def __init__(self):
        arguments = {
            "column": Argument(str, "the key"),
            "meaning": Argument(str, "the same in words", {"default": "all keys are small"}),
        }
        super().__init__("expect_target_keys_to_be_small", scope="row", arguments=arguments)

    def plan(self, facts):
        for column in facts.state.key_columns:
            yield PlannedExpectation(self.type, {"column": column}, "critical", "catalog", "small")

    def row_condition(self, planned):
        column = planned.kwargs["column"]
        return RowCondition(f"{column} < 3", (column,))


FEW_ROWS = TargetKind(
    "expect_target_to_have_few_rows",
    rules=lambda _: (),
    judge=lambda *_: [FailingRows(3)],
)


@pytest.fixture
def small_keys(monkeypatch):
    kind = SmallKeys()
    monkeypatch.setitem(KINDS, kind.type, kind)
    return kind


@pytest.mark.parametrize(("rows", "count"), [([1, 2], 0), ([2, 3], 1)])
def test_a_new_kind_is_planned_and_judged(tmp_path, small_keys, rows, count):
    """Its class and the registry say all there is to know."""
    plan = plan_suite(state([ID]), HELD)
    number = len(plan.expectations) - 1
    assert plan.expectations[number].type == small_keys.type
    assert depends_on(plan.expectations[number]) == "row"
    write_deltalake(str(tmp_path), pa.table({"id": rows}))
    dataset = table_at(str(tmp_path)).open().dataset()
    found = count_written(dataset, row_conditions({number: plan.expectations[number]}))[number]
    assert found.rows == count
    assert small_keys.outcome(plan.expectations[number], found).success is (count == 0)


def test_a_new_kind_makes_another_suite(small_keys, monkeypatch):
    """Rows that met the suite before must meet it too."""
    found = suite_of(plan_suite(state([ID]), HELD))
    monkeypatch.delitem(KINDS, small_keys.type)
    assert suite_of(plan_suite(state([ID]), HELD)) != found


def test_a_new_kind_counts_for_itself():
    """Its outcome has the number of rows."""
    planned = PlannedExpectation(FEW_ROWS.type, {}, "critical", "catalog", "few rows")
    (outcome,) = FEW_ROWS.outcomes([planned], None)
    assert (outcome.success, outcome.observed) == (False, "3 rows fail")


def test_an_unknown_kind_is_great_expectations_own():
    """It has no condition and no Arrow, so that nobody takes it for met."""
    kind = kind_of("ExpectColumnMaxToBeBetween")
    planned = PlannedExpectation(kind.type, {"column": "id"}, "critical", "own", "m")
    assert kind.type == "expect_column_max_to_be_between"
    assert kind.row_condition(planned) is None


def test_pages_know_the_kinds_that_depend_on_other_data():
    """They load no PySpark, so the ledger has a list of its own."""
    assert {kind.type for kind in KINDS.values() if kind.scope == "other data"} == ON_OTHERS


OWN = [
    ("expect_column_values_to_be_between", {"column": "id"}, "row"),
    ("expect_column_values_to_be_between", {"column": "id", "row_condition": "a > b"}, "anything"),
    ("expect_column_values_to_be_between", {"min_value": {"$PARAMETER": "x"}}, "anything"),
    ("expect_target_rows_to_satisfy", {"condition": "id > 0"}, "row"),
    ("expect_target_rows_to_satisfy", {"condition": "id > rand()"}, "anything"),
    ("ExpectColumnMaxToBeBetween", {"column": "id"}, "rows"),
    ("expect_table_row_count_to_equal_other_table", {"other_table_name": "u"}, "anything"),
    ("expect_target_key_to_be_unique", {"columns": ["id"]}, "anything"),
    ("expect_target_to_be_fresh", {"is_met": True}, "anything"),
]


@pytest.mark.parametrize(("type_name", "kwargs", "expected"), OWN)
def test_what_own_expectations_depend_on(type_name, kwargs, expected):
    planned = PlannedExpectation(type_name, kwargs, "critical", "own", "m")
    assert depends_on(planned) == expected


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("expect_target_columns_to_match", "rows"),
        ("expect_target_key_to_be_unique", "rows"),
        ("expect_target_rows_to_satisfy", "row"),
        ("expect_target_rows_to_refer_to_rows", "other data"),
        ("expect_target_to_be_as_before", "earlier runs"),
        ("expect_target_to_be_judged", "rows"),
    ],
)
def test_what_built_in_expectations_depend_on(type_name, expected):
    """A condition from a catalog too, whatever its functions are."""
    kwargs = {"condition": "my_function(id)"}
    planned = PlannedExpectation(type_name, kwargs, "critical", "catalog", "m")
    assert depends_on(planned) == expected


def own_filter(text, analysed, *columns):
    return to_text(RowFilter(text, analysed, columns))


NAME = ("name", "text", "string", False)
CASES = [
    ("one key", state([ID, NAME]),
     [("expect_target_columns_to_match", {"columns": {"id": "bigint", "name": "string"}}),
      ("expect_target_key_to_be_unique", {"columns": ["id"]}),
      ("expect_column_values_to_not_be_null", {"column": "id"})], []),
    ("two key columns", state([ID, NAME], keys=("id", "name")),
     [("expect_target_key_to_be_unique", {"columns": ["id", "name"]}),
      ("expect_column_values_to_not_be_null", {"column": "id"}),
      ("expect_column_values_to_not_be_null", {"column": "name"})], []),
    ("no key", state([NAME], keys=()), [],
     ["unique key: the table has none, so duplicate rows are allowed"]),
    ("dotted name", state([("a.b", "bigint", "bigint", True)], keys=("a.b",)),
     [("expect_target_key_to_be_unique", {"columns": ["a.b"]}),
      ("expect_column_values_to_not_be_null", {"column": "`a.b`"})], []),
    ("name with a backtick", state([("a`b", "bigint", "bigint", True)], keys=("a`b",)),
     [("expect_target_key_to_be_unique", {"columns": ["a`b"]}),
      ("expect_target_rows_to_satisfy",
       {"condition": "`a``b` is not null", "meaning": "key column a`b has no nulls"})], []),
    ("value that may be kept verbatim", state([ID, ("n", "numeric(9,2)", "decimal(9,2)", True)]),
     [("expect_target_rows_to_satisfy",
       {"condition": ("(`n` is not null or coalesce(map_contains_key(_wd_raw, 'n'), false))"),
        "meaning": "NOT NULL column n has no nulls"})], []),
    *[
        (
            f"value that {kind} doesn't hold exactly",
            state([ID, ("n", of, kind, True)]),
            [
                (
                    "expect_target_rows_to_satisfy",
                    {
                        "condition": (
                            "(`n` is not null or coalesce(map_contains_key(_wd_raw, 'n'), false))"
                        ),
                        "meaning": "NOT NULL column n has no nulls",
                    },
                ),
            ],
            [],
        )
        for of, kind in (("numeric", "numeric as double"), ("jsonb", "variant"))
    ],
    ("filter", state([ID, NAME], row_filter="(name = 'x'::text)"),
     [("expect_target_rows_to_satisfy",
       {"condition": "(`name` = 'x')",
        "meaning": "publication's row filter holds: (name = 'x'::text)"})], []),
    ("filter of the target",
     state([ID, NAME], target_filter=own_filter("name='y'", "(name = 'y'::text)", "name")),
     [("expect_target_rows_to_satisfy",
       {"condition": "(`name` = 'y')", "meaning": "target's filter holds: name='y'"})], []),
    ("filter beyond us", state([ID, NAME], row_filter="(lower(name) = 'x'::text)"), [],
     [("row filter: not checked, because of its part at line 1, column 2 (near"
       " \"lower(name) = 'x'::text\"): upper and lower case, which depend on the collation"
       ' (add COLLATE "C" if'
       " that is meant)")]),
    ("filter that computes with dates",
     state([ID, ("d", "date", "date", False)], row_filter="((d + 1) > d)"), [],
     [("row filter: not checked, because it computes with columns that may hold infinity"
       " or years BC")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "expected", "left_out"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_plan_suite(table, expected, left_out):
    """The suite follows from recorded columns, key and filter; what can't be checked is said."""
    plan = plan_suite(table, HELD)
    planned = [(p.type, p.kwargs) for p in plan.expectations]
    assert [e for e in expected if e not in planned] == []
    assert list(plan.omitted) == left_out
    assert {p.severity for p in plan.expectations} == {"critical"}
    if "filter beyond us" not in str(left_out) and not table.row_filter:
        assert not any("row filter" in p.meaning for p in plan.expectations)


def test_own_expectations_keep_their_place():
    """An engineer's expectation carries severity, notes and where it stands."""
    suite = OwnSuite.model_validate(
        {
            "expectations": [{"type": "expect_column_to_exist", "kwargs": {"column": "id"},
                              "severity": "warning"}],
        }
    )  # fmt: skip
    plan = plan_suite(state([ID]), HELD, OwnSuiteFile(Path("x/public.t.yml"), suite))
    own = plan.expectations[-1]
    assert (own.type, own.severity, own.origin) == ("expect_column_to_exist", "warning", "own")
    assert own.place == "x/public.t.yml: expectations[0]"


def test_what_is_a_gate_is_checked_too():
    """What a copy brought, or an operator let pass, was never judged before."""
    suite = OwnSuite.model_validate(
        {"expectations": [{"type": "expect_column_to_exist", "gate": "stop"}]}
    )
    plan = plan_suite(state([ID]), HELD, OwnSuiteFile(Path("public.t.yml"), suite))
    assert (plan.expectations[-1].type, plan.omitted) == ("expect_column_to_exist", ())


CHECKS = [
    ("a comparison, met where it is null", "(n > 0)", True, "not coalesce("),
    ("of a column that isn't published", "(other > 0)", False,
     "CHECK constraint c: not checked, because the target has no column other yet"),
    ("of an enum", "(mood = ANY (ARRAY['sad'::app.mood, 'ok'::app.mood]))", True,
     "not coalesce((not (`mood` in ('sad', 'ok'))), false)"),
    ("by an enum's order", "(mood > 'sad'::app.mood)", True, "not coalesce((not (`mood` in ('ok'"),
    ("of another type", "(cased = 'x'::app.citext)", False,
     ("CHECK constraint c: not checked, because of its part at line 1, column 20 (near"
      " 'app.citext))'): the type app.citext, which is neither")),
    ("with a function that Spark lacks", "(my_function(n) > 0)", False,
     "CHECK constraint c: not checked, because of its part at"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "is_planned", "told"), [c[1:] for c in CHECKS], ids=[c[0] for c in CHECKS]
)
def test_check_constraints(expression, is_planned, told):
    """What the source makes sure of is expected, where Spark can tell; else it is said."""
    plan = plan_suite(
        state([ID, *(("n", "integer", "int", False), ("mood", "app.mood", "string", False))]),
        HELD,
        None,
        SourceRules(
            [CheckConstraint("c", expression)], {"mood": EnumType("app.mood", ("sad", "ok"))}
        ),
    )
    found = [
        item for item in plan.expectations if item.meaning.startswith("CHECK constraint c holds")
    ]
    assert [item.severity for item in found] == ["critical"] * is_planned
    texts = [item.kwargs["condition"] for item in found] or list(plan.omitted)
    assert texts[-1].startswith(told)


def test_enum_labels():
    """A column of an enum has its labels only; one of other values in the lake isn't asked."""
    columns = [ID, ("mood", "mood", "string", False), ("moods", "mood[]", "array<string>", False)]
    plan = plan_suite(
        state(columns),
        HELD,
        None,
        SourceRules(enums=dict.fromkeys(("mood", "moods"), EnumType("mood", ("sad", "ok")))),
    )
    found = [
        (item.type, item.kwargs, item.severity)
        for item in plan.expectations
        if "labels" in item.meaning
    ]
    assert found == [
        ("expect_column_values_to_be_in_set", {"column": "mood", "value_set": ["sad", "ok"]},
         "critical"),
    ]  # fmt: skip


UNKNOWN = [
    ("that isn't asked", "mirror", None, []),
    ("none", "mirror", 0, [("expect_target_to_know_all_values", True)]),
    ("of a state", "history", 2, [("expect_target_to_know_all_values", False)]),
    ("which a changelog says of each row", "changelog", 2,
     [("expect_kept_rows_to_hold", None)] * 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "rows", "expected"), [c[1:] for c in UNKNOWN], ids=[c[0] for c in UNKNOWN]
)
def test_values_that_were_not_sent(mode, rows, expected):
    """A warning; and judged again of a target that hasn't changed."""
    plan = plan_suite(replace(state([ID]), mode=mode), HELD, None, SourceRules(unknown_rows=rows))
    found = [item for item in plan.expectations if item.severity == "warning"]
    assert [(item.type, item.kwargs.get("is_met")) for item in found] == expected
    told = [
        (outcome.success, outcome.observed)
        for planned in keep_other_data(plan).expectations
        for outcome in kind_of(planned.type).outcomes([planned], None)
    ]
    assert told == [
        (met, f"{rows} rows in quarantine lack values") for _, met in expected if met is not None
    ]
