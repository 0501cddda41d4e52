"""Inspect: reads what a run has to know of its targets before it applies anything, once.

Warnings, resync marks and ledger rows of a target are written first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from waldelta.changes.merge.commits import read_unreported
from waldelta.errors import StateError
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import SYNCED, TableState, TargetCut, now
from waldelta.pipeline import Job
from waldelta.pipeline.drift import (
    CatalogTable,
    check_drift,
    check_mode,
    check_rewrite,
    find_drift,
    outdated_columns,
    read_own_tables,
    read_published_now,
    record_leaves,
    unsent_changes,
    with_leaves,
)
from waldelta.pipeline.reported_commits import ReportedCommits
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    RequiredAction,
    TableLifecycle,
    TargetSource,
    Watermarks,
    read_lifecycles,
    requiring,
)
from waldelta.pipeline.targets.external_commits import Watch
from waldelta.pipeline.targets.lifecycle import states_to_apply
from waldelta.pipeline.targets.move_target import move_targets
from waldelta.pipeline.targets.target_sources import read_target_sources
from waldelta.postgres import LOCK_TIMEOUT_S, LockedTables, read_around
from waldelta.postgres.publication_checks import find_unpublished, warn_of_refused_writes
from waldelta.spark import Runner
from waldelta.stages.apply._apply_batches import measures, plan_apply_batches
from waldelta.stages.apply.outcome import Applied
from waldelta.stages.check.gate.gate_files import TableGate, read_gates
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InspectedTarget:
    """A target as it is before a run applies anything to it.

    ``batch`` is the last landed batch that it contains. ``gate`` judges its changes.
    """

    state: TableState
    catalog: CatalogTable
    batch: int
    gate: TableGate | None

    @property
    def name(self) -> str:
        """The table's name."""
        return self.state.table_name


@dataclass(frozen=True, slots=True)
class Inspection:
    """The targets to which landed changes apply, and the batches that wait for them.

    ``sizes`` has the messages of each landed batch, ``ends`` the last batch of each apply batch.
    ``unreported`` are commits by table that no run result contains: of killed runs and repairs.
    Without ``is_all``, targets that should get changes are missing, so no cut is made.
    ``unpublished`` aren't published any more.
    """

    targets: Sequence[InspectedTarget]
    watermarks: Watermarks
    watch: Watch
    sizes: Mapping[int, int]
    ends: Sequence[int]
    unreported: dict[str, TargetCut]
    is_all: bool
    unpublished: Sequence[TableLifecycle]


def inspect(runner: Runner, applied: Applied, landed_as_of: int | None) -> Inspection:
    """Returns all targets that landed changes apply to; puts warnings and failures into
    ``applied``.

    Records new leaf partitions, and marks targets that need a new copy or a repair to be exact.
    """
    # Read before the catalogs, which must be newer than this batch.
    watermarks = Watermarks(applied.job, applied.job.read_identity())
    last = watermarks.change_log.last_batch()
    selected = _select_targets(runner, applied, landed_as_of)
    applied.reported_late += _find_unreported_of_unpublished(
        applied.job, watermarks, selected.unpublished
    )
    return _inspect_lake(applied, watermarks, selected, last)


def inspect_unchanged(applied: Applied, upto: int) -> Inspection:
    """Returns the targets with nothing to report or mark first, for an apply batch while changes
    land.

    Until all changes have landed, it is unknown, for example, whether a TRUNCATE among them emptied
    a leaf partition.
    """
    watermarks = Watermarks(applied.job, applied.job.read_identity())
    return _inspect_lake(applied, watermarks, _select_unchanged(applied.job), upto, most_ends=1)


@dataclass(frozen=True, slots=True)
class _Selected:
    """The selected targets' states, with the current catalog state of their sources.

    ``mended`` are commits of killed repairs. ``is_all`` and ``unpublished`` are as in Inspection.
    """

    states: Sequence[TableState]
    catalog_tables: Mapping[str, CatalogTable]
    mended: dict[str, TargetCut] = field(default_factory=dict)
    unpublished: Sequence[TableLifecycle] = ()
    is_all: bool = True


def _inspect_lake(
    applied: Applied,
    watermarks: Watermarks,
    selected: _Selected,
    last: int | None,
    most_ends: int | None = None,
) -> Inspection:
    """Returns the selected targets with what the lake has of them, up to a batch.

    ``most_ends`` is the most apply batches, while more is landing.
    """
    job = applied.job
    watch, gates = Watch(job, watermarks.cut), read_gates(job, selected.states)
    targets: list[InspectedTarget] = []
    for state in selected.states if last is not None else ():
        name = state.table_name
        with applied.isolated(state):
            reached = applied.reached.get((name, state.generation), 0)
            batch = max(watermarks.of(state), reached)
            targets.append(
                InspectedTarget(state, selected.catalog_tables[name], batch, gates.get(name))
            )
    sizes: dict[int, int] = {}
    if last is not None:
        after = [target.batch for target in targets if applied.is_fine(target.name)]
        sizes = job.read_landed_sizes(watermarks.identity, min(after, default=last), last)
    for target in targets:
        if applied.is_fine(target.name):
            with applied.isolated(target.state):
                applied.warnings += watch.find(target.state, watermarks.versions[target.name])
    bytes_of_batches = watermarks.change_log.bytes_of_batches
    ends = plan_apply_batches(*measures(job, sizes, bytes_of_batches))[:most_ends]
    is_all, unreported = selected.is_all, dict(selected.mended)
    if most_ends is not None:
        is_all &= _is_behind_copies(watermarks.change_log, ends, selected.states, applied)
    # While changes land, only an apply batch that ends in a cut reports commits of killed runs.
    # Otherwise the apply after the landing reports them.
    if is_all or most_ends is None:
        unreported |= _find_unreported(applied, watermarks, targets)
    if last is not None and unreported and not ends:
        ends = [last]
    return Inspection(
        targets, watermarks, watch, sizes, ends, unreported, is_all, selected.unpublished
    )


