"""Drift: before a run applies anything, tell targets that a filter, a column list or a partition left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from spark_jobs.plan import last_truncates
from waldelta.drift import find_drift
from waldelta.errors import ConfigError, NeedsSync
from waldelta.job import Job
from waldelta.ledger import TableState, now
from waldelta.locks import target_lock
from waldelta.moving_rows import describe_moving
from waldelta.present import PresentTable
from waldelta.recopy import mark
from waldelta.repair import Repair
from waldelta.targets import Feed, Target, read_targets
from waldelta.visibility import Snapshot
from waldelta.watermark import Watermarks, check_same_copy


def read_published_now(
    connection: psycopg.Connection[Any], job: Job, feeds: Mapping[str, Feed], states: Sequence[TableState]
) -> dict[str, Target]:
    """The targets as they are fed now, by name; nothing is asked when nothing was copied."""
    if not states:
        return {}
    return {str(target.id): target for target in read_targets(connection, job.pipeline, feeds, sizes=False)}


def check_drift(
    job: Job, state: TableState, present: PresentTable, target: Target | None, drifted: dict[str, Repair]
) -> list[str]:
    """What is to be told of a target's drift.

    Raises NeedsSync, marks the target and enters into ``drifted`` what it takes, where it is to be mended.
    """
    if target is None:
        return []
    if target.problem is not None:
        raise ConfigError(target.problem)
    if present.emptied and _is_truncated(job, state):
        present = replace(present, emptied=present.emptied_alone)
    if (drift := find_drift(job.pipeline, state, target.table, present, target.feed)) is None:
        return []
    name, reasons = state.table_name, "; ".join(drift.reasons)
    evolves = job.pipeline.target.policy_of(name) == "evolve"
    if (drift.mends and evolves) or drift.is_new:
        with target_lock(job, name):
            held = check_same_copy(job, state)
            if drift.mends and evolves:
                mark(job, held, f"{name}: {reasons}")
                drifted[name] = drift.repair
            elif (known := _recorded(held, drift.state)) != held:
                job.ledger.append_state(replace(known, at=now(), run_id=job.run_id), held)
    if drift.mends:
        raise NeedsSync(f"{name}: {reasons}" + ("" if evolves else ": run the initial sync for it again"))
    if not reasons:
        return []
    with job.connect("drift") as connection:
        moving = describe_moving(connection, drift.repair)
    told = f"{name} drifted from its source: {reasons}; the target stays as a subscriber of PostgreSQL's would have it"
    return [f"{told}; {moving + ': ' if moving else 'to mend it: '}python -m spark_jobs sync FILE --tables {name}"]


def _is_truncated(job: Job, state: TableState) -> bool:
    """Whether a TRUNCATE of the whole table was landed that the target doesn't reflect yet: it empties all leaves, and is sent."""
    change_log = job.change_log(identity := job.slot_identity())
    last, after = change_log.last_batch(), Watermarks(job, identity).of(state)
    if last is None or last <= after:
        return False
    return bool(last_truncates(change_log.stream(after, last), state, Snapshot.parse(state.snapshot)))


def _recorded(held: TableState, known: TableState) -> TableState:
    """The latest state with what is now known of the drift."""
    return replace(
        held, row_filter=known.row_filter, later_filters=known.later_filters, unmended_leaves=known.unmended_leaves,
        unpublished=known.unpublished, entries=known.entries,
    )  # fmt: skip
