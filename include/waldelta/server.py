"""Where the server stands: its identity, timeline, WAL position and file size, and next transaction id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.errors import NotPrimary, SourceError
from waldelta.lsn import Lsn

_POSITION = """
select (select system_identifier::text from pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int,
       pg_current_wal_flush_lsn()::text,
       (select setting::bigint from pg_settings where name = 'wal_segment_size')
"""


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """One look at a primary; ``next_xid8`` tells the epoch of the 32-bit xids in that WAL."""

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    next_xid8: int
    wal_segment_size: int

    def must_move(self, confirmed: Lsn, upto: Lsn, restart: Lsn | None = None) -> bool:
        """Whether a slot at ``confirmed`` must move over what was read up to ``upto`` and holds nothing for us.

        It must when that lets go of a whole WAL file, since the server keeps and removes nothing smaller, and when more
        is to be read behind it, since every reading begins where the slot stands. It must too while the slot's
        ``restart`` position lags by files behind the confirmed one, as after a huge transaction: that position follows
        only when a move passes the server's next record of running transactions, and every reading begins there.
        """
        lets_go = self._file(upto) > self._file(confirmed) or (
            restart is not None and self._file(confirmed) > self._file(restart)
        )
        return upto > confirmed and (lets_go or upto < self.flush_lsn)

    def _file(self, lsn: Lsn) -> int:
        return lsn.value // self.wal_segment_size


def read_oldest_xid(connection: psycopg.Connection[Any]) -> int:
    """The oldest transaction (xid8) that is still running: those below it have ended, and whoever reads the slot sees them."""
    ((oldest,),) = connection.execute("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchall()
    return int(oldest)


def read_position(connection: psycopg.Connection[Any]) -> ServerPosition:
    """Ask a primary where it stands; raises NotPrimary on a standby."""
    if connection.execute("select pg_is_in_recovery()").fetchone() == (True,):
        raise NotPrimary(
            f"{connection.info.host}:{connection.info.port} is a standby, where the slot can't be consumed and no copy taken: "
            "point the connection at the primary, or promote this server (docs/failover.md)"
        )
    row = connection.execute(_POSITION).fetchone()
    xid = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    if row is None or xid is None:
        raise SourceError("the server didn't say where it stands")
    return ServerPosition(row[0], row[1], Lsn.parse(row[2]), xid[0], row[3])