def _is_behind_copies(
    change_log: ChangeLog, ends: Sequence[int], states: Sequence[TableState], applied: Applied
) -> bool:
    """Returns whether no target contains more than the apply batch, so that a cut can be made
    there.

    A target that was copied later contains more, until its copy's position has landed.
    """
    if not ends or not applied.is_complete:
        return False
    end = change_log.end_lsn(ends[-1])
    return all(state.snapshot_lsn <= end for state in states)


def _find_unreported(
    applied: Applied, watermarks: Watermarks, targets: Sequence[InspectedTarget]
) -> dict[str, TargetCut]:
    """Returns the commits that were never reported: this run reports, checks and announces them.

    The part that the newest cut already contains goes into ``applied``; the rest is returned,
    for the next cut.
    """
    unreported, reported = {}, _reported_commits(applied.job)
    for target in targets:
        with applied.isolated(target.state):
            in_cut = watermarks.cut.of(target.state) if watermarks.cut is not None else None
            version = in_cut.version if in_cut is not None else None
            within, beyond = read_unreported(
                applied.job, watermarks.identity, target.state, reported, version
            )
            applied.reported_late += [within] if within is not None else []
            if beyond is not None:
                unreported[target.name] = beyond
    return unreported


def _find_unreported_of_unpublished(
    job: Job, watermarks: Watermarks, unpublished: Sequence[TableLifecycle]
) -> list[TargetCut]:
    """Returns the unreported commits of targets that aren't published any more.

    Such a target gets no changes any more, so an error of one doesn't fail the run.
    """
    cuts, reported = [], _reported_commits(job)
    for state in (lifecycle.state for lifecycle in unpublished):
        if state is None or state.status != SYNCED:
            continue
        try:
            _, cut = read_unreported(job, watermarks.identity, state, reported)
        except Exception as err:
            log.warning(
                "table=%s what was applied to it before it left its publications can't be"
                " reported: %s",
                state.table_name,
                err,
            )
        else:
            cuts += [cut] if cut is not None else []
    return cuts


def _reported_commits(job: Job) -> ReportedCommits:
    return ReportedCommits(job.ledger, now() - job.pipeline.maintenance.ledger_retention)


def _select_targets(runner: Runner, applied: Applied, landed_as_of: int | None) -> _Selected:
    job = applied.job
    applied.warnings += move_targets(job)
    with job.source.connect("apply") as connection:
        applied.published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_target_sources, connection, job.pipeline)
        )
        all_lifecycles, mended = end_killed_repairs(runner, job, applied.published)
        states = []
        for state in states_to_apply(all_lifecycles):
            with applied.isolated(state):
                states.append(record_leaves(job, state, applied.published))
        applied.warnings += warn_of_refused_writes(
            connection, job.pipeline.source.publication_names
        )
        applied.unpublished = find_unpublished(connection, job.pipeline.source)
        source = _read_source(connection, job, states, applied.published, locked, landed_as_of)
    for broken in requiring(all_lifecycles, RequiredAction.BROKEN):
        applied.failures[broken.table_name] = StateError(
            f"{broken.table_name} gets no changes because {broken.why}: run the initial sync for it"
            " again"
        )
    for state in source.states:
        with applied.isolated(state):
            now_there = source.catalog_tables[state.table_name]
            check_mode(job, state)
            applied.warnings += check_drift(
                job, state, now_there, source.target(state), applied.drifted
            )
            # check_rewrite() comes last, because check_drift() compares with the catalog state that
            # it records.
            applied.warnings += check_rewrite(job, state, now_there)
    return _Selected(
        source.states,
        source.catalog_tables,
        mended,
        requiring(all_lifecycles, RequiredAction.REMOVED),
    )


def _select_unchanged(job: Job) -> _Selected:
    with job.source.connect("apply") as connection:
        published, locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_target_sources, connection, job.pipeline)
        )
        all_lifecycles = read_lifecycles(job, published)
        states = states_to_apply(all_lifecycles)
        source = _read_source(connection, job, states, published, locked, 0)
    names = {state.table_name for state in states if with_leaves(state, published) is state}
    unchanged = [
        state
        for state in source.states
        if state.table_name in names and _has_nothing_to_report(job, state, source)
    ]
    is_all = len(unchanged) == len(states) and not requiring(
        all_lifecycles, RequiredAction.BROKEN, RequiredAction.COPY
    )
    return _Selected(unchanged, source.catalog_tables, is_all=is_all)


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
    if state.target_mode != job.pipeline.target.mode_of(state.table_name) or unsent_changes(
        state, catalog.storage, outdated_columns(job, state, catalog.storage)
    ):
        return False
    if target is None:
        return True
    drift = find_drift(job.pipeline, state, catalog, target)
    return not (target.is_unread or target.problem or drift.reasons or drift.is_new)
