"""The ledger table ``decisions``: what waits for an operator's decision, and what was decided.

The latest row per table, generation and key counts; ``decision_kinds`` has the kinds.
The status of a row is one of these:

- ``waiting``: it is in quarantine. It isn't in the target, because the source had moved on or a
  gate failed.
- ``completed``: it is in the target, with some values read from the source later than the change.
- ``resolved``: it was waiting or discarded. A later change has replaced, moved or deleted the row,
  or it was read from the source.
- ``accepted``: it was waiting or discarded. By an operator's decision, it was read from the source
  and written although it fails its gate.
- ``discarded``: it was waiting, and an operator decided that the target must lack it. A repair
  carries the decision into the generation that it begins, and an update into the row's new key; a
  copy doesn't.

A message that can't be decoded is waiting, skipped or resolved; ``unreadable_messages`` reads and
writes these rows. A table that a gate stops has a row once it is released. A batch's rows are
written before the target's commit. Rows of a run that died in between are replaced by the next run,
which recognizes them by the target's watermark.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.decision_kinds import (
    EXTERNAL_COMMIT,
    MESSAGE,
    QUESTIONS,
    ROW,
    TABLE,
    actions_of,
)
from waldelta.lake.fence import UNFENCED, Fence
from waldelta.lake.lake import Lake
from waldelta.lake.ledger.records import LedgerRow, rows_of
from waldelta.lake.ledger.table import LedgerTable, in_order, last_rows, of_tables
from waldelta.lsn import Lsn
from waldelta.pgoutput.messages import ID_LETTERS

# Nothing after a waiting message lands, or is applied to its table, until an operator decides that
# runs go on without it: it is skipped.
WAITING, COMPLETED, RESOLVED = "waiting", "completed", "resolved"
ACCEPTED, DISCARDED, SKIPPED, RELEASED = "accepted", "discarded", "skipped", "released"
AGREED, REFUSED = "agreed", "refused"

# The beginning of the reason of a row that a gate has quarantined.
FAILS = "fails "


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A pgoutput message, and its position in the change log; ``raw`` has its bytes, or None.

    ``lsn`` is the change's own position, ``xid`` its top-level transaction, widened to 64 bits.
    ``batch`` and ``seq`` are None for a message that hasn't landed.
    """

    batch: int | None
    seq: int | None
    lsn: int | None
    xid: int
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Decision(LedgerRow):
    """A row, a message or a table that waits for an operator, and what was decided on it.

    A row (``kind``) arrived without the values of ``columns``, or its values fail an expectation
    that has ``gate: quarantine`` and is named in ``reason``. ``outdated``: the target has the row
    as it was before the change. ``key`` and ``values`` are JSON objects of PostgreSQL's texts.
    ``values`` has the values that arrived, and is None unless the row waits. For a row that was
    read from the source again and still waits, it has the source's values at ``lsn``. ``batch`` is
    the last of the batches that were applied with the row. ``messages`` are the messages of a
    waiting row, in commit order. ``lsn`` of an accepted row is its position in the target.
    ``row_id`` is the id that it had before a repair began another generation with it.

    A message's ``key`` is its id, and ``reason`` says why it can't be decoded. A released table has
    no key: all changes pass its gates whose commits are before ``upto_lsn``, and it had those
    before ``after_lsn`` already.

    ``by`` is who decided, ``why`` their reason, ``decided_at`` the time: a repair copies rows with
    a later ``at``. ``incarnation`` and ``timeline`` are those of the slot, for positions.
    """

    # For rows: waiting, completed, resolved, accepted, discarded; for messages: waiting, skipped,
    # resolved; for tables: released
    status: str
    table_name: str
    generation: int
    batch: int
    key: str
    columns: list[str] = field(default_factory=list)
    values: str | None = None
    lsn: int | None = None
    commit_ts: datetime | None = None
    reason: str | None = None
    messages: list[SentMessage] | None = None
    by: str | None = None
    outdated: bool | None = None
    row_id: str | None = None
    kind: str = ROW
    why: str | None = None
    decided_at: datetime | None = None
    incarnation: str | None = None
    timeline: int | None = None
    after_lsn: int | None = None
    upto_lsn: int = 0

    table: ClassVar[str] = "decisions"

    @property
    def id(self) -> str:
        """The id by which commands and pages name a waiting row, message or table.

        It stays the same as long as the row is open with these values, whatever is decided on other
        rows. When a change quarantines the key again, or a repair reads other values, that row has
        another id.
        """
        if self.kind == MESSAGE:
            return self.key
        if self.row_id is not None:
            return self.row_id
        parts = f"{self.table_name}\n{self.generation}\n{self.batch}\n{self.lsn}\n{self.key}"
        return hashlib.sha256(parts.encode()).hexdigest()[:ID_LETTERS]

    @property
    def is_kept_out(self) -> bool:
        """Returns whether a gate or an operator keeps the row's values from the target, which then
        lacks the row or has earlier values of it.
        """
        is_of_gate = (self.reason or "").startswith(FAILS)
        return self.status == DISCARDED or (self.status == WAITING and is_of_gate)

    def as_listed(self) -> dict[str, Any]:
        """Returns what waits, since when, why and what an operator may do, ready for JSON.

        ``key`` and ``values`` are PostgreSQL's texts by column. ``messages`` are the changes that
        it came from, with their bytes in hexadecimal, or null where they weren't stored.
        """
        return {
            "id": self.id,
            "table": self.table_name,
            "status": self.status,
            "since": self.at.isoformat(),
            "reason": self.reason,
            "actions": list(actions_of(self.kind, self.status)),
            # A decision is listed until a run has applied it.
            "applied": None if self.status == WAITING else False,
            "by": self.by,
            "why": self.why,
            "key": json.loads(self.key) if self.kind == ROW else None,
            "lsn": _lsn(self.lsn),
            "commit_ts": self.commit_ts.isoformat() if self.commit_ts is not None else None,
            "lacking": self.columns,
            "values": json.loads(self.values) if self.values else None,
            "messages": [
                {
                    "batch": message.batch,
                    "seq": message.seq,
                    "lsn": _lsn(message.lsn),
                    "xid": message.xid,
                    "raw": message.raw.hex() if message.raw is not None else None,
                }
                for message in self.messages or ()
            ],
            "run_id": self.run_id,
        }

    def decided(
        self, status: str, run_id: str, at: datetime, by: str | None, why: str | None
    ) -> Decision:
        """Returns the row that records an operator's decision on this one."""
        return replace(self, at=at, run_id=run_id, status=status, by=by, why=why, decided_at=at)


