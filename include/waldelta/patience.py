"""Patience: how long our statements wait on the source, for its answer or for a lock, and who stands in the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import psycopg
from psycopg import sql

from waldelta.errors import TableBusy

Connection = psycopg.Connection[Any]

# What keeps a table from being read.
_BARRED = ("AccessExclusiveLock",)


@contextmanager
def limited(
    connection: Connection, setting: Literal["statement_timeout", "lock_timeout"], seconds: float
) -> Iterator[None]:
    """Give each statement inside so much time; PostgreSQL ends it with QueryCanceled or LockNotAvailable then."""
    connection.execute("select set_config(%s, %s, false)", (setting, str(math.ceil(seconds * 1000))))
    try:
        yield
    finally:
        with suppress(psycopg.OperationalError):  # a lost connection has been told by then
            connection.execute(sql.SQL("reset {}").format(sql.Identifier(setting)))


@contextmanager
def readable_tables(connection: Connection, seconds: float) -> Iterator[None]:
    """Read what is published, for which PostgreSQL locks each table; raises TableBusy that names who keeps one from that."""
    try:
        with limited(connection, "lock_timeout", seconds):
            yield
    except psycopg.errors.LockNotAvailable as err:
        raise TableBusy(
            f"a published table couldn't be read for {seconds:g} s, nor could what is published; nothing was changed, and what "
            f"has landed waits. Locks that stand in the way:\n{lock_holders(connection, _BARRED)}\nwait until they end, and run "
            "again"
        ) from err


def lock_holders(connection: Connection, modes: Sequence[str]) -> str:
    """Sessions that hold such locks on tables, a line each."""
    holders = connection.execute(_LOCK_HOLDERS, (list(modes),)).fetchall()
    return "\n".join(f"  - {who} on {table}" for who, table in holders) or "  - (they have ended just now)"


_LOCK_HOLDERS = """
select distinct 'pid ' || l.pid || coalesce(' (' || nullif(a.application_name, '') || ')', ''),
       l.relation::regclass::text
from pg_locks l
join pg_class c on c.oid = l.relation and c.oid >= 16384
left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'relation'
  and l.granted
  and l.pid <> pg_backend_pid()
  and l.database = (select oid from pg_database where datname = current_database())
  and l.mode = any(%s)
order by 1
"""
