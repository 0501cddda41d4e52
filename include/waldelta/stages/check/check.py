"""The check stage: evaluates every target's expectations on the run's version, and writes results
and reports: in the ledger also profiles, and the suites that all rows of a target meet.

A failed expectation raises nothing in this module: ``QualityReport.raise_if_critical`` raises after
all results are written. Great Expectations is imported only where it evaluates, or describes
results on a page, and then while the targets are judged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import OwnSuites, read_own_suites
from waldelta.errors import StateError
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    SYNCED,
    Decisions,
    ExpectationResult,
    Ledger,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import (
    KEPT_PER_TABLE,
    PassedSuite,
    Profile,
    latest_profiles,
    latest_suites,
    newest_versions,
)
from waldelta.lake.ledger.table import Newest, again_when_late
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import CHECKS
from waldelta.pipeline.targets.external_commits import check_readable
from waldelta.pipeline.targets.quarantined_rows import read_decided, record_unknown
from waldelta.spark import Runner, RunnerPool
from waldelta.spark.runner import MOST_AT_ONCE
from waldelta.stages.check.check_run import CheckHistory, CheckRun, RunOutcome, verdict_of_error
from waldelta.stages.check.evaluate import judge_target
from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.measure.profile import ProfileBounds, bounds_of
from waldelta.stages.check.measure.references import CheckedTarget
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta.stages.check.suite.expectation import (
    QualityReport,
    SourceRules,
    TableVerdict,
)

NO_SUITES = OwnSuites()
log = logging.getLogger(__name__)


def keep_report(
    ledger: Ledger,
    report: QualityReport,
    history: CheckHistory,
    states: Mapping[str, TableState],
    since: datetime | None = None,
    own_suites: OwnSuites = NO_SUITES,
) -> None:
    """Record a check's results in the ledger: verdicts, profiles and passed suites.

    ``history`` is what earlier checks recorded, ``states`` are the targets' states, ``own_suites``
    their own expectations. Another run may have checked a later version of a table after ``since``:
    this check's results for that table are then not recorded.
    """
    at = now()
    # How many rows lack values was counted when the check began, and may have changed.
    counts = {
        verdict.table: outcome.planned.kwargs["observed"]
        for verdict in _record(ledger, report, at, own_suites, since)
        for outcome in verdict.outcomes
        if outcome.planned.type == ALL_VALUES_KNOWN
    }
    record_unknown(ledger, report.run_id, counts)
    ledger.append_all([
        Profile(at, report.run_id, verdict.table, verdict.version, *verdict.measured)
        for verdict in report.tables
        if verdict.measured is not None and verdict.version is not None
    ])  # fmt: skip
    ledger.append_all([
        PassedSuite(
            at, report.run_id, v.table, states[v.table].generation, v.version, v.suite, v.whole,
            history.end_of(states[v.table], v.version),
        )
        for v in report.tables
        if v.suite is not None and v.version is not None
    ])  # fmt: skip
    _log(report)


@again_when_late
def _record(
    ledger: Ledger,
    report: QualityReport,
    at: datetime,
    own_suites: OwnSuites,
    since: datetime | None,
) -> list[TableVerdict]:
    """Record the results, and return the verdicts without those on tables of which other runs have
    checked a later version since ``since``.
    """
    later: dict[str, int] = {}
    after: Newest | None = None
    if since is not None:
        later, after = newest_versions(ledger, since, [verdict.table for verdict in report.tables])
    verdicts = [v for v in report.tables if v.version is None or v.version >= later.get(v.table, 0)]
    rows = [
        ExpectationResult(
            at,
            report.run_id,
            verdict.table,
            outcome.planned.type,
            outcome.planned.meaning,
            outcome.planned.severity,
            outcome.planned.origin,
            outcome.success,
            outcome.observed,
            outcome.unexpected_count,
            verdict.version,
            list(verdict.omitted) if outcome is verdict.outcomes[0] else None,
            digest,
            list(outcome.examples) or None,
        )
        for verdict in verdicts
        for digest in [own_suites.digest_of(verdict.table)]
        for outcome in verdict.outcomes
    ]
    ledger.append_all(rows, after)
    return verdicts


def _log(report: QualityReport) -> None:
    for verdict in report.tables:
        failed = len(verdict.failed("critical")) + len(verdict.failed("warning"))
        log.info(
            "checked table=%s version=%s expectations=%s failed=%s seconds=%.1f",
            verdict.table, verdict.version, len(verdict.outcomes), failed, verdict.seconds,
        )  # fmt: skip
        for reason in verdict.omitted:
            log.warning("not checked table=%s: %s", verdict.table, reason)
    for note in report.notes:
        log.warning("%s", note)
    for warning in report.warnings:
        log.warning("expectation not met (warning): %s", warning)


def check(
    runner: Runner,
    pipeline: PipelineFile,
    ledger: Ledger,
    run_id: str,
    tables: Iterable[str] | None = None,
    outcome: RunOutcome | None = None,
) -> QualityReport:
    """Check the given targets, or all that have been synced, and write results and report.

    ``outcome`` describes what the run did to its targets; without it the current versions are
    checked. If a target can't be judged, or its own expectations are refused, only that target
    fails: the others are still judged, recorded and reported.
    """
    began, outcome = now(), outcome or RunOutcome()
    states = {
        name: state for name, state in ledger.table_states().items() if state.status == SYNCED
    }
    own_suites = read_own_suites(
        Path(pipeline.quality.suites) if pipeline.quality.suites else None, states
    )
    names = sorted(states.keys() & (states if tables is None else {*tables}))
    if not names:
        return QualityReport(run_id, (), notes=tuple(own_suites.unused))
    targets = [states[name] for name in names]
    history = CheckHistory(latest_suites(ledger, names), ledger.last_cut())
    bounds = _read_bounds(pipeline, ledger, names, run_id)
    rules = _rules(ledger, outcome, targets)
    with (
        _in_background() as background,
        RunnerPool.open(runner, len(targets), reads=True) as pool,
        private_files(OWNER_ONLY),
    ):
        context = (pipeline, run_id, began, pool, background, own_suites, outcome)
        run = CheckRun(*context, history, rules, bounds, read_decided(ledger, targets))
        report = _judge(run, ledger, targets)
    fault_point("check.reported")
    # A run checks its own versions while no other run is active. A separate check of all targets
    # takes long, and runs may record newer results during it.
    since = None if outcome.versions and not outcome.is_concurrent else began
    keep_report(ledger, report, history, states, since, own_suites)
    return report


def _judge(run: CheckRun, ledger: Ledger, states: Sequence[TableState]) -> QualityReport:
    """Judge the targets, and write the pages and their list."""
    if run.outcome.paged or not {state.table_name for state in states} <= run.outcome.written:
        # While the targets are judged: most of them will have a page.
        kinds = {
            each.type
            for file in run.own_suites.by_table.values()
            for each in file.suite.expectations
        }
        run.background.submit(import_great_expectations, kinds)
    targets, verdicts = _open_targets(run, ledger, states)
    run = replace(
        run, rules=_without_references(run.rules, {verdict.table for verdict in verdicts})
    )
    verdicts += run.pool.map(partial(judge_target, run), targets)
    verdicts.sort(key=lambda verdict: verdict.table)
    docs = DocsStore(run.pipeline, ledger.lake)
    place = docs.begin(CHECKS, run.run_id, run.began)
    index: Path | str | None = docs.index
    if any(each.version is None or run.outcome.has_page(each) for each in verdicts):
        # A check that writes no page doesn't load the templates.
        from waldelta.stages.check.write_pages import write_pages

        verdicts, index = write_pages(run, ledger, place, targets, verdicts)
    return QualityReport(run.run_id, tuple(verdicts), index, tuple(run.own_suites.unused))


@contextmanager
def _in_background() -> Iterator[ThreadPoolExecutor]:
    """Yields an executor for background work; after an error the caller does not wait for it."""
    executor = ThreadPoolExecutor(1 + MOST_AT_ONCE, "ahead")
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _rules(
    ledger: Ledger, outcome: RunOutcome, states: Sequence[TableState]
) -> dict[str, SourceRules]:
    """Returns the source's rules by target, with the number of rows that lack values.

    A target has no rules when the source could not be queried.
    """
    unknown = Decisions(ledger.lake).unknown_counts({s.table_name: s.generation for s in states})
    return {
        state.table_name: replace(
            outcome.rules.get(state.table_name, SourceRules()),
            unknown_rows=unknown.get(state.table_name, 0),
        )
        for state in states
    }


def _open_targets(
    run: CheckRun, ledger: Ledger, states: Sequence[TableState]
) -> tuple[list[CheckedTarget], list[TableVerdict]]:
    """Returns the targets at the run's versions, else at their current ones, and failed verdicts.

    A target fails when it is missing or can't be opened or read safely. The versions of the latest
    consistent cut are not used: while one table lags there is no new cut, and a verdict on an old
    version would be taken as the current one.
    """

    def open_one(state: TableState) -> CheckedTarget | TableVerdict:
        target = ledger.lake.target(state.table_name)
        try:
            version = run.outcome.versions.get(state.table_name)
            if version is None:
                if (newest := target.find()) is None:
                    raise StateError(
                        f"the target of {state.table_name} isn't at {target.uri}: run the initial"
                        " sync again"
                    )
                version = newest.version
            check_readable(target.log, state, run.history.cut, version)
            return CheckedTarget(state, version, target)
        except Exception as err:
            return verdict_of_error(state.table_name, None, err)

    results = list(run.background.map(open_one, states))
    return [t for t in results if isinstance(t, CheckedTarget)], [
        v for v in results if isinstance(v, TableVerdict)
    ]


def _without_references(
    rules: Mapping[str, SourceRules], unreadable: AbstractSet[str]
) -> dict[str, SourceRules]:
    """Returns the rules without foreign keys to or from targets that can't be read."""
    return {
        name: replace(
            of,
            references=[
                each
                for each in of.references
                if unreadable.isdisjoint(side.table for side in each.sides)
            ],
        )
        for name, of in rules.items()
    }


def _read_bounds(
    pipeline: PipelineFile, ledger: Ledger, tables: Sequence[str], run_id: str
) -> dict[str, ProfileBounds]:
    """Returns what earlier runs measured of these targets; empty when profile anomalies are off."""
    drift = pipeline.quality.drift
    if not drift.enabled:
        return {}
    profiles = latest_profiles(ledger, tables, KEPT_PER_TABLE, but=run_id)
    return {name: bounds_of(profiles.get(name, []), drift) for name in tables}
