"""Decode: raw row messages of one target become events, column by column over all messages at once.

Pure NumPy and Arrow: runs inside Spark's Python tasks on whatever part of a batch they were given. What the columns
of a message are depends on where it stands in the stream, so the driver hands over the relation's versions.

Events carry their values as PostgreSQL's text. Only what is left after collapse is brought into the target's types:
less work, and no nested columns between tasks (Spark's writer of Arrow batches takes quadratic time over those).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.collapse import DELETE, INSERT, EventShape, collapse, event_schema, net_schema
from spark_jobs.collapse_copies import PLACE, collapse_copies
from waldelta.copy import RAW_TYPE, raw_map
from waldelta.errors import ApplyError
from waldelta.pgoutput.relation import Relation
from waldelta.pgoutput.rows import Rows, decode_rows
from waldelta.type_map import TargetType
from waldelta.visibility import Snapshot

# A message's place in the whole stream: its batch, then its number within the batch.
SEQ_BITS = 40

CHANGE_COLUMNS = ("batch", "seq", "kind", "relation_id", "xid8", "commit_lsn", "commit_ts", "data")


def order_of(batch: int, seq: int) -> int:
    """The place of a message in the stream of all batches."""
    return (batch << SEQ_BITS) | seq


def split_order(place: int) -> tuple[int, int]:
    """The batch and number of a place in the stream."""
    return place >> SEQ_BITS, place & ((1 << SEQ_BITS) - 1)


@dataclass(frozen=True, slots=True)
class RelationVersion:
    """What a relation's messages look like from one place in the stream on."""

    since: int
    relation: Relation


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything a task needs to decode one target's messages."""

    shape: EventShape
    names: tuple[str, ...]
    types: tuple[TargetType, ...]
    versions: tuple[RelationVersion, ...]
    snapshot: Snapshot
    truncated_at: int = -1

    @property
    def event_schema(self) -> pa.Schema:
        """The Arrow schema of events: every value as text."""
        return event_schema(self.shape, [pa.binary()] * len(self.names))

    @property
    def net_schema(self) -> pa.Schema:
        """The Arrow schema of typed net changes; ``raw`` and ``base_raw`` hold what the types of ``c`` and ``b`` can't."""
        fields = list(net_schema(self.shape, [kind.arrow for kind in self.types]))
        if not self.shape.key:
            fields += [pa.field(PLACE, pa.int64()), pa.field("base_raw", RAW_TYPE)]
        return pa.schema([*fields, pa.field("raw", RAW_TYPE)])


def decode(changes: pa.RecordBatch, plan: DecodePlan) -> Iterator[pa.Table]:
    """Yield the events among ``changes`` (CHANGE_COLUMNS) that the target's copy doesn't hold already."""
    place = (changes["batch"].to_numpy().astype(np.int64) << SEQ_BITS) | changes["seq"].to_numpy()
    relation_id = changes["relation_id"].to_numpy()
    wanted = (place > plan.truncated_at) & ~plan.snapshot.sees(changes["xid8"].to_numpy())
    for relation in sorted({v.relation.relation_id for v in plan.versions}):
        versions = [v for v in plan.versions if v.relation.relation_id == relation]
        ends = [*(v.since for v in versions[1:]), np.iinfo(np.int64).max]
        for version, end in zip(versions, ends, strict=True):
            chosen = wanted & (relation_id == relation) & (place > version.since) & (place < end)
            if chosen.all():
                yield _decode_version(changes, place, version.relation, plan)
            elif chosen.any():
                part = changes.filter(pa.array(chosen))
                yield _decode_version(part, place[chosen], version.relation, plan)


def _decode_version(
    changes: pa.RecordBatch, place: npt.NDArray[np.int64], relation: Relation, plan: DecodePlan
) -> pa.Table:
    rows = decode_rows(changes["data"], len(relation.columns))
    position = {column.name: k for k, column in enumerate(relation.columns)}
    columns: dict[str, pa.Array] = {"ord": pa.array(place), "op": pa.array(rows.op.astype(np.int32))}
    identity = plan.shape.identity
    if not plan.shape.key:
        _check_whole_rows(rows)
    for k, i in enumerate(identity):
        columns[f"o{k}"] = _old_key(rows, position[plan.names[i]])
    for i, (name, column) in enumerate(zip(plan.shape.values, plan.names, strict=True)):
        columns[name] = rows.new[position[column]] if i not in identity else _new_key(rows, position[column])
    for i in plan.shape.toastable:
        flags = rows.unchanged[position[plan.names[i]]]
        columns[f"u{i}"] = pa.array(np.zeros(len(rows), bool) if i in identity else flags)
    columns["lsn"] = changes["commit_lsn"]
    columns["commit_ts"] = changes["commit_ts"]
    return pa.table(columns, schema=plan.event_schema)


