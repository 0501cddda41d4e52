"""Has Great Expectations evaluate expectations on some rows; imports it only then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation
from waldelta.stages.check.suite.kinds import SuitePlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def judge_rows(
    name: str, table: str, planned: Sequence[PlannedExpectation], rows: DataFrame
) -> tuple[Outcome, ...]:
    """Returns the outcomes of expectations on these rows, in their order; ``name`` is that of the
    suite.

    Raises ConfigError for a name or argument that Great Expectations refuses.
    """
    import_great_expectations({each.type for each in planned})
    from waldelta.stages.check.great_expectations.run_suite import (
        SuiteCheck,
        build_suite,
        open_context,
        outcomes,
    )

    plan = SuitePlan(table, tuple(planned))
    check = SuiteCheck(open_context(), build_suite(name, plan))
    return outcomes(check.run(rows, {}), plan)
