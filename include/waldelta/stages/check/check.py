"""The check stage: evaluates every target's expectations on the run's version, and writes results
and reports.

A failed expectation raises nothing in this module: ``QualityReport.raise_if_critical`` raises after
all results are written. Great Expectations is imported only when it is needed, concurrently with
the first measurements of the targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake.exceptions import TableNotFoundError

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import OwnSuites, read_own_suites
from waldelta.errors import ConfigError, StateError, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget
from waldelta.lake.ledger import BatchCut, Ledger, Quarantine, TableState
from waldelta.lake.ledger.passed_suites import latest_suites
from waldelta.lake.ledger.profiles import KEPT_PER_TABLE, latest_profiles
from waldelta.lake.ledger.records import SYNCED, now
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import own_docs_folder
from waldelta.pipeline.targets.external_commits import check_readable
from waldelta.pipeline.task_errors import unexpected_error
from waldelta.spark import SessionPool
from waldelta.stages.check._background import (
    Measurements,
    in_background,
    measure_early,
    profile_early,
)
from waldelta.stages.check._incremental import (
    Known,
    are_met,
    changed_since,
    is_unchanged_since_full_check,
    met_at,
    rest_of,
    suite_of,
)
from waldelta.stages.check._quick_check import (
    affordable,
    outcomes_in_driver,
    quick_outcomes,
    quick_profile,
    rest_outcomes,
    row_conditions,
)
from waldelta.stages.check._record import keep_report
from waldelta.stages.check.great_expectations import import_great_expectations
from waldelta.stages.check.measure import Measured, Reference
from waldelta.stages.check.reports import list_reports
from waldelta.stages.check.reports.data_docs import (
    drop_old_results,
    keep_result,
    open_context,
    page_name,
    page_path,
    run_identifier,
    write_check_pages,
)
from waldelta.stages.check.suite import (
    Outcome,
    QualityReport,
    SourceRules,
    SuitePlan,
    TableVerdict,
    plan_suite,
)
from waldelta.stages.check.suite.profile_drift import Before, bounds_of
from waldelta.stages.check.suite.target_facts import CheckedTarget
from waldelta.stages.check.suite.verdict import unchecked

if TYPE_CHECKING:
    from datetime import datetime

    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run's effect on its targets: the Delta versions it wrote, and which targets get a quick
    check.

    A quick-checked target gets a report page only when it fails an expectation, or has an
    expectation that only Great Expectations can evaluate.
    """

    versions: Mapping[str, int] = field(default_factory=dict)
    quick: frozenset[str] = frozenset()
    # By target: what the constraints of its source tables guarantee.
    rules: Mapping[str, SourceRules] = field(default_factory=dict)
    # By target: what earlier runs measured.
    before: Mapping[str, Before] = field(default_factory=dict)
    # What earlier checks established about the targets.
    known: Known = field(default_factory=Known)
    # True for a scheduled full check. A target that is unchanged since a full check found its suite
    # met is then judged only by expectations that depend on other data.
    is_upkeep: bool = False
    # True when other runs may go on during this check, and may record newer results.
    is_concurrent: bool = False

    def rules_of(self, target: CheckedTarget) -> SourceRules:
        """Returns the source rules of a target."""
        return self.rules[target.state.table_name]


@dataclass(frozen=True, slots=True)
class _Validated:
    """A target with its suite plan, validation result, duration in seconds and measured profile."""

    target: CheckedTarget
    plan: SuitePlan
    result: ExpectationSuiteValidationResult
    seconds: float
    measured: Measured | None


