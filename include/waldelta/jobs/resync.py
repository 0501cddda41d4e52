"""Job resync: recreates a lost slot, repairs the targets by the rows that differ, and checks them.

::

    resync  a new slot where the old one is lost or can't be read   (stages.setup.renew_slot)
            a snapshot of the source -> rows that differ            (stages.sync)
            what is pending in the slot -> change log               (stages.land)
    check, report: as job consume
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from waldelta.errors import LockHeld, SlotUnreadable
from waldelta.jobs._shared_stages import check_stage, report_stage
from waldelta.jobs._stages import Stage, continued, run_stages
from waldelta.jobs.sync import copied_tables
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.quantities import counted
from waldelta.slot import remaining_on_primary
from waldelta.slot.gaps import describe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_resync(
    spark: SparkSession,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    only: Collection[str] | None = None,
    *,
    accept_server: str | None = None,
) -> RunResult:
    """Recreate a lost slot, repair the targets by the rows that differ, then check them.

    This covers these tables, or all that have no copy in the current slot incarnation. If the slot
    is fine, it is kept. A slot is fine when its pending changes could be read and have landed.
    ``accept_server`` names a server that differs from the earlier one, as ``renew_slot`` requires.
    """
    from waldelta.changes.decode.route import translate
    from waldelta.stages.land import land_backlog
    from waldelta.stages.setup.renew_slot import renew_slot
    from waldelta.stages.sync.sync import sync

    def resync_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        gap = renew_slot(job, translate, accept_server=accept_server)
        if gap is None:
            try:  # Only reading the slot shows that it can be read.
                land_backlog(spark, job)
            except SlotUnreadable as err:
                gap = renew_slot(job, translate, accept_server=accept_server, broken=err)
        if gap is not None:
            result.warnings.append(
                f"the slot was created again, so the changes in {describe(gap)} were lost:"
                f" {gap.cause}: {gap.detail}"
            )
        if gap is not None and accept_server is not None:
            result.warnings.append(
                f"slot {gap.slot!r} on the previous server (system {gap.system_identifier},"
                f" timeline {gap.timeline}) keeps its WAL until you drop it there"
            )
        if gap is not None:
            with (
                job.source.connect("resync") as primary,
                job.source.connect_slot("resync", primary) as connection,
            ):
                result.warnings += remaining_on_primary(primary, connection, gap.slot)
        done, failed = copied_tables(
            lambda: sync(spark, job, tables, reason or (gap.cause if gap else None), by_diff=True)
        )
        for table in done:
            name = str(table.table)
            result.add_copy(table)
            result.warnings += (
                [f"{name} was copied as a whole: {table.whole}"] if table.whole else []
            )
            result.warnings += [f"{name} was {table.skipped}"] if table.skipped else []
        result.targets.not_applied = sorted(failed.failures) if failed is not None else []
        written = sum(table.rows if table.diff is None else table.diff.written for table in done)
        stage.detail = (
            f"{counted(len(done), 'table')}, {counted(written, 'row')} written or removed; slot"
            f" {'created again' if gap else 'unchanged'}"
        )
        if failed is not None:
            raise failed
        with suppress(LockHeld):  # A run holds the lock, and reads the slot.
            land_backlog(spark, job)

    result = continued(job, "resync", fresh=False)
    stages: dict[str, Stage] = {
        "resync": resync_stage,
        "check": check_stage,
        "report": report_stage,
    }
    return run_stages(spark, job, result, stages, only)
