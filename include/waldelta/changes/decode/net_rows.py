"""Takes apart and rebuilds a few staged net changes as Arrow, for completing rows and for the
gate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from waldelta.arrow import Bools, one_array, with_column
from waldelta.changes.decode.collapse import (
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
)
from waldelta.changes.decode.row_keys import row_keys
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.types import TargetType

# Net changes that produce a new row.
FRESH = (ACTION_INSERT, ACTION_UPSERT)
WRITTEN = (*FRESH, ACTION_UPDATE)


def as_net(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Return rows that were read from files in the plan's schema."""
    schema = plan.decode.net_schema
    return rows.select(schema.names).cast(schema).combine_chunks()


def keys_of(rows: pa.Table, plan: TargetPlan, which: str) -> list[str]:
    """Return each row's key as JSON: the base key (``b``) or the current one (``c``)."""
    shape = plan.decode.shape
    return row_keys(
        rows, plan.decode, shape.bases if which == "b" else [f"c{i}" for i in shape.key]
    )


def move_keys(rows: pa.Table, plan: TargetPlan) -> Bools:
    """Return which updates move their row to another key than it has in the target."""
    bases, present = (keys_of(rows, plan, which) for which in "bc")
    others = np.array([base != key for base, key in zip(bases, present, strict=True)], np.bool_)
    return others & np.array(
        [action == ACTION_UPDATE for action in rows["action"].to_pylist()], np.bool_
    )


def unsent(rows: pa.Table, plan: TargetPlan) -> list[list[str]]:
    """Return the columns that arrived without a value, by row."""
    flags = {plan.decode.names[i]: rows[f"u{i}"].to_pylist() for i in plan.decode.shape.toastable}
    return [[name for name, of_rows in flags.items() if of_rows[n]] for n in range(len(rows))]


def sent(rows: pa.Table, plan: TargetPlan, absent: Sequence[Sequence[str]]) -> list[str]:
    """Return the values of each row that did arrive, as JSON."""
    return values_as_json(rows, plan.decode.columns, absent)


def values_as_json(
    rows: pa.Table, columns: Sequence[tuple[str, TargetType]], absent: Sequence[Sequence[str]]
) -> list[str]:
    """Return PostgreSQL's text of each value in the columns ``c<i>`` of these names and types, as
    JSON by row.

    The columns in ``absent`` are left out, by row.
    """
    texts = {
        name: kind.pg_text(one_array(rows[f"c{i}"])).to_pylist()
        for i, (name, kind) in enumerate(columns)
    }
    raws = rows["raw"].to_pylist() if "raw" in rows.column_names else [None] * len(rows)
    found = []
    for n, raw in enumerate(raws):
        verbatim = dict(raw or [])
        values = {name: verbatim.get(name, of_rows[n]) for name, of_rows in texts.items()}
        found.append(
            json.dumps({name: value for name, value in values.items() if name not in absent[n]})
        )
    return found


def purges(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Return these rows as purges of the row at their base key."""
    rows = with_action(rows, ACTION_PURGE)
    for name in [*plan.decode.shape.values, "raw"]:
        rows = with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    for name in plan.decode.shape.flags:
        rows = with_column(rows, name, pa.array([False] * len(rows), pa.bool_()))
    return rows


def without_base(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """Return these rows without a base, as rows that come from none of the target's."""
    for name in plan.decode.shape.bases:
        rows = with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    return rows


def with_action(rows: pa.Table, action: str) -> pa.Table:
    """Return these rows with another action."""
    return with_column(rows, "action", pa.array([action] * len(rows), pa.string()))