def check(
    spark: SparkSession,
    pipeline: PipelineFile,
    ledger: Ledger,
    run_id: str,
    tables: Iterable[str] | None = None,
    outcome: RunOutcome | None = None,
) -> QualityReport:
    """Check the given targets, or all that have been synced, and write results and report.

    ``outcome`` describes what the run did to its targets; without it the current versions are
    checked. If a target can't be judged, or its own expectations are refused, only that target
    fails: the others are still judged, recorded and reported. Without a folder for reports the
    check writes no pages; everything else is the same.
    """
    began, outcome = now(), outcome or RunOutcome()
    folder = own_docs_folder(pipeline)
    states = {
        name: state for name, state in ledger.table_states().items() if state.status == SYNCED
    }
    own = read_own_suites(_suites(pipeline), states)
    wanted = sorted(name for name in states if tables is None or name in set(tables))
    if not wanted:
        return QualityReport(run_id, (), notes=tuple(own.unused))
    known = Known(latest_suites(ledger, wanted), ledger.last_cut())
    quick = frozenset(wanted) if outcome.is_upkeep else outcome.quick
    unknown = Quarantine(ledger.lake).unknown_counts({n: states[n].generation for n in wanted})
    # A target has no rules when the source could not be queried.
    rules = {
        n: replace(outcome.rules.get(n, SourceRules()), unknown_rows=unknown.get(n, 0))
        for n in wanted
    }
    before = _before(pipeline, ledger, wanted, run_id)
    outcome = replace(outcome, rules=rules, before=before, known=known, quick=quick)
    kinds = {item.type for file in own.by_table.values() for item in file.suite.expectations}
    with (
        in_background() as background,
        SessionPool(spark, len(wanted)) as pool,
        private_files(OWNER_ONLY),
    ):
        imported = (
            None
            if outcome.quick.issuperset(wanted)
            else background.submit(import_great_expectations, kinds)
        )
        targets, lost = _targets(
            background, ledger, [states[name] for name in wanted], outcome.versions, known.cut
        )
        outcome = replace(
            outcome, rules=_without_references(rules, {verdict.table for verdict in lost})
        )
        met, targets = _quick(pool, background, targets, (own, outcome))
        asked = [
            measure_early(
                background,
                spark,
                target,
                outcome.rules_of(target).references,
            )
            for target in targets
        ]
        plans = pool.map(lambda session, target: _plan(session, target, (own, outcome)), targets)
        if imported is not None:
            imported.result()
        verdicts: list[TableVerdict] = []
        if targets:
            import_great_expectations(kinds)
            profiled = [
                profile_early(background, *both) for both in zip(targets, plans, strict=True)
            ]
            planned = list(zip(targets, plans, zip(asked, profiled, strict=True), strict=True))
            verdicts = _run(pool, folder, pipeline, (run_id, began), planned)
        index = _index(folder)
        if folder is not None and (told := [*lost, *verdicts]):
            index = list_reports(folder, pipeline, run_id, began, told)
        both = sorted([*lost, *met, *verdicts], key=lambda verdict: verdict.table)
        report = QualityReport(run_id, tuple(both), index, tuple(own.unused))
    fault_point("check.reported")
    # A run checks its own versions while no other run is active. A separate check of all targets
    # takes long, and runs may record newer results during it.
    keep_report(
        ledger,
        report,
        known,
        states,
        None if outcome.versions and not outcome.is_concurrent else began,
    )
    return report


def _quick(
    pool: SessionPool,
    background: ThreadPoolExecutor,
    targets: Sequence[CheckedTarget],
    suites: tuple[OwnSuites, RunOutcome],
) -> tuple[list[TableVerdict], list[CheckedTarget]]:
    """Returns the verdicts of the quick check, and the targets that need a full check.

    A target has a quick verdict when it meets its whole suite, or when it is unchanged since a full
    check found the suite met.
    """
    left = suites[1]
    judge = partial(_rest_verdict if left.is_upkeep else _quick_verdict, background, suites)

    def check_quickly(session: SparkSession, target: CheckedTarget) -> TableVerdict | None:
        try:
            return judge(session, target)
        except Exception as err:  # The full check reports the cause.
            log.info(
                "table=%s can't have a quick check, a full check follows: %s",
                target.state.table_name,
                type(err).__name__,
            )
            return None

    chosen = [t for t in targets if _is_quick(t.state, left)]
    met = [verdict for verdict in pool.map(check_quickly, chosen) if verdict is not None]
    done = {verdict.table for verdict in met}
    return met, [target for target in targets if target.state.table_name not in done]


