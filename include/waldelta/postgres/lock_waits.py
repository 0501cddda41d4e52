"""How long our statements wait on the source, for its answer or for a lock, and which sessions
block them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import psycopg
import tenacity

from waldelta.errors import TableBusy
from waldelta.postgres.connection import Connection

_Found = TypeVar("_Found")

# How long a reader of a table waits for its lock. A session that holds one for longer, as VACUUM
# FULL does, must not delay the tables that come after it, nor the next run's read of the slot.
LOCK_TIMEOUT_S = 10.0
# Locks that keep a table from being read.
EXCLUSIVE_MODES = ("AccessExclusiveLock",)
# Another table may be locked while the first one is waited for.
_ATTEMPTS = 3


@contextmanager
def limited(
    connection: Connection, setting: Literal["statement_timeout", "lock_timeout"], seconds: float
) -> Iterator[None]:
    """Limit the time of each statement inside; afterwards the session's own limit holds again.

    PostgreSQL ends it with QueryCanceled or LockNotAvailable. A session whose limit can't be put
    back is closed: it is lost, canceled just then, or still busy with an interrupted statement. An
    open transaction of such a session ends without a commit, so one that writes isn't for this.
    """
    limit = str(math.ceil(seconds * 1000))
    ((original, _),) = connection.execute(_LIMIT, {"setting": setting, "limit": limit}).fetchall()
    try:
        yield
    finally:
        try:
            connection.execute("select set_config(%s, %s, false)", (setting, original))
        except psycopg.OperationalError:
            # Raising would hide the interruption, which Airflow may have sent, or say of a
            # statement that succeeded that it was canceled.
            connection.close()


def savepoint(connection: Connection) -> AbstractContextManager[object]:
    """Returns a savepoint where a transaction is open, which goes on when a statement fails."""
    idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    return nullcontext() if idle else connection.transaction()


@dataclass(frozen=True, slots=True)
class LockedTables:
    """Tables (oids) that another session keeps locked against readers, or waits to lock.

    A reader would wait in the queue behind that session.
    """

    relations: frozenset[int] = frozenset()
    holders: str = ""

    def busy(self, table: str) -> TableBusy:
        """Returns the error for a target that can't be judged without reading one of them."""
        return TableBusy(
            f"{table} can't be read, nor its row filter, because another session locks it, or a"
            " table above it; the target is unchanged, and landed changes wait. Blocking"
            f" sessions:\n{self.holders}\nthe first run after they end applies the changes"
        )


def read_around(
    connection: Connection,
    seconds: float,
    read: Callable[[frozenset[int]], _Found],
    locked: LockedTables | None = None,
) -> tuple[_Found, LockedTables]:
    """Returns what ``read`` finds, and which tables it had to skip because they stayed locked too
    long.

    ``read`` gets their oids, and must not lock them; those in ``locked`` aren't waited for again.
    Raises TableBusy when ``read`` still doesn't end in time. An open transaction of the caller, and
    its snapshot, stay valid.
    """
    locked = locked or LockedTables()
    for _ in range(_ATTEMPTS):
        try:
            with limited(connection, "lock_timeout", seconds), savepoint(connection):
                return read(locked.relations), locked
        except psycopg.errors.LockNotAvailable:
            new_locks = read_locked_tables(connection)
            locked = LockedTables(locked.relations | new_locks.relations, new_locks.holders)
    raise TableBusy(
        f"published tables stayed locked, one after the other, for {seconds:g} s each; nothing was"
        f" changed, and landed changes wait. Blocking sessions:\n{locked.holders}\nwait until they"
        " end, and run again"
    )


def read_locked_tables(connection: Connection) -> LockedTables:
    """Returns which tables are locked against readers now."""
    rows = connection.execute(_LOCKED, (list(EXCLUSIVE_MODES),)).fetchall()
    relations = frozenset(oid for (oid,) in rows)
    return LockedTables(
        relations, lock_holders(connection, EXCLUSIVE_MODES, waiting=True) if relations else ""
    )


def lock_holders(connection: Connection, modes: Sequence[str], *, waiting: bool = False) -> str:
    """Returns a line for each session that holds such locks on tables.

    With ``waiting``, sessions that wait for one are included, because they block readers, too.
    """
    return "\n".join(
        f"  - {holder}" for holder in list_lock_holders(connection, modes, waiting=waiting)
    )


