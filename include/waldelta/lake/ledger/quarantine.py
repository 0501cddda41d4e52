"""Rows that came without all of their values, or fail a gate, and what became of them: the
bookkeeping table ``quarantine``.

Latest row per table, generation and key counts: ``quarantined`` (not in the target: the source had
moved on), ``reread`` (in the target, with some values as they were later than the change),
``resolved`` (was quarantined or discarded; a later change has replaced, moved or deleted the row,
or it was read again), ``accepted`` (likewise, by an operator's decision: it was read again and
written whatever its gate says), ``discarded`` (was quarantined; somebody has said that the target
is to lack it; a repair takes that along into the generation that it begins, and an update to the
key that it gives the row; a copy doesn't). Messages that can't be read are here too, by other
statuses (UNREADABLE, SKIPPED), which ``unreadable_messages`` reads and writes. A batch's rows are
written before the target's commit; what a run that died in between left is replaced by the next
one, whose watermark tells it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.delta_log import DeltaLog
from waldelta.lake.ledger.table import LedgerTable, in_order, of_tables
from waldelta.lake.storage import bookkeeping_uri
from waldelta.pgoutput.unread_message import ID_LETTERS

COMPLETED, QUARANTINED, RESOLVED, DISCARDED = "reread", "quarantined", "resolved", "discarded"
# Of a message of the replication protocol: nothing behind it lands, or is applied to its table,
# until an operator decides that runs go on without it.
UNREADABLE, SKIPPED = "unreadable", "skipped"
# In place of a column's name, which is never empty: the key of a message's row.
_MESSAGE_KEY = ""
MESSAGE_HEAD = '{"": "'
ACCEPTED = "accepted"

# How the reason begins of a row that a gate has set aside.
FAILS = "fails "

_Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message of pgoutput's, and where it stands in the change log; ``raw`` are its bytes, None
    where they weren't kept.

    ``lsn`` is the change's own position, ``xid`` that of its top-level transaction, widened to 64
    bits. ``batch`` and ``seq`` are None of a message that hasn't landed.
    """

    batch: int | None
    seq: int | None
    lsn: int | None
    xid: int
    raw: bytes | None = None


