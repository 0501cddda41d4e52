"""Collapse: reduces a target's changes, in commit order, to at most one change for each row.

This stage between decode and merge is pure NumPy and Arrow, so tests need no Spark. An *event* is
one row message. Its *source key* is the key of the row that it consumes, its *destination key* that
of the row that it produces. Events form *chains*: where a row came from (a target row at its *base
key*, or an insert), what happened to it, and its key at the end. Moves, swaps, moves to freed keys
and delete-and-reinsert are all chains, so one MERGE on the base key applies them.

Without a key, each change affects one of several duplicate rows. Which of several equal rows the
source changed isn't known and doesn't matter. An event that consumes a row takes the duplicate that
this batch produced last, and a row of the target only when there is none. So events form chains
again, each from one duplicate to at most one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints, one_array, with_column
from waldelta.types.base import lists_as_bytes

# New and updated rows with a value that its column's type can't hold: the raw value is in _wd_raw.
RAW_ROWS = "raw_rows"
# Rows that arrived without all of their values: those that were completed from the source, and
# those that couldn't be.
COMPLETED_ROWS, QUARANTINED_ROWS = "completed", "quarantined"


INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")

# The offsets of binary and string arrays have 32 bits, and take() makes one array of a column.
_MOST_BYTES = 1 << 30
_WIDE = {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}

# What the merge does with a net change.
ACTION_UPDATE = "update"  # Updates the row at the base key; skipped when there is none.
ACTION_INSERT = "insert"  # Inserts a new row; the row at that key moved elsewhere in this batch.
ACTION_UPSERT = "upsert"  # Inserts a new row, replacing a row at its key.
ACTION_DELETE = "delete"  # Deletes the row at the base key; skipped when there is none.
ACTION_PURGE = "purge"  # Deletes like delete, but the source never said that there is a row.
# Does nothing: an update or delete of a row that this same batch shows to be missing.
ACTION_SKIP = "skip"
ACTIONS = (ACTION_UPDATE, ACTION_INSERT, ACTION_UPSERT, ACTION_DELETE, ACTION_PURGE, ACTION_SKIP)


def net_changes(counts: Mapping[str, int]) -> int:
    """Returns the number of net changes in counts, which have them by action and may have other
    counts.
    """
    return sum(counts.get(action, 0) for action in ACTIONS)


class Root(IntEnum):
    """Where a chain of events starts: from which row its first event takes the row it consumes."""

    BASE = -1  # The chain starts at a row of the target.
    NEW = -2  # The chain starts with an insert.
    MISSING = -3  # The chain starts with an update or delete of a row that the target lacks.


@dataclass(frozen=True, slots=True)
class ColumnNumbering:
    """How columns of decoded events are numbered: ``c<i>`` new values, ``o<k>`` old identity,
    ``u<i>`` unchanged.

    ``key`` has the positions of the key among the columns; where it is empty, all columns are the
    identity. ``toastable`` has those of columns that may arrive as "unchanged". The ``stopped``
    ones among them keep their last values: the source has dropped or retyped them.
    """

    column_count: int
    key: tuple[int, ...]
    toastable: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()

    @property
    def values(self) -> list[str]:
        """Names of the value columns."""
        return [f"c{i}" for i in range(self.column_count)]

    @property
    def identity(self) -> tuple[int, ...]:
        """Positions of the columns that identify a row: the key, or, without one, all of them."""
        return self.key or tuple(range(self.column_count))

    @property
    def old_keys(self) -> list[str]:
        """Names of the columns with the row's identity before the event."""
        return [f"o{k}" for k in range(len(self.identity))]

    @property
    def bases(self) -> list[str]:
        """Names of the net changes' columns with the identity of the target's row."""
        return [f"b{k}" for k in range(len(self.identity))]

    @property
    def flags(self) -> list[str]:
        """Names of the "unchanged" flags."""
        return [f"u{i}" for i in self.toastable]

    @property
    def completable(self) -> tuple[int, ...]:
        """Positions of the toastable columns that the source still has."""
        return tuple(i for i in self.toastable if i not in self.stopped)

    def lacks_values(self, rows: pa.Table) -> Bools:
        """Returns which rows arrived without some value that the source may still have."""
        flagged = np.zeros(len(rows), np.bool_)
        for i in self.completable:
            flagged |= np.asarray(rows[f"u{i}"])
        return flagged


