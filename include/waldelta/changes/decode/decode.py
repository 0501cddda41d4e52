"""Decodes raw row messages of one target into events, column by column over all messages at once.

It is pure NumPy and Arrow, and runs in Spark's Python tasks on any part of a batch. The columns of
a message depend on its position in the stream, so the driver passes the relation's versions.

Events have values as PostgreSQL's text. Only what is left after collapse is converted to the
target's types. That is less work, and needs no nested columns between tasks (Spark's writer of
Arrow batches takes quadratic time for those).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import one_array, with_column
from waldelta.changes.decode.collapse import (
    DELETE,
    INSERT,
    PLACE,
    UPDATE,
    ColumnNumbering,
    collapse,
    common_net_schema,
    event_schema,
)
from waldelta.changes.decode.relation_versions import RelationVersion
from waldelta.changes.decode.route import OLD_ROW, SAME, SENT, UNKNOWN, Routing
from waldelta.changes.decode.row_states import (
    Unfolding,
    row_version_fields,
    row_versions,
)
from waldelta.errors import ApplyError, DecodeError, NeedsSync
from waldelta.lake.changelog import Snapshot, place_columns
from waldelta.lake.changelog.row_messages import commits
from waldelta.lsn import Lsn
from waldelta.pgoutput.messages import Relation
from waldelta.pgoutput.rows import Rows, decode_rows
from waldelta.pgoutput.transactions import SEQ_BITS, Segments
from waldelta.snapshot.read_table import RAW_TYPE, raw_map
from waldelta.target_modes.target_mode import STATE_XID
from waldelta.types import TargetType
from waldelta.types.type_map import unheld_key
from waldelta.types.wire.wire_format import text_of

# The bytes of a column that are converted to the target's type together.
_PIECE_BYTES = 256 << 20
CHANGE_COLUMNS = (
    "batch",
    "seq",
    "kind",
    "relation_id",
    "xid8",
    "streamed_xid",
    "commit_lsn",
    "commit_ts",
    "data",
)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All that a task needs to decode one target's messages."""

    numbering: ColumnNumbering
    names: tuple[str, ...]
    types: tuple[TargetType, ...]
    versions: tuple[RelationVersion, ...]
    # The position of each column in the rows of each version. None: the column didn't exist yet,
    # and existing rows got the fill.
    positions: tuple[tuple[int | None, ...], ...]
    fills: tuple[bytes | None, ...]
    snapshot: Snapshot
    segments: Segments
    # The position of each relation's last TRUNCATE that the copy doesn't reflect.
    truncated_at: Mapping[int, int] = field(default_factory=dict)
    # The columns' types in binary format, by wire_name().
    wire_names: tuple[str, ...] = ()
    # The target's own filter; until route, events also have its columns, typed.
    routing: Routing | None = None
    # The column with the relation's oid, in a target that merges partitions.
    relid: int | None = None
    # For a target that isn't a mirror: how changes become row versions, in place of collapse.
    unfolding: Unfolding | None = None
    # Batches and relations (None: any) of which rows without a description are left out, by an
    # operator's decision.
    undescribed: frozenset[tuple[int, int | None]] = frozenset()

    @property
    def columns(self) -> list[tuple[str, TargetType]]:
        """The target's columns, by name."""
        return list(zip(self.names, self.types, strict=True))

    @property
    def merges_leaves(self) -> bool:
        """Whether the target merges partitions, so that a TRUNCATE may affect only some of its
        rows.
        """
        return self.relid is not None

    @property
    def event_schema(self) -> pa.Schema:
        """The Arrow schema of events: every value as text."""
        schema = event_schema(self.numbering, [pa.binary()] * len(self.names))
        if self.unfolding is None or not self.unfolding.fold.has_changes:
            return schema
        return schema.append(pa.field(STATE_XID, pa.int64()))

    @property
    def decoded_schema(self) -> pa.Schema:
        """The Arrow schema of what decode yields: events, plus the columns that route needs."""
        if self.routing is None:
            return self.event_schema
        return pa.schema([*self.event_schema, *self.routing.fields(self.types)])

    @property
    def filtered_schema(self) -> pa.Schema:
        """The Arrow schema of the columns that route reads: position, operation, filter's columns.

        Only the first two without a filter.
        """
        fields = [] if self.routing is None else self.routing.fields(self.types)
        return pa.schema([self.event_schema.field("ord"), self.event_schema.field("op"), *fields])

    @property
    def net_schema(self) -> pa.Schema:
        """The Arrow schema of typed net changes.

        ``raw`` has the texts of values that the types of the columns ``c<i>`` (new values) can't
        hold, and ``base_raw`` those of the old key columns ``b<k>``.
        """
        fields = list(common_net_schema(self.numbering, [kind.arrow for kind in self.types]))
        if self.unfolding is not None:
            key_types = [self.types[i].arrow for i in self.numbering.identity]
            fields += row_version_fields(self.numbering, key_types, self.unfolding.fold)
            return pa.schema([*fields, pa.field("raw", RAW_TYPE)])
        if not self.numbering.key:
            fields += [pa.field(PLACE, pa.int64()), pa.field("base_raw", RAW_TYPE)]
        return pa.schema([*fields, pa.field("raw", RAW_TYPE)])


