"""Resync of single tables that only a new copy makes exact, from the finding until they are copied.

Apply marks such a table ``needs_sync`` in the ledger and skips it; landing and the other tables go
on. The same run copies a small table. A sync that follows copies a large one: in Airflow, the run
triggers the DAG of the initial sync. A copy that failed or was killed leaves the table marked
(waldelta.pipeline.targets.lifecycle), so that every run tries again, or asks for a sync, until a
copy succeeds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from waldelta.errors import TableBusy
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import NEEDS_SYNC, now
from waldelta.pipeline.advisory_locks import target_lock
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.target_sources import read_targets
from waldelta.pipeline.targets.watermarks import check_same_copy
from waldelta.postgres.catalog import read_bytes
from waldelta.postgres.lock_waits import LOCK_TIMEOUT_S, read_around


def mark(job: Job, state: TableState, reason: str) -> None:
    """Record that a target needs a new copy; the caller holds its lock and passes its latest
    ``state``.
    """
    marked = replace(state, at=now(), run_id=job.run_id, status=NEEDS_SYNC, reason=reason)
    job.ledger.append_state(marked, state)
    fault_point("recopy.marked")


def mark_same_copy(job: Job, state: TableState, reason: str) -> None:
    """Mark a target under its lock; raises LockHeld, and LateWriter as check_same_copy() does."""
    with target_lock(job, state.table_name):
        mark(job, check_same_copy(job, state), reason)


def read_table_bytes(job: Job) -> tuple[dict[str, int], dict[str, TableBusy]]:
    """Return the size of each target's source tables with TOAST, by the target's name.

    Also returns the error of each target whose tables stay locked too long to be read.
    """
    with job.source.connect("sizes") as connection:
        (sizes, unread), locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(_table_bytes, connection, job)
        )
    return sizes, {name: locked.busy(name) for name in unread}


def _table_bytes(
    connection: psycopg.Connection[Any], job: Job, locked: Collection[int]
) -> tuple[dict[str, int], set[str]]:
    """Return the sizes, and the names of targets left out because their tables (oids) are
    ``locked``.
    """
    targets = read_targets(connection, job.pipeline, sizes=False, locked=locked)
    leaves = {str(target.id): {leaf.oid for leaf in target.table.leaves} for target in targets}
    unread = {
        str(target.id)
        for target in targets
        if target.is_unread or not leaves[str(target.id)].isdisjoint(locked)
    }
    readable = {name: own for name, own in leaves.items() if name not in unread}
    return read_bytes(connection, readable), unread
