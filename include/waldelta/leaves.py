"""Leaves that join a target which gathers them: a partition made since the copy was born empty, so its changes are all there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from waldelta.job import Job
from waldelta.ledger import TableState, now
from waldelta.locks import target_lock
from waldelta.targets import Feed
from waldelta.watermark import check_same_copy


def with_leaves(state: TableState, feeds: Mapping[str, Feed]) -> TableState:
    """A target's state with all the leaves that feed it now; those that went stay until another target takes them."""
    feed = feeds.get(state.table_name)
    if feed is None or feed.root_id is None or feed.root_id != state.root_id:
        return state
    elsewhere = {oid for name, other in feeds.items() if name != state.table_name for oid in other.relation_ids}
    leaves = sorted((feed.relation_ids | set(state.relation_ids)) - elsewhere)
    return state if leaves == sorted(state.relation_ids) else replace(state, relation_ids=leaves)


def record_leaves(job: Job, state: TableState, feeds: Mapping[str, Feed]) -> TableState:
    """The same, entered into the ledger where it is another state; raises LockHeld while the target is at work."""
    if with_leaves(state, feeds) is state:
        return state
    with target_lock(job, state.table_name):
        held = check_same_copy(job, state)
        return job.ledger.append_state(replace(with_leaves(held, feeds), at=now(), run_id=job.run_id), held)