def _lsn(value: int | None) -> str | None:
    return str(Lsn(value)) if value is not None else None


_OF_KEY = ("table_name", "generation", "key", "at", "status")
# The columns to read for a row's id, and when and by whom it was written.
OF_ID = (*_OF_KEY, "run_id", "batch", "lsn", "row_id", "kind")


@dataclass(frozen=True, slots=True)
class Outline:
    """The columns of a Decision that show whether its key is open."""

    key: str
    status: str
    batch: int
    outdated: bool | None = None


_OUTLINE = ["key", "status", "batch", "outdated"]
R = TypeVar("R", Decision, Outline)
_OF_ROWS = pc.field("kind") == ROW


class Decisions:
    """Reads and writes the table of one lake without a JVM; every write is durable when it
    returns.
    """

    def __init__(self, lake: Lake) -> None:
        self._table = LedgerTable(Decision, lake)
        self.uri, self._log = self._table.uri, self._table.place.log
        self._outline: tuple[int, pa.Table] | None = None

    def rows(
        self, table_name: str, generation: int, keys: Collection[str] | None = None
    ) -> list[Decision]:
        """Returns the rows of one copy of a table, or those of these keys, oldest first."""
        where = (pc.field("table_name") == table_name) & (pc.field("generation") == generation)
        where &= _OF_ROWS
        if keys is None:
            return self._table.read(where)
        return self._table.read(where & pc.field("key").isin(list(keys)), cache=False)

    def questions(self, tables: Collection[str] | None = None) -> list[Decision]:
        """Returns the latest row of each question about a schema change of all source tables, or of
        these, by time.
        """
        where = pc.field("kind").isin(QUESTIONS)
        rows = self._table.read(where if tables is None else where & of_tables(tables))
        latest = {(row.table_name, row.key): row for row in rows}
        return sorted(latest.values(), key=lambda row: row.at)

    def accepted_commits(self) -> list[Decision]:
        """Returns the external commits that operators agreed to."""
        return self._table.read(pc.field("kind") == EXTERNAL_COMMIT)

    def outlines(self, table_name: str, generation: int) -> list[Outline]:
        """Returns the rows of one copy of a table in short, oldest first.

        The messages, which are most of a row, aren't read. The result for all tables is cached
        until another commit to the quarantine.
        """
        if self._outline is None or self._log.read(self._outline[0] + 1) is not None:
            self._outline = (
                self._table.version(),
                self._table.scan(
                    ["table_name", "generation", *_OUTLINE], None, _OF_ROWS, cache=False
                ),
            )
        rows = self._outline[1]
        is_of_copy = pc.and_(
            pc.equal(rows["table_name"], table_name), pc.equal(rows["generation"], generation)
        )
        return [
            Outline(**values) for values in rows.filter(is_of_copy).select(_OUTLINE).to_pylist()
        ]

    def open_counts(self, generations: Mapping[str, int]) -> dict[str, int]:
        """Returns how many rows each table lacks in the given generation; tables without any are
        left out.
        """
        return self.missing_counts(generations)[0]

    def missing_counts(
        self, generations: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Returns how many quarantined rows each table lacks in the given generation, and how many
        discarded ones it lacks or has outdated.
        """
        rows = self._table.scan(_OF_KEY, where=_OF_ROWS & of_tables(generations))
        latest = _latest(rows, generations)
        quarantined, discarded = (
            _counts(latest.filter(pc.field("status") == status)) for status in (WAITING, DISCARDED)
        )
        return quarantined, discarded

    def open_rows(self, generations: Mapping[str, int]) -> list[Decision]:
        """Returns the latest row for each key that these tables lack in the given generation.

        The rows are sorted by table and time.
        """
        return rows_of(Decision, self.scan_open(generations, self._table.schema.names))

    def scan_open(
        self,
        generations: Mapping[str, int],
        columns: Sequence[str] = (),
        *,
        cache: bool = True,
    ) -> pa.Table:
        """Returns the rows of open_rows() as Arrow, with their keys and these columns.

        ``cache``: see read_sorted().
        """
        names = list(dict.fromkeys((*_OF_KEY, *columns)))
        rows = self._table.scan(names, where=_OF_ROWS & of_tables(generations), cache=cache)
        return _open(rows, generations)

    def unknown_counts(self, generations: Mapping[str, int]) -> dict[str, int]:
        """Returns how many rows each table lacks because they arrived without a value.

        This reads once for all tables. An update that a gate set aside may have arrived without a
        value, too, but isn't counted.
        """
        rows = self.scan_open(generations, ("columns", "reason"), cache=False)
        lacks_values = pc.greater(pc.list_value_length(rows["columns"]), 0)
        of_gate = pc.fill_null(pc.starts_with(rows["reason"], FAILS), False)
        return _counts(rows.filter(pc.and_(lacks_values, pc.invert(of_gate))))

    def gate_reasons(
        self, tables: Collection[str], generations: Mapping[str, int]
    ) -> list[tuple[Decision, bool]]:
        """Returns the rows of these tables that gates have ever quarantined, and whether each still
        waits.

        Rows that are missing from the given generation of the target do.
        """
        rows = self._table.scan((*OF_ID, "reason"), where=_OF_ROWS & of_tables(tables), cache=False)
        waiting = {
            (row.table_name, row.key, row.at) for row in rows_of(Decision, _open(rows, generations))
        }
        return [
            (row, (row.table_name, row.key, row.at) in waiting)
            for row in rows_of(Decision, rows)
            if row.status == WAITING and (row.reason or "").startswith(FAILS)
        ]

    def causes(self, run_id: str, tables: Collection[str]) -> dict[str, frozenset[bool]]:
        """Returns by table whether rows that a run quarantined fail a gate: yes, no, or both."""
        where = _OF_ROWS & of_tables(tables) & (pc.field("run_id") == run_id)
        rows = self._table.scan(("table_name", "status", "reason"), where=where, cache=False)
        flags: dict[str, set[bool]] = {}
        for row in rows.to_pylist():
            if row["status"] == WAITING:
                fails = (row["reason"] or "").startswith(FAILS)
                flags.setdefault(row["table_name"], set()).add(fails)
        return {name: frozenset(of) for name, of in flags.items()}

    def ids_decided(self, run_id: str, status: str) -> set[str]:
        """Returns the ids of the quarantined rows on which a run has recorded this decision.

        The decision may be in the row's generation or the next.
        """
        rows = self._table.read(_OF_ROWS, columns=OF_ID, cache=False)
        decided = {
            (row.table_name, row.key)
            for row in rows
            if (row.run_id, row.status) == (run_id, status)
        }
        return {
            row.id for row in rows if row.status == WAITING and (row.table_name, row.key) in decided
        }

    def lacking(
        self, table_name: str, generation: int, upto: int | None = None
    ) -> dict[str, Outline]:
        """Returns the latest outline of each key that a copy lacks, or has as it was before
        (outdated).

        These are quarantined or discarded rows, as of batch ``upto`` when given.
        """
        outlines = [
            row
            for row in self.outlines(table_name, generation)
            if upto is None or row.batch <= upto
        ]
        return {
            key: row
            for key, row in latest_rows(outlines).items()
            if row.status in (WAITING, DISCARDED)
        }

    def replace(
        self,
        table_name: str,
        generation: int,
        after_batch: int,
        rows: Sequence[Decision],
        fence: Fence = UNFENCED,
    ) -> None:
        """Replace the rows of one copy's batches after ``after_batch`` by these, in one commit.

        This always commits, also without rows, so that concurrent commits of other runs fail.
        ``fence`` raises when another run has taken the target over. It is verified again when a
        concurrent write makes the commit fail. Otherwise, a run that was suspended could replace
        what the next run wrote, or reopen what it resolved.
        """
        ordered = in_order(rows)
        name = table_name.replace("'", "''")
        where = f"table_name = '{name}' and generation = {generation:d} and batch > {after_batch:d}"
        self._table.replace(ordered, where, fence)

    def fence(self, fence: Fence) -> None:
        """Commit without a change, so that concurrent replace() and add() calls verify theirs
        again.

        They write nothing when it raises.
        """
        self._table.replace((), "false", fence)

    def add(self, rows: Sequence[Decision], fence: Fence = UNFENCED) -> None:
        """Add rows after all others, in one commit; ``fence`` as in replace()."""
        self._table.extend(in_order(rows), fence=fence)

    def messages(
        self, table_name: str | None = None, generation: int | None = None
    ) -> list[Decision]:
        """Returns all rows about messages that can't be decoded, or those of one copy of a table,
        oldest first, including resolved ones.
        """
        where = pc.field("kind") == MESSAGE
        if table_name is not None:
            where &= pc.field("table_name") == table_name
            where &= pc.field("generation") == generation
        return self._table.read(where)

    def releases(self) -> list[Decision]:
        """Returns the releases of stopped tables, oldest first."""
        return self._table.read(pc.field("kind") == TABLE)

    def prune(self, oldest: datetime) -> int:
        """Drop rows older than ``oldest``, except those of keys that targets lack; returns how
        many.

        The table is compacted into one file.
        """
        return self._table.prune(lambda rows: _keep(rows, oldest))


def _open(rows: pa.Table, generations: Mapping[str, int]) -> pa.Table:
    """Returns the last row of each key of these generations, where it waits.

    They are sorted by table and time.
    """
    return (
        _latest(rows, generations)
        .filter(pc.field("status") == WAITING)
        .sort_by([("table_name", "ascending"), ("at", "ascending"), ("key", "ascending")])
    )


def _latest(rows: pa.Table, generations: Mapping[str, int]) -> pa.Table:
    latest = last_rows(rows, ["table_name", "generation", "key"])
    names = pa.array(list(generations), pa.string())
    generation_array = pa.array(list(generations.values()), pa.int64())
    current = generation_array.take(pc.index_in(latest["table_name"], value_set=names))
    return latest.filter(pc.equal(latest["generation"], current))


def _counts(rows: pa.Table) -> dict[str, int]:
    """Returns the number of rows by table."""
    counts = rows["table_name"].value_counts().to_pylist()
    return {item["values"]: item["counts"] for item in counts}


def _keep(rows: Sequence[Decision], oldest: datetime) -> list[bool]:
    latest = {(row.table_name, row.generation, row.key): row.status for row in rows}
    # An accepted row stays in its target, where checks don't judge it by its gate.
    statuses = (WAITING, DISCARDED, ACCEPTED, SKIPPED, RELEASED, AGREED, REFUSED)
    # A skipped message stays skipped as long as anything reads it.
    return [
        r.at >= oldest
        or r.status == SKIPPED
        or latest[r.table_name, r.generation, r.key] in statuses
        for r in rows
    ]


def watched_rows(rows: Iterable[R]) -> dict[str, R]:
    """Returns the latest row of each key that the target lacks or has outdated, from one copy's
    rows.

    Discarded rows are included only where the target has them as they were before: later changes
    don't send all that changed since.
    """
    return {
        key: row
        for key, row in latest_rows(rows).items()
        if row.status == WAITING or (row.status == DISCARDED and row.outdated)
    }


def discarded_rows(rows: Iterable[R]) -> dict[str, R]:
    """Returns the latest row of each key that was discarded and isn't in the target, from one
    copy's rows.
    """
    return {
        key: row
        for key, row in latest_rows(rows).items()
        if row.status == DISCARDED and not row.outdated
    }


def latest_rows(rows: Iterable[R]) -> dict[str, R]:
    """Returns the latest row of each key; the rows are of one copy, in their order."""
    return {row.key: row for row in rows}
