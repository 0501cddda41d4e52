"""Pages of targets that were judged without Great Expectations, which only describes the outcomes.

Importing this module imports Great Expectations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import great_expectations
from great_expectations.core.expectation_validation_result import (
    ExpectationSuiteValidationResult,
    ExpectationValidationResult,
)

from waldelta.lake import Lake
from waldelta.stages.check._check_run import CheckRun, about
from waldelta.stages.check.great_expectations import build_suite
from waldelta.stages.check.reports.data_docs import (
    Place,
    drop_old_checks,
    open_context,
    page_name,
    pages_may_be_missing,
    run_identifier,
    write_page,
)
from waldelta.stages.check.suite import Outcome, SuitePlan, TableVerdict
from waldelta.stages.check.suite.target_facts import CheckedTarget

if TYPE_CHECKING:
    from great_expectations.core.run_identifier import RunIdentifier
    from great_expectations.expectations.expectation import Expectation


def write_outcome_pages(
    run: CheckRun,
    place: Place,
    lake: Lake,
    targets: Mapping[str, CheckedTarget],
    verdicts: Sequence[TableVerdict],
) -> list[TableVerdict]:
    """Write the pages of these verdicts to ``place``; returns the verdicts with their pages."""
    context = open_context(place)
    identifier = run_identifier(run.pipeline.pipeline, run.run_id, run.began)
    written: list[TableVerdict] = []
    for verdict in verdicts:
        result = _result(run, identifier, targets[verdict.table], verdict)
        page = write_page(context, place, verdict.table, result, identifier)
        written.append(replace(verdict, page=page))
    with pages_may_be_missing():
        drop_old_checks(context, place, run.pipeline, lake)
    return written


def _result(
    run: CheckRun, identifier: RunIdentifier, target: CheckedTarget, verdict: TableVerdict
) -> ExpectationSuiteValidationResult:
    """Returns the outcomes as Great Expectations would have found them."""
    judged = [outcome for outcome in verdict.outcomes if outcome.error is None]
    errors = [str(outcome.error) for outcome in verdict.outcomes if outcome.error is not None]
    plan = SuitePlan(verdict.table, tuple(outcome.planned for outcome in judged), verdict.omitted)
    suite = build_suite(page_name(verdict.table), plan)
    results = [_item(*each) for each in zip(judged, suite.expectations, strict=True)]
    met = sum(bool(item.success) for item in results)
    return ExpectationSuiteValidationResult(
        success=met == len(results),
        results=results,
        suite_name=suite.name,
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": met,
            "unsuccessful_expectations": len(results) - met,
            "success_percent": 100 * met / len(results) if results else None,
        },
        meta={
            "run_id": identifier,
            "batch_parameters": about(run, target, (*verdict.omitted, *errors)),
            "great_expectations_version": great_expectations.__version__,
        },
    )


def _item(outcome: Outcome, expectation: Expectation) -> ExpectationValidationResult:
    result = {
        name: value
        for name, value in (
            ("observed_value", outcome.observed),
            ("unexpected_count", outcome.unexpected_count),
        )
        if value is not None
    }
    return ExpectationValidationResult(
        success=bool(outcome.success), expectation_config=expectation.configuration, result=result
    )
