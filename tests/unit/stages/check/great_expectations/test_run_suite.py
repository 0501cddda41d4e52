"""Great Expectations' own that ours correct."""

import pandas as pd
import pytest

from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation, TableVerdict


@pytest.mark.parametrize(("most", "success"), [(3, True), (2, False)])
def test_an_answer_about_quantiles_can_be_written(most, success):
    """Its checkpoint writes it, in this version of NumPy and Great Expectations."""
    # Not above: each process that collects the tests would import them, for seconds.
    import great_expectations as gx

    import waldelta.stages.check.great_expectations.run_suite  # noqa: F401 - it registers ours

    context = gx.get_context(mode="ephemeral")
    asset = context.data_sources.add_pandas("p").add_dataframe_asset("a")
    data = asset.add_batch_definition_whole_dataframe("b")
    expectation = gx.expectations.ExpectColumnQuantileValuesToBeBetween(
        column="v", quantile_ranges={"quantiles": [0.5], "value_ranges": [[None, most]]}
    )
    suite = context.suites.add(gx.ExpectationSuite(name="s", expectations=[expectation]))
    definition = context.validation_definitions.add(
        gx.ValidationDefinition(name="v", data=data, suite=suite)
    )
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(name="c", validation_definitions=[definition])
    )
    (result,) = checkpoint.run(
        {"dataframe": pd.DataFrame({"v": [1, 2, 3, 4]})}
    ).run_results.values()
    assert result.results[0].success is success


def test_a_new_kind_gets_its_class():
    """With its fields and its words; Great Expectations finds it by its type."""
    from great_expectations.expectations.registry import get_expectation_impl

    from tests.unit.stages.check.suite.test_kinds import SmallKeys
    from waldelta.stages.check.great_expectations.run_suite import register

    register(SmallKeys())
    made = get_expectation_impl(SmallKeys.type)(column="id")
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
