"""The stages that end several jobs: check the targets, and report the replication lag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from waldelta.failpoints import fault_point
from waldelta.lake.ledger import now
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.pipeline.run_result import ReportedLag
from waldelta.pipeline.targets import synced_states
from waldelta.pipeline.targets.corrected_expectations import corrected
from waldelta.postgres.partition_access import read_unreadable
from waldelta.slot import read_slot, slot_position
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.slot.health import reading
from waldelta.spark import Runner
from waldelta.stages.check.gate.quarantined_rows import record_current


def check_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Check the targets that the run changed, and those whose failed expectations were edited;
    raises QualityFailed when a critical expectation failed.

    After decisions on quarantined rows all their targets are checked, because a decision alone may
    change a result.
    """
    decided = result.verb == "quarantine"
    # Without a changed row, rows may still have entered or left quarantine: one that was deleted,
    # or all of an earlier copy's.
    unchanged = {
        name: table for name, table in result.tables.items() if not (table.changed or decided)
    }
    quiet = [
        name for name, table in unchanged.items() if table.passed_by or result.verb != "consume"
    ]
    # Without checks, nothing else records the other tables' results.
    if not job.pipeline.quality.enabled:
        quiet += result.tables.keys() - unchanged.keys()
    if quiet:
        record_current(job, quiet)
    changed = [name for name, table in result.tables.items() if table.changed or decided]
    edited = _edited(job, changed) if result.verb == "consume" else []
    check_tables(runner, job, result, stage, [*changed, *edited])


def _edited(job: Job, changed: Sequence[str]) -> list[str]:
    """Returns the other targets whose failed expectations were edited since."""
    if job.pipeline.quality.suites is None:
        return []
    return corrected(job, {state.table_name for state in synced_states(job)} - {*changed})


def check_tables(
    runner: Runner,
    job: Job,
    result: RunResult,
    stage: StageResult,
    tables: Sequence[str],
) -> None:
    """Check these targets and add the results; raises QualityFailed for failed critical
    expectations.
    """
    from waldelta.stages.check import RunOutcome
    from waldelta.stages.check.check import check
    from waldelta.stages.check.paged_targets import MERGES, paged_targets
    from waldelta.stages.check.suite.source_constraints import read_rules

    fault_point("check.begun")
    result.checked = replace(result.checked, passed=[], corrected=[])
    fine = {*result.tables, *tables} - set(result.targets.not_applied)
    if result.verb != "validate" and not job.pipeline.quality.enabled:
        result.checked = replace(result.checked, passed=sorted(fine))
        stage.detail = "switched off"
        return
    versions = {
        name: table.version for name, table in result.tables.items() if table.version is not None
    }
    wrote = [name for name in tables if name in result.tables and result.verb != "validate"]
    paged = paged_targets(job, result, wrote)
    # Only rows of new changes have a newer position than those that were judged before.
    touched = [name for name in wrote if name not in paged] if result.verb in MERGES else []
    left = RunOutcome(
        versions,
        frozenset(wrote),
        frozenset(paged),
        read_rules(job, result, tables, touched),
        is_concurrent=result.verb == "quarantine",
    )
    report = check(runner, job.pipeline, job.ledger, job.run_id, tables, left)
    passed = sorted(fine - set(report.failed_tables))
    result.add_check(report, passed, [name for name in passed if name not in result.tables])
    stage.detail = report.summary
    fault_point("check.ended")
    report.raise_if_critical()


def report_stage(_: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Record how far the lake lags behind now, and print the summary."""
    with job.source.connect_slot("report") as connection:
        position = slot_position(connection, job)
        confirmed = confirmed_lsn(connection, job.pipeline.source.slot)
        slot = read_slot(connection, job.pipeline.source.slot)
        unreadable = read_unreadable(connection, job.pipeline.source)
    result.warn(unreadable)
    # WAL that was read and has nothing to land is no lag, although a slot isn't moved for less than
    # a WAL file.
    lag_bytes = position.lag_of(result.landed.read_upto(confirmed))
    result.reported = ReportedLag(
        lag_bytes, None if slot is None else reading(slot, lag_bytes, now())
    )
    stage.detail = f"lag {lag_bytes:,} bytes"
