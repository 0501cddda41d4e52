"""Job sync copies the initial snapshot of tables; job resync recreates a lost slot and repairs the
targets by the rows that differ. Both check the targets.

::

    sync    a snapshot of the source -> targets                     (waldelta.stages.sync)
    check, report: as job consume

    resync  a new slot where the old one is lost or can't be read   (stages.setup.renew_slot)
            a snapshot of the source -> rows that differ            (stages.sync)
            what is pending in the slot -> change log               (stages.land)
    check, report: as job consume
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from waldelta.errors import LockHeld, SlotUnreadable, SyncFailed
from waldelta.jobs._stages import Stage, check_stage, report_stage, resume_result, run_stages
from waldelta.lake.ledger import Gap
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.quantities import counted
from waldelta.slot.gaps import OPEN, describe
from waldelta.slot.standby import remaining_on_primary
from waldelta.spark import Runner
from waldelta.stages.land.drain import land_backlog
from waldelta.stages.setup.renew_slot import renew_slot
from waldelta.stages.sync.copy_table import SyncResult, count_raw_rows
from waldelta.stages.sync.sync import sync


def run_sync(
    runner: Runner,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    stages: Collection[str] | None = None,
    *,
    only_waiting: bool = False,
) -> RunResult:
    """Copy tables that were never copied, or the given ones, then check them.

    ``only_waiting``: only tables that get no changes until they are copied.
    """

    def sync_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        copied, failed = _add_copies(
            runner,
            job,
            result,
            partial(sync, runner, job, names, reason, only_waiting=only_waiting),
        )
        stage.detail = (
            f"{counted(len(copied), 'table')}, {counted(sum(copy.rows for copy in copied), 'row')}"
        )
        if failed is not None:
            raise failed

    # A retry copies what the failed attempt left; tables of that attempt are checked and reported
    # too.
    result = resume_result(job, "sync", fresh=False)
    names = _tables_to_copy(result, tables)
    job_stages: dict[str, Stage] = {
        "sync": sync_stage,
        "check": check_stage,
        "report": report_stage,
    }
    return run_stages(runner, job, result, job_stages, stages)


def _tables_to_copy(result: RunResult, tables: Sequence[str] | None) -> Sequence[str] | None:
    """Returns the named tables without those that the process which began the run has copied."""
    copy = result.stages.get(result.verb)
    if tables is None or copy is None or copy.status != "running":
        return tables
    return [name for name in tables if name not in result.tables]


def _add_copies(
    runner: Runner, job: Job, result: RunResult, copy: Callable[..., list[SyncResult]]
) -> tuple[list[SyncResult], SyncFailed | None]:
    """Add what was copied to the result, also where the process leaves the rest to an application;
    returns it, and the error that names the rest.
    """
    results: list[SyncResult] = []
    failed: SyncFailed | None = None
    try:
        copy(results=results)
    except SyncFailed as err:
        failed = err
    finally:
        for copied in results:
            name, written = copied.table_name, copied.copy
            if written.raw_rows is None and written.diff is None:
                raw_rows = count_raw_rows(runner, job, name, copied.version)
                written = replace(written, raw_rows=raw_rows)
            result.add_copy(replace(copied, copy=written))
            if written.full_rewrite_reason:
                result.warnings.append(
                    f"{name} was copied as a whole: {written.full_rewrite_reason}"
                )
            if copied.skipped is not None:
                result.warnings.append(f"{name} was {copied.skipped}")
    result.targets.leave_behind(failed.failures if failed is not None else {})
    return results, failed


def run_resync(
    runner: Runner,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    stages: Collection[str] | None = None,
    *,
    accept_server: str | None = None,
) -> RunResult:
    """Recreate a lost slot, repair the targets by the rows that differ, then check them.

    This covers these tables, or all that have no copy in the current slot incarnation. If the slot
    is fine, it is kept. A slot is fine when its pending changes could be read and have landed.
    ``accept_server`` names a server that differs from the earlier one, as ``renew_slot`` requires.
    Raises RunFailed.
    """

    result = resume_result(job, "resync", fresh=False)
    names = _tables_to_copy(result, tables)

    def resync_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        gap = _renew_slot(runner, job, accept_server)
        if gap is not None:
            result.warnings += _warnings_of(job, gap, accept_server)
        gaps = reversed(job.ledger.gaps(job.pipeline.source.slot))
        cause = reason or next((one.cause for one in gaps if one.status == OPEN), None)
        copies, failed = _add_copies(
            runner, job, result, partial(sync, runner, job, names, cause, by_diff=True)
        )
        written = sum(copied.written for copied in copies)
        stage.detail = (
            f"{counted(len(copies), 'table')}, {counted(written, 'row')} written or removed;"
            f" slot {'unchanged' if gap is None else 'created again'}"
        )
        if failed is not None:
            raise failed
        with suppress(LockHeld):  # A run holds the lock, and reads the slot.
            land_backlog(runner, job)

    job_stages: dict[str, Stage] = {
        "resync": resync_stage,
        "check": check_stage,
        "report": report_stage,
    }
    return run_stages(runner, job, result, job_stages, stages)


def _renew_slot(runner: Runner, job: Job, accept_server: str | None) -> Gap | None:
    """Land what is pending in the slot, or recreate the slot if that is lost; returns the gap."""
    gap = renew_slot(job, accept_server=accept_server)
    if gap is not None:
        return gap
    try:  # Only reading the slot shows that it can be read.
        land_backlog(runner, job)
    except SlotUnreadable as err:
        return renew_slot(job, accept_server=accept_server, broken=err)
    return None


def _warnings_of(job: Job, gap: Gap, accept_server: str | None) -> list[str]:
    loss = f"the changes in {describe(gap)} were lost: {gap.cause}: {gap.detail}"
    warnings = [f"the slot was created again, so {loss}"]
    if accept_server is not None:
        warnings.append(
            f"slot {gap.slot!r} on the previous server (system {gap.system_identifier},"
            f" timeline {gap.timeline}) keeps its WAL until you drop it there"
        )
    with (
        job.source.connect("resync") as primary,
        job.source.connect_slot("resync", primary) as connection,
    ):
        return warnings + remaining_on_primary(primary, connection, gap.slot)
