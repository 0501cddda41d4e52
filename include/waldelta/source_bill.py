"""The source's bill: what a run cost the publisher, as far as that can be told apart from everybody else's work.

PostgreSQL tells no session's CPU time, and temporary files only for a whole database; what is told here is ours alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from waldelta.finding import size
from waldelta.lsn import Lsn
from waldelta.pipeline_file import Source

Connection = psycopg.Connection[Any]


@dataclass(slots=True)
class SourceBill:
    """What a run cost the source.

    ``slot_calls`` read or moved the slot, and went through ``wal_read_bytes`` of WAL, each from the slot's restart_lsn on.
    ``decoded_bytes``, ``spilled_bytes`` and ``streamed_bytes`` are what the server counted for the slot meanwhile: all
    transactions in that WAL, published or not; those that didn't fit into logical_decoding_work_mem; open ones that were
    sent. ``slot_seconds`` is how long the slot was read or moved, while what was read was written to the lake.
    ``snapshot_seconds`` is how long the longest snapshot of a copy was held, and ``xmin_age`` how many transactions vacuum
    lagged behind for one.
    """

    slot_calls: int = 0
    wal_read_bytes: int = 0
    decoded_bytes: int = 0
    spilled_bytes: int = 0
    streamed_bytes: int = 0
    slot_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    xmin_age: int = 0

    def add(self, other: SourceBill) -> None:
        """Add what another part of the run cost; of snapshots the longest counts."""
        self.slot_calls += other.slot_calls
        self.wal_read_bytes += other.wal_read_bytes
        self.decoded_bytes += other.decoded_bytes
        self.spilled_bytes += other.spilled_bytes
        self.streamed_bytes += other.streamed_bytes
        self.slot_seconds = round(self.slot_seconds + other.slot_seconds, 3)
        self.snapshot_seconds = round(max(self.snapshot_seconds, other.snapshot_seconds), 3)
        self.xmin_age = max(self.xmin_age, other.xmin_age)

    def describe(self) -> str:
        """One line for people; empty when nothing was asked of the source."""
        parts = []
        if self.slot_calls:
            parts.append(
                f"{size(self.wal_read_bytes)} of WAL read in {self.slot_calls} calls ({self.slot_seconds:.1f} s), "
                f"{size(self.decoded_bytes)} decoded, {size(self.spilled_bytes)} spilled"
            )
        if self.snapshot_seconds:
            parts.append(f"a snapshot held for {self.snapshot_seconds:.1f} s, {self.xmin_age:,} transactions")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class _Counters:
    restart: Lsn
    decoded_bytes: int
    spilled_bytes: int
    streamed_bytes: int
    counted_since: datetime | None


class SlotMeter:
    """Counts what calls of one slot go through; whoever holds the slot's lock is alone with it."""

    def __init__(self, connection: Connection, slot: str) -> None:
        self._connection, self._slot = connection, slot
        self._before = self._read()
        self._bill = SourceBill()

    def restart(self) -> Lsn:
        """Where the next call begins to read."""
        return self._read().restart

    def add(self, calls: int, restart: Lsn, upto: Lsn) -> None:
        """Count calls that each read the WAL from ``restart`` to ``upto``."""
        self._bill.slot_calls += calls
        self._bill.wal_read_bytes += calls * max(0, upto - restart)

    def bill(self, seconds: float) -> SourceBill:
        """What was counted, with the server's own counters since the beginning (after a reset: since that)."""
        now, before = self._read(), self._before
        for name in ("decoded_bytes", "spilled_bytes", "streamed_bytes"):
            earlier = getattr(before, name) if now.counted_since == before.counted_since else 0
            setattr(self._bill, name, getattr(now, name) - earlier)
        self._bill.slot_seconds = round(seconds, 3)
        return self._bill

    def _read(self) -> _Counters:
        row = self._connection.execute(_COUNTERS, (self._slot,)).fetchone() or ("0/0", 0, 0, 0, None)
        return _Counters(Lsn.parse(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4])


def peeks(source: Source) -> int:
    """How many times landing a bite goes through its WAL: with streamed messages it is read without streaming, too."""
    return 2 if source.options.streaming != "off" and source.options.messages else 1


def moves(source: Source) -> int:
    """How many times moving the slot over a bite goes through its WAL."""
    return 2 if source.options.acknowledge == "peek" else 1


def xmin_age(connection: Connection, snapshot: str) -> int:
    """How many transactions began since the oldest one that this snapshot (``xmin:xmax:…``) may not see."""
    row = connection.execute(_AGE, (snapshot,)).fetchone()
    return int(row[0]) if row else 0


_COUNTERS = """
select coalesce(s.restart_lsn, '0/0')::text,
       coalesce(t.total_bytes, 0),
       coalesce(t.spill_bytes, 0),
       coalesce(t.stream_bytes, 0),
       t.stats_reset
from pg_replication_slots s
left join pg_stat_replication_slots t on t.slot_name = s.slot_name
where s.slot_name = %s
"""

_AGE = """
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint - pg_snapshot_xmin(%s::pg_snapshot)::text::bigint
"""
