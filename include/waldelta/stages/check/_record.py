"""Records what a check found in the ledger and the log: results, profiles, and the suites that all
rows of a target meet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

from waldelta.config.expectation_files import OwnSuites
from waldelta.lake.ledger import ALL_VALUES_KNOWN, ExpectationResult, Ledger, TableState, now
from waldelta.lake.ledger.check_records import PassedSuite, Profile, newest_versions
from waldelta.lake.ledger.table import Newest, again_when_late
from waldelta.stages.check.check_run import Known
from waldelta.stages.check.gate.quarantined_rows import record_unknown
from waldelta.stages.check.suite.expectation import QualityReport, TableVerdict

NO_SUITES = OwnSuites()
log = logging.getLogger(__name__)


def keep_report(
    ledger: Ledger,
    report: QualityReport,
    known: Known,
    states: Mapping[str, TableState],
    since: datetime | None = None,
    own: OwnSuites = NO_SUITES,
) -> None:
    """Record the whole report; ``known`` is what the check knew before, ``states`` the targets'
    states, ``own`` their own expectations.

    ``since``: results that other runs recorded since then for a later version are newer, so this
    check's results for these tables are not recorded.
    """
    at = now()
    later = _record(ledger, report, at, own, since)
    _recount_unknown(ledger, report, later)
    ledger.append_all([
        Profile(at, report.run_id, verdict.table, verdict.version, *verdict.measured)
        for verdict in report.tables
        if verdict.measured is not None and verdict.version is not None
    ])  # fmt: skip
    ledger.append_all([
        PassedSuite(
            at, report.run_id, v.table, states[v.table].generation, v.version, v.suite, v.whole,
            known.end_of(states[v.table], v.version),
        )
        for v in report.tables
        if v.suite is not None and v.version is not None
    ])  # fmt: skip
    _log(report)


@again_when_late
def _record(
    ledger: Ledger, report: QualityReport, at: datetime, own: OwnSuites, since: datetime | None
) -> dict[str, int]:
    """Record the results, and return the versions that other runs have checked since ``since``."""
    later: dict[str, int] = {}
    after: Newest | None = None
    if since is not None:
        tables = [verdict.table for verdict in report.tables]
        later, after = newest_versions(ledger, since, tables)
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
        )
        for verdict in _last_words(report, later)
        for digest in [own.digest_of(verdict.table)]
        for outcome in verdict.outcomes
    ]
    ledger.append_all(rows, after)
    return later


def _last_words(report: QualityReport, later: Mapping[str, int]) -> list[TableVerdict]:
    return [v for v in report.tables if v.version is None or v.version >= later.get(v.table, 0)]


def _recount_unknown(ledger: Ledger, report: QualityReport, later: Mapping[str, int]) -> None:
    """Record how many rows lack values, as counted when the check began.

    Tables checked at a later version are skipped: that check recorded its own, newer count.
    """
    told = {
        verdict.table: outcome.planned.kwargs["observed"]
        for verdict in _last_words(report, later)
        for outcome in verdict.outcomes
        if outcome.planned.type == ALL_VALUES_KNOWN
    }
    if told:
        record_unknown(ledger, report.run_id, told)


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