@dataclass(frozen=True, slots=True)
class _Described:
    """A relation as one of its versions describes it, and where its rows have the plan's columns.

    A position is None where the version doesn't have the column.
    """

    relation: Relation
    positions: tuple[int | None, ...]


def decode(changes: pa.RecordBatch, plan: DecodePlan) -> Iterator[pa.Table]:
    """Yields the events among ``changes`` (CHANGE_COLUMNS) that the target's copy doesn't contain
    yet.
    """
    batch, seq, streamed_xid = place_columns(changes)
    landed, is_streamed = (batch << SEQ_BITS) | seq, streamed_xid >= 0
    place = plan.segments.places(batch, seq, streamed_xid)
    relation_id, xid8 = changes["relation_id"].to_numpy(), changes["xid8"].to_numpy()
    is_new = (place >= 0) & ~plan.snapshot.sees(xid8)
    for truncated, at in plan.truncated_at.items():
        is_new &= (place > at) | (relation_id != truncated)
    described = np.zeros(len(place), np.bool_)
    for version, positions in zip(plan.versions, plan.positions, strict=True):
        is_of_version = (
            is_new
            & (relation_id == version.relation.relation_id)
            & version.describes(landed, is_streamed, xid8)
        )
        described |= is_of_version
        of_version = _Described(version.relation, positions)
        for streamed in (False, True):
            of_format = is_of_version & (is_streamed == streamed)
            if not of_format.any():
                continue
            part = changes if of_format.all() else changes.filter(pa.array(of_format))
            try:
                yield _decode_version(part, place[of_format], of_version, plan, streamed=streamed)
            except DecodeError as err:
                raise _with_position(err, part) from None
    unknown = is_new & ~described
    for of_batch, of_relation in plan.undescribed:
        unknown &= (batch != of_batch) | (
            (relation_id != of_relation) if of_relation is not None else False
        )
    _check_described(changes, unknown)


def decode_all(parts: Iterable[pa.RecordBatch], plan: DecodePlan) -> Iterator[pa.RecordBatch]:
    """Yields the events of all parts, as decode() does."""
    for part in parts:
        for events in decode(part, plan):
            yield from events.to_batches()


def _with_position(err: DecodeError, changes: pa.RecordBatch) -> DecodeError:
    """Returns the error with its message's position in the change log."""
    batches = sorted(changes["batch"].unique().to_pylist())
    where = (
        f"in batches {batches[0]} to {batches[-1]}"
        if len(batches) > 1
        else f"in batch {batches[0]}"
    )
    # A nested value has a row number of its own, which may not be a message's.
    if (
        err.row is not None
        and err.row < len(changes)
        and err.message in ("Insert", "Update", "Delete", "row")
    ):
        message = changes.slice(err.row, 1).to_pylist()[0]
        commit = message["commit_lsn"]
        where = f"message {message['seq']} of batch {message['batch']}"
        where += f", of the transaction committed at {Lsn(commit)}" if commit is not None else ""
    return DecodeError(
        err.message,
        err.field,
        err.offset,
        f"{err.detail}, {where}; the change log keeps it",
        err.row,
    )


