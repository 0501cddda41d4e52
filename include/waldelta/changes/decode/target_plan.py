"""Plans how to apply a range of batches to one target, from the change log's timeline.

Finds the message of a landed range that can't be decoded, after decoding has failed.

Decoding reads many messages at once, in tasks or in the driver, and its error may not name the
message. So the range is read again in ever smaller parts until a single message is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode
from waldelta.changes.decode.relation_versions import RelationVersion, read_versions
from waldelta.changes.decode.route import check_columns, plan_routing
from waldelta.changes.decode.row_states import Truncation, Unfolding
from waldelta.config.pipeline_file import SchemaPolicy, SchemaRules
from waldelta.errors import ApplyError, DecodeError, NeedsSync, SchemaChanged, WaldeltaError
from waldelta.lake.changelog import (
    BatchNumbers,
    BatchRange,
    ChangeLog,
    RowMessages,
    Snapshot,
    Stream,
    last_truncates,
    place_columns,
)
from waldelta.lake.changelog.batch_file import XID_MASK
from waldelta.lake.changelog.row_messages import Volume, commits, logical_messages
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RELID
from waldelta.pgoutput.message_kinds import CONTROL_KINDS
from waldelta.pgoutput.messages import (
    Relation,
    RelationColumn,
    UnreadMessage,
    decode_logical_messages,
    read_control,
    read_relation,
    read_truncate,
)
from waldelta.pgoutput.transactions import Segments
from waldelta.pipeline.drift import (
    CatalogTable,
    Evolution,
    changed_columns,
    check_key,
    check_may_copy,
    columns_to_stop,
    other_type,
    plan_empty,
    plan_evolution,
    plan_ignoring,
    refusal,
    unchanged,
)
from waldelta.pipeline.targets import filter_of
from waldelta.postgres import INT8, PgType, TableId
from waldelta.types import TargetType, column_types
from waldelta.types.wire.wire_format import wire_name

# Describes types, given as (oid, typmod), as type_catalog.read_types does.
ReadTypes = Callable[[set[tuple[int, int]]], dict[tuple[int, int], PgType]]


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """How a range of batches is applied to one target."""

    state: TableState
    batches: BatchNumbers
    volume: Volume
    decode: DecodePlan
    truncated: bool
    # The target's row messages when they are few enough for the driver to decode, else None.
    rows: pa.Table | None
    # With REPLICA IDENTITY FULL every update has its old row, so the envelope doesn't show which
    # ones move a key.
    may_move: bool
    # The change of the target's columns that must happen first; None: nothing.
    evolution: Evolution | None
    # The target's row messages in files of their own; None: they are only in the change log.
    split: RowMessages | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether a TRUNCATE removed all rows of the target.

        False for a target that merges partitions: a TRUNCATE removes only the truncated leaves'
        rows.
        """
        return self.truncated and not self.decode.merges_leaves

    @property
    def truncated_leaves(self) -> tuple[int, ...]:
        """The truncated leaves of a target that merges partitions."""
        return tuple(sorted(self.decode.truncated_at)) if self.decode.merges_leaves else ()


def plan_target(
    read_types: ReadTypes,
    batch_range: BatchRange,
    state: TableState,
    catalog: CatalogTable,
    rules: SchemaRules,
    *,
    is_empty: bool = False,
) -> TargetPlan:
    """Read the range's relation versions and truncations, and plan the target's columns.

    ``catalog`` is the source's table in the catalogs after the range was landed. ``is_empty``: the
    target has no rows. Raises NeedsSync where only a new copy is exact, including columns whose
    type in the lake changes by ``rules``. Raises SchemaChanged where these, or the difference
    itself, forbid following it.
    """
    stream, snapshot = batch_range.stream, Snapshot.parse(state.snapshot)
    check_prepared(stream, state, snapshot)
    volume = batch_range.volume(state)
    # A recreated leaf counts as a new leaf, so a target that merges partitions isn't checked.
    if state.root_id is None:
        _check_not_recreated(stream, state, catalog)
    described = read_versions(stream, state.relation_ids) if volume.rows else []
    versions = bringing_rows(batch_range, snapshot, described)
    relations = [as_merged_partition(version.relation, state) for version in versions]
    evolution = _plan_evolution(read_types, state, relations, catalog, rules, is_empty=is_empty)
    truncated_at = last_truncates(stream, state, snapshot)
    decode = plan_decode(read_types, batch_range, state, versions, evolution, rules)
    if (mode := state.target_mode).keeps_rows:
        # Rows from before a TRUNCATE are part of its history.
        truncates = read_truncations(stream, state, snapshot)
        decode = replace(decode, unfolding=Unfolding(mode.fold, state.snapshot_lsn, truncates))
    else:
        decode = replace(decode, truncated_at=truncated_at)
    return TargetPlan(
        state,
        batch_range.batches,
        volume,
        decode,
        bool(truncated_at),
        batch_range.rows_of(state),
        any(version.relation.replica_identity == "f" for version in versions),
        evolution if evolution.changes(state) else None,
        batch_range.split,
    )