def _quick_verdict(
    background: ThreadPoolExecutor,
    suites: tuple[OwnSuites, RunOutcome],
    session: SparkSession,
    target: CheckedTarget,
) -> TableVerdict | None:
    """Returns the verdict on a target that the run changed little.

    Returns None when Great Expectations must evaluate the suite.
    """
    started = time.monotonic()
    left = suites[1]
    rules = affordable(left.rules_of(target))
    table = target.open()
    columns = table.schema.names
    suite = _suite(target, columns, suites, rules)
    profiled = quick_profile(table, suite)
    if profiled is None:
        return None
    measured, plan = profiled
    met = met_at(left.known, target, suite)
    found, since = outcomes_in_driver(table, plan, rules.references), None
    if found is None and (conditions := row_conditions(plan)) is not None:
        asked = measure_early(background, session, target, rules.references, met)
        since = changed_since(left.known, target, suite, columns)
        found = quick_outcomes(target.frame(session), plan, conditions, asked, since)
    if found is None:
        return None
    digest = suite_of(suite) if plan.refused is None else None
    found, seconds = (*found, *_refused(plan.refused)), time.monotonic() - started
    # Without an earlier result the check covered all rows.
    whole = met is None and since is None
    return TableVerdict(
        plan.table,
        target.version,
        found,
        plan.omitted,
        None,
        seconds,
        measured,
        digest,
        whole=whole,
    )


def _rest_verdict(
    background: ThreadPoolExecutor,
    suites: tuple[OwnSuites, RunOutcome],
    session: SparkSession,
    target: CheckedTarget,
) -> TableVerdict | None:
    """Returns the verdict of the expectations that depend on other data, met or not.

    Returns None when the target has changed since its last full check.
    """
    started = time.monotonic()
    left = suites[1]
    suite = _suite(target, target.open().schema.names, suites, left.rules_of(target))
    if not is_unchanged_since_full_check(left.known, target, suite):
        return None
    plan = rest_of(suite)
    references, types = left.rules_of(target).references, {p.type for p in plan.expectations}
    asked = measure_early(background, session, target, references, types=types)
    found = rest_outcomes(plan, asked)
    return TableVerdict(
        plan.table, target.version, found, plan.omitted, None, time.monotonic() - started
    )


def _is_quick(state: TableState, outcome: RunOutcome) -> bool:
    return state.table_name in outcome.quick and (outcome.is_upkeep or not state.kept_as.keeps_rows)


def _suites(pipeline: PipelineFile) -> Path | None:
    return Path(pipeline.quality.suites) if pipeline.quality.suites else None


def _targets(
    background: ThreadPoolExecutor,
    ledger: Ledger,
    states: Sequence[TableState],
    versions: Mapping[str, int],
    cut: BatchCut | None,
) -> tuple[list[CheckedTarget], list[TableVerdict]]:
    """Returns the targets at the given versions, else at their current ones, and failed verdicts.

    A target fails when it is missing or can't be opened or read safely. The versions of the latest
    consistent cut are not used: while one table lags there is no new cut, and a verdict on an old
    version would be taken as the current one.
    """

    def open_one(state: TableState) -> CheckedTarget | TableVerdict:
        target = ledger.lake.target(state.table_name)
        try:
            version = versions.get(state.table_name)
            if version is None:
                version = _current_version(state.table_name, target)
            check_readable(target.log, state, cut, version)
            return CheckedTarget(state, version, target)
        except Exception as err:
            return _failed(state.table_name, None, err)

    found = list(background.map(open_one, states))
    return [t for t in found if isinstance(t, CheckedTarget)], [
        v for v in found if isinstance(v, TableVerdict)
    ]


def _without_references(
    rules: Mapping[str, SourceRules], lost: AbstractSet[str]
) -> dict[str, SourceRules]:
    """Returns the rules without foreign keys to or from targets that can't be read."""

    def can_be_judged(reference: Reference) -> bool:
        return lost.isdisjoint((reference.referring.table, reference.referenced.table))

    if not lost:
        return dict(rules)
    return {
        name: replace(of, references=[*filter(can_be_judged, of.references)])
        for name, of in rules.items()
    }


def _current_version(table: str, target: DeltaTarget) -> int:
    try:
        return target.version
    except TableNotFoundError as err:
        raise StateError(
            f"the target of {table} isn't at {target.uri}: run the initial sync again"
        ) from err


def _failed(table: str, version: int | None, err: Exception) -> TableVerdict:
    """Returns the verdict on a target that couldn't be judged at all."""
    named = err if isinstance(err, WaldeltaError) else unexpected_error(table, err)
    log.error("table=%s couldn't be checked: %s", table, named)
    return TableVerdict(table, version, (unchecked(named),), (), None, 0.0)


def _refused(err: ConfigError | None) -> list[Outcome]:
    return [] if err is None else [unchecked(err)]