def _check_described(changes: pa.RecordBatch, unknown: npt.NDArray[np.bool_]) -> None:
    """Raise DecodeError when a row has no Relation message that describes its columns."""
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DecodeError(
            "row",
            "relation_id",
            1,
            f"no Relation message before it: relation {changes['relation_id'][row]}, message"
            f" {changes['seq'][row]} of batch {changes['batch'][row]}",
        )


def _decode_version(
    changes: pa.RecordBatch,
    place: npt.NDArray[np.int64],
    described: _Described,
    plan: DecodePlan,
    *,
    streamed: bool,
) -> pa.Table:
    positions, identity = described.positions, plan.numbering.identity
    rows = _read_rows(changes, described, plan, streamed=streamed)
    columns: dict[str, pa.Array] = {
        "ord": pa.array(place),
        "op": pa.array(rows.op.astype(np.int32)),
    }
    if not plan.numbering.key:
        _check_whole_rows(rows)
    for k, i in enumerate(identity):
        columns[f"o{k}"] = _identity_value(rows, plan, described, i, _old_key)
    for i, name in enumerate(plan.numbering.values):
        columns[name] = _new_value(rows, plan, described, i)
    for i in plan.numbering.toastable:
        at = positions[i]
        if at is None or i in identity:
            unchanged = (rows.op == UPDATE) & (i in plan.numbering.stopped)
        else:
            unchanged = rows.unchanged[at]
        columns[f"u{i}"] = pa.array(unchanged)
    columns["lsn"], columns["commit_ts"] = commits(changes, plan.segments)
    if STATE_XID in plan.event_schema.names:
        columns[STATE_XID] = changes["xid8"].cast(pa.int64())
    if plan.routing is not None:
        columns |= _filter_columns(rows, plan, plan.routing, described)
        columns |= _whole_updates(rows, plan, positions, columns)
    return pa.table(columns, schema=plan.decoded_schema)


def _read_rows(
    changes: pa.RecordBatch,
    described: _Described,
    plan: DecodePlan,
    *,
    streamed: bool,
) -> Rows:
    """Read the rows of one relation version, with values as text."""
    relation, positions = described.relation, described.positions
    # Texts must be exact in columns that identify rows, which are compared before they are typed,
    # and where some values may have arrived as text.
    exact = [kind.is_text or i in plan.numbering.identity for i, kind in enumerate(plan.types)]
    kinds = zip(plan.wire_names, exact, strict=True)
    wire = {at: of for at, of in zip(positions, kinds, strict=True) if at is not None}

    def to_text(k: int, values: pa.Array) -> pa.Array:
        if k not in wire:
            # The target doesn't have the column any more, so its values aren't needed.
            return pa.nulls(len(values), pa.binary())
        name, is_exact = wire[k]
        return text_of(values, name, is_exact=is_exact)

    # One batch is one call to the slot; the next call may have used another format.
    batch = changes["batch"].to_numpy()
    mixed_formats = bool((batch != batch[0]).any())
    return decode_rows(
        changes["data"],
        len(relation.columns),
        streamed=streamed,
        to_text=to_text,
        mixed_formats=mixed_formats,
    )


def _filter_columns(
    rows: Rows,
    plan: DecodePlan,
    routing: Routing,
    described: _Described,
) -> dict[str, pa.Array]:
    """Returns the filter's columns of new and old rows, typed.

    Raises ApplyError for an UPDATE whose old row can't be judged.
    """
    relation, positions = described.relation, described.positions
    places = {i: at for i in routing.positions if (at := positions[i]) is not None}
    is_told = relation.replica_identity == "f" or all(
        relation.columns[at].is_key for at in places.values()
    )
    if not is_told and (rows.op == UPDATE).any():
        raise ApplyError(
            f"an UPDATE of {relation.schema}.{relation.name} lacks the old values of the columns"
            " that its target's where uses: give the table replica identity full, then sync it"
            " again"
        )
    has_old_row = rows.old.has_tuple if is_told else np.zeros(len(rows), np.bool_)
    old_row = np.where(has_old_row, SENT, np.where(rows.op == DELETE, UNKNOWN, SAME))
    columns: dict[str, pa.Array] = {OLD_ROW: pa.array(old_row.astype(np.int32))}
    for i, at in places.items():
        old = rows.old[at] if is_told else pa.nulls(len(rows), pa.binary())
        for letter, texts in (("n", _new_key(rows, at)), ("p", old)):
            value, raw = plan.types[i].from_text(texts)
            columns[f"{letter}{i}"] = value
            if i in routing.raw_positions:
                columns[f"{letter}r{i}"] = (
                    pa.nulls(len(rows), pa.string()) if raw is None else raw.cast(pa.string())
                )
    return columns