def list_lock_holders(
    connection: Connection, modes: Sequence[str], *, waiting: bool = False
) -> list[str]:
    """Returns each session that holds such locks, and on which table; see lock_holders()."""
    # Within a transaction, the view would show the sessions as of its first read.
    connection.execute("select pg_stat_clear_snapshot()")
    holders = connection.execute(
        _LOCK_HOLDERS, {"modes": list(modes), "waiting": waiting}
    ).fetchall()
    return [f"{who} on {table}" for who, table in holders] or ["(they have ended just now)"]


def open_transactions(
    connection: Connection, xids: Iterable[str] | None = None, older_than_s: float = 0.0
) -> list[tuple[str, str]]:
    """Returns who has a transaction with an xid open, prepared ones included, and since when.

    The oldest comes first. ``xids``: only those that hold one of these. ``older_than_s``: only
    those open for longer, or for an unknown time, and all prepared ones.
    """
    xid_list = None if xids is None else list(xids)
    params = {"xids": xid_list, "age": timedelta(seconds=older_than_s)}
    rows = connection.execute(_OPEN_TRANSACTIONS, params).fetchall()
    return list(dict.fromkeys(rows))  # A subtransaction has an xid of its own.


def wait_until_none(
    read: Callable[[], Collection[_Found]],
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Collection[_Found]:
    """Read until there is nothing, or the time is over; return what is left then."""
    attempts = tenacity.Retrying(
        sleep=sleep,
        wait=tenacity.wait_exponential(0.02, max=0.5),
        stop=tenacity.stop_after_delay(timeout_s),
        retry=tenacity.retry_if_result(bool),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    return attempts(read)


# Materialized, so that the value is read before it is set.
_LIMIT = """
with session as materialized (select current_setting(%(setting)s) as before)
select before, set_config(%(setting)s, %(limit)s, false)
from session
"""

_OPEN_TRANSACTIONS = """
select coalesce(
           'prepared transaction ' || quote_literal(p.gid),
           'pid ' || l.pid || coalesce(' (' || nullif(a.application_name, '') || ')', '')
       ),
       coalesce(coalesce(p.prepared, a.xact_start, a.backend_start)::text,
         'a time that pg_read_all_stats would show')
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
left join pg_prepared_xacts p on p.transaction::text = l.transactionid::text
where l.locktype = 'transactionid'
  and l.granted
  and l.pid is distinct from pg_backend_pid()
  and (%(xids)s::text[] is null or l.transactionid::text = any(%(xids)s))
  and (p.gid is not null or (clock_timestamp() - a.xact_start < %(age)s) is not true)
order by age(l.transactionid) desc
"""

_LOCKED = """
select distinct l.relation::bigint
from pg_locks l
where l.locktype = 'relation'
  and l.pid is distinct from pg_backend_pid()
  and l.database = (select oid from pg_database where datname = current_database())
  and l.mode = any(%s)
"""

# A prepared transaction's locks have no pid, and an autovacuum worker has no name.
_LOCK_HOLDERS = """
select distinct coalesce('pid ' || l.pid || coalesce(' (' || coalesce(nullif(a.application_name,
  ''), nullif(a.backend_type, 'client backend')) || ')', ''),
                         'prepared transaction ' || coalesce(quote_literal(x.gid),
                           'that was just decided')),
       l.relation::regclass::text || case when l.granted then ''
         else ' (waits for the lock' || coalesce(', behind ' || b.pids, '') || ')' end
from pg_locks l
join pg_class c on c.oid = l.relation and c.oid >= 16384
left join pg_stat_activity a on a.pid = l.pid
left join pg_locks own on l.pid is null and own.pid is null and own.locktype = 'transactionid'
  and own.granted
    and own.virtualtransaction = l.virtualtransaction
left join pg_prepared_xacts x on x.transaction = own.transactionid
left join lateral (
    select string_agg(distinct case p when 0 then 'a prepared transaction' else 'pid ' || p end,
      ', ') as pids
    from unnest(pg_blocking_pids(l.pid)) p
    where not l.granted
) b on true
where l.locktype = 'relation'
  and (l.granted or %(waiting)s)
  and l.pid is distinct from pg_backend_pid()
  and l.database = (select oid from pg_database where datname = current_database())
  and l.mode = any(%(modes)s)
order by 1
"""
