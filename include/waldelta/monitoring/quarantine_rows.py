"""Quarantined rows, without reading resolved ones, and operators' decisions on what was kept out of
targets: what, on which, who, when and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.ledger import (
    ACCEPTED,
    DISCARDED,
    QUARANTINED,
    RESOLVED,
    SKIPPED,
    IncompleteRow,
    Ledger,
    Release,
)
from waldelta.lake.ledger.quarantine import MESSAGE_HEAD, OF_ID, message_of
from waldelta.lake.ledger.records import schema_of

_KEY = ("table_name", "generation", "key")
# Messages are left out: a row may have megabytes of them, which no list shows.
_SHOWN = tuple(name for name in schema_of(IncompleteRow).names if name != "messages")
_WHAT = {
    DISCARDED: "discarded",
    RESOLVED: "retried",
    ACCEPTED: "accepted",
    QUARANTINED: "retried, still fails",
}
_OF_MESSAGES = {SKIPPED: "skipped", RESOLVED: "resolved"}
_OF_ONE = ("run_id", "table_name", "status", "by", "reason")


def read_open(ledger: Ledger, keys: pa.Table) -> list[IncompleteRow]:
    """Returns the quarantine records of some of these keys, in their order.

    Pass only a few keys, because each becomes an object.
    """
    in_order = [tuple(row.values()) for row in keys.select([*_KEY, "at"]).to_pylist()]
    # ``at`` identifies the rows of one table; another table's rows of that time are removed below.
    chosen = pc.field("at").isin(keys["at"]) & (pc.field("status") == QUARANTINED)
    rows = ledger.table(IncompleteRow).read(chosen, columns=_SHOWN)
    by_key = {(row.table_name, row.generation, row.key, row.at): row for row in rows}
    return [by_key[key] for key in in_order if key in by_key]


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


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision on one table; ``key`` is the first of its ``rows``.

    ``upto_lsn`` is the position up to which changes were released. ``message`` is the unreadable
    message that was decided on.
    """

    at: datetime
    what: str
    table_name: str
    by: str | None
    reason: str | None
    run_id: str
    rows: int | None = None
    key: str | None = None
    upto_lsn: int | None = None
    message: str | None = None


def read_decided(ledger: Ledger) -> list[Decided]:
    """Returns all decisions, newest first; decisions on rows as long as the ledger stores them."""
    names = ("at", "table_name", "by", "reason", "run_id", "upto_lsn")
    releases = ledger.table(Release).scan(names).to_pylist()
    released = (Decided(what="released", **row) for row in releases)
    return sorted([*_on_rows(ledger), *released], key=lambda one: one.at, reverse=True)


def _on_rows(ledger: Ledger) -> Iterator[Decided]:
    # Rows without ``by`` were resolved, or moved to another key, by a later change. Rows that a
    # repair carried over repeat an earlier decision.
    chosen = pc.field("status").isin([*_WHAT, SKIPPED]) & pc.field("by").is_valid()
    rows = ledger.table(IncompleteRow).scan((*_OF_ONE, "at", "key"), None, chosen)
    found = rows.group_by(list(_OF_ONE), use_threads=False).aggregate(
        [("at", "first"), ("key", "first"), ("key", "count_distinct")]
    )
    for row in found.to_pylist():
        message = message_of(row["key_first"])
        what = (_WHAT if message is None else _OF_MESSAGES)[row["status"]]
        yield Decided(
            row["at_first"], what, row["table_name"], row["by"], row["reason"], row["run_id"],
            row["key_count_distinct"], row["key_first"], message=message,
        )  # fmt: skip
