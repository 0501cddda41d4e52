"""Finds the rows of a target without a key that net changes take, with Arrow and NumPy.

The rules are those of the statements in keyless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints, one_array
from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPDATE, codes_of
from waldelta.changes.decode.collapse_keyless import PLACE
from waldelta.metadata_columns import RAW
from waldelta.types import TargetType
from waldelta.types.hstore import Hstore

_REMOVALS = pa.array([ACTION_UPDATE, ACTION_DELETE])


def match_duplicates(
    rows: pa.Table, net: pa.Table, columns: Sequence[tuple[str, TargetType]], *, metadata: bool
) -> Ints:
    """Return, for each row of the target, the update or delete that takes it; -1 for none.

    Each change takes one of the rows that equal its old row, in the order of the changes. Rows that
    are written exactly like the old rows are taken first. ``columns`` are the published columns;
    ``metadata``: the target has raw values.
    """
    removals = np.flatnonzero(np.asarray(pc.is_in(net["action"], value_set=_REMOVALS)))
    removals = removals[np.argsort(np.asarray(net[PLACE])[removals], kind="stable")]
    removed = net.take(pa.array(removals))
    equal, exact = _codes(rows, removed, columns, metadata=metadata)
    is_exact = _numbers(exact[: len(rows)]) < _sought(exact, rows)[exact[: len(rows)]]
    equal_rows, sought = equal[: len(rows)], _sought(equal, rows)
    number = _numbers(equal_rows, ~is_exact)
    is_taken = number < sought[equal_rows]
    # Changes that take equal rows are next to each other, in their order.
    grouped = removals[np.argsort(equal[len(rows) :], kind="stable")]
    begin = np.cumsum(sought) - sought
    of_row = np.full(len(rows), -1, np.int64)
    of_row[is_taken] = grouped[(begin[equal_rows] + number)[is_taken]]
    return of_row


def _codes(
    rows: pa.Table,
    removed: pa.Table,
    columns: Sequence[tuple[str, TargetType]],
    *,
    metadata: bool,
) -> tuple[Ints, Ints]:
    """Return integers of the rows and then of the removed ones: the same where they are equal, and
    where they are also written alike.
    """
    equal: list[pa.Array] = []
    exact: list[pa.Array] = []
    for i, (name, kind) in enumerate(columns):
        both = _both(rows[name], removed[f"b{i}"], kind.arrow)
        equal.append(kind.equal_values(both))
        if (written := kind.exact_values(both)) is not equal[-1]:
            exact.append(written)
    if metadata:
        equal.append(_raw_entries(_both(rows[RAW], removed["base_raw"], Hstore().arrow)))
    codes = codes_of([pa.chunked_array([values]) for values in equal])
    if not exact:
        return codes, codes
    return codes, codes_of([pa.chunked_array([values]) for values in (pa.array(codes), *exact)])


def _both(rows: pa.ChunkedArray, removed: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return one_array(pa.chunked_array([*rows.cast(kind).chunks, *removed.cast(kind).chunks], kind))


def _raw_entries(raw: pa.Array) -> pa.Array:
    """Return the raw values as bytes, as raw_entries() does as an array; null without any."""
    entries = Hstore().exact_values(raw)
    return pc.if_else(
        pc.equal(pc.binary_length(entries), 0), pa.scalar(None, entries.type), entries
    )


def _sought(codes: Ints, rows: pa.Table) -> Ints:
    """Return how many rows of each code are removed."""
    return np.bincount(codes[len(rows) :], minlength=int(codes.max(initial=-1)) + 1)


def _numbers(codes: Ints, is_late: Bools | None = None) -> Ints:
    """Return the number of each row among those of its code, those that are late last."""
    order = np.argsort(codes, kind="stable") if is_late is None else np.lexsort((is_late, codes))
    counts = np.bincount(codes, minlength=1)
    begin = np.cumsum(counts) - counts
    numbers = np.empty(len(codes), np.int64)
    numbers[order] = np.arange(len(codes)) - begin[codes[order]]
    return numbers