def _whole_updates(
    rows: Rows, plan: DecodePlan, positions: tuple[int | None, ...], columns: dict[str, pa.Array]
) -> dict[str, pa.Array]:
    """Take unchanged TOAST values from the complete old row, where one was sent.

    A row that enters the target has no other source for them.
    """
    whole = rows.old_kind == ord("O")
    values: dict[str, pa.Array] = {}
    for i in plan.numbering.toastable if whole.any() else ():
        at = positions[i]
        if (
            at is None
            or i in plan.numbering.identity
            or not (is_whole := rows.unchanged[at] & whole).any()
        ):
            continue
        values[f"c{i}"] = pc.if_else(pa.array(is_whole), rows.old[at], columns[f"c{i}"])
        values[f"u{i}"] = pa.array(rows.unchanged[at] & ~whole)
    return values


def _new_value(rows: Rows, plan: DecodePlan, described: _Described, i: int) -> pa.Array:
    if i == plan.relid or i in plan.numbering.identity:
        return _identity_value(rows, plan, described, i, _new_key)
    at = described.positions[i]
    return _repeat(plan.fills[i], len(rows)) if at is None else rows.new[at]


def _identity_value(
    rows: Rows,
    plan: DecodePlan,
    described: _Described,
    i: int,
    read: Callable[[Rows, int], pa.Array],
) -> pa.Array:
    relation, positions = described.relation, described.positions
    if i == plan.relid:
        return _repeat(str(relation.relation_id).encode(), len(rows))
    at = positions[i]
    if at is not None:
        return read(rows, at)
    # A relation lacks a key column only if the replica identity changed: without the key, its
    # changes can't be assigned to rows.
    if plan.numbering.key:
        raise NeedsSync(
            "a change lacks its key, because the table's replica identity was changed: sync the"
            " table again"
        )
    return _repeat(plan.fills[i], len(rows))


def _repeat(value: bytes | None, count: int) -> pa.Array:
    return (
        pa.nulls(count, pa.binary())
        if value is None
        else pa.repeat(pa.scalar(value, pa.binary()), count)
    )


def _check_whole_rows(rows: Rows) -> None:
    """Check that old rows are complete: without a key, only they identify the changed row."""
    if ((rows.op != INSERT) & (rows.old_kind != ord("O"))).any():
        raise NeedsSync(
            "an update or delete of a table without a key lacks the complete old row: give the"
            " table a primary key or REPLICA IDENTITY FULL, then sync it again"
        )


def _new_key(rows: Rows, k: int) -> pa.Array:
    """Returns the key after the change; an unchanged TOASTed key is only in the old tuple."""
    unchanged = rows.unchanged[k] & rows.old.has_tuple
    return (
        pc.if_else(pa.array(unchanged), rows.old[k], rows.new[k])
        if unchanged.any()
        else rows.new[k]
    )


def _old_key(rows: Rows, k: int) -> pa.Array:
    """Returns the key before the change; none for an insert.

    It is in the old tuple where one was sent, else in the new one.
    """
    new, inserted = _new_key(rows, k), rows.op == INSERT
    if not rows.old.has_tuple.any():
        return pc.if_else(pa.array(inserted), pa.scalar(None, new.type), new)
    is_unchanged = ~rows.old.has_tuple & (rows.op != DELETE) & ~inserted
    return pc.if_else(pa.array(is_unchanged), new, rows.old[k])


def with_typed_keys(events: pa.Table, plan: DecodePlan) -> pa.Table:
    """Returns the events with the key's columns in the target's types.

    Equal keys may have different texts. Raises ApplyError for a key that the target's type can't
    hold.
    """
    op = events["op"].to_numpy()
    for k, i in enumerate(plan.numbering.key):
        for name, required in ((f"o{k}", op != INSERT), (f"c{i}", op != DELETE)):
            key = typed_key(events[name], plan.types[i], plan.names[i], required)
            events = with_column(events, name, key)
    return events


