"""The rows that targets lack: counts and lists quarantined rows without reading resolved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.ledger import IncompleteRow
from waldelta.lake.ledger.quarantine import MESSAGE_HEAD, QUARANTINED, as_row, row_id_of
from waldelta.monitoring.lake_tables import Bookkeeping

_KEY = ("table_name", "generation", "key")
_NAMED = ("table_name", "generation", "batch", "lsn", "key")
# Messages are left out: a row may have megabytes of them, which no list shows.
_SHOWN = tuple(name for name in IncompleteRow.schema.names if name != "messages")


def open_keys(lake: Bookkeeping, generations: Mapping[str, int]) -> pa.Table:
    """Returns the open keys of these tables' current copies: those whose latest row is quarantined.

    The columns are ``_KEY``, ``at`` and ``reason``, sorted by table and time.
    """
    rows = lake.scan(IncompleteRow, (*_KEY, "status", "at", "reason"))
    latest = rows.group_by(list(_KEY), use_threads=False).aggregate(
        [
            ("status", "last"),
            ("at", "last"),
            ("reason", "last", pc.ScalarAggregateOptions(skip_nulls=False)),
        ]
    )
    held = pa.table(
        {"table_name": list(generations), "generation": list(generations.values())},
        schema=pa.schema([("table_name", pa.string()), ("generation", pa.int64())]),
    )
    found = latest.filter(pc.field("status_last") == QUARANTINED).join(
        held, ["table_name", "generation"], join_type="inner"
    )
    found = found.select([*_KEY, "at_last", "reason_last"]).rename_columns([*_KEY, "at", "reason"])
    return found.sort_by([("table_name", "ascending"), ("at", "ascending"), ("key", "ascending")])


def count_open(lake: Bookkeeping, generations: Mapping[str, int]) -> dict[str, int]:
    """Returns how many rows each of these tables lacks; tables that lack none are left out."""
    counts = open_keys(lake, generations)["table_name"].value_counts().to_pylist()
    return {item["values"]: item["counts"] for item in counts}


def read_open(lake: Bookkeeping, keys: pa.Table) -> list[IncompleteRow]:
    """Returns the quarantine records of some of these keys, in their order.

    Pass only a few keys, because each becomes an object.
    """
    wanted = [tuple(row.values()) for row in keys.select([*_KEY, "at"]).to_pylist()]
    # ``at`` identifies the rows of one table; another table's rows of that time are removed below.
    told = _rows(lake, pc.field("at").isin(keys["at"]) & (pc.field("status") == QUARANTINED))
    by_key = {(row.table_name, row.generation, row.key, row.at): row for row in told}
    return [by_key[key] for key in wanted if key in by_key]


def read_by_id(lake: Bookkeeping, row_id: str) -> IncompleteRow | None:
    """Returns the quarantined row with this id, with its messages, even if it was decided on
    since.
    """
    told = lake.scan(
        IncompleteRow, (*_NAMED, "at"), None, pc.field("status") == QUARANTINED
    ).to_pylist()
    found = next(
        (row for row in reversed(told) if row_id_of(*(row[name] for name in _NAMED)) == row_id),
        None,
    )
    if found is None:
        return None
    chosen = (pc.field("at") == pa.scalar(found["at"], UTC_TIME)) & (
        pc.field("table_name") == found["table_name"]
    )
    return next(
        iter(_rows(lake, chosen & (pc.field("key") == found["key"]), IncompleteRow.schema.names)),
        None,
    )


def read_since(lake: Bookkeeping, row: IncompleteRow) -> IncompleteRow | None:
    """Returns the latest record of the row's key after it, in the same copy, or None."""
    chosen = (pc.field("table_name") == row.table_name) & (pc.field("key") == row.key)
    chosen &= (pc.field("generation") == row.generation) & (
        pc.field("at") > pa.scalar(row.at, UTC_TIME)
    )
    return next(reversed(_rows(lake, chosen)), None)


def read_of_run(lake: Bookkeeping, run_id: str, most: int) -> tuple[list[IncompleteRow], int]:
    """Returns the first rows that a run quarantined, oldest first, and their number.

    Unreadable messages don't count.
    """
    chosen = (pc.field("run_id") == run_id) & ~pc.starts_with(pc.field("key"), MESSAGE_HEAD)
    moments = lake.scan(IncompleteRow, ("at",), None, chosen)["at"]
    return _rows(lake, chosen & pc.field("at").isin(moments.slice(0, most).unique()))[:most], len(
        moments
    )


def _rows(
    lake: Bookkeeping, chosen: pc.Expression, columns: Sequence[str] = _SHOWN
) -> list[IncompleteRow]:
    rows: Sequence[dict[str, Any]] = lake.scan(IncompleteRow, columns, None, chosen).to_pylist()
    return [as_row({**row, "columns": row["columns"] or []}) for row in rows]
