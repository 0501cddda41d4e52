"""Plan: what it takes to apply a range of batches to one target; read from the change log's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.collapse import EventShape
from spark_jobs.decode import DecodePlan, RelationVersion, order_of, split_order
from spark_jobs.stretch import Stretch
from waldelta.catalog import TableId
from waldelta.change_log import ChangeLog, Volume
from waldelta.errors import SchemaChanged
from waldelta.ledger import TableState
from waldelta.pgoutput.relation import Relation, read_relation
from waldelta.pgoutput.truncate import read_truncate
from waldelta.type_catalog import PgType, read_types
from waldelta.type_map import target_type
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
    timeline, batches = stretch.timeline, stretch.batches
    snapshot = Snapshot.parse(state.snapshot)
    volume = stretch.volume(state)
    versions = _versions(timeline, state)
    names = tuple(column.name for column in state.columns)
    _check_not_recreated(timeline, state)
    if volume.rows:
        _check_versions(stretch.change_log, state, batches, versions)
    pairs = {(column.type_oid, column.typmod) for column in state.columns}
    types = _types(connection, state, pairs)
    shape = EventShape(
        column_count=len(names),
        key=tuple(names.index(name) for name in state.key_columns),
        toastable=tuple(i for i, column in enumerate(state.columns) if column.spark_type not in _FIXED_SIZE),
    )
    truncated_at = _last_truncate(timeline, state, snapshot)
    decode = DecodePlan(
        shape,
        names,
        tuple(target_type(types[(column.type_oid, column.typmod)]) for column in state.columns),
        tuple(versions),
        snapshot,
        truncated_at,
    )
    may_move = any(version.relation.replica_identity == "f" for version in versions)
    return TargetPlan(state, batches, volume, decode, truncated_at >= 0, stretch.rows_of(state), may_move)


def _versions(timeline: pa.Table, state: TableState) -> list[RelationVersion]:
    rows = [row for row in timeline.to_pylist() if row["kind"] == "R" and row["relation_id"] in state.relation_ids]
    return [RelationVersion(order_of(row["batch"], row["seq"]), read_relation(row["data"])) for row in rows]


def _last_truncate(timeline: pa.Table, state: TableState, snapshot: Snapshot) -> int:
    """The place of the last TRUNCATE of this target that its copy doesn't reflect, or -1."""
    found = -1
    for row in timeline.filter(pc.equal(timeline["kind"], "T")).to_pylist():
        unseen = not snapshot.sees(pa.array([row["xid8"]]).to_numpy()).all()
        if unseen and set(read_truncate(row["data"]).relation_ids) & set(state.relation_ids):
            found = max(found, order_of(row["batch"], row["seq"]))
    return found


def _check_not_recreated(timeline: pa.Table, state: TableState) -> None:
    """A table dropped and created again has another oid, so its changes would pass by unseen."""
    for row in timeline.filter(pc.equal(timeline["kind"], "R")).to_pylist():
        relation = read_relation(row["data"])
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


def _check_versions(
    change_log: ChangeLog, state: TableState, batches: tuple[int, int], versions: list[RelationVersion]
) -> None:
    """Every version that brings rows the copy doesn't hold must have the target's columns."""
    snapshot = Snapshot.parse(state.snapshot)
    ends = [*(version.since for version in versions[1:]), order_of(batches[1] + 1, 0)]
    for version, end in zip(versions, ends, strict=True):
        difference = _difference(state, version.relation)
        if difference and change_log.has_changes(
            *batches, state.relation_ids, snapshot, between=(split_order(version.since), split_order(end))
        ):
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