def collapse(
    events: pa.Table, numbering: ColumnNumbering, *, base_is_empty: bool | Bools = False
) -> pa.Table:
    """Collapse events into net changes.

    Their columns are ``action, b<k>…, c<i>…, u<i>…, lsn, commit_ts``. ``events`` has ``ord``
    (commit order), ``op`` (letter as int), ``o<k>…, c<i>…, u<i>…, lsn, commit_ts``.
    ``base_is_empty``: the target was truncated before the first event, so no chain can start at one
    of its rows. Where only some of a target's leaves were truncated, it is an array with a value
    for each event.

    Without a key there is ``place``, too: what was deleted or updated is removed in that order, and
    an action does nothing when the target has no such row left, as in a PostgreSQL subscriber.
    ``skip``: the batch itself shows that there was no such row. Rows are equal where PostgreSQL's
    texts of all their columns are equal.
    """
    if not isinstance(base_is_empty, bool):
        base_is_empty = base_is_empty[stream_order(events)]
    events = in_order(events, numbering)
    op = events["op"].to_numpy().astype(np.int64)
    if not numbering.key and (op == INSERT).all():
        return _rows(events, numbering, ACTION_INSERT, None, np.arange(len(op)))
    old, new = identity_codes(events, numbering)
    source, destination = np.where(op == INSERT, -1, old), np.where(op == DELETE, -1, new)
    if not numbering.key:
        return _collapse_keyless(events, numbering, op, source, destination, base_is_empty)
    return _net_changes(events, numbering, Chains(op, source, destination, base_is_empty))


class Chains:
    """The chains of a batch as arrays over events; keys are integers, -1 means none."""

    def __init__(
        self, op: Ints, source: Ints, destination: Ints, base_is_empty: bool | Bools
    ) -> None:
        self.op, self.source, self.destination = op, source, destination
        self._link(base_is_empty)
        while len(nowhere := self._nowhere()):
            self.destination = self.destination.copy()
            self.destination[nowhere] = -1
            self._link(base_is_empty)

    def _link(self, base_is_empty: bool | Bools) -> None:
        self._order_touches()
        self.parent = self._parents()
        self.parent[(self.parent == Root.BASE) & base_is_empty] = Root.MISSING
        self.root = follow(np.where(self.parent >= 0, self.parent, np.arange(len(self.op))))
        self.origin: Ints = self.parent[self.root]

    def _nowhere(self) -> Ints:
        """Returns the first event of each chain of a missing row that would give the row another
        key.

        Such an event is skipped, so later events at that key find the row that was there before.
        """
        missing = (
            (self.origin == Root.MISSING)
            & (self.destination >= 0)
            & (self.destination != self.source)
        )
        moves = np.flatnonzero(missing)
        return moves[np.unique(self.root[moves], return_index=True)[1]]

    def _order_touches(self) -> None:
        """List every key that an event touches, ordered by key and then by event."""
        index = np.arange(len(self.op))
        arrives = (self.destination >= 0) & (self.destination != self.source)
        consumes = self.source >= 0
        event = np.concatenate([index[consumes], index[arrives]])
        key = np.concatenate([self.source[consumes], self.destination[arrives]])
        order = np.lexsort((event, key))
        self.touch_event, self.touch_key = event[order], key[order]
        self.is_first = np.ones(len(key), bool)
        self.is_first[1:] = self.touch_key[1:] != self.touch_key[:-1]
        self.is_last = np.ones(len(key), bool)
        self.is_last[:-1] = self.is_first[1:]

    def _parents(self) -> Ints:
        """Returns, for each event, the event that left the row it changes, or the chain's Root."""
        previous = np.full(len(self.touch_event), -1, np.int64)
        previous[1:] = self.touch_event[:-1]
        previous[self.is_first] = -1
        consuming = self.touch_key == self.source[self.touch_event]
        event, previous = self.touch_event[consuming], previous[consuming]
        left_a_row = (previous >= 0) & (self.destination[previous] == self.source[event])
        parent = np.full(len(self.op), Root.NEW, np.int64)
        parent[event] = np.where(
            left_a_row, previous, np.where(previous < 0, Root.BASE, Root.MISSING)
        )
        return parent

    def live(self) -> Ints:
        """Returns the events that produced a row which exists at the end."""
        stays = self.is_last & (self.destination[self.touch_event] == self.touch_key)
        events = self.touch_event[stays]
        return np.sort(events[self.origin[events] != Root.MISSING])

    def unclaimed(self) -> Ints:
        """Returns the events that are the first of the batch to arrive at a key.

        A row of the target at that key is in their way.
        """
        arrived = self.is_first & (self.touch_key != self.source[self.touch_event])
        events = self.touch_event[arrived]
        return np.sort(events[self.origin[events] != Root.MISSING])


