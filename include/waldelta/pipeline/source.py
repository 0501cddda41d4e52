"""The source of one run: the connections to its primary and to the server that has the slot, and
what the run cost it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Self

import psycopg
from psycopg.abc import Params

from waldelta.config import Source
from waldelta.errors import ConfigError
from waldelta.lsn import Lsn
from waldelta.postgres import (
    Connection,
    OneStatementCursor,
    connect,
    ended_by_replay,
    lacks_room,
    name_unreadable,
    named_loss,
    privilege_missing,
)
from waldelta.postgres.sessions import PLAIN_SESSIONS
from waldelta.quantities import counted, size
from waldelta.server_errors.sqlstate import ServerError


@dataclass(frozen=True, slots=True)
class SourceConnections:
    """Opens connections to a source; ``conninfo`` connects to its primary.

    ``conninfo`` is empty for a job that only reads the lake. ``read_conninfo`` connects to the
    standby of source.read_from, and is None without one.
    """

    config: Source
    conninfo: str = field(default="", repr=False)
    read_conninfo: str | None = field(default=None, repr=False)

    @property
    def slot_conninfo(self) -> str:
        """The connection string of the server that has the slot: the primary, or the standby of
        source.read_from.
        """
        if self.config.read_from is None:
            return self.conninfo
        if not self.read_conninfo:
            raise ConfigError(
                f"connection {self.config.read_from!r} (source.read_from) wasn't passed to this run"
            )
        return self.read_conninfo

    def connect(self, purpose: str) -> AbstractContextManager[Connection]:
        """Open a connection to the source's primary; its application_name contains the purpose.

        Raises PrivilegeMissing where the server refuses a statement without a more specific error,
        SourceError where it has no room for a query's result,
        NameUnreadable where it can't send a name as UTF-8, and SourceUnreachable where the
        connection is lost.
        """
        return self._open(self.conninfo, purpose, PLAIN_SESSIONS.session)

    def connect_slot(
        self, purpose: str, primary: Connection | None = None
    ) -> AbstractContextManager[Connection]:
        """Open a connection to the server that has the slot; raises as connect() does.

        Unless source.read_from names a standby, it is the caller's ``primary`` connection when
        given.
        """
        if self.config.read_from is None and primary is not None:
            return nullcontext(primary)
        # The session ends with its temporary slots.
        return self._open(self.slot_conninfo, purpose, connect)

    @contextmanager
    def _open(
        self,
        conninfo: str,
        purpose: str,
        opened: Callable[[str, str], AbstractContextManager[Connection]],
    ) -> Iterator[Connection]:
        with (
            named_loss(conninfo),
            opened(conninfo, f"waldelta {purpose} {self.config.slot}") as connection,
        ):
            try:
                yield connection
                if not connection.closed:  # Otherwise the loss was noticed within the block.
                    connection.commit()
            except psycopg.errors.InsufficientPrivilege as err:
                raise privilege_missing(connection, err) from err
            except psycopg.errors.UntranslatableCharacter as err:
                # The text is in a row that the slot decodes, not in a name.
                if ServerError.of(err).is_from_decoding:
                    raise
                raise name_unreadable(conninfo, err) from err
            except psycopg.errors.SerializationFailure as err:
                # A session of ours is never serializable: replay of a standby is the other cause.
                raise ended_by_replay(
                    f"{purpose} of slot {self.config.slot!r}", ServerError.of(err)
                ) from err
            except psycopg.OperationalError as err:
                if (full := lacks_room(err)) is not None:
                    raise full from err
                raise


class SharedConnection(AbstractContextManager["SharedConnection"]):
    """A connection to the source's primary, for uses with other work in between that leave no state
    in its session.

    It is opened at first use, and closed at the end of its ``with`` block. A server or a firewall
    may end it while it is idle, so each use first checks that it still works. An exception within a
    use closes it, because the session's state isn't known then.
    """

    def __init__(self, source: SourceConnections, purpose: str) -> None:
        self._source, self._purpose = source, purpose
        self._connection: Connection | None = None
        self._opened = ExitStack()

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Yields the connection; raises as SourceConnections.connect() does."""
        if self._connection is not None:
            try:
                self._connection.execute("select 1")
            except psycopg.Error:
                self._close()
        if self._connection is None:
            self._connection = self._opened.enter_context(self._source.connect(self._purpose))
        try:
            yield self._connection
        except BaseException:
            self._connection = None
            with self._opened.pop_all():  # Closing the connection's block names the error.
                raise

    def _close(self) -> None:
        self._connection = None
        with suppress(psycopg.Error):
            self._opened.close()

    def __exit__(self, *_: object) -> None:
        self._close()


# --- what a run cost the source, as far as that can be separated from other work
#
# PostgreSQL has no CPU time of a session, and counts temporary files only for a whole database. So
# the server's time for our statements is the upper bound of the CPU time, since one backend at a
# time works for a run. Temporary files are reported for the whole database. All other figures are
# the run's own.

