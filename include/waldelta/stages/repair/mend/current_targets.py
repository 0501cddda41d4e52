"""Reads the targets whose rows are read again, and what the source has of them now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waldelta.errors import ConfigError, NeedsSync
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job, RunResult
from waldelta.pipeline.drift import (
    CatalogTable,
    Repair,
    read_catalog_state,
    reduce_to_leaves,
    repair_without_drift,
    with_leaves,
)
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    RequiredAction,
    TableLifecycle,
    TargetSource,
    read_target_filter,
    read_unlocked_sources,
)
from waldelta.pipeline.targets.lifecycle import states_requiring
from waldelta.postgres import Connection, LockedTables
from waldelta.spark import Runner
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs


@dataclass(frozen=True, slots=True)
class CurrentTargets:
    """Every table's lifecycle, the states of those with a target that gets changes, and their
    sources.
    """

    lifecycles: list[TableLifecycle]
    states: dict[str, TableState]
    catalog: Mapping[str, CatalogTable]
    mappings: Mapping[str, TargetSource]
    targets: Mapping[str, ReplicatedTarget]
    locked: LockedTables

    @classmethod
    def read(cls, runner: Runner, job: Job, verb: str, result: RunResult) -> CurrentTargets:
        """Read the targets' lifecycles, states and sources from ledger and source.

        Repairs that were killed are completed or given up first, and their effects are added to
        ``result``.
        """
        with job.source.connect(verb) as connection:
            mappings, targets, locked = read_unlocked_sources(connection, job.pipeline, sizes=False)
            lifecycles, ended = end_killed_repairs(runner, job, mappings)
            # Also a target whose changes a run leaves for later.
            replicated = states_requiring(lifecycles, RequiredAction.APPLY)
            catalog = read_catalog_state(connection, replicated)
        for cut in ended.values():
            result.add_repair(cut)
        by_name = {state.table_name: state for state in replicated}
        return cls(lifecycles, by_name, catalog, mappings, {str(t.id): t for t in targets}, locked)

    @classmethod
    def as_of(
        cls, connection: Connection, job: Job, states: Iterable[TableState]
    ) -> CurrentTargets:
        """Read the sources of these targets as the connection's snapshot sees them.

        Partitions that have joined merged ones since a run read the catalog belong to their target.
        """
        mappings, targets, locked = read_unlocked_sources(connection, job.pipeline)
        by_name = {state.table_name: with_leaves(state, mappings) for state in states}
        catalog = read_catalog_state(connection, list(by_name.values()))
        return cls([], by_name, catalog, mappings, {str(t.id): t for t in targets}, locked)

    def as_copied(self, job: Job, name: str, *, waits: bool = True) -> Repair:
        """Returns a target's state, source and filter, with which its rows can be read again.

        Raises NeedsSync for a target that has drifted or gets no changes now, ConfigError for one
        whose filter or partitions can't be read. Raises TableBusy while another session keeps the
        target's source locked: if the rows can't be planned then or, unless the caller ``waits``,
        can't be read.
        """
        if name not in self.states:
            raise NeedsSync("it gets no changes now: status says what it waits for")
        if (target := self.targets.get(name)) is None:
            raise NeedsSync("it is no longer published")
        tables = {*target.table.relation_ids, *(leaf.oid for leaf in target.table.leaves)}
        if target.is_unread or not (waits or self.locked.relations.isdisjoint(tables)):
            raise self.locked.busy(name)
        if target.problem is not None:
            raise ConfigError(target.problem)
        there = reduce_to_leaves(self.states[name], self.catalog[name], self.mappings.get(name))
        try:
            return repair_without_drift(job.pipeline, *there, target)
        except NeedsSync:
            # A filter that the server doesn't understand is no drift that a run could repair.
            with job.source.connect("repair") as connection:
                read_target_filter(connection, name, target.mapping.where, target.table)
            raise
