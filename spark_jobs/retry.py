"""Retry: quarantined rows are read from the source again, and put right in their targets, or it is said why not.

By the same steps as a repair: what the source holds of a key now is exact only as of a snapshot from which the stream goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from spark_jobs.flow import Stage, all_failures, check_stage, continued, run_stages
from spark_jobs.repair import Again, reread_rows
from spark_jobs.repair_end import end_killed_repairs
from spark_jobs.result import RunResult, StageResult
from spark_jobs.task_error import of_table
from waldelta.drift import fed_as_copied
from waldelta.errors import ConfigError, NeedsSync, WaldeltaError
from waldelta.job import Job
from waldelta.leaves import of_partition
from waldelta.ledger_rows import TableState
from waldelta.present import PresentTable, read_present
from waldelta.quarantine import Quarantine
from waldelta.quarantined import current_user
from waldelta.standing import Due, states
from waldelta.targets import Target, read_unbarred

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def run_retry(
    spark: SparkSession,
    job: Job,
    tables: Collection[str] | None = None,
    by: str | None = None,
    reason: str | None = None,
) -> RunResult:
    """Read the quarantined rows of all targets, or of these, again; a table that can't be mended doesn't stop the others.

    The rows of a table that can't be read again stay in quarantine, and the failure names it. The others are checked, as a run's
    are, also those that an earlier attempt at this run put right. ``by`` is who asked for it, by default the user of this process; the
    ledger, with ``reason``, and the rows that were put right say so. Raises RunFailed.
    """
    by = by or current_user()
    again = Again(f"quarantine --retry by {by}" + (f": {reason}" if reason else ""), by)

    def retry(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        failures: dict[str, WaldeltaError] = {}
        with job.connect("quarantine") as connection:
            feeds, found, barred = read_unbarred(connection, job.pipeline, sizes=False)
            standings, ended = end_killed_repairs(spark, job, feeds)
            fed = {state.table_name: state for state in states(standings, Due.FEED)}
            targets = {str(target.id): target for target in found}
            present = read_present(connection, list(fed.values()))
        for cut in ended.values():
            result.add_repair(cut)
        if unknown := sorted(set(tables or ()) - fed.keys()):
            raise ConfigError(
                f"gets no changes, or isn't known: {', '.join(unknown)}: status says which tables there are"
            )
        generations = {name: state.generation for name, state in fed.items()}
        lacking = Quarantine(job.pipeline.target.root, job.storage_options).open_counts(generations)
        for name in sorted(lacking.keys() if tables is None else lacking.keys() & set(tables)):
            try:
                if name in targets and targets[name].is_unread:
                    raise barred.busy(name)
                there = of_partition(fed[name], present[name], feeds.get(name))
                _retry(spark, job, result, (*there, targets.get(name)), again)
            except WaldeltaError as err:
                log.error("table=%s %s", name, err)
                failures[name] = of_table(err, name)
        result.not_applied = sorted(failures)
        stage.detail = (
            f"{sum(lacking.get(name, 0) for name in result.tables)} rows of {len(result.tables)} tables put right"
        )
        if failures:
            raise all_failures(failures)

    stages: dict[str, Stage] = {"retry": retry, "check": check_stage}
    earlier = continued(job, "quarantine", fresh=False)
    result = RunResult("quarantine", job.run_id, tables=dict(earlier.tables), begun=earlier.begun)
    return run_stages(spark, job, result, stages, None)


def _retry(
    spark: SparkSession,
    job: Job,
    result: RunResult,
    table: tuple[TableState, PresentTable, Target | None],
    again: Again,
) -> None:
    state, present, target = table
    name = state.table_name
    if target is None or target.problem is not None:
        raise NeedsSync(
            f"{name}: {target.problem if target else 'it is no longer published'}; its rows stay in quarantine"
        )
    fed = fed_as_copied(job.pipeline, state, present, target)
    try:
        done = reread_rows(spark, job, fed, again)
    except NeedsSync as err:
        raise NeedsSync(f"{name}: {err}; its rows stay in quarantine: sync --tables {name} copies it anew") from err
    result.changes += done.drained.changes
    result.source.add(done.drained.bill)
    result.add_repair(done.cut)