def plan_decode(
    read_types: ReadTypes,
    batch_range: BatchRange,
    state: TableState,
    versions: Sequence[RelationVersion],
    evolution: Evolution,
    rules: SchemaRules,
) -> DecodePlan:
    """Plan how rows of these relation versions become events with the evolution's columns.

    Raises SchemaChanged or NeedsSync as ``plan_target`` does.
    """
    columns = [column.state for column in evolution.columns]
    names = tuple(column.name for column in columns)
    targets, wire = _types_of_columns(read_types, state, evolution, rules)
    _check_chosen_types(state, evolution, targets, rules.policy)
    row_filter, follows = filter_of(state), rules.policy != "ignore"
    check_columns(state.table_name, row_filter, evolution, follows=follows)
    relid = names.index(RELID) if state.root_id is not None else None
    return DecodePlan(
        _number_columns(evolution, targets),
        names,
        tuple(targets.values()),
        tuple(versions),
        tuple(  # Rows as sent don't include the leaf's oid.
            tuple(None if i == relid else at for i, at in enumerate(places))
            for places in evolution.positions
        ),
        tuple(
            None if column.fill is None else column.fill.encode() for column in evolution.columns
        ),
        Snapshot.parse(state.snapshot),
        batch_range.stream.segments,
        wire_names=wire,
        routing=plan_routing(row_filter, columns),
        relid=relid,
        undescribed=batch_range.stream.undescribed,
    )


def _types_of_columns(
    read_types: ReadTypes, state: TableState, evolution: Evolution, rules: SchemaRules
) -> tuple[dict[str, TargetType], tuple[str, ...]]:
    """Returns the columns' types in the lake, and how they are named in binary format."""
    columns = [column.state for column in evolution.columns]
    pairs = {c.name: (c.type_oid, c.typmod) for c in columns if not c.stopped}
    types = _source_types(read_types, state, set(pairs.values()))
    types_by_name = {name: types[pair] for name, pair in pairs.items()}
    targets = column_types(types_by_name, evolution.key_columns, rules.types)
    for column in (column for column in columns if column.stopped):
        targets[column.name] = column.stored_as
        with suppress(KeyError):  # The source has dropped its type.
            pair = column.type_oid, column.typmod
            types_by_name[column.name] = read_types({pair})[pair]
    wire = {name: wire_name(kind) for name, kind in types_by_name.items()}
    return (
        {column.name: targets[column.name] for column in columns},
        tuple(wire.get(column.name, column.type_name) for column in columns),
    )


def _number_columns(evolution: Evolution, targets: Mapping[str, TargetType]) -> ColumnNumbering:
    names, stopped = list(targets), evolution.stopped
    return ColumnNumbering(
        column_count=len(names),
        key=tuple(names.index(name) for name in evolution.key_columns),
        toastable=tuple(
            i
            for i, (name, kind) in enumerate(targets.items())
            if name in stopped or not kind.is_fixed_size
        ),
        stopped=tuple(i for i, name in enumerate(names) if name in stopped),
    )


def as_merged_partition(relation: Relation, state: TableState) -> Relation:
    """Returns a leaf as a relation of the target that merges it: with its oid as an extra last
    column.
    """
    if state.root_id is None:
        return relation
    is_key = any(column.is_key for column in relation.columns)
    return replace(relation, columns=(*relation.columns, RelationColumn(RELID, INT8, -1, is_key)))


def bringing_rows(
    batch_range: BatchRange, snapshot: Snapshot, versions: Sequence[RelationVersion]
) -> list[RelationVersion]:
    """Returns the versions that describe rows which the copy doesn't contain, in stream order."""
    # When all versions have the same columns, no search is needed.
    if len({frozenset(version.relation.columns) for version in versions}) <= 1:
        return sorted(versions, key=attrgetter("since"))
    matches = [
        version
        for version in versions
        if batch_range.change_log.has_changes(
            batch_range.stream, [version.relation.relation_id], snapshot, version.describes
        )
    ]
    return sorted(matches, key=attrgetter("since"))


