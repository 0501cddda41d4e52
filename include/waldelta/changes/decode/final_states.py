"""Final states: the row that some changes leave at each key, to which a replay brings its target.

This stage between decode and differences is pure NumPy and Arrow, and uses the chains of collapse.
Collapse describes how to get from the state before the events to the one after them. A replay's
target is in the later state already, except for damaged rows. So a row is looked up under its final
key, and every other key that was touched must have no row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from waldelta.arrow import Bools, Ints
from waldelta.changes.decode.collapse import (
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    EventShape,
    Root,
    find_chains,
    keys_only,
    remaining_rows,
)


def final_states(
    events: pa.Table, shape: EventShape, *, base_is_empty: bool | Bools = False
) -> pa.Table:
    """Return one row per key that the events touch, in the columns of collapse's net changes.

    ``action`` is ``upsert`` for a row that the events inserted. It is ``update`` for a row that
    existed before them, with a flag ``u<i>`` for each value that no event sent. It is ``purge`` for
    a key without a row. ``b<k>`` is the key. ``events`` (columns as in collapse) must include the
    events of all keys that rows moved from and to. A key that only an UPDATE of a missing row would
    have given a row is left out: a PostgreSQL subscriber skips that UPDATE. ``base_is_empty`` as in
    collapse().
    """
    events, chains = find_chains(events, shape, base_is_empty)
    live = chains.live()
    held = chains.origin[live] == Root.BASE
    last = chains.touch_event[chains.is_last]
    # An event that consumed a key as the last to touch it left no row there.
    gone = np.sort(last[chains.destination[last] != chains.touch_key[chains.is_last]])
    parts = [
        remaining_rows(events, shape, chains, ACTION_UPDATE, live[held], base=(live[held], "new")),
        remaining_rows(
            events, shape, chains, ACTION_UPSERT, live[~held], base=(live[~held], "new")
        ),
        keys_only(events, shape, ACTION_PURGE, gone, "old"),
    ]
    return pa.concat_tables(part for part in parts if part is not None)


def reached(touched: Ints, source: Ints, destination: Ints) -> Bools:
    """Return which moves concern a touched key, directly or through other moves.

    The moves go from ``source`` to ``destination``, as codes of keys.

    >>> reached(np.array([1]), np.array([1, 2, 7]), np.array([2, 3, 8])).tolist()
    [True, True, False]
    """
    size = (
        int(max((codes.max(initial=-1) for codes in (touched, source, destination)), default=-1))
        + 1
    )
    found = np.zeros(size, np.bool_)
    found[touched] = True
    while True:
        hit: Bools = found[source] | found[destination]
        before = int(found.sum())
        found[source[hit]] = found[destination[hit]] = True
        if int(found.sum()) == before:
            return hit
