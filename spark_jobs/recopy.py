"""Recopy: copy tables again whose source changed in a way that the stream doesn't tell, or leave that to a sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_jobs.result import RunResult, TableResult
from waldelta.errors import StateError, WaldeltaError
from waldelta.job import Job
from waldelta.recopy import PendingCopy, pending_copies, read_table_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def recopy(spark: SparkSession, job: Job, result: RunResult) -> dict[str, WaldeltaError]:
    """Take up every target that waits for a new copy; returns what went wrong, by table.

    Where a sync follows, large tables are left to it: they are named in ``result.needs_sync``, and as a failure too when
    the copy before failed, so that the run is red until one succeeds. Each run tries a copy of its own once.
    """
    target = job.pipeline.target
    pending = [copy for copy in pending_copies(job) if target.policy_of(copy.table_name) == "evolve"]
    sizes = read_table_bytes(job) if pending else {}
    failures: dict[str, WaldeltaError] = {}
    result.needs_sync, result.not_applied = [], []  # this may be the stage's second try
    for copy in pending:
        name = copy.table_name
        try:
            if copy.running:
                result.warnings.append(f"{name} is being copied again, and its changes wait until that is done")
                result.not_applied.append(name)
            elif name not in sizes:
                raise StateError(
                    f"{name} waits to be copied again ({copy.reason}), but isn't published any more: run setup"
                )
            elif job.hand_over and sizes[name] > target.copy_within_run_mb << 20:
                _hand_over(job, result, copy)
            else:
                _copy(spark, job, result, copy)
        except WaldeltaError as err:
            failures[name] = err
    return failures


def _hand_over(job: Job, result: RunResult, copy: PendingCopy) -> None:
    dag, name = f"{job.pipeline.pipeline}_initial_sync", copy.table_name
    result.needs_sync.append(name)
    result.not_applied.append(name)
    if copy.failed:
        raise StateError(f"{name} gets no changes since its last copy {copy.failed}: {dag} is to copy it again")
    result.warnings.append(f"{copy.reason}: {dag} is to copy it again, and its changes wait until then")


def _copy(spark: SparkSession, job: Job, result: RunResult, copy: PendingCopy) -> None:
    from spark_jobs.sync import sync

    (copied,) = sync(spark, job, [copy.table_name])
    result.tables[copy.table_name] = TableResult(rows=copied.rows, version=copied.version)
    why = f"{copy.table_name}: its last copy {copy.failed}" if copy.failed else copy.reason
    result.warnings.append(f"{why}: it was copied again, {copied.rows:,} rows")
