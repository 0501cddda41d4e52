"""Plan: what it takes to apply a range of batches to one target; read from the change log's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from spark_jobs.collapse import EventShape
from spark_jobs.decode import DecodePlan
from spark_jobs.stretch import Stretch
from spark_jobs.versions import RelationVersion, read_versions
from waldelta.catalog import TableId
from waldelta.change_log import ChangeLog, Stream, Volume
from waldelta.errors import ApplyError, SchemaChanged
from waldelta.ledger import TableState
from waldelta.pgoutput.relation import Relation, read_relation
from waldelta.pgoutput.truncate import read_truncate
from waldelta.type_catalog import PgType, read_types
from waldelta.type_map import target_type
from waldelta.types.wire_format import wire_name
from waldelta.visibility import Snapshot

# Values of these types have no TOAST table, so they are always sent.
_FIXED_SIZE = frozenset(
    {"boolean", "smallint", "int", "bigint", "float", "double", "date", "timestamp", "timestamp_ntz"}
)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """How a range of batches (after the first, up to and with the second) is applied to one target."""

    state: TableState
    batches: tuple[int, int]
    volume: Volume
    decode: DecodePlan
    truncated: bool
    # The target's row messages when they are few enough to be decoded by the driver, else None.
    rows: pa.Table | None
    # With REPLICA IDENTITY FULL every update carries its old row, so the envelope can't tell which ones move a key.
    may_move: bool


def plan_target(connection: psycopg.Connection[Any], stretch: Stretch, state: TableState) -> TargetPlan:
    """Read the relation's versions and truncations in the range; raises SchemaChanged when the columns differ."""
    stream, batches = stretch.stream, stretch.batches
    snapshot = Snapshot.parse(state.snapshot)
    _check_prepared(stream, state, snapshot)
    volume = stretch.volume(state)
    versions = read_versions(stream, state.relation_ids)
    names = tuple(column.name for column in state.columns)
    _check_not_recreated(stream, state)
    if volume.rows:
        _check_versions(stretch.change_log, stream, state, versions)
    pairs = {(column.type_oid, column.typmod) for column in state.columns}
    types = _types(connection, state, pairs)
    shape = EventShape(
        column_count=len(names),
        key=tuple(names.index(name) for name in state.key_columns),
        toastable=tuple(i for i, column in enumerate(state.columns) if column.spark_type not in _FIXED_SIZE),
    )
    truncated_at = _last_truncate(stream, state, snapshot)
    decode = DecodePlan(
        shape,
        names,
        tuple(target_type(types[(column.type_oid, column.typmod)]) for column in state.columns),
        tuple(versions),
        snapshot,
        stream.segments,
        truncated_at,
        tuple(wire_name(types[(column.type_oid, column.typmod)]) for column in state.columns),
    )
    may_move = any(version.relation.replica_identity == "f" for version in versions)
    return TargetPlan(state, batches, volume, decode, truncated_at >= 0, stretch.rows_of(state), may_move)


def _check_prepared(stream: Stream, state: TableState, snapshot: Snapshot) -> None:
    """A transaction committed in the range must have its changes in the log, unless the copy holds them."""
    for lost in stream.segments.missing:
        if not snapshot.sees(np.array([lost.xid8])).all():
            raise ApplyError(
                f"{state.table_name}: prepared transaction {lost.gid!r} was committed in batch {lost.decided_in}, but the change "
                f"log doesn't hold its changes: sync this table again (initial sync with tables={state.table_name})"
            )


def _last_truncate(stream: Stream, state: TableState, snapshot: Snapshot) -> int:
    """The place of the last TRUNCATE of this target that its copy doesn't reflect, or -1."""
    found = -1
    for row, place in stream.of_kind("T"):
        if place <= found or snapshot.sees(np.array([row["xid8"]])).all():
            continue
        truncated = read_truncate(row["data"], streamed=row["streamed_xid"] is not None)
        if set(truncated.relation_ids) & set(state.relation_ids):
            found = place
    return found


def _check_not_recreated(stream: Stream, state: TableState) -> None:
    """A table dropped and created again has another oid, so its changes would pass by unseen."""
    for row, place in stream.of_kind("R"):
        if place < 0:
            continue
        relation = read_relation(row["data"], streamed=row["streamed_xid"] is not None)
        same_name = str(TableId(relation.schema, relation.name)) == state.table_name
        if (
            same_name
            and relation.relation_id not in state.relation_ids
            and relation.relation_id > max(state.relation_ids)
        ):
            raise SchemaChanged(
                f"{state.table_name} was dropped and created again on the source: sync this table again (initial sync with "
                f"tables={state.table_name})"
            )


def _check_versions(change_log: ChangeLog, stream: Stream, state: TableState, versions: list[RelationVersion]) -> None:
    """Every version that brings rows the copy doesn't hold must have the target's columns."""
    snapshot = Snapshot.parse(state.snapshot)
    for version in versions:
        difference = _difference(state, version.relation)
        ids = [version.relation.relation_id]
        if difference and change_log.has_changes(stream, ids, snapshot, version.describes):
            raise SchemaChanged(
                f"{state.table_name}: its columns changed ({difference}); its changes wait in the change log: sync this "
                f"table again (initial sync with tables={state.table_name})"
            )


def _difference(state: TableState, relation: Relation) -> str:
    expected = {c.name: (c.type_oid, c.typmod) for c in state.columns}
    found = {c.name: (c.type_oid, c.typmod) for c in relation.columns}
    added, dropped = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
    changed = sorted(n for n in found.keys() & expected.keys() if found[n] != expected[n])
    flagged = {c.name for c in relation.columns if c.is_key}
    # Old rows carry the replica identity's columns only, so another identity is another key.
    other_key = sorted(flagged) if flagged and not flagged.issuperset(state.key_columns) else []
    parts = [("added", added), ("dropped", dropped), ("of another type", changed), ("replica identity now", other_key)]
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names)


def _types(
    connection: psycopg.Connection[Any], state: TableState, pairs: set[tuple[int, int]]
) -> dict[tuple[int, int], PgType]:
    try:
        return read_types(connection, pairs)
    except KeyError as err:
        raise SchemaChanged(
            f"{state.table_name}: a column's type was dropped on the source: sync this table again"
        ) from err
