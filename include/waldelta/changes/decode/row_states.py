"""Turns a target's changes, in commit order, into row versions or change rows, without merging
them.

It replaces collapse for targets whose mode isn't ``mirror``, and is pure NumPy and Arrow over the
same chains. Of states, each one that a transaction left is a row with the range of positions in
which it was valid. Intermediate states within a transaction were visible to no other transaction,
and are left out. The mode's ``Fold`` says whether all states of a key are rows, its last one, or
each change instead.

A TRUNCATE ends all states at once: for the chains, keys before and after it are different keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME, Ints, with_column
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    DELETE,
    INSERT,
    PLACE,
    Chains,
    ColumnNumbering,
    Root,
    identity_codes,
    in_order,
    keys_only,
    newest_known,
    remaining_rows,
)
from waldelta.target_modes.target_mode import MOVED, STATE_XID, TO_LSN, TO_TS, Fold


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE of the table: its position in commit order, its commit's position and time, its
    transaction.

    The time is in microseconds.
    """

    place: int
    lsn: int
    at_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class Unfolding:
    """How the changes of a range become rows: fold, TRUNCATEs in commit order, the copy's position.

    In the target's rows, every later change comes after the copy. So ``floor_lsn`` is the lowest
    position used: a transaction that the copy doesn't contain may have committed a little before
    the copy's position.
    """

    fold: Fold
    floor_lsn: int = 0
    truncates: tuple[Truncation, ...] = field(default=())


def row_versions(events: pa.Table, numbering: ColumnNumbering, unfolding: Unfolding) -> pa.Table:
    """Returns the rows for the target, in the columns of net changes and of ``row_version_fields``.

    For states: ``insert`` is a state of a new row. ``update`` is a state of a row that the target
    has at its base key (skipped when it doesn't). ``delete`` ends, at ``to_lsn``, the target's
    current state at the base key. For changes, the action is the operation.
    """
    events = in_order(events, numbering)
    if unfolding.fold.has_changes:
        return _changes(events, numbering, unfolding)
    return _states(events, numbering, unfolding)


def row_version_fields(
    numbering: ColumnNumbering, key_types: list[pa.DataType], fold: Fold
) -> list[pa.Field]:
    """Returns the Arrow fields that row versions have in addition to those of net changes."""
    if not fold.has_changes:
        return [pa.field(TO_LSN, pa.int64()), pa.field(TO_TS, UTC_TIME)]
    fields = [
        pa.field(PLACE, pa.int64()),
        pa.field(STATE_XID, pa.int64()),
        pa.field(MOVED, pa.bool_()),
    ]
    return fields + [
        pa.field(name, kind)
        for name, kind in zip(numbering.old_keys, key_types, strict=True)
        if numbering.key
    ]


def _chains(
    events: pa.Table, numbering: ColumnNumbering, unfolding: Unfolding
) -> tuple[Chains, Ints, tuple[Ints, Ints]]:
    """Returns the chains, the number of TRUNCATEs before each event, and its old and new key
    codes.
    """
    op = events["op"].to_numpy().astype(np.int64)
    places = np.array([truncate.place for truncate in unfolding.truncates], np.int64)
    era = np.searchsorted(places, events["ord"].to_numpy()).astype(np.int64)
    old, new = identity_codes(events, numbering)
    eras = len(places) + 1
    source, destination = np.where(op == INSERT, -1, old), np.where(op == DELETE, -1, new)
    chains = Chains(
        op,
        np.where(source < 0, -1, source * eras + era),
        np.where(destination < 0, -1, destination * eras + era),
        era > 0,
    )
    return chains, era, (source, destination)


def _states(events: pa.Table, numbering: ColumnNumbering, unfolding: Unfolding) -> pa.Table:
    chains, era, (source, destination) = _chains(events, numbering, unfolding)
    lsn = np.maximum(events["lsn"].to_numpy().astype(np.int64), unfolding.floor_lsn)
    at, emptied_at = _times(events, unfolding)
    events = with_column(
        with_column(events, "lsn", pa.array(lsn)), "commit_ts", pa.array(at).cast(UTC_TIME)
    )
    emptied = np.array([truncate.lsn for truncate in unfolding.truncates], np.int64)
    end_lsn, end_at = _ends(chains, era, (lsn, emptied), (at, emptied_at))
    has_left = (destination >= 0) & (chains.origin != Root.MISSING) & (end_lsn != lsn)
    if unfolding.fold is Fold.LAST_STATES:
        has_left &= _is_last(destination, has_left)
    states = np.flatnonzero(has_left)
    is_of_base = chains.origin[states] == Root.BASE
    is_base = chains.parent == Root.BASE
    arrivals = chains.unclaimed()
    end_events = np.concatenate([np.flatnonzero(is_base), arrivals[era[arrivals] == 0]])
    is_old = np.arange(len(end_events)) < int(is_base.sum())
    keys = np.where(is_old, source[end_events], destination[end_events])
    if unfolding.fold is Fold.LAST_STATES:
        # The new state of a key replaces the one that ends.
        lacks_successor = ~np.isin(keys, destination[states])
        end_events, is_old = end_events[lacks_successor], is_old[lacks_successor]
    updates, fresh = states[is_of_base], states[~is_of_base]
    parts = [
        (ACTION_UPDATE, updates, (chains.root[updates], "old")),
        (ACTION_INSERT, fresh, None),
    ]
    tables = [
        _until(
            remaining_rows(events, numbering, chains, action, places, base=base),
            end_lsn[places],
            end_at[places],
        )
        for action, places, base in parts
    ]
    for of, name in ((end_events[is_old], "old"), (end_events[~is_old], "new")):
        if (rows := keys_only(events, numbering, ACTION_DELETE, of, name)) is not None:
            tables.append(_until(rows, lsn[of], at[of]))
    skips = np.flatnonzero(chains.origin == Root.MISSING)
    if (rows := keys_only(events, numbering, ACTION_SKIP, skips, None)) is not None:
        tables.append(_until(rows, lsn[skips], at[skips]))
    return pa.concat_tables(tables)


