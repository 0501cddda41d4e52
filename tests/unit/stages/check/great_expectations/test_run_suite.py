"""Classes of our kinds in Great Expectations, and what a page is made of."""

import pytest

from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation, TableVerdict


def test_a_new_kind_gets_its_class():
    """With its fields and its words; Great Expectations finds it by its type."""
    from great_expectations.expectations.registry import get_expectation_impl

    from tests.unit.stages.check.suite.test_kinds import SmallKeys
    from waldelta.stages.check.great_expectations.run_suite import register

    register(kind := SmallKeys())
    made = get_expectation_impl(kind.type)(column="id")
    assert made.meaning == "all keys are small"
    with pytest.raises(ValueError, match="field required"):
        type(made)()


def test_a_page_fails_by_what_has_no_place_on_it():
    """An own expectation can be judged with a bound that Great Expectations refuses."""
    from waldelta.stages.check.great_expectations.run_suite import suite_result

    kind = "expect_column_values_to_be_between"
    planned = PlannedExpectation(kind, {"column": "at", "max_value": [3]}, "critical", "own", kind)
    verdict = TableVerdict("public.t", 0, (Outcome(planned, None, None, None, raised="x"),), ())
    result = suite_result(verdict, "public.t", {})
    assert (result.success, result.results) == (False, [])
