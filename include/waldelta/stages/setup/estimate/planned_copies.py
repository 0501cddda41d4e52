"""The copies that a sync will make after setup: which relations, columns, filters and leaves.

The publications may not exist yet, so this is derived from what preflight planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from waldelta.errors import SlotMissing
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import SYNCED
from waldelta.pipeline import Job
from waldelta.pipeline.targets import TargetSource
from waldelta.postgres import Connection, Leaf, PublishedTable
from waldelta.postgres.catalog import read_leaves
from waldelta.postgres.published_tables import combined_filter
from waldelta.stages.setup.preflight.targets import PlannedRelation, PlannedTargets


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A relation that a sync will copy into a target.

    ``where`` is the target's own filter as PostgreSQL reads it.
    """

    target: str
    table: PublishedTable
    where: str | None

    @property
    def readable(self) -> bool:
        """Returns whether the role can read all of it."""
        return all(leaf.readable for leaf in self.table.stored_leaves)

    @property
    def blocks(self) -> int:
        """Returns the blocks of all leaves, without TOAST."""
        return sum(leaf.blocks for leaf in self.table.stored_leaves)


def plan_copies(
    conn: Connection, job: Job, planned: PlannedTargets, locked: frozenset[int]
) -> tuple[PlannedCopy, ...]:
    """Returns the copies of all targets without a complete one; leaves that are ``locked`` (by oid)
    count as empty.
    """
    states: Mapping[str, TableState] = {}
    with suppress(SlotMissing):  # Before the first setup no target has a copy.
        states = job.read_states()
    wanted = {
        name: mapping
        for name, mapping in planned.sources.items()
        if job.pipeline.target.copies(name)
        and (name not in states or states[name].status != SYNCED)
    }
    if not wanted:
        return ()
    oids = [part.relation.oid for name in wanted for part in planned.relations_of(name)]
    leaves = read_leaves(conn, list(dict.fromkeys(oids)), locked=locked)
    return tuple(_copies(planned, wanted, leaves))


def _copies(
    planned: PlannedTargets,
    wanted: Mapping[str, TargetSource],
    leaves: Mapping[int, tuple[Leaf, ...]],
) -> Iterator[PlannedCopy]:
    for name, mapping in sorted(wanted.items()):
        for part in planned.relations_of(name):
            own = [
                leaf
                for leaf in leaves[part.relation.oid]
                if mapping.partition is None or leaf.is_of(mapping.partition)
            ]
            yield PlannedCopy(name, _published(part, own), mapping.where)


def _published(part: PlannedRelation, leaves: Sequence[Leaf]) -> PublishedTable:
    relation = part.relation
    return PublishedTable(
        id=relation.id,
        oid=relation.oid,
        relkind=relation.relkind,
        replica_identity=relation.replica_identity,
        columns=tuple(c for c in relation.columns if c.name in part.columns),
        key_columns=tuple(sorted(part.key)) if part.key <= part.columns else (),
        primary_key=relation.primary_key,
        identity_columns=relation.identity_columns,
        row_filter=combined_filter(part.filters),
        leaves=tuple(leaves),
        relation_ids=(relation.oid,),
        publishes=frozenset(part.publishes),
    )
