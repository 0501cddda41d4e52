"""Selects the targets that a run applies changes to. Warnings, resync marks and ledger rows of a
target are written first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from waldelta.errors import StateError
from waldelta.lake.ledger import TableState, TargetCut
from waldelta.pipeline import Job
from waldelta.pipeline.drift import CatalogTable, outdated_columns, unsent_changes, with_leaves
from waldelta.pipeline.drift.drift import find_drift
from waldelta.pipeline.drift.partitions import read_own_tables, record_leaves
from waldelta.pipeline.drift.record_drift import (
    check_drift,
    check_mode,
    check_rewrite,
    read_published_now,
)
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    RequiredAction,
    TableLifecycle,
    TargetSource,
    read_lifecycles,
    read_published,
    requiring,
)
from waldelta.pipeline.targets.lifecycle import states as due_states
from waldelta.postgres.lock_waits import LOCK_TIMEOUT_S, LockedTables, read_around
from waldelta.postgres.refused_statements import refused_statements
from waldelta.postgres.unpublished_tables import unpublished
from waldelta.spark import Runner
from waldelta.stages.apply.outcome import Applied, isolated
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs


@dataclass(frozen=True, slots=True)
class SelectedTargets:
    """The selected targets, with their sources' current tables.

    ``mended`` are commits of killed repairs, which are reported with other unreported commits.
    Without ``is_all``, targets that should get changes are missing, so no cut is made.
    ``unpublished`` aren't published any more.
    """

    states: Sequence[TableState]
    catalog_tables: Mapping[str, CatalogTable]
    mended: dict[str, TargetCut] = field(default_factory=dict)
    unpublished: Sequence[TableLifecycle] = ()
    is_all: bool = True


def select_targets(
    runner: Runner, job: Job, landed_as_of: int | None, applied: Applied
) -> SelectedTargets:
    """Returns all targets that landed changes apply to; puts warnings and failures into
    ``applied``.

    Records new leaf partitions, and marks targets that need a new copy or a repair to be exact.
    """
    with job.source.connect("apply") as connection:
        applied.published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_published, connection, job)
        )
        standings, mended = end_killed_repairs(runner, job, applied.published)
        states = []
        for state in due_states(standings, RequiredAction.APPLY):
            with isolated(job, state, applied):
                states.append(record_leaves(job, state, applied.published))
        applied.warnings += refused_statements(connection, job.pipeline.source.publication_names)
        applied.unpublished = unpublished(connection, job.pipeline.source)
        source = _read_source(connection, job, states, applied.published, locked, landed_as_of)
    for broken in requiring(standings, RequiredAction.BROKEN):
        applied.failures[broken.table_name] = StateError(
            f"{broken.table_name} gets no changes because {broken.why}: run the initial sync for it"
            " again"
        )
    for state in source.states:
        with isolated(job, state, applied):
            now_there = source.catalog_tables[state.table_name]
            check_mode(job, state)
            applied.warnings += check_drift(
                job, state, now_there, source.target(state), applied.drifted
            )
            # This comes last, because drift is found by comparing with what it records.
            applied.warnings += check_rewrite(job, state, now_there)
    return SelectedTargets(
        source.states, source.catalog_tables, mended, requiring(standings, RequiredAction.REMOVED)
    )


def select_unchanged(job: Job) -> SelectedTargets:
    """Returns the targets with nothing to report or mark first, for an apply while changes land.

    Until all changes have landed, it is unknown, for example, whether a TRUNCATE among them emptied
    a leaf partition.
    """
    with job.source.connect("apply") as connection:
        published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_published, connection, job)
        )
        standings = read_lifecycles(job, published)
        states = due_states(standings, RequiredAction.APPLY)
        source = _read_source(connection, job, states, published, locked, 0)
    kept = {state.table_name for state in states if with_leaves(state, published) is state}
    unchanged = [
        state
        for state in source.states
        if state.table_name in kept and _has_nothing_to_report(job, state, source)
    ]
    is_all = len(unchanged) == len(states) and not requiring(
        standings, RequiredAction.BROKEN, RequiredAction.COPY
    )
    return SelectedTargets(unchanged, source.catalog_tables, is_all=is_all)


@dataclass(frozen=True, slots=True)
class _Source:
    """What the source has of some targets, and the states of these."""

    states: list[TableState]
    catalog_tables: dict[str, CatalogTable]
    targets: dict[str, ReplicatedTarget]
    locked: LockedTables

    def target(self, state: TableState) -> ReplicatedTarget | None:
        """Returns a target with its current source; raises TableBusy when that couldn't be read."""
        target = self.targets.get(state.table_name)
        if target is not None and target.is_unread:
            raise self.locked.busy(str(target.id))
        return target


def _read_source(
    connection: psycopg.Connection[Any],
    job: Job,
    states: Sequence[TableState],
    published: Mapping[str, TargetSource],
    locked: LockedTables,
    landed_as_of: int | None,
) -> _Source:
    states, catalog_tables = read_own_tables(connection, states, published, landed_as_of)
    targets, locked = read_around(
        connection,
        LOCK_TIMEOUT_S,
        partial(read_published_now, connection, job, published, states),
        locked,
    )
    return _Source(states, catalog_tables, targets, locked)


def _has_nothing_to_report(job: Job, state: TableState, source: _Source) -> bool:
    target, catalog = source.targets.get(state.table_name), source.catalog_tables[state.table_name]
    if state.kept_as != job.pipeline.target.mode_of(state.table_name) or unsent_changes(
        state, catalog.storage, outdated_columns(job, state, catalog.storage)
    ):
        return False
    if target is None:
        return True
    is_well = not target.is_unread and target.problem is None
    return (
        is_well and find_drift(job.pipeline, state, target.table, catalog, target.mapping) is None
    )
