"""Keeps track of the leaves of a target that merges partitions, or takes one partition.

A leaf that joins the merged ones was created empty after the copy, so its changes are all that it
holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from waldelta.lake.ledger import TableState
from waldelta.pipeline.drift.catalog_state import CatalogTable, read_catalog_state, stored
from waldelta.pipeline.drift.unsent_changes import with_truncated
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets import TargetSource, record_state
from waldelta.postgres import Connection
from waldelta.postgres.publication_membership import from_texts


def with_leaves(state: TableState, mappings: Mapping[str, TargetSource]) -> TableState:
    """Return a target's state with all leaves that are its sources now.

    Leaves that were detached stay until another target takes them.
    """
    mapping = mappings.get(state.table_name)
    if mapping is None or mapping.root_id is None or mapping.root_id != state.root_id:
        return state
    elsewhere = {
        oid
        for name, other in mappings.items()
        if name != state.table_name
        for oid in other.relation_ids
    }
    leaves = sorted((mapping.relation_ids | set(state.relation_ids)) - elsewhere)
    return state if leaves == sorted(state.relation_ids) else replace(state, relation_ids=leaves)


def of_partition(
    state: TableState, catalog: CatalogTable, mapping: TargetSource | None
) -> tuple[TableState, CatalogTable]:
    """Reduce a target's stored state, then and now, to its own leaves.

    This applies to a target that takes one partition of a published root, or merges partitions. A
    merged leaf that has left all publications isn't included, though it still is a partition.
    """
    if mapping is None or catalog.storage is None:
        return state, catalog
    if mapping.root_id is not None:
        return _without_returned(state, mapping), replace(
            catalog, storage=stored(catalog, mapping.relation_ids)
        )
    if (partition := mapping.partition) is None:
        return state, catalog
    own = {leaf for leaf, above in catalog.above.items() if leaf == partition or partition in above}
    attached = {leaf: name for leaf, name in catalog.attached.items() if leaf in own}
    return state, replace(catalog, storage=stored(catalog, own), attached=attached)


def read_own_tables(
    connection: Connection,
    states: Sequence[TableState],
    mappings: Mapping[str, TargetSource],
    landed_as_of: int | None = None,
) -> tuple[list[TableState], dict[str, CatalogTable]]:
    """Read what the source has of these targets now; return both reduced as by of_partition().

    ``landed_as_of``: see with_truncated().
    """
    there = read_catalog_state(connection, states)
    found = [
        of_partition(state, there[state.table_name], mappings.get(state.table_name))
        for state in states
    ]
    reduced = [state for state, _ in found]
    own = {state.table_name: table for state, table in found}
    return reduced, with_truncated(connection, reduced, own, landed_as_of)


def _without_returned(state: TableState, mapping: TargetSource) -> TableState:
    """Return the state without recorded leaves that were in no publication then.

    A run that was killed may have left them. Without them, they count as new when they return.
    """
    if state.storage is None or mapping.late.isdisjoint(file.oid for file in state.storage.files):
        return state
    if not (known := {m.relation for m in from_texts(state.entries)}):
        return state
    files = [
        file for file in state.storage.files if file.oid in known or file.oid not in mapping.late
    ]
    return replace(state, storage=replace(state.storage, files=files))


def record_leaves(job: Job, state: TableState, mappings: Mapping[str, TargetSource]) -> TableState:
    """Record the leaves of with_leaves() in the ledger where they changed the state.

    Raises LockHeld while another run works on the target.
    """
    if with_leaves(state, mappings) is state:
        return state
    return record_state(job, state, lambda latest: with_leaves(latest, mappings))
