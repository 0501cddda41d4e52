"""Recopy: tables that only a new copy makes exact, from where that is found out until somebody has copied them.

Apply marks such a table ``needs_sync`` in the ledger and leaves it out; landing and the other tables go on. A small one is
copied by the same run, a large one by a sync that follows (in Airflow the DAG of the initial sync, which the run triggers).
A copy that failed or was killed leaves the table in need (waldelta.standing), so that every run tries, or asks, again
until one succeeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg

from waldelta.errors import TableBusy
from waldelta.fault import fault_point
from waldelta.job import Job
from waldelta.ledger_rows import TableState, now
from waldelta.patience import Barred, read_barred
from waldelta.standing import NEEDS_SYNC
from waldelta.targets import read_targets
from waldelta.type_catalog import fetch


def mark(job: Job, state: TableState, reason: str) -> None:
    """Record that a target needs a new copy; the caller holds its lock, and ``state`` is the latest."""
    marked = replace(state, at=now(), run_id=job.run_id, status=NEEDS_SYNC, reason=reason)
    job.ledger.append_state(marked, state)
    fault_point("recopy.marked")


def read_table_bytes(job: Job) -> tuple[dict[str, int], dict[str, TableBusy]]:
    """How large what feeds each target is, with what is TOASTed, by the target's name; and those that are locked against that."""
    with job.connect("sizes") as connection:
        return _table_bytes(connection, job, read_barred(connection))


def _table_bytes(
    connection: psycopg.Connection[Any], job: Job, barred: Barred
) -> tuple[dict[str, int], dict[str, TableBusy]]:
    targets = read_targets(connection, job.pipeline, sizes=False, barred=barred.relations)
    leaves = {str(target.id): {leaf.oid for leaf in target.table.leaves} for target in targets}
    busy = {
        str(target.id): barred.busy(str(target.id))
        for target in targets
        if target.is_unread or not barred.relations.isdisjoint(leaves[str(target.id)])
    }
    oids = {oid for name, own in leaves.items() if name not in busy for oid in own}
    sizes = {row.oid: row.bytes for row in fetch(connection, _SIZES, {"oids": list(oids)})}
    return {name: sum(sizes[oid] for oid in own) for name, own in leaves.items() if name not in busy}, busy


_SIZES = """
select l.oid, coalesce(pg_table_size(l.oid), 0)::bigint as bytes
from unnest(%(oids)s::oid[]) as l (oid)
"""