def collapse_events(events: pa.Table, plan: DecodePlan) -> pa.Table:
    """Collapse events, and convert the result to the target's types; columns as in
    ``plan.net_schema``.

    Raises ApplyError for a key that the target's type can't hold.
    """
    base_is_empty = _base_is_empty(events, plan)
    events = with_typed_keys(events, plan)
    if plan.unfolding is not None:
        net = row_versions(events, plan.numbering, plan.unfolding)
        # No earlier state is looked up for a row without a key.
        texts = {i: f"c{i}" for i in range(len(plan.names)) if i not in plan.numbering.key}
        if not plan.numbering.key:
            for i, kind in enumerate(plan.types):
                net = with_column(net, f"b{i}", pa.nulls(len(net), kind.arrow))
        return (
            _convert_columns(net, plan, texts, "raw")
            .select(plan.net_schema.names)
            .cast(plan.net_schema)
        )
    net = collapse(events, plan.numbering, base_is_empty=base_is_empty)
    if not plan.numbering.key:
        net = _convert_columns(net, plan, {i: f"b{i}" for i in plan.numbering.identity}, "base_raw")
    texts = {i: f"c{i}" for i in range(len(plan.names)) if i not in plan.numbering.key}
    return _convert_columns(net, plan, texts, "raw").cast(plan.net_schema)


def _base_is_empty(events: pa.Table, plan: DecodePlan) -> bool | npt.NDArray[np.bool_]:
    """Returns whether the target's rows were truncated before these events.

    For a target that merges partitions, it is an array with a value for each event.
    """
    if plan.relid is None or not plan.truncated_at:
        return bool(plan.truncated_at)
    truncated = pa.array([str(oid).encode() for oid in plan.truncated_at], pa.binary())
    return np.asarray(pc.is_in(events[f"c{plan.relid}"], value_set=truncated))


def _convert_columns(
    net: pa.Table, plan: DecodePlan, columns: dict[int, str], raw_name: str
) -> pa.Table:
    """Convert columns of text, given by the position of their type, to the target's types."""
    raws: dict[str, pa.Array] = {}
    for i, name in columns.items():
        read = [plan.types[i].from_text(piece) for piece in _pieces(net[name])]
        value = pa.chunked_array([value for value, _ in read], plan.types[i].arrow)
        net = with_column(net, name, value)
        if any(raw is not None for _, raw in read):
            texts = [
                pa.nulls(len(value), pa.string()) if raw is None else raw for value, raw in read
            ]
            raws[plan.names[i]] = pa.concat_arrays(texts)
    return net.append_column(pa.field(raw_name, RAW_TYPE), raw_map(raws, len(net)))


def _pieces(column: pa.ChunkedArray) -> list[pa.Array]:
    """Returns the column as arrays small enough to be converted, and sent, at once."""
    pieces: list[pa.Array] = []
    waiting = list(reversed(column.chunks))
    while waiting:
        chunk = waiting.pop()
        if chunk.nbytes > _PIECE_BYTES and len(chunk) > 1:
            middle = len(chunk) // 2
            waiting += [chunk.slice(middle), chunk.slice(0, middle)]
        else:
            # A cast to narrow offsets checks those of the whole array, so a slice gets its own.
            is_wide = pa.types.is_large_binary(chunk.type) or pa.types.is_large_string(chunk.type)
            pieces.append(chunk.take(pa.array(np.arange(len(chunk)))) if is_wide else chunk)
    return pieces


def typed_key(
    texts: pa.ChunkedArray, kind: TargetType, name: str, required: npt.NDArray[np.bool_]
) -> pa.Array:
    """Returns a key column in its type.

    Raises ApplyError for a key that the type can't hold, NeedsSync for a missing one where
    ``required``.
    """
    value, raw = kind.from_text(one_array(texts))
    if raw is not None and raw.null_count < len(raw):
        raise ApplyError(unheld_key(name, kind))
    if pc.any(pc.and_(pa.array(required), pc.is_null(value))).as_py():
        raise NeedsSync(
            f"a change lacks its key column {name!r}, because the table's replica identity was"
            " changed: sync the table again"
        )
    return value