def _net_changes(events: pa.Table, numbering: ColumnNumbering, chains: Chains) -> pa.Table:
    live = chains.live()
    from_base = chains.origin[live] == Root.BASE
    updates, fresh = live[from_base], live[~from_base]
    base_roots = np.flatnonzero(chains.parent == Root.BASE)
    dead_roots = np.setdiff1d(base_roots, chains.root[updates], assume_unique=True)
    kept_keys = chains.source[chains.root[updates]]
    is_kept_key = np.isin(chains.destination[fresh], kept_keys)
    fresh_keys = chains.destination[fresh]
    deletes = dead_roots[~np.isin(chains.source[dead_roots], fresh_keys)]
    unclaimed = chains.unclaimed()
    purges = unclaimed[~np.isin(chains.destination[unclaimed], fresh_keys)]
    skips = np.flatnonzero(chains.origin == Root.MISSING)
    parts = [
        remaining_rows(
            events, numbering, chains, ACTION_UPDATE, updates, base=(chains.root[updates], "old")
        ),
        remaining_rows(
            events,
            numbering,
            chains,
            ACTION_UPSERT,
            fresh[~is_kept_key],
            base=(fresh[~is_kept_key], "new"),
        ),
        remaining_rows(events, numbering, chains, ACTION_INSERT, fresh[is_kept_key], base=None),
        keys_only(events, numbering, ACTION_DELETE, deletes, "old"),
        keys_only(events, numbering, ACTION_PURGE, purges, "new"),
        keys_only(events, numbering, ACTION_SKIP, skips, None),
    ]
    return pa.concat_tables(part for part in parts if part is not None)


def remaining_rows(
    events: pa.Table,
    numbering: ColumnNumbering,
    chains: Chains,
    action: str,
    places: Ints,
    *,
    base: tuple[Ints, str] | None,
) -> pa.Table:
    """Returns net changes of the kind ``action``: for each chain of events on one key, the row
    after its last event.

    ``places`` are the numbers of the chains' last events. ``base`` has the events, and which of
    their keys ("old" or "new") is the key under which the target has the row so far.
    """
    columns: dict[str, pa.ChunkedArray | pa.Array] = {"action": pa.repeat(action, len(places))}
    columns |= _base_columns(events, numbering, base, len(places))
    resolved: dict[int, tuple[Ints, Bools]] = {
        i: newest_known(events[f"u{i}"], chains, places) for i in numbering.toastable
    }
    for i, name in enumerate(numbering.values):
        columns[name] = events[name].take(resolved[i][0] if i in resolved else places)
    for i in numbering.toastable:
        columns[f"u{i}"] = pa.array(resolved[i][1])
    for name in ("lsn", "commit_ts"):
        columns[name] = events[name].take(places)
    return pa.table(columns)


def newest_known(unchanged: pa.ChunkedArray, chains: Chains, places: Ints) -> tuple[Ints, Bools]:
    """Returns for one column each chain's newest event that sent its value, and whether there is
    none.
    """
    flags = np.asarray(unchanged.fill_null(False))
    if not flags[places].any():
        return places, np.zeros(len(places), bool)
    index = np.arange(len(flags))
    sender = follow(np.where(flags & (chains.parent >= 0), chains.parent, index))[places]
    return sender, flags[sender]


def keys_only(
    events: pa.Table, numbering: ColumnNumbering, action: str, places: Ints, which: str | None
) -> pa.Table | None:
    """Returns net changes without values, at the old or new keys of these events; None without
    events.
    """
    if not len(places):
        return None
    columns: dict[str, pa.ChunkedArray | pa.Array] = {"action": pa.repeat(action, len(places))}
    columns |= _base_columns(
        events, numbering, None if which is None else (places, which), len(places)
    )
    for name in numbering.values:
        columns[name] = pa.nulls(len(places), events.schema.field(name).type)
    for name in numbering.flags:
        columns[name] = pa.array(np.zeros(len(places), bool))
    for name in ("lsn", "commit_ts"):
        columns[name] = events[name].take(places)
    return pa.table(columns)


def _base_columns(
    events: pa.Table, numbering: ColumnNumbering, base: tuple[Ints, str] | None, count: int
) -> dict[str, pa.ChunkedArray | pa.Array]:
    if base is None:
        return {
            b: pa.nulls(count, events.schema.field(o).type)
            for b, o in zip(numbering.bases, numbering.old_keys, strict=True)
        }
    places, which = base
    names = numbering.old_keys if which == "old" else [f"c{i}" for i in numbering.key]
    return {b: events[name].take(places) for b, name in zip(numbering.bases, names, strict=True)}


