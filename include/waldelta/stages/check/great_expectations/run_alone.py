"""Has Great Expectations evaluate one expectation on some rows; imports it only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.suite import Outcome, PlannedExpectation, SuitePlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def judge_alone(name: str, table: str, planned: PlannedExpectation, rows: DataFrame) -> Outcome:
    """Returns the outcome of one expectation on these rows; ``name`` is that of its suite.

    Raises ConfigError for a name or argument that Great Expectations refuses.
    """
    import_great_expectations({planned.type})
    import great_expectations as gx

    from waldelta.stages.check.great_expectations import SuiteCheck, build_suite
    from waldelta.stages.check.great_expectations.run_suite import outcomes

    plan = SuitePlan(table, (planned,))
    check = SuiteCheck(gx.get_context(mode="ephemeral"), build_suite(name, plan))
    (found,) = outcomes(check.run(rows, {}), plan)
    return found
