"""Reads quarantined rows from the source again, and repairs their targets with them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from waldelta.errors import NeedsSync, WaldeltaError
from waldelta.lake.ledger import Quarantine, TableState
from waldelta.pipeline import Job, RunResult, StageResult, of_table
from waldelta.pipeline.drift import CatalogTable, Repair, read_catalog_state
from waldelta.pipeline.drift.drift import source_as_copied
from waldelta.pipeline.drift.partitions import of_partition
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    RequiredAction,
    read_unlocked_sources,
    unknown_tables,
)
from waldelta.pipeline.targets.lifecycle import states
from waldelta.postgres.lock_waits import LockedTables
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.repair.mend import end_killed_repairs
from waldelta.stages.repair.repair import Again, repair

log = logging.getLogger(__name__)

_STILL = (
    "row still fails a gate and stays in quarantine",
    "rows still fail a gate and stay in quarantine",
)


def read_quarantined_again(
    runner: Runner,
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
    with job.source.connect("quarantine") as connection:
        mappings, found, locked = read_unlocked_sources(connection, job.pipeline, sizes=False)
        standings, ended = end_killed_repairs(runner, job, mappings)
        replicated = {state.table_name: state for state in states(standings, RequiredAction.APPLY)}
        targets = {str(target.id): target for target in found}
        catalog_tables = read_catalog_state(connection, list(replicated.values()))
    for cut in ended.values():
        result.add_repair(cut)
    if unknown := sorted(set(tables or ()) - replicated.keys()):
        raise unknown_tables(unknown, replicated)
    rows: Counter[str] = Counter()
    for name, again in sorted(wanted(replicated).items()):
        try:
            if name not in replicated:
                raise NeedsSync(f"{name}: it gets no changes now: status says what it waits for")
            there = of_partition(replicated[name], catalog_tables[name], mappings.get(name))
            as_copied = _as_copied(job, *there, targets.get(name), locked)
            rows.update(_read_again(runner, job, result, as_copied, again))
        except WaldeltaError as err:
            log.error("table=%s %s", name, err)
            failures[name] = of_table(err, name)
    result.targets.not_applied = sorted(failures)
    corrected, within = counted(rows["corrected"], "row"), counted(len(result.tables), "table")
    stage.detail = f"{corrected} of {within} corrected"
    if kept := rows["kept"]:
        result.warnings.append(counted(kept, *_STILL))
        stage.detail += f"; {result.warnings[-1]}"
    return failures


def _as_copied(
    job: Job,
    state: TableState,
    catalog: CatalogTable,
    target: ReplicatedTarget | None,
    locked: LockedTables,
) -> Repair:
    if target is not None and target.is_unread:
        raise locked.busy(state.table_name)
    if target is None or target.problem is not None:
        raise NeedsSync(
            f"{state.table_name}: {target.problem if target else 'it is no longer published'}; its"
            " rows stay in quarantine"
        )
    return source_as_copied(job.pipeline, state, catalog, target)


def _read_again(
    runner: Runner, job: Job, result: RunResult, as_copied: Repair, again: Again
) -> dict[str, int]:
    """Returns how many rows were corrected and left the quarantine, and how many it kept."""
    name, generation = as_copied.state.table_name, as_copied.state.generation
    before = Quarantine(job.lake).open_counts({name: generation})
    try:
        done = repair(runner, job, as_copied, again)
    except NeedsSync as err:
        raise NeedsSync(
            f"{name}: {err}; its rows stay in quarantine: sync --tables {name} copies it again"
        ) from err
    done.add_to(result)
    return {"corrected": before.get(name, 0) - done.kept, "kept": done.kept}