def _times(events: pa.Table, unfolding: Unfolding) -> tuple[Ints, Ints]:
    """Returns the times of events and TRUNCATEs in microseconds, never decreasing in stream order.

    Clocks may step back from one commit to the next, but a row's states must follow each other.
    """
    truncates = unfolding.truncates
    places = np.concatenate(
        [events["ord"].to_numpy(), np.array([truncate.place for truncate in truncates], np.int64)]
    )
    at = events["commit_ts"].cast(pa.int64()).to_numpy().astype(np.int64)
    at = np.concatenate([at, np.array([truncate.at_us for truncate in truncates], np.int64)])
    order = np.argsort(places, kind="stable")
    at[order] = np.maximum.accumulate(at[order])
    return at[: len(events)], at[len(events) :]


def _ends(chains: Chains, era: Ints, *when: tuple[Ints, Ints]) -> tuple[Ints, ...]:
    """Returns, by each measure, when the row that an event produced was changed or removed.

    A measure is given for the events and the TRUNCATEs. -1: the row still is as the event left it.
    """
    stays = np.flatnonzero(chains.destination[chains.touch_event] == chains.touch_key)
    ended = stays[~chains.is_last[stays]]
    by = np.full(len(era), -1, np.int64)
    by[chains.touch_event[ended]] = chains.touch_event[ended + 1]
    ends = []
    for of, truncated in when:
        emptied = np.append(truncated, -1)[era]
        ends.append(np.where(by >= 0, of[by], emptied))
    return tuple(ends)


def _is_last(keys: Ints, is_candidate: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns which of the chosen events are the last of their key."""
    places = np.flatnonzero(is_candidate)
    _, first = np.unique(keys[places][::-1], return_index=True)
    last = np.zeros(len(keys), np.bool_)
    last[places[len(places) - 1 - first]] = True
    return last


def _until(rows: pa.Table, lsn: Ints, at: Ints) -> pa.Table:
    open_ended = lsn < 0
    rows = rows.append_column(TO_LSN, pa.array(lsn, mask=open_ended))
    return rows.append_column(TO_TS, pa.array(at, mask=open_ended).cast(UTC_TIME))


def _changes(events: pa.Table, numbering: ColumnNumbering, unfolding: Unfolding) -> pa.Table:
    places = np.arange(len(events))
    op = events["op"].to_numpy().astype(np.int64)
    deleted = pa.array(op == DELETE)
    actions = np.select([op == INSERT, op == DELETE], [ACTION_INSERT, ACTION_DELETE], ACTION_UPDATE)
    columns: dict[str, pa.ChunkedArray | pa.Array] = {
        "action": pa.array(actions.tolist(), pa.string())
    }
    twins = {i: f"o{k}" for k, i in enumerate(numbering.identity)}
    base = pa.array(np.zeros(len(events), np.bool_))
    moved, senders = np.zeros(len(events), np.bool_), {}
    root = places
    if numbering.key and len(events):
        chains, _, (source, destination) = _chains(events, numbering, unfolding)
        moved = (source >= 0) & (destination >= 0) & (source != destination)
        senders = {i: newest_known(events[f"u{i}"], chains, places) for i in numbering.toastable}
        root, base = chains.root, pa.array(chains.origin == Root.BASE)
    for b, o in zip(numbering.bases, numbering.old_keys, strict=True):
        columns[b] = pc.if_else(
            base, events[o].take(root), pa.scalar(None, events.schema.field(o).type)
        )
    for i, name in enumerate(numbering.values):
        value = events[name].take(senders[i][0]) if i in senders else events[name]
        columns[name] = pc.if_else(deleted, events[twins[i]], value) if i in twins else value
    for i in numbering.toastable:
        unknown = senders[i][1] if i in senders else np.asarray(events[f"u{i}"].fill_null(False))
        columns[f"u{i}"] = pa.array(unknown & (op != DELETE))
    lsn = np.maximum(events["lsn"].to_numpy().astype(np.int64), unfolding.floor_lsn)
    columns |= {"lsn": pa.array(lsn), "commit_ts": events["commit_ts"]}
    columns |= {PLACE: events["ord"], STATE_XID: events[STATE_XID], MOVED: pa.array(moved)}
    for name in numbering.old_keys if numbering.key else ():
        columns[name] = pc.if_else(
            pa.array(moved), events[name], pa.scalar(None, events.schema.field(name).type)
        )
    return pa.table(columns)
