"""Full check: evaluates planned suites by Great Expectations, and writes the report pages, also of
targets that were judged without it.

Importing this module imports Great Expectations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import great_expectations
from great_expectations.core.expectation_validation_result import (
    ExpectationSuiteValidationResult,
    ExpectationValidationResult,
)
from great_expectations.expectations.expectation import Expectation
from pyspark.sql import DataFrame

from waldelta.errors import ConfigError
from waldelta.metadata_columns import LSN
from waldelta.spark import Runner
from waldelta.stages.check.check_run import CheckRun, about, are_met, failed, refused, suite_of
from waldelta.stages.check.gate.release import is_decided
from waldelta.stages.check.great_expectations.run_suite import (
    SuiteCheck,
    build_known,
    build_suite,
    measured,
    open_context,
    outcomes,
)
from waldelta.stages.check.measure.profile import Measurements
from waldelta.stages.check.reports.data_docs import (
    Place,
    page_name,
    write_page,
)
from waldelta.stages.check.suite.expectation import Outcome, TableVerdict
from waldelta.stages.check.suite.kinds import SuitePlan
from waldelta.stages.check.suite.target_facts import CheckedTarget


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A target whose suite is ready to be evaluated."""

    target: CheckedTarget
    plan: SuitePlan
    measurements: Measurements
    suite: SuiteCheck


def check_fully(
    run: CheckRun,
    place: Place,
    planned: Sequence[tuple[CheckedTarget, SuitePlan | Exception, Measurements]],
) -> list[TableVerdict]:
    """Returns the verdicts on targets with their plans, and writes their pages to ``place``.

    A plan is the error that prevented it where there is none.
    """
    context = open_context()
    verdicts: list[TableVerdict] = []
    ready: list[_Prepared] = []
    for target, plan, measurements in planned:
        if isinstance(plan, Exception):
            verdicts.append(failed(target.state.table_name, target.version, plan))
            continue
        suite, unknown = build_known(page_name(plan.table), plan)
        known = replace(plan, refused=_together(plan.refused, unknown))
        ready.append(_Prepared(target, known, measurements, SuiteCheck(context, suite)))

    for verdict, result in run.pool.map(partial(_evaluate, run), ready):
        page = None
        if result is not None:
            page = write_page(place, *run.name, verdict.table, result)
        verdicts.append(replace(verdict, page=page))
    return verdicts


def _together(one: ConfigError | None, other: ConfigError | None) -> ConfigError | None:
    """Returns one error for own expectations that are refused for different reasons."""
    texts = list(dict.fromkeys(str(err) for err in (one, other) if err is not None))
    return ConfigError("\n".join(texts)) if texts else None


def _evaluate(
    run: CheckRun, runner: Runner, item: _Prepared
) -> tuple[TableVerdict, ExpectationSuiteValidationResult | None]:
    """Returns the verdict on a target, and its result for the page unless it can't be judged."""
    started = time.monotonic()
    target, plan = item.target, item.plan
    try:
        frame = target.frame(runner)
        result = item.suite.run(frame, item.measurements)
        if plan.table in run.decided:
            plan = _judge_undecided(run, item, frame, result)
    except Exception as err:
        return failed(plan.table, target.version, err), None
    seconds = time.monotonic() - started
    errors = [str(plan.refused)] if plan.refused is not None else []
    result.meta["batch_parameters"] = about(run, target, (*plan.omitted, *errors))
    found = (*outcomes(result, plan), *refused(plan.refused))
    return TableVerdict(
        plan.table,
        target.version,
        found,
        plan.omitted,
        seconds=seconds,
        measured=measured(result),
        suite=suite_of(plan) if are_met(found) else None,
        whole=True,
    ), result


def _judge_undecided(
    run: CheckRun,
    item: _Prepared,
    frame: DataFrame,
    result: ExpectationSuiteValidationResult,
) -> SuitePlan:
    """Judge gates that aren't met again, without the rows that operators let in.

    Returns the plan, which says which gates only these rows don't meet.
    """
    plan = item.plan
    gates = {number for number, planned in enumerate(plan.expectations) if planned.is_gate}
    if LSN not in frame.columns or not gates:
        return plan
    rest = frame.where(~is_decided(run.decided[plan.table]))
    met = item.suite.judge_again(result, rest, gates)
    told = tuple(
        f"{plan.expectations[number].meaning}: not judged on rows that an operator accepted or"
        " released"
        for number in sorted(met)
    )
    return replace(plan, omitted=(*plan.omitted, *told))


def write_outcome_pages(
    run: CheckRun,
    place: Place,
    targets: Mapping[str, CheckedTarget],
    verdicts: Sequence[TableVerdict],
) -> list[TableVerdict]:
    """Write the pages of these verdicts to ``place``; returns the verdicts with their pages."""
    written: list[TableVerdict] = []
    for verdict in verdicts:
        result = _result(run, targets[verdict.table], verdict)
        page = write_page(place, *run.name, verdict.table, result)
        written.append(replace(verdict, page=page))
    return written


def _result(
    run: CheckRun, target: CheckedTarget, verdict: TableVerdict
) -> ExpectationSuiteValidationResult:
    """Returns the outcomes as Great Expectations would have found them."""
    judged = [outcome for outcome in verdict.outcomes if outcome.error is None]
    errors = [str(outcome.error) for outcome in verdict.outcomes if outcome.error is not None]
    plan = SuitePlan(verdict.table, tuple(outcome.planned for outcome in judged), verdict.omitted)
    suite = build_suite(page_name(verdict.table), plan)
    return ExpectationSuiteValidationResult(
        success=all(outcome.success for outcome in judged),
        results=[_item(*each) for each in zip(judged, suite.expectations, strict=True)],
        suite_name=suite.name,
        meta={
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
