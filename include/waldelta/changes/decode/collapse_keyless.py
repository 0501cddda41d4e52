"""Collapse for tables without a key: each change affects one of several duplicate rows.

This stage between decode and merge corresponds to ``collapse``. Which of several equal rows the
source changed isn't known and doesn't matter. An event that consumes a row takes the duplicate that
this batch produced last, and a row of the target only when there is none. So events form chains
again, each from one duplicate to at most one row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from waldelta.arrow import Bools, Ints
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    DELETE,
    INSERT,
    EventShape,
    Root,
    follow,
    identity_codes,
    in_order,
    in_order_of,
)

PLACE = "place"


def collapse_copies(
    events: pa.Table, shape: EventShape, *, base_is_empty: bool | Bools = False
) -> pa.Table:
    """Collapse events of a table without a key.

    The columns are ``action, b<k>…, c<i>…, u<i>…, lsn, commit_ts, place``. Actions: ``insert`` a
    row; ``delete`` one duplicate of row ``b``; ``update`` one duplicate of row ``b`` to row ``c``.
    Delete and update do nothing when the target has no such row left, as in a PostgreSQL
    subscriber; ``place`` is their order then. ``skip``: the batch itself shows that there was no
    such row. Rows are equal where PostgreSQL's texts of all their columns are equal.
    ``base_is_empty`` as in collapse().
    """
    if not isinstance(base_is_empty, bool):
        base_is_empty = base_is_empty[in_order_of(events)]
    events = in_order(events, shape)
    op = events["op"].to_numpy().astype(np.int64)
    if (op == INSERT).all():
        return _rows(events, shape, ACTION_INSERT, None, np.arange(len(op)))
    old, new = identity_codes(events, shape)
    parent, is_consumed = _parents(np.where(op == INSERT, -1, old), np.where(op == DELETE, -1, new))
    parent[(parent == Root.BASE) & base_is_empty] = Root.MISSING
    root = follow(np.where(parent >= 0, parent, np.arange(len(op))))
    origin = parent[root]
    live = np.flatnonzero((op != DELETE) & ~is_consumed)
    inserts, updates = live[origin[live] == Root.NEW], live[origin[live] == Root.BASE]
    deletes = np.setdiff1d(np.flatnonzero(parent == Root.BASE), root[updates], assume_unique=True)
    skips = np.flatnonzero(origin == Root.MISSING)
    return pa.concat_tables(
        [
            _rows(events, shape, ACTION_INSERT, None, inserts),
            _rows(events, shape, ACTION_UPDATE, root[updates], updates),
            _rows(events, shape, ACTION_DELETE, deletes, None),
            _rows(events, shape, ACTION_SKIP, skips, None),
        ]
    )


def _parents(source: Ints, destination: Ints) -> tuple[Ints, Bools]:
    """Return each event's parent, or where its chain starts; and which events were consumed.

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
    """Return how many duplicates of its row exist in the batch at each event, the event's own
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
    events: pa.Table, shape: EventShape, action: str, base: Ints | None, final: Ints | None
) -> pa.Table:
    """Return net changes from the old rows of the ``base`` events to the new rows of the ``final``
    ones.
    """
    told = [chosen for chosen in (base, final) if chosen is not None]
    columns: dict[str, pa.ChunkedArray | pa.Array] = {"action": pa.repeat(action, len(told[0]))}
    for names, given, chosen in (
        (shape.bases, shape.old_keys, base),
        (shape.values, shape.values, final),
    ):
        for name, source in zip(names, given, strict=True):
            kind = events.schema.field(source).type
            columns[name] = (
                pa.nulls(len(told[0]), kind) if chosen is None else events[source].take(chosen)
            )
    for name in shape.flags:
        columns[name] = pa.array(np.zeros(len(told[0]), bool))
    for name in ("lsn", "commit_ts"):
        columns[name] = events[name].take(told[-1])
    columns[PLACE] = pa.array(told[0])
    return pa.table(columns)
