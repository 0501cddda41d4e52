"""Kinds of expectations: what each depends on, and a kind that the product lacks."""

from typing import ClassVar

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from tests.unit.stages.check.suite.test_kinds_plan import HELD, ID, state
from waldelta.lake.ledger.check_records import ON_OTHERS
from waldelta.stages.check.check_run import suite_of
from waldelta.stages.check.evaluate import count_by_arrow
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import (
    Argument,
    ExpectationKind,
    PlannedExpectation,
    RowCondition,
)
from waldelta.stages.check.suite.kinds import KINDS, CountedKind, depends_on, kind_of, plan_suite


class EvenKeys(ExpectationKind):
    """Every key is even."""

    type = "expect_target_keys_to_be_even"
    scope = "row"
    arguments: ClassVar = {
        "column": Argument(str, "the key"),
        "meaning": Argument(str, "the same in words", {"default": "all keys are even"}),
    }

    def plan(self, facts):
        for column in facts.state.key_columns:
            yield PlannedExpectation(self.type, {"column": column}, "critical", "catalog", "even")

    def row_condition(self, kwargs):
        return RowCondition("id % 2 <> 0", "true", (kwargs["column"],))

    def columns_read(self, planned):
        return [planned.kwargs["column"]]

    def failing(self, rows, planned):
        keys = rows[planned.kwargs["column"]].to_pylist()
        return pa.chunked_array([[key % 2 == 1 for key in keys]]), pa.chunked_array(
            [[True for _ in keys]]
        )


class FewRows(CountedKind):
    """No rows are too many."""

    type = "expect_target_to_have_few_rows"

    def count(self, planned, rows):
        return FailingRows(3)


@pytest.fixture
def even_keys(monkeypatch):
    kind = EvenKeys()
    monkeypatch.setitem(KINDS, kind.type, kind)
    return kind


@pytest.mark.parametrize(("rows", "count"), [([2, 4], 0), ([2, 3], 1)])
def test_a_new_kind_is_planned_and_judged(tmp_path, even_keys, rows, count):
    """Its class and the registry say all there is to know."""
    plan = plan_suite(state([ID]), HELD)
    number = len(plan.expectations) - 1
    assert plan.expectations[number].type == even_keys.type
    assert even_keys.judges_rows({})
    assert depends_on(plan.expectations[number]) == "row"
    write_deltalake(str(tmp_path), pa.table({"id": rows}))
    dataset = table_at(str(tmp_path)).open().dataset()
    found = count_by_arrow(dataset, {number: plan.expectations[number]})[number]
    assert found.rows == count
    assert even_keys.outcome(plan.expectations[number], found).success is (count == 0)


def test_a_new_kind_makes_another_suite(even_keys, monkeypatch):
    """Rows that met the suite before must meet it too."""
    found = suite_of(plan_suite(state([ID]), HELD))
    monkeypatch.delitem(KINDS, even_keys.type)
    assert suite_of(plan_suite(state([ID]), HELD)) != found


def test_a_new_kind_counts_for_itself():
    """Its outcome has the number of rows."""
    planned = PlannedExpectation(FewRows.type, {}, "critical", "catalog", "few rows")
    (outcome,) = FewRows().outcomes([planned], None)
    assert (outcome.success, outcome.observed) == (False, "3 rows fail")


def test_an_unknown_kind_is_great_expectations_own():
    """It has no condition and no Arrow, so that nobody takes it for met."""
    kind = kind_of("ExpectColumnMaxToBeBetween")
    planned = PlannedExpectation(kind.type, {"column": "id"}, "critical", "own", "m")
    assert (kind.type, kind.row_condition({})) == ("expect_column_max_to_be_between", None)
    assert (kind.columns_read(planned), kind.outcomes([planned], None)) == (None, None)
    assert not kind.judges_rows({})


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
