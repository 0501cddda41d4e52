"""Operators' decisions on rows and changes that were kept out of targets: what, on which, who, when
and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow.compute as pc

from waldelta.lake.ledger import IncompleteRow, Ledger
from waldelta.lake.ledger.quarantine import (
    ACCEPTED,
    DISCARDED,
    QUARANTINED,
    RESOLVED,
    SKIPPED,
    message_of,
)
from waldelta.lake.ledger.records import Release

_WHAT = {
    DISCARDED: "discarded",
    RESOLVED: "retried",
    ACCEPTED: "accepted",
    QUARANTINED: "retried, still fails",
}
_OF_MESSAGES = {SKIPPED: "skipped", RESOLVED: "resolved"}
_OF_ONE = ("run_id", "table_name", "status", "by", "reason")


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
    return sorted([*_on_rows(ledger), *_releases(ledger)], key=lambda one: one.at, reverse=True)


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


def _releases(ledger: Ledger) -> Iterator[Decided]:
    names = ("at", "table_name", "by", "reason", "run_id", "upto_lsn")
    for row in ledger.table(Release).scan(names).to_pylist():
        upto = row.pop("upto_lsn")
        yield Decided(what="released", upto_lsn=upto, **row)
