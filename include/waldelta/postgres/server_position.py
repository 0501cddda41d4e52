"""Reads a server's identity, timeline, WAL position, WAL file size, and next transaction id.

A primary and a standby need different functions, which fail on the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.errors import NotPrimary, NotStandby
from waldelta.lsn import Lsn
from waldelta.postgres.connection import describe_server

# How far the server's WAL can be decoded: a primary's is flushed, a standby's is replayed.
READABLE_LSN = (
    "case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else"
    " pg_current_wal_flush_lsn() end"
)
# Where the last record ends that a primary has written, for Lsn.of_record, and the WAL file size
# that it needs.
WRITTEN_SQL = (
    "pg_current_wal_insert_lsn()::text, pg_size_bytes(current_setting('wal_segment_size'))"
)
# Only the replication protocol returns a standby's timeline.
_POSITION = f"""
select (select system_identifier::text from pg_control_system()),
       case when not pg_is_in_recovery() then ('x' || substr(pg_walfile_name(pg_current_wal_lsn()),
         1, 8))::bit(32)::int end,
       ({READABLE_LSN})::text,
       (select setting::bigint from pg_settings where name = 'wal_segment_size'),
       current_database()::text
"""  # noqa: S608 - no value in it


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """A server's position at one moment; ``next_xid8`` has the epoch of the 32-bit xids in that
    WAL.

    ``flush_lsn`` is how far its WAL can be read: for a standby, that is what it has replayed.
    ``primary_lsn`` is then how far its primary's WAL is flushed.
    """

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    next_xid8: int
    wal_segment_size: int
    database: str
    primary_lsn: Lsn | None = None

    def lag_of(self, read: Lsn) -> int:
        """Returns the bytes of WAL by which a reader at ``read`` is behind, including a standby's
        own lag.
        """
        return max(0, (self.primary_lsn or self.flush_lsn) - read)

    @property
    def replay_lag(self) -> int | None:
        """The bytes of WAL by which a standby is behind its primary; None for a primary."""
        return None if self.primary_lsn is None else max(0, self.primary_lsn - self.flush_lsn)

    def must_move(self, confirmed: Lsn, upto: Lsn, restart: Lsn | None = None) -> bool:
        """Returns whether a slot at ``confirmed`` must move past WAL up to ``upto`` that has
        nothing for us.

        It must when that frees a whole WAL file, since the server keeps and removes nothing
        smaller. It also must when there is more to read after it, since every read begins at the
        slot's position. And it must while the slot's ``restart`` position is files behind the
        confirmed one, as after a huge transaction. That position follows only when a move passes
        the server's next record of running transactions, and every read begins there.
        """
        lets_go = self._file(upto) > self._file(confirmed) or (
            restart is not None and self._file(confirmed) > self._file(restart)
        )
        return upto > confirmed and (lets_go or upto < self.flush_lsn)

    def _file(self, lsn: Lsn) -> int:
        return lsn.value // self.wal_segment_size


def read_system_identifier(connection: psycopg.Connection[Any]) -> str:
    """Returns the identifier of the cluster; a standby has its primary's."""
    ((identifier,),) = connection.execute(
        "select system_identifier::text from pg_control_system()"
    ).fetchall()
    return str(identifier)


def read_oldest_xid(connection: psycopg.Connection[Any]) -> int:
    """Returns the oldest transaction (xid8) that is still running.

    Those below it have ended, and a reader of the slot sees them. Call this on the server that has
    the slot: on a standby, it is what was running as of its replay.
    """
    ((oldest,),) = connection.execute(
        "select pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    ).fetchall()
    return int(oldest)


def read_position(connection: psycopg.Connection[Any]) -> ServerPosition:
    """Read a primary's position; raises NotPrimary on a standby."""
    if is_standby(connection):
        raise NotPrimary(
            f"{describe_server(connection)} is a standby, but copies need the primary, and a"
            " standby's slot is read only by source.read_from: point the connection at the"
            " primary, or promote this server"
        )
    return _read(connection)


def read_standby_position(connection: psycopg.Connection[Any]) -> ServerPosition:
    """Read a standby's position, without its timeline and ``primary_lsn``, which the caller sets;
    raises NotStandby on a primary.
    """
    if not is_standby(connection):
        raise NotStandby(
            f"source.read_from leads to {describe_server(connection)}, which is no standby, or was"
            " promoted: point it at a standby of conn_id's server, or remove it; then run resync"
        )
    return _read(connection)


def is_standby(connection: psycopg.Connection[Any]) -> bool:
    """Returns whether the server is in recovery."""
    return connection.execute("select pg_is_in_recovery()").fetchone() == (True,)


def _read(connection: psycopg.Connection[Any]) -> ServerPosition:
    (row,) = connection.execute(_POSITION.encode()).fetchall()
    ((xid,),) = connection.execute(
        "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    ).fetchall()
    return ServerPosition(row[0], row[1], Lsn.parse(row[2]), xid, row[3], row[4])
