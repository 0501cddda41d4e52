"""Replay plan: what is needed to derive a target's keys again from batches applied earlier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg

from waldelta.changes.decode.relation_versions import RelationVersion, read_versions
from waldelta.changes.decode.target_plan import (
    TargetPlan,
    as_merged_partition,
    bringing_rows,
    check_prepared,
    plan_decode,
)
from waldelta.errors import NeedsSync, SchemaChanged
from waldelta.lake.changelog import BatchRange, Snapshot, last_truncates
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.pipeline import Job
from waldelta.pipeline.drift import CatalogTable, Evolution, outdated_columns, unsent_changes
from waldelta.pipeline.drift.schema_evolution import NewColumn
from waldelta.postgres.type_catalog import read_types
from waldelta.stages.repair.replay.interval import (
    doubtful_leaves,
    may_lack_rows,
    place_columns_by_history,
    place_columns_by_name,
)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a target's keys are derived again.

    ``target`` covers all batches from the first replayed one to the target's watermark. The keys
    are those touched up to and including batch ``upto``. With ``invents``, a row that a change
    found on the source but the target lacks is damage, and is restored; otherwise it may rightly be
    missing.
    """

    target: TargetPlan
    upto: int
    invents: bool


def plan_replay(
    connection: psycopg.Connection[Any],
    job: Job,
    batch_range: BatchRange,
    state: TableState,
    catalog: CatalogTable,
    upto: int,
) -> ReplayPlan:
    """Read what the change log has of one target since the first batch to be replayed.

    ``batch_range`` ends at the target's watermark, so that its columns are the target's own. Raises
    NeedsSync when the table was rewritten without replication. Raises SchemaChanged for columns
    that can't be mapped by the ledger, and for changes of leaf partitions that may have been
    another target's.
    """
    outdated = outdated_columns(job, state, catalog.storage)
    if what := "; ".join(unsent_changes(state, catalog.storage, outdated)):
        raise NeedsSync(f"{state.table_name}: {what}")
    stream, snapshot, name = batch_range.stream, Snapshot.parse(state.snapshot), state.table_name
    check_prepared(stream, state, snapshot)
    rules = job.pipeline.target.schema_rules_of(name)
    volume = batch_range.volume(state)
    rows = [row for row in job.read_all_states(name) if row.generation == state.generation]
    history = [row for row in rows if row.status == SYNCED]
    if state.root_id is not None:
        _check_leaves(batch_range, state, history)
    described = read_versions(stream, state.relation_ids) if volume.rows else []
    versions = bringing_rows(batch_range, snapshot, described)
    evolution = _as_they_are(state, history, versions, follows=rules.policy != "ignore")
    types = partial(read_types, connection)
    decode = plan_decode(types, batch_range, state, versions, evolution, rules)
    absent = {i for places in evolution.positions for i, at in enumerate(places) if at is None}
    toastable = tuple(sorted({*decode.shape.toastable, *(absent - set(decode.shape.key))}))
    shape = replace(decode.shape, toastable=toastable)
    truncated_at = last_truncates(stream, state, snapshot)
    decode = replace(decode, shape=shape, truncated_at=truncated_at, keeps_absent=True)
    is_full = any(version.relation.replica_identity == "f" for version in versions)
    may_move = is_full or decode.routing is not None
    # Spark derives the states from the whole change log.
    plan = TargetPlan(
        state, batch_range.batches, volume, decode, bool(truncated_at), None, may_move, None
    )
    hides_origins = job.pipeline.source.options.origin != "any"
    invents = not may_lack_rows(state, next(iter(history), state), hides_origins=hides_origins)
    return ReplayPlan(plan, upto, invents)


def _as_they_are(
    state: TableState,
    history: Sequence[TableState],
    versions: Sequence[RelationVersion],
    *,
    follows: bool,
) -> Evolution:
    """Returns the evolution that keeps the target's columns, with their positions in old rows
    too.
    """
    held = [row.columns for row in history]
    positions = []
    for version in versions:
        relation = as_merged_partition(version.relation, state)
        places = (
            place_columns_by_history(state, held, relation)
            if follows
            else place_columns_by_name(state, relation)
        )
        if places is None or _lacks_key(state, places):
            listed = ", ".join(column.name for column in relation.columns)
            raise SchemaChanged(
                f"{state.table_name}: the range has rows with other columns ({listed}), which the"
                " ledger can't map to the target's: copy it again (initial sync with its name in"
                " tables)"
            )
        positions.append(places)
    columns = tuple(NewColumn(column, column.name) for column in state.columns)
    return Evolution(columns, tuple(state.key_columns), (), tuple(positions))


def _check_leaves(
    batch_range: BatchRange, state: TableState, history: Sequence[TableState]
) -> None:
    stream, snapshot = batch_range.stream, Snapshot.parse(state.snapshot)
    doubtful = sorted(doubtful_leaves(state, history))
    truncated = last_truncates(stream, replace(state, relation_ids=doubtful), snapshot)
    concerned = {
        oid for oid in doubtful if batch_range.change_log.has_changes(stream, [oid], snapshot)
    } | truncated.keys()
    if not concerned:
        return
    relations = {version.relation for version in read_versions(stream, concerned)}
    named = ", ".join(sorted({f"{relation.schema}.{relation.name}" for relation in relations}))
    raise SchemaChanged(
        f"{state.table_name} merges partitions, and the range has changes of {named}, attached"
        " since its copy or part of another target now, so the change log doesn't show which"
        " changes were its own: repair it from the source (_resync, or initial sync, with its"
        " name in tables)"
    )


def _lacks_key(state: TableState, places: Sequence[int | None]) -> bool:
    return any(
        at is None and c.name in state.key_columns
        for at, c in zip(places, state.columns, strict=True)
    )
