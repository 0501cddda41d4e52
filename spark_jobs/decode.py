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
from spark_jobs.versions import RelationVersion
from waldelta.change_log import place_columns
from waldelta.copy import RAW_TYPE, raw_map
from waldelta.errors import ApplyError, DecodeError
from waldelta.pgoutput.relation import Relation
from waldelta.pgoutput.rows import Rows, decode_rows
from waldelta.transactions import SEQ_BITS, Segments
from waldelta.type_map import TargetType
from waldelta.visibility import Snapshot

CHANGE_COLUMNS = ("batch", "seq", "kind", "relation_id", "xid8", "streamed_xid", "commit_lsn", "commit_ts", "data")


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything a task needs to decode one target's messages."""

    shape: EventShape
    names: tuple[str, ...]
    types: tuple[TargetType, ...]
    versions: tuple[RelationVersion, ...]
    # Where each column stands in the rows of each version; None: it wasn't there yet, and existing rows got the fill.
    positions: tuple[tuple[int | None, ...], ...]
    fills: tuple[bytes | None, ...]
    snapshot: Snapshot
    segments: Segments
    truncated_at: int = -1

    @property
    def event_schema(self) -> pa.Schema:
        """The Arrow schema of events: every value as text."""
        return event_schema(self.shape, [pa.binary()] * len(self.names))

    @property
    def net_schema(self) -> pa.Schema:
        """The Arrow schema of typed net changes."""
        return net_schema(self.shape, [kind.arrow for kind in self.types]).append(pa.field("raw", RAW_TYPE))


def decode(changes: pa.RecordBatch, plan: DecodePlan) -> Iterator[pa.Table]:
    """Yield the events among ``changes`` (CHANGE_COLUMNS) that the target's copy doesn't hold already."""
    batch, seq, streamed_xid = place_columns(changes)
    landed, is_streamed = (batch << SEQ_BITS) | seq, streamed_xid >= 0
    place = plan.segments.places(batch, seq, streamed_xid)
    relation_id, xid8 = changes["relation_id"].to_numpy(), changes["xid8"].to_numpy()
    wanted = (place >= 0) & (place > plan.truncated_at) & ~plan.snapshot.sees(xid8)
    described = np.zeros(len(place), np.bool_)
    for version, positions in zip(plan.versions, plan.positions, strict=True):
        chosen = wanted & (relation_id == version.relation.relation_id) & version.describes(landed, is_streamed, xid8)
        described |= chosen
        for streamed in (False, True):
            of_format = chosen & (is_streamed == streamed)
            if of_format.all():
                yield _decode_version(changes, place, (version.relation, positions), plan, streamed=streamed)
            elif of_format.any():
                part = changes.filter(pa.array(of_format))
                yield _decode_version(part, place[of_format], (version.relation, positions), plan, streamed=streamed)
    _check_described(changes, wanted & ~described)


def _check_described(changes: pa.RecordBatch, unknown: npt.NDArray[np.bool_]) -> None:
    """No row is left out because nothing says what its columns are."""
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DecodeError(
            "row", "relation_id", 1,
            f"no Relation message before it: relation {changes['relation_id'][row]}, message {changes['seq'][row]} of batch "
            f"{changes['batch'][row]}",
        )  # fmt: skip


def _decode_version(
    changes: pa.RecordBatch,
    place: npt.NDArray[np.int64],
    described: tuple[Relation, tuple[int | None, ...]],
    plan: DecodePlan,
    *,
    streamed: bool,
) -> pa.Table:
    relation, positions = described
    rows = decode_rows(changes["data"], len(relation.columns), streamed=streamed)
    columns: dict[str, pa.Array] = {"ord": pa.array(place), "op": pa.array(rows.op.astype(np.int32))}
    for k, i in enumerate(plan.shape.key):
        columns[f"o{k}"] = _old_key(rows, _key_position(positions, i))
    for i, name in enumerate(plan.shape.values):
        if i in plan.shape.key:
            columns[name] = _new_key(rows, _key_position(positions, i))
        elif (at := positions[i]) is None:
            columns[name] = _filled(plan.fills[i], len(rows))
        else:
            columns[name] = rows.new[at]
    for i in plan.shape.toastable:
        at = positions[i]
        never = i in plan.shape.key or at is None
        columns[f"u{i}"] = pa.array(np.zeros(len(rows), bool) if never else rows.unchanged[at])
    columns["lsn"], columns["commit_ts"] = commits(changes, plan.segments)
    return pa.table(columns, schema=plan.event_schema)


def _key_position(positions: tuple[int | None, ...], i: int) -> int:
    at = positions[i]
    if at is None:  # planned so: a relation without the key's columns can't be followed
        raise ApplyError("a change came without its key: sync this table again; was its replica identity changed?")
    return at


def _filled(value: bytes | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.binary()) if value is None else pa.repeat(pa.scalar(value, pa.binary()), count)


def commits(changes: pa.RecordBatch, segments: Segments) -> tuple[pa.Array, pa.Array]:
    """Commit position and time; those of streamed and prepared transactions were unknown when they were landed."""
    lsn, at = changes["commit_lsn"], changes["commit_ts"]
    if segments.is_plain:
        return lsn, at
    stretch = segments.find(*place_columns(changes))
    own_lsn = np.asarray(pc.fill_null(lsn, 0).to_numpy(zero_copy_only=False), np.int64)
    own_at = np.asarray(pc.fill_null(at.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), np.int64)
    times = pa.array(segments.commit_ts_us(stretch, own_at)).cast(at.type)
    return pa.array(segments.commit_lsn(stretch, own_lsn)), times


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
    net = collapse(events, plan.shape, base_is_empty=base_is_empty)
    raws: dict[str, pa.Array] = {}
    for i in set(range(len(plan.names))) - set(plan.shape.key):
        value, raw = plan.types[i].from_text(_one_array(net[f"c{i}"]))
        at = net.schema.get_field_index(f"c{i}")
        net = net.set_column(at, pa.field(f"c{i}", plan.types[i].arrow), value)
        if raw is not None and raw.null_count < len(raw):
            raws[plan.names[i]] = raw
    return net.append_column(pa.field("raw", RAW_TYPE), raw_map(raws, len(net))).cast(plan.net_schema)


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
