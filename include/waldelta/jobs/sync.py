"""Job sync: copies the initial snapshot of tables, then checks them.

::

    sync    a snapshot of the source -> targets   (waldelta.stages.sync)
    check, report: as job consume
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from waldelta.errors import SyncFailed
from waldelta.jobs._stages import Stage, check_stage, continued, report_stage, run_stages
from waldelta.pipeline import Job, RunResult, StageResult, TableResult
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.sync.copy_table import SyncResult, count_raw_rows
from waldelta.stages.sync.sync import sync


def run_sync(
    runner: Runner,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    only: Collection[str] | None = None,
    *,
    only_waiting: bool = False,
) -> RunResult:
    """Copy tables that were never copied, or the given ones, then check them.

    ``only_waiting``: only tables that get no changes until they are copied.
    """

    def sync_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        copied, failed = copied_tables(
            lambda: sync(runner, job, tables, reason, only_waiting=only_waiting)
        )
        for done in copied:
            name = str(done.table)
            raw_rows = (
                count_raw_rows(runner, job, name, done.version)
                if done.raw_rows is None
                else done.raw_rows
            )
            result.tables[name] = TableResult(
                rows=done.rows, version=done.version, raw_rows=raw_rows
            )
            result.source.add(done.bill)
            result.warnings += [f"{name} was {done.skipped}"] if done.skipped else []
        result.targets.leave_behind(failed.failures if failed is not None else {})
        stage.detail = (
            f"{counted(len(copied), 'table')}, {counted(sum(done.rows for done in copied), 'row')}"
        )
        if failed is not None:
            raise failed

    # A retry copies what the failed attempt left; tables of that attempt are checked and reported
    # too.
    result = continued(job, "sync", fresh=False)
    stages: dict[str, Stage] = {"sync": sync_stage, "check": check_stage, "report": report_stage}
    return run_stages(runner, job, result, stages, only)


def copied_tables(
    copy: Callable[[], list[SyncResult]],
) -> tuple[list[SyncResult], SyncFailed | None]:
    """Returns what was copied, and the error that names the rest."""
    try:
        return copy(), None
    except SyncFailed as err:
        return cast("list[SyncResult]", list(err.results)), err
