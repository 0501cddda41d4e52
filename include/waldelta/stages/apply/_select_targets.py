"""Which targets a run applies changes to; what has to be told, marked or recorded of each
comes before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from waldelta.errors import StateError
from waldelta.lake.ledger import TableState, TargetCut
from waldelta.pipeline import Job
from waldelta.pipeline.drift import CatalogTable, read_catalog_state
from waldelta.pipeline.drift.drift import find_drift
from waldelta.pipeline.drift.partitions import of_partition, record_leaves, with_leaves
from waldelta.pipeline.drift.record_drift import check_drift, read_published_now
from waldelta.pipeline.drift.record_rewrites import check_mode, check_rewrite
from waldelta.pipeline.drift.rewrites import unsent_changes
from waldelta.pipeline.drift.unsent_truncates import with_truncated
from waldelta.pipeline.targets import ReplicatedTarget, RequiredAction, TableLifecycle, TargetSource
from waldelta.pipeline.targets.lifecycle import read_lifecycles, read_published, requiring
from waldelta.pipeline.targets.lifecycle import states as due_states
from waldelta.postgres.lock_waits import LOCK_TIMEOUT_S, LockedTables, read_around
from waldelta.postgres.refused_statements import refused_statements
from waldelta.postgres.unpublished_tables import unpublished
from waldelta.stages.apply.outcome import Applied, isolated
from waldelta.stages.sync import end_killed_repairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SelectedTargets:
    """The targets to be fed, with the tables that feed them as they are now.

    ``mended`` is what killed repairs have committed, which is told with what else nobody has told.
    Unless they are all that should be fed (``is_all``), they make no cut. ``unpublished`` are those
    that aren't published any more.
    """

    states: Sequence[TableState]
    catalog_tables: Mapping[str, CatalogTable]
    mended: dict[str, TargetCut] = field(default_factory=dict)
    unpublished: Sequence[TableLifecycle] = ()
    is_all: bool = True


def select_targets(
    spark: SparkSession, job: Job, landed_as_of: int | None, applied: Applied
) -> SelectedTargets:
    """All that landed changes are due; enters into ``applied`` what is to be told, and which of
    them can't be fed.

    Records which leaves joined, and marks those that only a new copy, or a repair, makes exact.
    """
    with job.connect("apply") as connection:
        applied.published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_published, connection, job)
        )
        standings, mended = end_killed_repairs(spark, job, applied.published)
        states = _with_their_leaves(job, due_states(standings, RequiredAction.APPLY), applied)
        applied.warnings += refused_statements(connection, job.pipeline.source.publication_names)
        applied.unpublished = unpublished(connection, job.pipeline.source)
        source = _read_source(connection, job, (states, applied.published), locked, landed_as_of)
    applied.failures |= {
        found.table_name: _broken(found) for found in requiring(standings, RequiredAction.BROKEN)
    }
    for state in source.states:
        with isolated(job, state, applied):
            now_there = source.catalog_tables[state.table_name]
            check_mode(job, state)
            applied.warnings += check_drift(
                job, state, now_there, source.target(state), applied.drifted
            )
            # Afterwards: what it records is what drift is told by.
            applied.warnings += check_rewrite(job, state, now_there)
    return SelectedTargets(
        source.states, source.catalog_tables, mended, requiring(standings, RequiredAction.REMOVED)
    )


def select_unchanged(job: Job) -> SelectedTargets:
    """Those of which nothing has to be told or marked first: all that can be fed while changes are
    still landing.

    Until they have landed nobody can tell, say, whether a leaf was emptied by a TRUNCATE that is
    among them.
    """
    with job.connect("apply") as connection:
        published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_published, connection, job)
        )
        standings = read_lifecycles(job, published)
        states = due_states(standings, RequiredAction.APPLY)
        source = _read_source(connection, job, (states, published), locked, 0)
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
    """What the source has of some targets, and the states of these as far as that concerns them."""

    states: list[TableState]
    catalog_tables: dict[str, CatalogTable]
    targets: dict[str, ReplicatedTarget]
    locked: LockedTables

    def target(self, state: TableState) -> ReplicatedTarget | None:
        """A target as it is fed now; raises TableBusy when that couldn't be read."""
        target = self.targets.get(state.table_name)
        if target is not None and target.is_unread:
            raise self.locked.busy(str(target.id))
        return target


def _read_source(
    connection: psycopg.Connection[Any],
    job: Job,
    replicated: tuple[Sequence[TableState], Mapping[str, TargetSource]],
    locked: LockedTables,
    landed_as_of: int | None,
) -> _Source:
    states, mappings = replicated
    there = read_catalog_state(connection, states)
    found = [
        of_partition(state, there[state.table_name], mappings.get(state.table_name))
        for state in states
    ]
    states = [state for state, _ in found]
    catalog_tables = with_truncated(
        connection, states, {s.table_name: table for s, table in found}, landed_as_of
    )
    targets, locked = read_around(
        connection,
        LOCK_TIMEOUT_S,
        partial(read_published_now, connection, job, mappings, states),
        locked,
    )
    return _Source(states, catalog_tables, targets, locked)


def _has_nothing_to_report(job: Job, state: TableState, source: _Source) -> bool:
    target, catalog = source.targets.get(state.table_name), source.catalog_tables[state.table_name]
    if state.kept_as != job.pipeline.target.mode_of(state.table_name) or unsent_changes(
        state, catalog.storage
    ):
        return False
    if target is None:
        return True
    is_well = not target.is_unread and target.problem is None
    return (
        is_well and find_drift(job.pipeline, state, target.table, catalog, target.mapping) is None
    )


def _with_their_leaves(
    job: Job, states: Sequence[TableState], applied: Applied
) -> list[TableState]:
    found = []
    for state in states:
        with isolated(job, state, applied):
            found.append(record_leaves(job, state, applied.published))
    return found


def _broken(found: TableLifecycle) -> StateError:
    return StateError(
        f"{found.table_name} gets no changes since {found.why}: run the initial sync for it again"
    )
