"""Judges one target: plans its suite, measures its profile, and evaluates what may have changed.

What forces all rows to be read is listed in ``reads_all``. After a run's changes the other rows are
known to meet what is expected of single rows, so only the changed ones are read for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from waldelta.errors import ConfigError, JavaMissing, SparkUnreachable, class_and_text
from waldelta.lake import READ_FAILURES, TargetVersion, row_count
from waldelta.lake.ledger.check_records import REFERENCES_HOLD
from waldelta.spark import Runner
from waldelta.stages.check.check_run import (
    CheckRun,
    are_met,
    failed,
    is_unchanged_since_full_check,
    met_at,
    refused,
    rest_of,
    suite_of,
)
from waldelta.stages.check.evaluate import SuiteEvaluation
from waldelta.stages.check.measure.columns import listed
from waldelta.stages.check.measure.profile import (
    Measured,
    measure_profile,
    profile_by_values,
    profile_in_driver,
)
from waldelta.stages.check.measure.references import Reference
from waldelta.stages.check.suite.expectation import TableVerdict
from waldelta.stages.check.suite.kinds import SuitePlan, kind_of
from waldelta.stages.check.suite.target_facts import CheckedTarget, TargetRows

log = logging.getLogger(__name__)

# After few changes a foreign key is judged only when both of its targets together have at most this
# many rows.
_MOST_ROWS_REFERRED = 1_000_000
_NOT_MEASURED = "drift: not judged, since this check can't measure the target"


def judge_target(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict:
    """Returns the verdict on a target, which is failed where it can't be judged at all.

    Raises SparkUnreachable or JavaMissing where only Spark can judge it: that is no fault of the
    target.
    """
    started = time.monotonic()
    try:
        verdict = _judge(run, runner, target)
    except (SparkUnreachable, JavaMissing):
        raise
    except Exception as err:
        return failed(target.state.table_name, target.version, err)
    return replace(verdict, seconds=time.monotonic() - started)


def _judge(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict:
    table = None if target.state.kept_as.keeps_rows else _opened(target)
    types = dict(target.frame(runner).dtypes) if table is None else table.spark_types
    suite = run.suite_of(target, types)
    rows = TargetRows(
        target,
        runner,
        {listed(name): kind for name, kind in types.items()},
        run.rules_of(target).references,
    )
    if run.outcome.is_upkeep and is_unchanged_since_full_check(run.known, target, suite):
        unchanged = SuiteEvaluation(run, rows, rest_of(suite), table)
        unchanged.evaluate()
        return TableVerdict(suite.table, target.version, tuple(unchanged.outcomes), suite.omitted)
    rows = replace(rows, met=None if reads_all(run, target) else met_at(run.known, target, suite))
    is_large = rows.met is None or suite.table in run.outcome.paged
    plan = suite if is_large else _affordable(suite, rows.references)
    if table is not None and table.is_small:
        rows = replace(rows, met=None)  # To read all costs no more, and finds what others changed.
    measured = _measure(rows, table, plan)
    if measured is None:
        plan = _without_profile(plan)
    judged = SuiteEvaluation(run, replace(rows, measured=measured), plan, table)
    judged.evaluate()
    outcomes = (*judged.outcomes, *refused(_together(plan.refused, judged.refused)))
    return TableVerdict(
        plan.table,
        target.version,
        outcomes,
        (*plan.omitted, *judged.omitted),
        measured=measured,
        suite=suite_of(suite) if are_met(outcomes) else None,
        whole=rows.met is None,
        measured_only=tuple(
            p for p in plan.expectations if not kind_of(p.type).is_judged(p.kwargs)
        ),
    )


def reads_all(run: CheckRun, target: CheckedTarget) -> bool:
    """Returns whether all rows of a target are read, whatever is known of them.

    That is in a scheduled full check, for a target that the run didn't write (``validate``, or an
    edited suite), and where a mode keeps rows. Otherwise they are read when no version is known to
    meet the suite, as after the first copy, a failed expectation or a changed suite.
    """
    return (
        run.outcome.is_upkeep
        or target.state.table_name not in run.outcome.written
        or target.state.kept_as.keeps_rows
    )


def _opened(target: CheckedTarget) -> TargetVersion | None:
    """Returns the target's version; None where only Spark reads it."""
    try:
        return target.open()
    except READ_FAILURES as err:
        log.info("%s is read by Spark: %s", target.state.table_name, class_and_text(err))
        return None


def _affordable(plan: SuitePlan, references: Sequence[Reference]) -> SuitePlan:
    """Returns the plan without the foreign keys that are too expensive to judge after changes.

    A check of all rows judges the omitted ones.
    """
    large = {
        reference.lookup_key: (
            f"foreign key {reference.name}: left to the next full check, since its targets are"
            " large"
        )
        for reference in references
        if (rows := _rows_of(reference)) is None or rows > _MOST_ROWS_REFERRED
    }
    kept = [
        p
        for p in plan.expectations
        if p.type != REFERENCES_HOLD or tuple(p.kwargs["columns"]) not in large
    ]
    return replace(plan, expectations=tuple(kept), omitted=(*plan.omitted, *large.values()))


def _rows_of(reference: Reference) -> int | None:
    """Returns the number of rows of both targets; None where it is unknown."""
    try:
        counts = [
            row_count(side.open().files) for side in (reference.referring, reference.referenced)
        ]
    except (*READ_FAILURES, KeyError):
        return None
    return None if None in counts else sum(count for count in counts if count is not None)


def _measure(rows: TargetRows, table: TargetVersion | None, plan: SuitePlan) -> Measured | None:
    """Returns the profile, if the plan has an expectation about it.

    After changes it comes from the statistics in the log; without these it isn't measured then.
    """
    columns = next(
        (p.kwargs["columns"] for p in plan.expectations if kind_of(p.type).needs_profile), None
    )
    if columns is None or not {listed(name) for name, _ in columns} <= rows.types.keys():
        return None
    try:
        if table is not None and rows.met is not None:
            return profile_in_driver(table, columns)
        if table is not None and not table.place.lake.on_spark:
            return profile_by_values(table, columns)
    except (*READ_FAILURES, KeyError) as err:
        log.info("table=%s: Spark measures the profile: %s", plan.table, class_and_text(err))
    return None if rows.met is not None else measure_profile(rows.frame(), columns)


def _without_profile(plan: SuitePlan) -> SuitePlan:
    """Returns the plan without what is expected of a profile that wasn't measured."""
    about = [p for p in plan.expectations if kind_of(p.type).needs_profile]
    omitted = [_NOT_MEASURED] if any(kind_of(p.type).is_judged(p.kwargs) for p in about) else []
    kept = tuple(p for p in plan.expectations if p not in about)
    return replace(plan, expectations=kept, omitted=(*plan.omitted, *omitted))


def _together(one: ConfigError | None, other: ConfigError | None) -> ConfigError | None:
    """Returns one error for own expectations that are refused for different reasons."""
    texts = list(dict.fromkeys(str(err) for err in (one, other) if err is not None))
    return ConfigError("\n".join(texts)) if texts else None
