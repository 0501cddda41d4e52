"""Row keys: the keys of a few rows as the quarantine names them, and finding rows by such a key."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pyarrow as pa

from waldelta.arrow import Ints, one_array
from waldelta.changes.decode.collapse import codes_of
from waldelta.changes.decode.decode import DecodePlan, typed_key
from waldelta.types import TargetType


def row_keys(rows: pa.Table, plan: DecodePlan, columns: Iterable[str]) -> list[str]:
    """Return each row's key, from these columns, as a JSON object of PostgreSQL's texts."""
    names = [plan.names[i] for i in plan.shape.key]
    texts = [
        plan.types[i].pg_text(one_array(rows[column])).to_pylist()
        for i, column in zip(plan.shape.key, columns, strict=True)
    ]
    return [json.dumps(dict(zip(names, row, strict=True))) for row in zip(*texts, strict=True)]


def own_keys(keys: Collection[str], plan: DecodePlan) -> set[str]:
    """Return those of these keys (JSON objects by column) whose columns are the current key's.

    The others were recorded before the table's key columns changed.
    """
    names = {plan.names[i] for i in plan.shape.key}
    return {key for key in keys if json.loads(key).keys() == names}


def named_keys(keys: Collection[str], columns: Sequence[tuple[str, TargetType]]) -> pa.Table:
    """Return these keys as texts, ``t<k>``, and in the types of these key columns, ``k<k>``.

    Raises ApplyError for a key that its type can't hold.
    """
    held = [json.loads(key) for key in sorted(keys)]
    texts = [pa.array([key[name] for key in held], pa.string()) for name, _ in columns]
    table = pa.table(texts, [f"t{k}" for k in range(len(columns))])
    required = np.ones(len(held), np.bool_)
    for k, (name, kind) in enumerate(columns):
        table = table.append_column(f"k{k}", typed_key(table[f"t{k}"], kind, name, required))
    return table


def first_values(keys: Collection[str], plan: DecodePlan, kind: pa.DataType) -> pa.Array:
    """Return the values of these keys' first column, as ``kind``.

    Few other rows have one of these values.
    """
    first = plan.shape.key[0]
    return _typed(sorted({json.loads(key)[plan.names[first]] for key in keys}), plan, first).cast(
        kind
    )


def _typed(texts: Sequence[str], plan: DecodePlan, column: int) -> pa.Array:
    typed, _ = plan.types[column].from_text(pa.array(texts, pa.string()))
    return typed


def typed_columns(keys: pa.Table) -> list[pa.ChunkedArray]:
    """Return the typed columns ``k<k>`` of keys in the columns of named_keys()."""
    return [keys[name] for name in keys.column_names if name.startswith("k")]


def key_codes(kinds: Sequence[TargetType], *keys: Sequence[pa.ChunkedArray]) -> list[Ints]:
    """Return integers for several lists of keys, equal where the keys are equal in PostgreSQL.

    Each list is given by its columns, which have these types.
    """
    columns = []
    for kind, *parts in zip(kinds, *keys, strict=True):
        chunks = [chunk for part in parts for chunk in part.cast(kind.arrow).chunks]
        values = one_array(pa.chunked_array(chunks, kind.arrow))
        columns.append(pa.chunked_array([kind.equal_values(values)]))
    ends = np.cumsum([len(part[0]) for part in keys])
    return np.split(codes_of(columns), ends[:-1])


def first_of_each(codes: Ints) -> Ints:
    """Return the positions of the first occurrence of each code, in their order."""
    _, first = np.unique(codes, return_index=True)
    return np.asarray(np.sort(first), np.int64)