def follow(jump: Ints) -> Ints:
    """Returns the end of each chain of references, by pointer doubling; an end refers to itself."""
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump
        jump = further


def in_order(events: pa.Table, numbering: ColumnNumbering) -> pa.Table:
    """Returns the events in stream order; columns of more than _MOST_BYTES get wide offsets."""
    twins = {f"c{i}": f"o{k}" for k, i in enumerate(numbering.identity)}
    for name in numbering.values:
        names = [name, twins[name]] if name in twins else [name]
        if sum(events[n].nbytes for n in names) > _MOST_BYTES:
            for n in names:
                if (kind := _WIDE.get(events.schema.field(n).type)) is not None:
                    events = with_column(events, n, events[n].cast(kind))
    position = events["ord"].to_numpy()
    if len(position) > 1 and not (position[1:] > position[:-1]).all():
        events = events.take(stream_order(events))
    return events.combine_chunks()


def stream_order(events: pa.Table) -> Ints:
    """Returns the events' row numbers in stream order."""
    return np.argsort(events["ord"].to_numpy(), kind="stable")


def identity_codes(events: pa.Table, numbering: ColumnNumbering) -> tuple[Ints, Ints]:
    """Returns integers that are equal where the identities of old and new rows are equal."""
    return codes_of_both(
        [events[f"o{k}"] for k in range(len(numbering.identity))],
        [events[f"c{i}"] for i in numbering.identity],
    )


def codes_of_both(
    columns: Sequence[pa.ChunkedArray], second_columns: Sequence[pa.ChunkedArray]
) -> tuple[Ints, Ints]:
    """Returns integers that are equal exactly where the rows of two tables are equal.

    The other table's columns are cast to the types of the first one's.
    """
    codes = codes_of(
        [
            pa.chunked_array([*column.chunks, *second.cast(column.type).chunks], column.type)
            for column, second in zip(columns, second_columns, strict=True)
        ]
    )
    count = len(columns[0]) if columns else 0
    return codes[:count], codes[count:]


def codes_of(columns: Sequence[pa.ChunkedArray]) -> Ints:
    """Returns integers that are equal exactly where the rows of these columns are equal."""
    codes = np.zeros(0, np.int64)
    for k, column in enumerate(columns):
        part, cardinality = _codes(column)
        if k > 0:  # Numbered anew, so that the product of more columns stays small.
            part, _ = _codes(pa.chunked_array([pa.array(codes * cardinality + part)]))
        codes = part
    return codes


def _codes(values: pa.ChunkedArray) -> tuple[Ints, int]:
    if pa.types.is_floating(values.type):
        # For PostgreSQL -0 equals 0, and all NaN are equal. Adding 0.0 turns -0 into 0.
        values = pc.add(values, pa.scalar(0.0, values.type))
    array = one_array(values)
    if pa.types.is_list(array.type):  # Arrow can't hash lists.
        elements, _ = _codes(pa.chunked_array([array.flatten()]))
        array = lists_as_bytes(array, pa.array(elements))
    encoded = array.dictionary_encode()
    indices = (
        encoded.indices.fill_null(len(encoded.dictionary))
        .to_numpy(zero_copy_only=False)
        .astype(np.int64)
    )
    return indices, len(encoded.dictionary) + 1


def event_schema(numbering: ColumnNumbering, column_types: Sequence[pa.DataType]) -> pa.Schema:
    """Returns the Arrow schema of events."""
    fields = [("ord", pa.int64()), ("op", pa.int32())]
    fields += [
        (name, column_types[i])
        for name, i in zip(numbering.old_keys, numbering.identity, strict=True)
    ]
    return pa.schema([*fields, *_common(numbering, column_types)])


def common_net_schema(numbering: ColumnNumbering, column_types: Sequence[pa.DataType]) -> pa.Schema:
    """Returns the columns that all net changes have; DecodePlan.net_schema adds its target's."""
    fields = [("action", pa.string())]
    fields += [
        (name, column_types[i]) for name, i in zip(numbering.bases, numbering.identity, strict=True)
    ]
    return pa.schema([*fields, *_common(numbering, column_types)])


def _common(
    numbering: ColumnNumbering, column_types: Sequence[pa.DataType]
) -> list[tuple[str, pa.DataType]]:
    return [
        *zip(numbering.values, column_types, strict=True),
        *((name, pa.bool_()) for name in numbering.flags),
        ("lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", tz="UTC")),
    ]


PLACE = "place"