_MESSAGE = pa.struct(
    [
        ("batch", pa.int64()),
        ("seq", pa.int64()),
        ("lsn", pa.int64()),
        ("xid", pa.int64()),
        ("raw", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class IncompleteRow:
    """A row that came without the values of ``columns``, or whose values fail an expectation with
    ``gate: quarantine`` (``reason``).

    ``outdated``: the target has the row as it was before the change.

    ``key`` and ``sent`` (the values that did come; None unless quarantined) are JSON objects of
    PostgreSQL's texts. ``batch`` is the last of the batches that were applied with it. ``messages``
    are those that a quarantined row came from, in commit order; None in rows of versions that
    didn't keep them. ``by`` says who had it read again, accepted or discarded it. Of a row that was
    read again and is still quarantined, ``sent`` are the values that the source had at ``lsn``.
    """

    at: datetime
    run_id: str
    # quarantined, reread, resolved, accepted, discarded; of messages: unreadable, skipped, resolved
    status: str
    table_name: str
    generation: int
    batch: int
    key: str
    columns: list[str] = field(default_factory=list)
    sent: str | None = None
    lsn: int | None = None
    commit_ts: datetime | None = None
    reason: str | None = None
    messages: list[SentMessage] | None = None
    by: str | None = None
    outdated: bool | None = None

    table: ClassVar[str] = "quarantine"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("status", pa.string()),
            ("table_name", pa.string()),
            ("generation", pa.int64()),
            ("batch", pa.int64()),
            ("key", pa.string()),
            ("columns", pa.list_(pa.string())),
            ("sent", pa.string()),
            ("lsn", pa.int64()),
            ("commit_ts", UTC_TIME),
            ("reason", pa.string()),
            ("messages", pa.list_(_MESSAGE)),
            ("by", pa.string()),
            ("outdated", pa.bool_()),
        ]
    )

    @property
    def id(self) -> str:
        """What people name it by: the same for as long as it is open, another one when its key is
        quarantined anew.
        """
        if (message := message_of(self.key)) is not None:
            return message
        return row_id_of(self.table_name, self.generation, self.batch, self.lsn, self.key)

    @property
    def is_kept_out(self) -> bool:
        """Whether it isn't in the target, or not as the source has it, because a gate or somebody
        has said so.
        """
        return self.status == DISCARDED or (self.status == QUARANTINED and _is_of_gate(self.reason))


def _is_quarantined(row: Mapping[str, Any], generations: Mapping[str, int]) -> bool:
    return bool(generations.get(row["table_name"]) == row["generation"])


def _is_of_gate(reason: str | None) -> bool:
    return (reason or "").startswith(FAILS)


def message_key(message: str) -> str:
    """The key under which a message's row stands, by the message's id."""
    return json.dumps({_MESSAGE_KEY: message})


def message_of(key: str) -> str | None:
    """The message whose row has this key; None of a table's row."""
    return str(json.loads(key)[_MESSAGE_KEY]) if key.startswith(MESSAGE_HEAD) else None


def row_id_of(table_name: str, generation: int, batch: int, lsn: int | None, key: str) -> str:
    """An IncompleteRow's ``id``."""
    told = f"{table_name}\n{generation}\n{batch}\n{lsn}\n{key}"
    return hashlib.sha256(told.encode()).hexdigest()[:ID_LETTERS]


@dataclass(frozen=True, slots=True)
class Outline:
    """Of an IncompleteRow, what tells whether its key is open."""

    key: str
    status: str
    batch: int
    outdated: bool | None = None


@dataclass(frozen=True, slots=True)
class GateReason:
    """Why a gate has set a row aside, in which run, and whether the row still waits for that."""

    table_name: str
    run_id: str
    reason: str
    is_open: bool


_OUTLINE = ["key", "status", "batch", "outdated"]
R = TypeVar("R", IncompleteRow, Outline)


class Quarantine:
    """Reads and writes the table of one lake; without a JVM, and durable when a call returns."""

    def __init__(self, root: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = bookkeeping_uri(root, IncompleteRow.table)
        self._table = LedgerTable(self.uri, IncompleteRow.schema, storage_options)
        self._log = DeltaLog(self.uri, storage_options)
        self._outline: tuple[int, pa.Table] | None = None

    def rows(
        self, table_name: str, generation: int, keys: Collection[str] | None = None
    ) -> list[IncompleteRow]:
        """The rows of one copy of a table, or those of these keys, oldest first."""
        chosen = (pc.field("table_name") == table_name) & (pc.field("generation") == generation)
        if keys is None:
            return self._read(chosen)
        found = self._table.scan(
            IncompleteRow.schema.names, chosen=chosen & pc.field("key").isin(list(keys)), kept=False
        )
        return [as_row(values) for values in found.to_pylist()]

    def outlines(self, table_name: str, generation: int) -> list[Outline]:
        """What the rows of one copy of a table say, in short, oldest first.

        For all tables it is read once, and again when anybody has written since: most of a row is
        its messages.
        """
        if self._outline is None or self._log.read(self._outline[0] + 1) is not None:
            version = self._table.version()
            self._outline = (
                version,
                self._table.scan(["table_name", "generation", *_OUTLINE], kept=False),
            )
        rows = self._outline[1]
        own = pc.and_(
            pc.equal(rows["table_name"], table_name), pc.equal(rows["generation"], generation)
        )
        return [Outline(**values) for values in rows.filter(own).select(_OUTLINE).to_pylist()]

    def open_counts(self, generations: Mapping[str, int]) -> dict[str, int]:
        """How many rows each of these tables lacks in the given generation of its target; those
        without any are left out.
        """
        return dict(Counter(row.table_name for row in self.open_rows(generations)))

    def open_rows(self, generations: Mapping[str, int]) -> list[IncompleteRow]:
        """What was told last of each row that these tables lack in the given generation of their
        targets, by table and time.
        """
        held = [row for row in self._read() if generations.get(row.table_name) == row.generation]
        latest = {(row.table_name, row.key): row for row in held}
        rows = [row for row in latest.values() if row.status == QUARANTINED]
        return sorted(rows, key=lambda row: (row.table_name, row.at))

    def unknown_counts(self, generations: Mapping[str, int]) -> dict[str, int]:
        """How many rows each of these tables lacks likewise because they came without a value;
        asked for all tables at once.

        An update that a gate set aside may have come without one too, and isn't lacking for that.
        """
        names = ["table_name", "generation", "key", "status", "columns", "reason"]
        chosen = of_tables(generations)
        rows = self._table.scan(names, chosen=chosen, kept=False).to_pylist()
        latest = {(r["table_name"], r["key"]): r for r in rows if _is_quarantined(r, generations)}
        waiting = (
            row for row in latest.values() if row["status"] == QUARANTINED and row["columns"]
        )
        return dict(Counter(row["table_name"] for row in waiting if not _is_of_gate(row["reason"])))

    def gate_reasons(
        self, tables: Collection[str], generations: Mapping[str, int]
    ) -> list[GateReason]:
        """Why gates have ever set rows of these tables aside; those wait that the given generation
        of the target lacks.
        """
        names = ["table_name", "generation", "key", "status", "run_id", "reason"]
        chosen = of_tables(tables)
        rows = self._table.scan(names, chosen=chosen, kept=False).to_pylist()
        latest = {
            (row["table_name"], row["key"]): row
            for row in rows
            if _is_quarantined(row, generations)
        }
        return [
            GateReason(
                row["table_name"],
                row["run_id"],
                row["reason"],
                latest.get((row["table_name"], row["key"])) is row,
            )
            for row in rows
            if row["status"] == QUARANTINED and _is_of_gate(row["reason"])
        ]

    def ids_decided(self, run_id: str, status: str) -> set[str]:
        """The ids of the quarantined rows of which a run has recorded this decision, in this
        generation or the next.
        """
        names = ["run_id", "status", "table_name", "generation", "batch", "lsn", "key"]
        rows = self._table.scan(names, kept=False).to_pylist()
        decided = {
            (r["table_name"], r["key"])
            for r in rows
            if (r["run_id"], r["status"]) == (run_id, status)
        }
        return {
            row_id_of(r["table_name"], r["generation"], r["batch"], r["lsn"], r["key"])
            for r in rows
            if r["status"] == QUARANTINED and (r["table_name"], r["key"]) in decided
        }

    def lacking(
        self, table_name: str, generation: int, upto: int | None = None
    ) -> dict[str, Outline]:
        """What was told last of the keys that a copy of a table is known to lack, or to have as
        they were before (outdated).

        Quarantined or discarded ones, as of batch ``upto`` where one is given.
        """
        told = [
            row
            for row in self.outlines(table_name, generation)
            if upto is None or row.batch <= upto
        ]
        return {
            key: row
            for key, row in latest_rows(told).items()
            if row.status in (QUARANTINED, DISCARDED)
        }

    def replace(
        self,
        table_name: str,
        generation: int,
        after_batch: int,
        rows: Sequence[IncompleteRow],
        check: _Check | None = None,
    ) -> None:
        """Make these the rows of one copy's batches after ``after_batch``, in one commit.

        ``check`` raises when the target is another run's by now. It is asked when whoever writes
        here meanwhile makes the commit fail: the rows of a run that slept would take the place of
        what the next one told, or reopen what it resolved.
        """
        told = in_order(rows)
        name = table_name.replace("'", "''")
        chosen = (
            f"table_name = '{name}' and generation = {generation:d} and batch > {after_batch:d}"
        )
        self._table.replace(told, chosen, check)

    def forget(self, table_name: str, generation: int, after_batch: int, check: _Check) -> None:
        """Drop what others told of one copy's batches after ``after_batch``; a commit in any case,
        so that theirs fails.
        """
        self.replace(table_name, generation, after_batch, (), check)

    def fence(self, check: _Check) -> None:
        """A commit that changes nothing: whoever asked ``check`` of replace() or add() before asks
        again, and writes nothing when it raises.
        """
        self._table.replace((), "false", check)

    def add(self, rows: Sequence[IncompleteRow], check: _Check | None = None) -> None:
        """Add rows behind all others, in one commit; ``check`` as of replace()."""
        self._table.extend(in_order(rows), check=check)

    def messages(self) -> list[IncompleteRow]:
        """All that was told of messages that can't be read, oldest first, also what was resolved
        since.
        """
        chosen = pc.field("status").isin([UNREADABLE, SKIPPED])
        if not (
            keys := self._table.scan(["key"], chosen=chosen, kept=False)["key"].unique().to_pylist()
        ):
            return []
        return self._read(pc.field("key").isin(keys))

    def prune(self, oldest: datetime) -> int:
        """Drop rows older than ``oldest`` but those of keys that targets lack, and leave one file;
        returns how many were dropped.
        """
        return self._table.prune(lambda rows: _keep([as_row(row) for row in rows], oldest))

    def _read(self, chosen: pc.Expression | None = None) -> list[IncompleteRow]:
        return [as_row(values) for values in self._table.read(chosen)]


def as_row(values: dict[str, Any]) -> IncompleteRow:
    """As it was read; of an older version's table it lacks what came later."""
    messages = values.get("messages")
    return IncompleteRow(
        **values | {"messages": messages and [SentMessage(**message) for message in messages]}
    )


def _keep(rows: Sequence[IncompleteRow], oldest: datetime) -> list[bool]:
    latest = {(row.table_name, row.generation, row.key): row.status for row in rows}
    kept = (QUARANTINED, DISCARDED, UNREADABLE, SKIPPED)
    # A message that runs skip is skipped for as long as anything reads it.
    return [
        r.at >= oldest or r.status == SKIPPED or latest[r.table_name, r.generation, r.key] in kept
        for r in rows
    ]


def watched_rows(rows: Iterable[R]) -> dict[str, R]:
    """The latest row of each key that isn't in the target as the source has it, of the rows of one
    copy in their order.

    Of discarded ones, those that the target has as they were before: later changes don't send all
    that changed since.
    """
    return {
        key: row
        for key, row in latest_rows(rows).items()
        if row.status == QUARANTINED or (row.status == DISCARDED and row.outdated)
    }


def discarded_rows(rows: Iterable[R]) -> dict[str, R]:
    """The latest row of each key that isn't in the target since it was discarded, of the rows of
    one copy in their order.
    """
    return {
        key: row
        for key, row in latest_rows(rows).items()
        if row.status == DISCARDED and not row.outdated
    }


def message_rows(rows: Iterable[IncompleteRow]) -> list[IncompleteRow]:
    """The latest row of each message that can't be read, or is skipped, of the rows of one copy in
    their order.
    """
    return [row for row in latest_rows(rows).values() if row.status in (UNREADABLE, SKIPPED)]


def latest_rows(rows: Iterable[R]) -> dict[str, R]:
    """The latest row of each key, of the rows of one copy in their order."""
    return {row.key: row for row in rows}