def _check_whole_rows(rows: Rows) -> None:
    """Without a key only the whole old row tells which row was changed."""
    if ((rows.op != INSERT) & (rows.old_kind != ord("O"))).any():
        raise ApplyError(
            "an update or delete came for a table without a key, and without its whole old row: give the table a primary "
            "key or REPLICA IDENTITY FULL, then sync it again"
        )


def _new_key(rows: Rows, k: int) -> pa.Array:
    """The key after the change; a TOASTed key that didn't change comes with the old tuple only."""
    unchanged = rows.unchanged[k] & rows.old.present
    return pc.if_else(pa.array(unchanged), rows.old[k], rows.new[k]) if unchanged.any() else rows.new[k]


def _old_key(rows: Rows, k: int) -> pa.Array:
    """The key before the change: from the old tuple where one was sent, else the new one; none for an insert."""
    new, inserted = _new_key(rows, k), rows.op == INSERT
    if not rows.old.present.any():
        return pc.if_else(pa.array(inserted), pa.scalar(None, new.type), new)
    same = ~rows.old.present & (rows.op != DELETE) & ~inserted
    return pc.if_else(pa.array(same), new, rows.old[k])


def collapse_events(events: pa.Table, plan: DecodePlan, *, base_is_empty: bool) -> pa.Table:
    """Collapse events and bring what is left into the target's types; columns as in ``plan.net_schema``.

    Keys are typed before, since equal keys may be printed differently. Raises ApplyError for a key that the target's
    type can't hold.
    """
    op = events["op"].to_numpy()
    for k, i in enumerate(plan.shape.key):
        for name, present in ((f"o{k}", op != INSERT), (f"c{i}", op != DELETE)):
            at = events.schema.get_field_index(name)
            field = pa.field(name, plan.types[i].arrow)
            events = events.set_column(at, field, _typed_key(events[name], plan.types[i], plan.names[i], present))
    if not plan.shape.key:
        net = collapse_copies(events, plan.shape, base_is_empty=base_is_empty)
        net = _typed(net, plan, {i: f"b{i}" for i in plan.shape.identity}, "base_raw")
    else:
        net = collapse(events, plan.shape, base_is_empty=base_is_empty)
    texts = {i: f"c{i}" for i in range(len(plan.names)) if i not in plan.shape.key}
    return _typed(net, plan, texts, "raw").cast(plan.net_schema)


def _typed(net: pa.Table, plan: DecodePlan, columns: dict[int, str], raw_name: str) -> pa.Table:
    """Bring columns of text, named by the position of their type, into the target's types."""
    raws: dict[str, pa.Array] = {}
    for i, name in columns.items():
        value, raw = plan.types[i].from_text(_one_array(net[name]))
        net = net.set_column(net.schema.get_field_index(name), pa.field(name, plan.types[i].arrow), value)
        if raw is not None and raw.null_count < len(raw):
            raws[plan.names[i]] = raw
    return net.append_column(pa.field(raw_name, RAW_TYPE), raw_map(raws, len(net)))


def _typed_key(texts: pa.ChunkedArray, kind: TargetType, name: str, present: npt.NDArray[np.bool_]) -> pa.Array:
    value, raw = kind.from_text(_one_array(texts))
    if pc.any(pc.and_(pa.array(present), pc.is_null(value))).as_py():
        raise ApplyError(
            f"a change came without its key column {name!r}: sync this table again; was its replica identity changed?"
        )
    if raw is not None and raw.null_count < len(raw):
        raise ApplyError(
            f"key column {name!r} has a value that {kind.spark} can't hold: leave such rows out by a row filter"
        )
    return value


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
