"""Where the server stands: its identity, timeline, WAL position and next transaction id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.errors import SourceError
from waldelta.lsn import Lsn

_POSITION = """
select (select system_identifier::text from pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int,
       pg_current_wal_flush_lsn()::text
"""


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """One look at a primary; ``next_xid8`` tells the epoch of the 32-bit xids in that WAL."""

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    next_xid8: int


def read_position(connection: psycopg.Connection[Any]) -> ServerPosition:
    """Ask a primary where it stands; raises SourceError on a standby."""
    if connection.execute("select pg_is_in_recovery()").fetchone() == (True,):
        raise SourceError("the server is a standby: point the connection at the primary")
    row = connection.execute(_POSITION).fetchone()
    xid = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    if row is None or xid is None:
        raise SourceError("the server didn't say where it stands")
    return ServerPosition(row[0], row[1], Lsn.parse(row[2]), xid[0])