_OF_SNAPSHOTS = ("snapshot_seconds", "xmin_age")


@dataclass(slots=True)
class SourceLoad:
    """What a run cost the source.

    - ``slot_calls``: calls that read or moved the slot.
    - ``wal_read_bytes``: WAL that these calls went through, each from the slot's restart_lsn on.
    - ``decoded_bytes``, ``spilled_bytes``, ``streamed_bytes``: counted by the server for the slot
      during the run. They cover all transactions in that WAL, published or not; those that didn't
      fit into logical_decoding_work_mem; and open ones that were sent.
    - ``slot_seconds``: how long the slot was read or moved, including the writing to the lake.
    - ``snapshot_seconds``: how long the longest snapshot of a copy was open.
    - ``xmin_age``: the most transactions by which vacuum lagged because of such a snapshot.
    - ``timeouts``: calls that the statement timeout ended. They aren't in ``slot_calls``, nor is
      their WAL in ``wal_read_bytes``.
    - ``server_seconds``: the server's time for our statements, an upper bound of its backends' CPU
      time.
    - ``database_temp_bytes``: temporary files of the whole database, from all sessions.
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

    def add(self, other: SourceLoad) -> None:
        """Add the cost of another part of the run; of snapshots, the longest counts."""
        for one in fields(self):
            both = getattr(self, one.name), getattr(other, one.name)
            together = max(both) if one.name in _OF_SNAPSHOTS else sum(both)
            setattr(self, one.name, round(together, 3))

    def describe(self) -> str:
        """Returns the load as one line of text; empty when the source wasn't used."""
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
    """Counters of the server, with the time of their last reset.

    After a reset in between, only what was counted since that reset is known.
    """

    counts: tuple[int, ...]
    counted_since: datetime | None

    def since(self, before: _Counters) -> list[int]:
        earlier = (
            before.counts if self.counted_since == before.counted_since else (0,) * len(self.counts)
        )
        return [now - then for now, then in zip(self.counts, earlier, strict=True)]


class SlotMeter:
    """Counts what the calls of one slot cost; the holder of the slot's lock is its only user.

    Creating it also starts the timing of the connection's statements.
    """

    def __init__(self, connection: Connection, slot: str) -> None:
        self._connection, self._slot = connection, slot
        self._slot_before, self._database_before = self._read_slot(), self._read_database()
        self._load = SourceLoad()
        self._server_seconds = 0.0
        connection.cursor_factory = self._timed_cursor()

    @contextmanager
    def timed(
        self, opened: AbstractContextManager[psycopg.Connection[tuple[Any, ...]]]
    ) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Yields another session whose statements are also timed."""
        with opened as connection:
            connection.cursor_factory = self._timed_cursor()
            yield connection

    def restart(self) -> Lsn:
        """Returns the position from which the next call reads."""
        row = self._connection.execute(_RESTART, (self._slot,)).fetchone()
        return Lsn.parse(row[0] if row and row[0] else "0/0")

    def add(self, calls: int, restart: Lsn, upto: Lsn, server_seconds: float = 0.0) -> None:
        """Count calls that each read the WAL from ``restart`` to ``upto``.

        ``server_seconds`` is their time when another connection made them.
        """
        self._load.slot_calls += calls
        self._load.wal_read_bytes += calls * max(0, upto - restart)
        self._server_seconds += server_seconds

    def timed_out(self, timeout_s: float) -> None:
        """Count a call of another connection that the statement timeout ended.

        How far it had read isn't known.
        """
        self._load.timeouts += 1
        self._server_seconds += timeout_s

    def load(self, seconds: float) -> SourceLoad:
        """Returns the load that the calls were for the source, with the server's own counters since
        this meter was created.

        ``seconds`` is how long the slot was read or moved. Only what came after a reset of the
        server's counters is counted.
        """
        load = self._load
        load.decoded_bytes, load.spilled_bytes, load.streamed_bytes = self._read_slot().since(
            self._slot_before
        )
        (load.database_temp_bytes,) = self._read_database().since(self._database_before)
        load.slot_seconds, load.server_seconds = round(seconds, 3), round(self._server_seconds, 3)
        return load

    def _read_slot(self) -> _Counters:
        *counts, since = self._connection.execute(_SLOT_COUNTERS, (self._slot,)).fetchone() or (
            0,
            0,
            0,
            None,
        )
        return _Counters(tuple(map(int, counts)), since)

    def _read_database(self) -> _Counters:
        # A busy backend reports its figures once a second; this one's are needed now.
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
    """Returns how many times landing a read window goes through its WAL.

    With streamed logical messages, the window is also read without streaming.
    """
    return 2 if source.options.streaming != "off" and source.options.messages else 1


def moves(source: Source) -> int:
    """Returns how many times moving the slot past a read window goes through its WAL."""
    return 2 if source.options.acknowledge == "peek" else 1


def xmin_age(connection: Connection, snapshot: str) -> int:
    """Returns how many transactions began since the oldest one invisible to this snapshot
    (``xmin:xmax:…``).
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
