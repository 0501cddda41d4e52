"""Drift: before a run applies anything, tell targets that a filter, a column list or a partition left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg

from waldelta.catalog import PublishedTable, read_published_tables
from waldelta.drift import find_drift
from waldelta.errors import NeedsSync
from waldelta.job import Job
from waldelta.ledger import TableState, now
from waldelta.locks import target_lock
from waldelta.recopy import mark
from waldelta.watermark import check_same_copy


def read_published_now(
    connection: psycopg.Connection[Any], job: Job, states: Sequence[TableState]
) -> dict[str, PublishedTable]:
    """The tables as they are published now, by name; nothing is asked when nothing was copied."""
    if not states:
        return {}
    tables = read_published_tables(connection, [p.name for p in job.pipeline.source.publications])
    return {str(table.id): table for table in tables}


def check_drift(job: Job, state: TableState, table: PublishedTable | None) -> list[str]:
    """What is to be told of a target's drift. Raises NeedsSync, and marks the target, where a new copy is to mend it."""
    if table is None or (drift := find_drift(job.pipeline, state, table)) is None:
        return []
    name, reasons = state.table_name, "; ".join(drift.reasons)
    evolves = job.pipeline.target.policy_of(name) == "evolve"
    if (drift.mends and evolves) or drift.is_new:
        with target_lock(job, name):
            held = check_same_copy(job, state)
            if drift.mends and evolves:
                mark(job, held, f"{name}: {reasons}")
            elif drift.state.row_filter != held.row_filter or drift.state.later_filters != held.later_filters:
                known = replace(held, row_filter=drift.state.row_filter, later_filters=drift.state.later_filters)
                job.ledger.append_state(replace(known, at=now(), run_id=job.run_id), held)
    if drift.mends:
        raise NeedsSync(f"{name}: {reasons}" + ("" if evolves else ": run the initial sync for it again"))
    if not reasons:
        return []
    told = f"{name} drifted from its source: {reasons}; the target stays as a subscriber of PostgreSQL's would have it"
    return [f"{told}; to mend it: python -m spark_jobs sync FILE --tables {name}"]
