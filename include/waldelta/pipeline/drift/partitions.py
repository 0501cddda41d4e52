"""Leaves of a target that gathers them, or takes one partition's.

One that joins those gathered was made since the copy and born empty, so that its changes are all
there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import now
from waldelta.pipeline.advisory_locks import target_lock
from waldelta.pipeline.drift.catalog_state import CatalogTable, stored
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets import TargetSource
from waldelta.pipeline.targets.watermarks import check_same_copy
from waldelta.postgres.publication_membership import from_texts


def with_leaves(state: TableState, mappings: Mapping[str, TargetSource]) -> TableState:
    """A target's state with all the leaves that feed it now; those that went stay until another
    target takes them.
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
    """What is stored of a target that takes one partition of a published root, or gathers leaves:
    its leaves alone, then and now.

    A gathered leaf that is in no publication any more is none of them, though it still is a
    partition.
    """
    if mapping is None or catalog.storage is None:
        return state, catalog
    if mapping.root_id is not None:
        return _without_returned(state, mapping), replace(
            catalog, storage=stored(catalog, mapping.relation_ids)
        )
    return (
        _of_one(state, catalog, mapping.partition)
        if mapping.partition is not None
        else (state, catalog)
    )


def _of_one(
    state: TableState, catalog: CatalogTable, partition: int
) -> tuple[TableState, CatalogTable]:
    """The leaves of one partition.

    Earlier versions recorded the leaves of the whole root. One that is another partition's now, and
    was attached to it since, was this one's; the others weren't.
    """
    files_now = catalog.storage.files if catalog.storage is not None else []
    own = {leaf for leaf, above in catalog.above.items() if leaf == partition or partition in above}
    others = {file.oid: file.inherits for file in files_now if file.oid not in own}
    if state.storage is not None:
        files = [
            f for f in state.storage.files if f.oid not in others or f.inherits != others[f.oid]
        ]
        state = replace(state, storage=replace(state.storage, files=files))
    attached = {leaf: name for leaf, name in catalog.attached.items() if leaf in own}
    return state, replace(catalog, storage=stored(catalog, own), attached=attached)


def _without_returned(state: TableState, mapping: TargetSource) -> TableState:
    """The state without leaves on record that were in no publication then, as earlier versions kept
    them: they come anew.
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
    """The same, entered into the ledger where it is another state; raises LockHeld while the target
    is at work.
    """
    if with_leaves(state, mappings) is state:
        return state
    with target_lock(job, state.table_name):
        held = check_same_copy(job, state)
        return job.ledger.append_state(
            replace(with_leaves(held, mappings), at=now(), run_id=job.run_id), held
        )
