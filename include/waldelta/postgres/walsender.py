"""Functions of the replication protocol alone: timelines, their history, and whether standbys keep
a slot.

They only need the privileges of reading a slot, while SQL functions for the same purpose
(pg_read_file) need a superuser. Source: the chapter on the streaming replication protocol.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from waldelta.errors import (
    AuthenticationFailed,
    PrivilegeMissing,
    SlotInUse,
    SourceError,
    SourceUnreachable,
)
from waldelta.lsn import Lsn
from waldelta.postgres.connection import connect_walsender

# The header of a message: its kind, the WAL's position and end, the server's clock.
_WAL_DATA, _HEADER_BYTES = b"w", 25
_HISTORY_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


def read_timeline_ends(conninfo: str, timeline: int) -> dict[int, Lsn]:
    """Returns where each timeline that ``timeline`` descends from was left.

    What is before that position is common to both. Raises SourceError when the server doesn't
    return it.
    """
    return parse_timeline_ends(
        _run(conninfo, sql.SQL("TIMELINE_HISTORY {}").format(sql.Literal(timeline)))[1]
    )


def parse_timeline_ends(history: str) -> dict[int, Lsn]:
    r"""The lines of a timeline's history file: a timeline, where it was left, and why.

    >>> file = "1\t0/3000148\tno recovery target specified\n\n2\t0/5000000\tbefore 2026-01-01"
    >>> {timeline: str(end) for timeline, end in parse_timeline_ends(file).items()}
    {1: '0/3000148', 2: '0/5000000'}
    """
    matches = (_HISTORY_LINE.match(line) for line in history.splitlines())
    return {int(line[1]): Lsn.parse(line[2]) for line in matches if line is not None}


def read_timeline(conninfo: str) -> int:
    """Returns the timeline that the server writes or, as a standby, replays now.

    Raises SourceError when the server doesn't return it. No SQL function returns a standby's
    timeline, and its control file is as old as its last restartpoint.
    """
    return int(_run(conninfo, sql.SQL("IDENTIFY_SYSTEM").format())[1])


@contextmanager
def unread_timeline(what: str, setting: str) -> Iterator[None]:
    """Raise SourceUnreachable when ``what`` can't be read, which doesn't make the server another
    one.

    Errors of authentication and privileges stay as they are, since a retry wouldn't change them.
    ``setting`` limits how many walsenders there are.
    """
    try:
        yield
    except (AuthenticationFailed, PrivilegeMissing):
        raise
    except SourceError as err:
        raise SourceUnreachable(
            f"{what} couldn't be read: {err}; this needs a free place in {setting}"
        ) from err


def alter_failover(conninfo: str, slot: str, *, failover: bool) -> None:
    """Make standbys keep the slot, or stop that (PostgreSQL 17).

    Raises SlotInUse while another process reads the slot.
    """
    _run(conninfo, alter_failover_command(slot, failover=failover))


def alter_failover_command(slot: str, *, failover: bool) -> sql.Composed:
    """Returns the command that makes a slot a failover slot, or no longer one.

    It needs a connection with ``replication=database``.
    """
    return sql.SQL("ALTER_REPLICATION_SLOT {} (FAILOVER {})").format(
        sql.Identifier(slot), sql.SQL("true" if failover else "false")
    )


def _run(conninfo: str, command: sql.Composed) -> list[str]:
    """Returns the values of a command's first row."""
    with connect_walsender(conninfo, "waldelta walsender") as connection:
        # Not through a cursor: the protocol has no parameters and transactions.
        result = connection.pgconn.exec_(command.as_bytes(connection))
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            what = f"{command.as_string(connection)}: {psycopg.pq.error_message(result)}"
            if result.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"55006":
                raise SlotInUse(f"{what}: stop that reader")
            raise SourceError(f"the server refused {what}")
        return (
            [(result.get_value(0, i) or b"").decode() for i in range(result.nfields)]
            if result.ntuples
            else []
        )


def stream_slot(
    conninfo: str, slot: str, options: Sequence[str], seconds: float
) -> Iterator[bytes]:
    """Yields the messages from the slot's position up to an error, or for ``seconds``.

    ``options`` has names and values in turn. Nothing is confirmed, so the slot stays where it is.
    Raises SourceError when the server refuses.
    """
    pairs = zip(options[::2], options[1::2], strict=True)
    arguments = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in pairs
    )
    command = sql.SQL("START_REPLICATION SLOT {} LOGICAL 0/0 ({})").format(
        sql.Identifier(slot), arguments
    )
    connection = connect_walsender(conninfo, f"waldelta stream {slot}")
    try:  # Not as a context manager: COMMIT isn't a command of the protocol.
        pgconn, deadline = connection.pgconn, time.monotonic() + seconds
        result = pgconn.exec_(command.as_bytes(connection))
        if result.status != ExecStatus.COPY_BOTH:
            raise SourceError(
                f"the server refused to stream slot {slot!r}: {psycopg.pq.error_message(result)}"
            )
        while (remaining_s := deadline - time.monotonic()) > 0:
            size, data = pgconn.get_copy_data(1)
            if size < 0:
                return
            if size == 0:
                if select.select([pgconn.socket], [], [], remaining_s)[0]:
                    pgconn.consume_input()
            elif bytes(data[:1]) == _WAL_DATA:
                yield bytes(data[_HEADER_BYTES:])
    finally:
        connection.close()