def _collapse_keyless(
    events: pa.Table,
    numbering: ColumnNumbering,
    op: Ints,
    source: Ints,
    destination: Ints,
    base_is_empty: bool | Bools,
) -> pa.Table:
    parent, is_consumed = _parents(source, destination)
    parent[(parent == Root.BASE) & base_is_empty] = Root.MISSING
    root = follow(np.where(parent >= 0, parent, np.arange(len(op))))
    origin = parent[root]
    live = np.flatnonzero((op != DELETE) & ~is_consumed)
    inserts, updates = live[origin[live] == Root.NEW], live[origin[live] == Root.BASE]
    deletes = np.setdiff1d(np.flatnonzero(parent == Root.BASE), root[updates], assume_unique=True)
    skips = np.flatnonzero(origin == Root.MISSING)
    return pa.concat_tables(
        [
            _rows(events, numbering, ACTION_INSERT, None, inserts),
            _rows(events, numbering, ACTION_UPDATE, root[updates], updates),
            _rows(events, numbering, ACTION_DELETE, deletes, None),
            _rows(events, numbering, ACTION_SKIP, skips, None),
        ]
    )


def _parents(source: Ints, destination: Ints) -> tuple[Ints, Bools]:
    """Returns each event's parent, or where its chain starts; and which events were consumed.

    The parent produced the duplicate that the event consumes. For each row, events that produce a
    duplicate and events that consume one match like opening and closing brackets: those at the same
    depth follow each other. A closing bracket at depth zero takes a row of the target.
    """
    index = np.arange(len(source))
    takes, leaves = np.flatnonzero(source >= 0), np.flatnonzero(destination >= 0)
    event = np.concatenate([index[takes], index[leaves]])
    row = np.concatenate([source[takes], destination[leaves]])
    is_opening = np.repeat([False, True], [len(takes), len(leaves)])
    # An update takes its old row before it produces the new one, which may be equal.
    order = np.lexsort((is_opening, event, row))
    event, row, is_opening = event[order], row[order], is_opening[order]
    level = _levels(row, is_opening)
    matched = np.flatnonzero(level > 0)
    matched = matched[np.lexsort((matched, level[matched], row[matched]))]
    closing = np.flatnonzero(~is_opening[matched])
    parent = np.full(len(source), Root.NEW, np.int64)
    parent[event[~is_opening]] = Root.BASE
    parent[event[matched[closing]]] = event[matched[closing - 1]]
    is_consumed = np.zeros(len(source), bool)
    is_consumed[parent[parent >= 0]] = True
    return parent, is_consumed


def _levels(row: Ints, is_opening: Bools) -> Ints:
    """Returns how many duplicates of its row exist in the batch at each event, the event's own
    included.

    It is 0 where the event takes a row of the target.
    """
    count = len(row)
    first = np.ones(count, bool)
    first[1:] = row[1:] != row[:-1]
    number = np.cumsum(first) - 1
    running = np.cumsum(np.where(is_opening, 1, -1))
    starts = np.flatnonzero(first)
    total = running - np.where(starts > 0, running[starts - 1], 0)[number]
    # The lowest total of each row so far, in one accumulation: the offset makes every row start
    # below all earlier rows.
    step = 2 * count + 2
    lowest = np.minimum.accumulate(np.minimum(total, 0) - number * step) + number * step
    earlier = np.where(first, 0, np.roll(lowest, 1))
    depth = total - lowest
    return np.asarray(np.where(is_opening, depth, np.where(lowest < earlier, 0, depth + 1)))


def _rows(
    events: pa.Table, numbering: ColumnNumbering, action: str, base: Ints | None, final: Ints | None
) -> pa.Table:
    """Returns net changes from the old rows of the ``base`` events to the new rows of the ``final``
    ones.
    """
    ends = [places for places in (base, final) if places is not None]
    columns: dict[str, pa.ChunkedArray | pa.Array] = {"action": pa.repeat(action, len(ends[0]))}
    for names, names_of_events, places in (
        (numbering.bases, numbering.old_keys, base),
        (numbering.values, numbering.values, final),
    ):
        for name, source in zip(names, names_of_events, strict=True):
            kind = events.schema.field(source).type
            columns[name] = (
                pa.nulls(len(ends[0]), kind) if places is None else events[source].take(places)
            )
    for name in numbering.flags:
        columns[name] = pa.array(np.zeros(len(ends[0]), bool))
    for name in ("lsn", "commit_ts"):
        columns[name] = events[name].take(ends[-1])
    columns[PLACE] = pa.array(ends[0])
    return pa.table(columns)