def _plan_evolution(
    read_types: ReadTypes,
    state: TableState,
    relations: Sequence[Relation],
    catalog: CatalogTable,
    rules: SchemaRules,
    *,
    is_empty: bool = False,
) -> Evolution:
    if not relations:
        return unchanged(state)
    if state.root_id is None:
        _check_not_renamed(state, relations[-1], catalog)
    if rules.policy == "ignore":
        check_key(state, catalog)
        return plan_ignoring(state, relations, catalog)
    types = _source_types(
        read_types, state, {(c.type_oid, c.typmod) for c in relations[-1].columns}
    )
    arguments = (state, relations, catalog, types, rules.types)
    try:
        check_key(state, catalog)
        if is_empty:
            evolution = plan_empty(*arguments, rules.renames)
        elif rules.policy == "ask":
            stopped = columns_to_stop(rules, state, *changed_columns(state, relations, catalog))
            evolution = plan_evolution(*arguments, stopped, rules.renames)
        else:
            evolution = plan_evolution(*arguments, renames=rules.renames)
    except NeedsSync as err:
        what = str(err).removeprefix(f"{state.table_name}: ")
        if rules.policy == "fail":
            raise refusal(state, what) from None
        if rules.policy == "ask":
            check_may_copy(rules, state, what)
        raise
    if rules.policy == "fail" and evolution.changes(state):
        raise refusal(state, f"its columns changed ({evolution.describe()})")
    return evolution


def _check_chosen_types(
    state: TableState, evolution: Evolution, targets: dict[str, TargetType], policy: SchemaPolicy
) -> None:
    """Check that columns kept by the plan still have the types that the pipeline file chooses."""
    for column in evolution.columns:
        if column.state.stored_type != (now := targets[column.state.name].ledger_name):
            reason = other_type(column.state.name, column.state.stored_type, now)
            if policy in ("evolve", "ask"):
                raise NeedsSync(f"{state.table_name}: {reason}")
            raise refusal(state, reason)


def _check_not_renamed(state: TableState, relation: Relation, catalog: CatalogTable) -> None:
    if _has_its_name(state, TableId(relation.schema, relation.name)):
        return
    # The table may have had another name during the changes, and its own again by now.
    name = catalog.name or TableId(relation.schema, relation.name)
    if _has_its_name(state, name):
        return
    if catalog.is_replaced:
        raise SchemaChanged(
            f"{state.table_name}: the table that was copied is called {name} on the source now,"
            " and another table has the old name: run setup, which publishes that other table; the"
            " next run copies it"
        )
    if state.source_table is not None:
        raise SchemaChanged(
            f"{state.table_name} gets its changes from {state.source_table}, which is called {name}"
            f" on the source now, and its changes wait in the change log: write from: {name} in the"
            " pipeline file, run setup and sync it"
        )
    raise SchemaChanged(
        f"{state.table_name} is called {name} on the source now, and its changes wait in the change"
        f" log: name {name} in the pipeline file, run setup and sync it, then remove the target of"
        " the old name"
    )


def _has_its_name(state: TableState, name: TableId | None) -> bool:
    """Whether a table has the name of the one that the target was copied from."""
    return str(name) == (state.source_table or state.table_name)


def check_prepared(stream: Stream, state: TableState, snapshot: Snapshot) -> None:
    """Check that prepared transactions committed in the range are in the log, or in the copy."""
    for prepared in stream.segments.missing:
        if not snapshot.sees(np.array([prepared.xid8])).all():
            raise ApplyError(
                f"{state.table_name}: prepared transaction {prepared.gid!r} was committed in batch"
                f" {prepared.decided_in}, but the change log doesn't hold its changes: sync this"
                f" table again (initial sync with tables={state.table_name})"
            )


def read_truncations(
    stream: Stream, state: TableState, snapshot: Snapshot
) -> tuple[Truncation, ...]:
    """Returns every TRUNCATE of this target's relation that its copy doesn't reflect, in commit
    order.
    """
    is_truncate = pc.equal(stream.timeline["kind"], "T")
    rows = stream.timeline.filter(is_truncate)
    if not len(rows):
        return ()
    lsn, at = commits(rows.combine_chunks().to_batches()[0], stream.segments)
    truncations = []
    for row, place, of, us in zip(
        rows.to_pylist(),
        stream.places[is_truncate.to_numpy()].tolist(),
        lsn.to_pylist(),
        at.cast(pa.int64()).to_pylist(),
        strict=True,
    ):
        truncated = read_truncate(row["data"], streamed=row["streamed_xid"] is not None)
        seen = place < 0 or snapshot.sees(np.array([row["xid8"]])).all()
        if not seen and set(truncated) & set(state.relation_ids):
            truncations.append(Truncation(place, max(of, state.snapshot_lsn), us, row["xid8"]))
    return tuple(sorted(truncations, key=attrgetter("place")))


def _check_not_recreated(stream: Stream, state: TableState, catalog: CatalogTable) -> None:
    """Raise NeedsSync when the table was dropped and created again.

    The new table has another oid, so its changes would otherwise be missed.
    """
    if _has_its_name(state, catalog.name):
        return  # Another table was changed under this name, and has another name now.
    for relation, place in stream.relations:
        if place < 0:
            continue
        if (
            _has_its_name(state, TableId(relation.schema, relation.name))
            and relation.relation_id not in state.relation_ids
            and relation.relation_id > max(state.relation_ids)
        ):
            raise NeedsSync(
                f"{state.table_name} was dropped and created again on the source: sync this table"
                f" again (initial sync with tables={state.table_name})"
            )


