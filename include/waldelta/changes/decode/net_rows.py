"""Takes apart and rebuilds a few staged net changes as Arrow, for completing rows and for the
gate.

Row keys are the keys of a few rows as the quarantine names them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pyarrow as pa

from waldelta.arrow import Bools, Ints, one_array, with_column
from waldelta.changes.decode.collapse import (
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    codes_of,
)
from waldelta.changes.decode.decode import DecodePlan, typed_key
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.types import TargetType


def row_keys(rows: pa.Table, plan: DecodePlan, columns: Iterable[str]) -> list[str]:
    """Returns each row's key, from these columns, as a JSON object of PostgreSQL's texts."""
    names = [plan.names[i] for i in plan.numbering.key]
    texts = [
        plan.types[i].pg_text(one_array(rows[column])).to_pylist()
        for i, column in zip(plan.numbering.key, columns, strict=True)
    ]
    return [json.dumps(dict(zip(names, row, strict=True))) for row in zip(*texts, strict=True)]


def own_keys(keys: Collection[str], plan: DecodePlan) -> set[str]:
    """Returns the keys (JSON objects by column) that have the columns of the table's current key.

    Other keys were recorded before the table's key columns changed.
    """
    names = {plan.names[i] for i in plan.numbering.key}
    return {key for key in keys if json.loads(key).keys() == names}


def named_keys(keys: Collection[str], columns: Sequence[tuple[str, TargetType]]) -> pa.Table:
    """Returns a table of keys: their texts in columns ``t<k>``, and their values in the key
    columns' types in ``k<k>``.

    Each key is a JSON object by column. Raises ApplyError for a key that its type can't hold.
    """
    key_values = [json.loads(key) for key in sorted(keys)]
    texts = [pa.array([key[name] for key in key_values], pa.string()) for name, _ in columns]
    table = pa.table(texts, [f"t{k}" for k in range(len(columns))])
    required = np.ones(len(key_values), np.bool_)
    for k, (name, kind) in enumerate(columns):
        table = table.append_column(f"k{k}", typed_key(table[f"t{k}"], kind, name, required))
    return table


def first_values(keys: Collection[str], plan: DecodePlan, kind: pa.DataType) -> pa.Array:
    """Returns the values of these keys' first column, as ``kind``.

    Few other rows have one of these values.
    """
    first = plan.numbering.key[0]
    return _convert_column(
        sorted({json.loads(key)[plan.names[first]] for key in keys}), plan, first
    ).cast(kind)


def _convert_column(texts: Sequence[str], plan: DecodePlan, column: int) -> pa.Array:
    typed, _ = plan.types[column].from_text(pa.array(texts, pa.string()))
    return typed


def typed_columns(keys: pa.Table) -> list[pa.ChunkedArray]:
    """Returns the typed columns ``k<k>`` of keys in the columns of named_keys()."""
    return [keys[name] for name in keys.column_names if name.startswith("k")]


def key_codes(kinds: Sequence[TargetType], *keys: Sequence[pa.ChunkedArray]) -> list[Ints]:
    """Returns integers for several lists of keys, equal where the keys are equal in PostgreSQL.

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
    """Returns the position of each code's first occurrence, in ascending order."""
    _, first = np.unique(codes, return_index=True)
    return np.asarray(np.sort(first), np.int64)


# Net changes that produce a new row.
FRESH = (ACTION_INSERT, ACTION_UPSERT)
WRITTEN = (*FRESH, ACTION_UPDATE)


def as_net(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Returns rows that were read from files in the plan's schema."""
    schema = plan.decode.net_schema
    return rows.select(schema.names).cast(schema).combine_chunks()


def keys_of(rows: pa.Table, plan: TargetPlan, which: str) -> list[str]:
    """Returns each row's key as JSON: the base key (``b``) or the current one (``c``)."""
    numbering = plan.decode.numbering
    return row_keys(
        rows, plan.decode, numbering.bases if which == "b" else [f"c{i}" for i in numbering.key]
    )


def find_key_moves(rows: pa.Table, plan: TargetPlan) -> Bools:
    """Returns which updates move their row to another key than it has in the target."""
    bases, present = (keys_of(rows, plan, which) for which in "bc")
    has_moved = np.array([base != key for base, key in zip(bases, present, strict=True)], np.bool_)
    return has_moved & np.array(
        [action == ACTION_UPDATE for action in rows["action"].to_pylist()], np.bool_
    )


def unsent(rows: pa.Table, plan: TargetPlan) -> list[list[str]]:
    """Returns the columns that arrived without a value, by row."""
    flags = {
        plan.decode.names[i]: rows[f"u{i}"].to_pylist() for i in plan.decode.numbering.toastable
    }
    return [[name for name, of_rows in flags.items() if of_rows[n]] for n in range(len(rows))]


def arrived_values(rows: pa.Table, plan: TargetPlan, absent: Sequence[Sequence[str]]) -> list[str]:
    """Returns the values of each row that did arrive, as JSON."""
    return values_as_json(rows, plan.decode.columns, absent)


def values_as_json(
    rows: pa.Table, columns: Sequence[tuple[str, TargetType]], absent: Sequence[Sequence[str]]
) -> list[str]:
    """Returns PostgreSQL's text of each value in the columns ``c<i>`` of these names and types, as
    JSON by row.

    The columns in ``absent`` are left out, by row.
    """
    texts = {
        name: kind.pg_text(one_array(rows[f"c{i}"])).to_pylist()
        for i, (name, kind) in enumerate(columns)
    }
    raws = rows["raw"].to_pylist() if "raw" in rows.column_names else [None] * len(rows)
    documents = []
    for n, raw in enumerate(raws):
        verbatim = dict(raw or [])
        values = {name: verbatim.get(name, of_rows[n]) for name, of_rows in texts.items()}
        documents.append(
            json.dumps({name: value for name, value in values.items() if name not in absent[n]})
        )
    return documents


def purges(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Returns net changes that each remove the target's row at the base key, without values."""
    rows = with_action(rows, ACTION_PURGE)
    for name in [*plan.decode.numbering.values, "raw"]:
        rows = with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    for name in plan.decode.numbering.flags:
        rows = with_column(rows, name, pa.array([False] * len(rows), pa.bool_()))
    return rows


def without_base(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Returns net changes without a base key: none of them replaces a row of the target."""
    for name in plan.decode.numbering.bases:
        rows = with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    return rows


def with_action(rows: pa.Table, action: str) -> pa.Table:
    """Returns net changes with another action."""
    return with_column(rows, "action", pa.array([action] * len(rows), pa.string()))
