"""Reads quarantined rows from the source again, and repairs their targets with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from waldelta.errors import ConfigError, NeedsSync, WaldeltaError
from waldelta.lake.ledger import Quarantine, TableState
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.pipeline.drift import CatalogTable, read_catalog_state
from waldelta.pipeline.drift.drift import source_as_copied
from waldelta.pipeline.drift.partitions import of_partition
from waldelta.pipeline.targets import ReplicatedTarget, RequiredAction
from waldelta.pipeline.targets.lifecycle import states
from waldelta.pipeline.targets.target_sources import read_unlocked_sources
from waldelta.pipeline.task_errors import of_table
from waldelta.quantities import counted
from waldelta.stages.repair.repair import Again, repair_rows
from waldelta.stages.sync import end_killed_repairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def read_quarantined_again(
    spark: SparkSession,
    job: Job,
    result: RunResult,
    stage: StageResult,
    wanted: Callable[[Mapping[str, TableState]], Mapping[str, Again]],
    tables: Collection[str] | None,
) -> dict[str, WaldeltaError]:
    """Returns the tables that failed, by name; their rows stay in quarantine.

    ``wanted`` selects, from the replicated tables by name, which ones are read again and how.
    Raises ConfigError for names in ``tables`` that are not replicated.
    """
    failures: dict[str, WaldeltaError] = {}
    with job.connect("quarantine") as connection:
        mappings, found, locked = read_unlocked_sources(connection, job.pipeline, sizes=False)
        standings, ended = end_killed_repairs(spark, job, mappings)
        replicated = {state.table_name: state for state in states(standings, RequiredAction.APPLY)}
        targets = {str(target.id): target for target in found}
        catalog_tables = read_catalog_state(connection, list(replicated.values()))
    for cut in ended.values():
        result.add_repair(cut)
    if unknown := sorted(set(tables or ()) - replicated.keys()):
        raise ConfigError(
            f"unknown table, or one that gets no changes: {', '.join(unknown)}: status lists the"
            " tables"
        )
    mended, kept = 0, 0
    for name, again in sorted(wanted(replicated).items()):
        try:
            if name not in replicated:
                raise NeedsSync(f"{name}: it gets no changes now: status says what it waits for")
            if name in targets and targets[name].is_unread:
                raise locked.busy(name)
            there = of_partition(replicated[name], catalog_tables[name], mappings.get(name))
            passed, failing = _read_again(spark, job, result, (*there, targets.get(name)), again)
            mended, kept = mended + passed, kept + failing
        except WaldeltaError as err:
            log.error("table=%s %s", name, err)
            failures[name] = of_table(err, name)
    result.not_applied = sorted(failures)
    stage.detail = f"{counted(mended, 'row')} of {counted(len(result.tables), 'table')} corrected"
    if kept:
        still = counted(
            kept,
            "row still fails a gate and stays in quarantine",
            "rows still fail a gate and stay in quarantine",
        )
        stage.detail += f"; {still}"
        result.warnings.append(still)
    return failures


def _read_again(
    spark: SparkSession,
    job: Job,
    result: RunResult,
    table: tuple[TableState, CatalogTable, ReplicatedTarget | None],
    again: Again,
) -> tuple[int, int]:
    """Returns how many rows left the quarantine, and how many are still in it."""
    state, catalog, target = table
    name = state.table_name
    if target is None or target.problem is not None:
        raise NeedsSync(
            f"{name}: {target.problem if target else 'it is no longer published'}; its rows stay in"
            " quarantine"
        )
    as_copied = source_as_copied(job.pipeline, state, catalog, target)
    before = Quarantine(job.lake).open_counts({name: state.generation})
    try:
        done = repair_rows(spark, job, as_copied, again)
    except NeedsSync as err:
        raise NeedsSync(
            f"{name}: {err}; its rows stay in quarantine: sync --tables {name} copies it again"
        ) from err
    result.changes += done.drained.changes
    result.source.add(done.drained.bill)
    result.add_repair(done.cut)
    return before.get(name, 0) - done.kept, done.kept
