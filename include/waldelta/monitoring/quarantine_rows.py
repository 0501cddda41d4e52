"""Counts and lists quarantined rows without reading resolved ones."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.ledger import IncompleteRow, Ledger
from waldelta.lake.ledger.ledger_row import schema_of
from waldelta.lake.ledger.quarantine import MESSAGE_HEAD, OF_ID, QUARANTINED

_KEY = ("table_name", "generation", "key")
# Messages are left out: a row may have megabytes of them, which no list shows.
_SHOWN = tuple(name for name in schema_of(IncompleteRow).names if name != "messages")


def read_open(ledger: Ledger, keys: pa.Table) -> list[IncompleteRow]:
    """Returns the quarantine records of some of these keys, in their order.

    Pass only a few keys, because each becomes an object.
    """
    wanted = [tuple(row.values()) for row in keys.select([*_KEY, "at"]).to_pylist()]
    # ``at`` identifies the rows of one table; another table's rows of that time are removed below.
    chosen = pc.field("at").isin(keys["at"]) & (pc.field("status") == QUARANTINED)
    told = ledger.table(IncompleteRow).read(chosen, columns=_SHOWN)
    by_key = {(row.table_name, row.generation, row.key, row.at): row for row in told}
    return [by_key[key] for key in wanted if key in by_key]


def read_by_id(ledger: Ledger, row_id: str) -> IncompleteRow | None:
    """Returns the quarantined row with this id, with its messages, even if it was decided on
    since.
    """
    table = ledger.table(IncompleteRow)
    rows = table.read(pc.field("status") == QUARANTINED, columns=OF_ID)
    found = next((row for row in reversed(rows) if row.id == row_id), None)
    if found is None:
        return None
    chosen = (pc.field("at") == pa.scalar(found.at, UTC_TIME)) & (pc.field("key") == found.key)
    return next(iter(table.read(chosen & (pc.field("table_name") == found.table_name))), None)


def read_since(ledger: Ledger, row: IncompleteRow) -> IncompleteRow | None:
    """Returns the latest record of the row's key after it, in the same copy, or None."""
    chosen = (pc.field("table_name") == row.table_name) & (pc.field("key") == row.key)
    chosen &= (pc.field("generation") == row.generation) & (
        pc.field("at") > pa.scalar(row.at, UTC_TIME)
    )
    return next(reversed(ledger.table(IncompleteRow).read(chosen, columns=_SHOWN)), None)


def read_of_run(ledger: Ledger, run_id: str, most: int) -> tuple[list[IncompleteRow], int]:
    """Returns the first rows that a run quarantined, oldest first, and their number.

    Unreadable messages don't count.
    """
    chosen = (pc.field("run_id") == run_id) & ~pc.starts_with(pc.field("key"), MESSAGE_HEAD)
    table = ledger.table(IncompleteRow)
    moments = table.scan(("at",), None, chosen)["at"]
    chosen &= pc.field("at").isin(moments.slice(0, most).unique())
    return table.read(chosen, columns=_SHOWN)[:most], len(moments)