def _source_types(
    read_types: ReadTypes, state: TableState, pairs: set[tuple[int, int]]
) -> dict[tuple[int, int], PgType]:
    try:
        return read_types(pairs)
    except KeyError as err:
        raise SchemaChanged(
            f"{state.table_name}: the source dropped the type of a column in waiting changes:"
            f" sync the table again (initial sync with tables={state.table_name})"
        ) from err


_Decode = Callable[[pa.RecordBatch], object]


def find_unreadable(
    change_log: ChangeLog, state: TableState, batches: BatchNumbers, plan: TargetPlan | None
) -> UnreadMessage | None:
    """Returns the first message that prevents applying a batch range to a target; None when all
    decode.

    ``plan`` is None when planning itself failed. Then the message describes rows, or decides which
    of them count.
    """
    # A transaction prepared in an earlier batch may count in the range.
    rows = itertools.chain(
        change_log.timeline(*batches).to_pylist(), change_log.controls(batches.after).to_pylist()
    )
    place = next(((row["batch"], row["seq"]) for row in rows if not _is_read(row, state)), None)
    if place is None and plan is not None:
        parts = change_log.rows_of(
            plan.decode.segments, state.relation_ids, plan.decode.snapshot, list(CHANGE_COLUMNS)
        )
        place = _first(parts, lambda part: _check_decodes(part, plan.decode))
    return None if place is None else _read_message(change_log, place)


def find_unreadable_logical(change_log: ChangeLog, segments: Segments) -> UnreadMessage | None:
    """Returns the first logical message of a range that can't be decoded."""
    place = _first(
        change_log.scan(logical_messages(segments), ["batch", "seq", "streamed_xid", "data"]),
        lambda part: _check_logical(part, segments),
    )
    return None if place is None else _read_message(change_log, place)


def _is_read(row: dict[str, Any], state: TableState) -> bool:
    """Returns whether a timeline message can be decoded, or isn't about the target."""
    kind, streamed = row["kind"], row["streamed_xid"] is not None
    try:
        if kind in CONTROL_KINDS:
            read_control(row["data"])
        elif kind == "T":
            read_truncate(row["data"], streamed=streamed)
        elif kind == "R" and row["relation_id"] in state.relation_ids:
            read_relation(row["data"], streamed=streamed)
    except DecodeError:
        return False
    return True


def _check_decodes(part: pa.RecordBatch, plan: DecodePlan) -> None:
    """Decode these row messages, including their values in the target's types; raises the error of
    one that can't be decoded.
    """
    for events in decode(part, plan):
        for i, kind in enumerate(plan.types):
            kind.from_text(events[f"c{i}"].combine_chunks())
        for k, i in enumerate(plan.numbering.key):
            plan.types[i].from_text(events[f"o{k}"].combine_chunks())


def _check_logical(part: pa.RecordBatch, segments: Segments) -> None:
    """Decode the logical messages that count; raises the error of one that can't be decoded."""
    counting = part.filter(pa.array(segments.places(*place_columns(part)) >= 0))
    decode_logical_messages(counting["data"], place_columns(counting)[2] >= 0)


def _first(parts: Iterable[pa.RecordBatch], read: _Decode) -> tuple[int, int] | None:
    """Returns the position of the first message that can't be decoded."""
    return next(_failing(parts, read), None)


def _failing(parts: Iterable[pa.RecordBatch], read: _Decode) -> Iterator[tuple[int, int]]:
    for part in parts:
        failing = part
        if _is_readable(failing, read):
            continue
        while len(failing) > 1:
            half = failing.slice(0, len(failing) // 2)
            failing = failing.slice(len(half)) if _is_readable(half, read) else half
        yield failing["batch"][0].as_py(), failing["seq"][0].as_py()


def _is_readable(part: pa.RecordBatch, read: _Decode) -> bool:
    try:
        read(part)
    except DecodeError:
        return False
    except WaldeltaError:  # A refused value isn't a problem of its message.
        return True
    return True


def _read_message(change_log: ChangeLog, place: tuple[int, int]) -> UnreadMessage:
    batch, seq = place
    condition = (pc.field("batch") == batch) & (pc.field("seq") == seq)
    parts = change_log.scan(condition, ["lsn", "xid8", "streamed_xid", "data"])
    (row,) = [row for part in parts for row in part.to_pylist()]
    message = UnreadMessage.of(
        row["lsn"], (row["xid8"] or 0) & XID_MASK, row["data"], row["streamed_xid"] is not None
    )
    return message.landed(batch, seq)