def _plan(
    spark: SparkSession, target: CheckedTarget, suites: tuple[OwnSuites, RunOutcome]
) -> SuitePlan | Exception:
    """Returns a target's suite plan, or the exception that prevented it."""
    try:
        return _suite(target, target.frame(spark).columns, suites, suites[1].rules_of(target))
    except Exception as err:
        return err


def _suite(
    target: CheckedTarget,
    columns: Sequence[str],
    suites: tuple[OwnSuites, RunOutcome],
    rules: SourceRules,
) -> SuitePlan:
    (own, left), name = suites, target.state.table_name
    plan = plan_suite(target.state, columns, own.by_table.get(name), rules, left.before.get(name))
    return replace(plan, refused=own.refused.get(name))


def _run(
    pool: SessionPool,
    folder: Path | None,
    pipeline: PipelineFile,
    begun: tuple[str, datetime],
    planned: Sequence[tuple[CheckedTarget, SuitePlan | Exception, Measurements]],
) -> list[TableVerdict]:
    from waldelta.stages.check.great_expectations import SuiteCheck
    from waldelta.stages.check.great_expectations.build import build_known
    from waldelta.stages.check.great_expectations.run_suite import measured, outcomes

    run_id, at = begun
    context = open_context(folder)
    run = run_identifier(pipeline.pipeline, run_id, at)
    verdicts: list[TableVerdict] = []
    ready: list[tuple[CheckedTarget, SuitePlan, Measurements, SuiteCheck]] = []
    for target, plan, asked in planned:
        if isinstance(plan, Exception):
            verdicts.append(_failed(target.state.table_name, target.version, plan))
            continue
        suite, refused = build_known(page_name(plan.table), plan)
        ready.append(
            (
                target,
                replace(plan, refused=plan.refused or refused),
                asked,
                SuiteCheck(context, suite),
            )
        )

    def validate(
        session: SparkSession, item: tuple[CheckedTarget, SuitePlan, Measurements, SuiteCheck]
    ) -> _Validated | TableVerdict:
        started = time.monotonic()
        target, plan, asked, suite_check = item
        try:
            result = suite_check.run(target.frame(session), *asked)
        except Exception as err:
            return _failed(plan.table, target.version, err)
        result.meta["run_id"] = run
        result.meta["batch_parameters"] = _about(pipeline, run_id, target, plan)
        return _Validated(target, plan, result, time.monotonic() - started, measured(result))

    identifiers = []
    for done in pool.map(validate, ready):
        if isinstance(done, TableVerdict):
            verdicts.append(done)
            continue
        page = None
        if folder is not None:
            identifier = keep_result(context, page_name(done.plan.table), done.result, run)
            identifiers.append(identifier)
            page = page_path(folder, identifier)
        found = (*outcomes(done.result, done.plan), *_refused(done.plan.refused))
        digest = suite_of(done.plan) if are_met(found) else None
        verdicts.append(
            TableVerdict(
                done.plan.table,
                done.target.version,
                found,
                done.plan.omitted,
                page,
                done.seconds,
                done.measured,
                digest,
                whole=True,
            )
        )
    if folder is not None:
        drop_old_results(context, folder, pipeline.pipeline, pipeline.quality.keep_reports)
        write_check_pages(context, folder, identifiers)
    return verdicts


def _index(folder: Path | None) -> Path | None:
    """Returns the index page of all reports, or None when no check has written one."""
    index = folder / "index.html" if folder is not None else None
    return index if index is not None and index.exists() else None


def _about(
    pipeline: PipelineFile, run_id: str, target: CheckedTarget, plan: SuitePlan
) -> dict[str, str]:
    """Returns what the report page says about the data it judges."""
    about = {
        "pipeline": pipeline.pipeline,
        "table": plan.table,
        "Airflow run": run_id,
        "Delta version": str(target.version),
        "location": target.table.uri,
    }
    if told := [*plan.omitted, *([str(plan.refused)] if plan.refused is not None else [])]:
        about["not checked"] = "; ".join(told)
    return about


def _before(
    pipeline: PipelineFile, ledger: Ledger, tables: Sequence[str], run_id: str
) -> dict[str, Before]:
    """Returns what earlier runs measured of these targets; empty when profile anomalies are off."""
    wanted = pipeline.quality.drift
    if not wanted.enabled:
        return {}
    found = latest_profiles(ledger, tables, KEPT_PER_TABLE, but=run_id)
    return {name: bounds_of(found.get(name, []), wanted) for name in tables}
