"""Finds the keys that a range of landed batches touched, whatever the columns were called then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa

from waldelta.changes.decode.relation_versions import RelationVersion, read_versions
from waldelta.changes.decode.target_plan import (
    TargetPlan,
    as_merged_partition,
    bringing_rows,
    check_prepared,
    plan_decode,
)
from waldelta.errors import SchemaChanged
from waldelta.lake.changelog import BatchRange, Snapshot, last_truncates
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.pipeline import Job
from waldelta.pipeline.drift import Evolution, NewColumn
from waldelta.postgres import read_types
from waldelta.spark import Runner
from waldelta.stages.repair.mend.touched_keys import read_touched
from waldelta.stages.repair.replay.interval import place_columns_by_history, place_columns_by_name

# A snapshot that sees no transaction: the range's changes count, also those that a later copy has.
_SEES_NOTHING = "1:1:"


def is_touched(batch_range: BatchRange, state: TableState) -> bool:
    """Returns whether a range has changes of a target's rows, or a TRUNCATE that may be its."""
    every = replace(state, snapshot=_SEES_NOTHING)
    return batch_range.count(every) > 0 or batch_range.stream.has_truncates()


def touched_rows(
    runner: Runner,
    job: Job,
    connection: psycopg.Connection[Any],
    batch_range: BatchRange,
    state: TableState,
    folder: str,
) -> pa.Table | None:
    """Returns the keys that a range touches (touched_schema()); None: it may touch any row.

    It does with a TRUNCATE, and in a table without a key. Raises SchemaChanged for columns that the
    ledger can't map to the key.
    """
    every, stream = replace(state, snapshot=_SEES_NOTHING), batch_range.stream
    check_prepared(stream, state, Snapshot.parse(state.snapshot))
    snapshot = Snapshot.parse(every.snapshot)
    volume = batch_range.volume(every)
    if last_truncates(stream, every, snapshot) or not state.key_columns:
        return None
    rules = job.pipeline.target.schema_rules_of(state.table_name)
    described = read_versions(stream, state.relation_ids) if volume.rows else []
    versions = bringing_rows(batch_range, snapshot, described)
    history = [row for row in job.read_all_states(state.table_name) if row.status == SYNCED]
    evolution = _as_they_are(state, history, versions, follows=rules.policy != "ignore")
    types = partial(read_types, connection)
    decode = plan_decode(types, batch_range, every, versions, evolution, rules)
    rows = batch_range.rows_of(every)
    plan = TargetPlan(every, batch_range.batches, volume, decode, False, rows, False, None)
    return read_touched(runner, batch_range.change_log, plan, folder)


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
        if places is None or any(
            at is None and c.name in state.key_columns
            for at, c in zip(places, state.columns, strict=True)
        ):
            listed = ", ".join(column.name for column in relation.columns)
            raise SchemaChanged(
                f"{state.table_name}: the range has rows with other columns ({listed}), which the"
                " ledger can't map to the target's: copy it again (initial sync with its name in"
                " tables)"
            )
        positions.append(places)
    columns = tuple(NewColumn(column, column.name) for column in state.columns)
    return Evolution(columns, tuple(state.key_columns), (), tuple(positions))
