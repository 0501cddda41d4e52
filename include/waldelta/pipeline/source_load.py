"""The source's bill: what a run cost the publisher, as far as that can be told apart from everybody
else's work.

PostgreSQL tells no session's CPU time, and temporary files only for a whole database. So the first
is told by how long the server took, which bounds it, since one backend at a time works for us; the
second as what it is, the database's. The rest is ours alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import psycopg
from psycopg.abc import Params

from waldelta.config import Source
from waldelta.lsn import Lsn
from waldelta.postgres import Connection
from waldelta.postgres.connection import OneStatementCursor
from waldelta.quantities import counted, size


@dataclass(slots=True)
class SourceBill:
    """What a run cost the source.

    ``slot_calls`` read or moved the slot, and went through ``wal_read_bytes`` of WAL, each from the
    slot's restart_lsn on. ``decoded_bytes``, ``spilled_bytes`` and ``streamed_bytes`` are what the
    server counted for the slot meanwhile: all transactions in that WAL, published or not; those
    that didn't fit into logical_decoding_work_mem; open ones that were sent. ``slot_seconds`` is
    how long the slot was read or moved, while what was read was written to the lake.
    ``snapshot_seconds`` is how long the longest snapshot of a copy was held, and ``xmin_age`` how
    many transactions vacuum lagged behind for one. ``timeouts`` are calls that the statement
    timeout ended; ``slot_calls`` and its WAL are without them. ``server_seconds`` is how long the
    server took over our statements: about the CPU time of its backends at the most.
    ``database_temp_bytes`` went into temporary files of the whole database meanwhile, ours and
    everybody's.
    """

    slot_calls: int = 0
    wal_read_bytes: int = 0
    decoded_bytes: int = 0
    spilled_bytes: int = 0
    streamed_bytes: int = 0
    slot_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    xmin_age: int = 0
    timeouts: int = 0
    server_seconds: float = 0.0
    database_temp_bytes: int = 0

    def add(self, other: SourceBill) -> None:
        """Add what another part of the run cost; of snapshots the longest counts."""
        self.slot_calls += other.slot_calls
        self.wal_read_bytes += other.wal_read_bytes
        self.decoded_bytes += other.decoded_bytes
        self.spilled_bytes += other.spilled_bytes
        self.streamed_bytes += other.streamed_bytes
        self.slot_seconds = round(self.slot_seconds + other.slot_seconds, 3)
        self.timeouts += other.timeouts
        self.server_seconds = round(self.server_seconds + other.server_seconds, 3)
        self.database_temp_bytes += other.database_temp_bytes
        self.snapshot_seconds = round(max(self.snapshot_seconds, other.snapshot_seconds), 3)
        self.xmin_age = max(self.xmin_age, other.xmin_age)

    def describe(self) -> str:
        """One line for people; empty when nothing was asked of the source."""
        parts = []
        if self.slot_calls:
            parts.append(
                f"{size(self.wal_read_bytes)} of WAL read in {counted(self.slot_calls, 'call')}"
                f" ({self.slot_seconds:.1f} s, the server {self.server_seconds:.1f} s),"
                f" {size(self.decoded_bytes)} decoded, {size(self.spilled_bytes)} spilled, at most"
                f" {size(self.database_temp_bytes)} of temporary files"
            )
        if self.timeouts:
            parts.append(f"{counted(self.timeouts, 'call')} ended by the statement timeout")
        if self.snapshot_seconds:
            parts.append(
                f"a snapshot held for {self.snapshot_seconds:.1f} s,"
                f" {counted(self.xmin_age, 'transaction')}"
            )
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class _Counters:
    """What the server counts, by the time of its last reset; a reset meanwhile leaves what was
    counted since.
    """

    counts: tuple[int, ...]
    counted_since: datetime | None

    def since(self, before: _Counters) -> list[int]:
        earlier = (
            before.counts if self.counted_since == before.counted_since else (0,) * len(self.counts)
        )
        return [now - then for now, then in zip(self.counts, earlier, strict=True)]


class SlotMeter:
    """Counts what calls of one slot go through; whoever holds the slot's lock is alone with it.

    From now on the connection's statements are timed, too.
    """

    def __init__(self, connection: Connection, slot: str) -> None:
        self._connection, self._slot = connection, slot
        self._slot_before, self._database_before = self._read_slot(), self._read_database()
        self._bill = SourceBill()
        self._server_seconds = 0.0
        connection.cursor_factory = self._timed_cursor()

    @contextmanager
    def timed(
        self, opened: AbstractContextManager[psycopg.Connection[tuple[Any, ...]]]
    ) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """One more session, whose statements are timed likewise."""
        with opened as connection:
            connection.cursor_factory = self._timed_cursor()
            yield connection

    def restart(self) -> Lsn:
        """Where the next call begins to read."""
        row = self._connection.execute(_RESTART, (self._slot,)).fetchone()
        return Lsn.parse(row[0] if row and row[0] else "0/0")

    def add(self, calls: int, restart: Lsn, upto: Lsn, server_seconds: float = 0.0) -> None:
        """Count calls that each read the WAL from ``restart`` to ``upto``, and took so long where
        another connection made them.
        """
        self._bill.slot_calls += calls
        self._bill.wal_read_bytes += calls * max(0, upto - restart)
        self._server_seconds += server_seconds

    def timed_out(self, timeout_s: float) -> None:
        """Count a call of another connection that the statement timeout ended; nobody knows how far
        it came.
        """
        self._bill.timeouts += 1
        self._server_seconds += timeout_s

    def bill(self, seconds: float) -> SourceBill:
        """What was counted, with the server's own counters since the beginning (after a reset:
        since that).
        """
        bill = self._bill
        bill.decoded_bytes, bill.spilled_bytes, bill.streamed_bytes = self._read_slot().since(
            self._slot_before
        )
        (bill.database_temp_bytes,) = self._read_database().since(self._database_before)
        bill.slot_seconds, bill.server_seconds = round(seconds, 3), round(self._server_seconds, 3)
        return bill

    def _read_slot(self) -> _Counters:
        *counts, since = self._connection.execute(_SLOT_COUNTERS, (self._slot,)).fetchone() or (
            0,
            0,
            0,
            None,
        )
        return _Counters(tuple(map(int, counts)), since)

    def _read_database(self) -> _Counters:
        # A backend that is busy tells its figures once a second; this one's are to be told now.
        self._connection.execute("select pg_stat_force_next_flush()")
        temp_bytes, since = self._connection.execute(_DATABASE_COUNTERS).fetchone() or (0, None)
        return _Counters((int(temp_bytes),), since)

    def _timed_cursor(self) -> type[psycopg.Cursor[Any]]:
        meter = self

        class TimedCursor(OneStatementCursor[Any]):
            def execute(
                self,
                query: Any,
                params: Params | None = None,
                *,
                prepare: bool | None = None,
                binary: bool | None = None,
            ) -> Self:
                began = time.monotonic()
                try:
                    return super().execute(query, params, prepare=prepare, binary=binary)
                finally:
                    meter._server_seconds += time.monotonic() - began

        return TimedCursor


def peeks(source: Source) -> int:
    """How many times landing a bite goes through its WAL: with streamed messages it is read without
    streaming, too.
    """
    return 2 if source.options.streaming != "off" and source.options.messages else 1


def moves(source: Source) -> int:
    """How many times moving the slot over a bite goes through its WAL."""
    return 2 if source.options.acknowledge == "peek" else 1


def xmin_age(connection: Connection, snapshot: str) -> int:
    """How many transactions began since the oldest one that this snapshot (``xmin:xmax:…``) may not
    see.
    """
    row = connection.execute(_AGE, (snapshot,)).fetchone()
    return int(row[0]) if row else 0


_RESTART = "select restart_lsn::text from pg_replication_slots where slot_name = %s"

_SLOT_COUNTERS = """
select total_bytes,
       spill_bytes,
       stream_bytes,
       stats_reset
from pg_stat_replication_slots
where slot_name = %s
"""

_DATABASE_COUNTERS = """
select temp_bytes,
       stats_reset
from pg_stat_database
where datname = current_database()
"""

_AGE = """
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint -
  pg_snapshot_xmin(%s::pg_snapshot)::text::bigint
"""
