"""The snapshot that a table is copied from: when it may be taken, and how it is kept alive.

A copy and the stream fit together by visibility: the copy has what its snapshot sees, the stream
has the rest. That is exact only if no transaction that was open at the slot's creation, or at a
change of the publication, is still open when the snapshot is taken. wait_for_old_transactions()
ensures that: changes from before an ALTER PUBLICATION are decoded by the rules of that moment,
though they commit later, and a snapshot taken while their transaction is open doesn't see them
either. A publication may be altered at any time, so the version that each snapshot sees is checked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import psycopg

from waldelta.errors import NotPrimary, SnapshotLost, TransactionsStillOpen, without_values
from waldelta.lsn import Lsn
from waldelta.postgres import WRITTEN_SQL, describe, open_transactions, wait_until_none
from waldelta.postgres.sessions import PLAIN_SESSIONS

log = logging.getLogger(__name__)

# Comparing snapshots isn't enough: a transaction whose commit waits for a synchronous standby may
# be decoded already, but no snapshot sees it. It keeps the lock on its own xid until it is visible;
# a prepared one does, too.
_OPEN_XIDS = """
    select transactionid::text
      from pg_locks
     where locktype = 'transactionid'
       and granted
"""
_ACTIVE_TASKS = """
    select substring(a.application_name from %s), coalesce(p.tuples_processed, 0)
      from pg_stat_activity a
      left join pg_stat_progress_copy p on p.pid = a.pid
     where a.datname = current_database()
       and a.application_name ~ %s
"""


def reader_name(holder_pid: int, task: int, table: object = "") -> str:
    """Returns the application_name of a copy task's session.

    It names the backend that holds the snapshot, the task's number and the table.
    """
    return f"waldelta copy {holder_pid}/{task} {table}".rstrip()


def not_primary(conninfo: str, use: str = "copy from") -> NotPrimary:
    """Returns the error for a ``use`` of this standby, whose snapshots can't be read exactly."""
    return NotPrimary(
        f"{describe(conninfo)} is a standby, whose snapshots leave running transactions out:"
        f" {use} the primary"
    )


def wait_for_old_transactions(
    conn: psycopg.Connection[Any], timeout_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until no transaction is open that was open at the call.

    Call it after slot creation has returned and after every committed change of a publication.
    Raises TransactionsStillOpen, naming each by pid or gid, when some are still open after
    ``timeout_s``.
    """
    xids = _open_xids(conn)
    if xids and (holders := open_transactions(conn, xids)):
        log.info(
            "waiting up to %g s for older transactions: %s",
            timeout_s,
            "; ".join(f"{who} since {since}" for who, since in holders),
        )
    if xids and (old := wait_until_none(lambda: xids & _open_xids(conn), timeout_s, sleep)):
        raise TransactionsStillOpen(_still_open(conn, old, timeout_s))


def wait_until_visible(
    conn: psycopg.Connection[Any], xids: Iterable[int], timeout_s: float
) -> None:
    """Wait until a new snapshot sees all of these committed transactions (64-bit ids).

    A commit that waits for a synchronous standby is decoded before it is visible. Raises
    TransactionsStillOpen, naming each, when some still aren't visible after ``timeout_s``.
    """
    decoded = {str(xid & 0xFFFFFFFF) for xid in xids}
    if hidden := wait_until_none(lambda: decoded & _open_xids(conn), timeout_s):
        holders = ", ".join(who for who, _ in open_transactions(conn, hidden))
        raise TransactionsStillOpen(
            f"transactions that the slot has decoded aren't visible after {timeout_s:g} s, because"
            f" they wait for a synchronous standby: {holders}; run again"
        )


def read_clock(conn: psycopg.Connection[Any]) -> datetime:
    """Returns the server's clock, later than every commit that an earlier snapshot sees."""
    ((moment,),) = conn.execute("select clock_timestamp()").fetchall()
    return moment  # type: ignore[no-any-return]


def _open_xids(conn: psycopg.Connection[Any]) -> set[str]:
    return {xid for (xid,) in conn.execute(_OPEN_XIDS)}


def _still_open(conn: psycopg.Connection[Any], xids: Iterable[str], timeout_s: float) -> str:
    lines = "\n".join(f"  - {who} since {since}" for who, since in open_transactions(conn, xids))
    return (
        "a table can't be copied while transactions are open that are older than the slot or the"
        f" publication's last change; still open after {timeout_s:g} s:\n{lines}\nend them"
        " (pg_terminate_backend(pid), rollback prepared 'gid'), or wait, and run the sync again"
    )


class SnapshotHolder:
    """An exported snapshot, kept alive by an idle transaction on its own connection (a context
    manager).

    ``snapshot`` is what it sees (text of pg_current_snapshot()). ``snapshot_id`` is what readers
    import. ``lsn`` is a WAL position by which every transaction it sees had committed. Raises
    NotPrimary on a standby, whose snapshots omit running transactions.
    """

    connection: psycopg.Connection[Any]
    snapshot: str
    snapshot_id: str
    lsn: Lsn

    def __init__(self, conninfo: str, application_name: str = "waldelta snapshot") -> None:
        self._conninfo, self._application_name = conninfo, application_name

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            session = PLAIN_SESSIONS.session(self._conninfo, self._application_name)
            self.connection = opening.enter_context(session)
            self._open()
            self._session = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Release the snapshot, which no reader uses any more: it holds vacuum back."""
        self._session.close()

    @property
    def pid(self) -> int:
        """The backend that holds the snapshot."""
        return self.connection.info.backend_pid

    def relfilenodes(self, oids: Sequence[int]) -> dict[int, int]:
        """Returns each relation's file as of the snapshot.

        A reader that finds another file would read a rewritten table.
        """
        # Not pg_relation_filenode(): it returns the current file, and a TRUNCATE may come between
        # snapshot and call.
        rows = self._execute(
            "select oid::bigint, relfilenode::bigint from pg_class where oid = any(%s)",
            (list(oids),),
        )
        return dict(rows)

    def active_tasks(self) -> dict[int, int]:
        """Returns the rows read so far by each task that is reading now.

        The tasks' sessions are named by reader_name().
        """
        # Statistics are frozen within a transaction until they are cleared.
        self._execute("select pg_stat_clear_snapshot()")
        pattern = f"^{reader_name(self.pid, 0).removesuffix('0')}([0-9]+)"
        rows = self._execute(_ACTIVE_TASKS, (pattern, pattern))
        return {int(task): row_count for task, row_count in rows}

    def _open(self) -> None:
        (standby,) = self._execute("select pg_is_in_recovery()")[0]
        if standby:
            raise not_primary(self._conninfo)
        # The transaction is idle as long as its readers read, whatever the role's or database's
        # defaults.
        self._execute("select set_config('idle_in_transaction_session_timeout', '0', false)")
        self.connection.execute("begin isolation level repeatable read read only")
        # The first statement takes the snapshot. The insert position read after it is later than
        # all commits it sees.
        self.snapshot, self.snapshot_id, written, segment_bytes = self._execute(
            f"select pg_current_snapshot()::text, pg_export_snapshot(), {WRITTEN_SQL}"
        )[0]
        self.lsn = Lsn.parse(written).of_record(segment_bytes)

    def _execute(
        self, statement: str, params: tuple[Any, ...] | None = None
    ) -> list[tuple[Any, ...]]:
        try:
            return self.connection.execute(statement, params).fetchall()
        except psycopg.OperationalError:
            raise SnapshotLost(
                "the session that holds the snapshot was ended (see the server's log): run again"
            ) from None


@dataclass(frozen=True, slots=True)
class PublicationVersion:
    """Publications, their version whose older transactions have ended, and the timeout for waiting
    again.
    """

    publications: tuple[str, ...]
    version: str
    timeout_s: float


def wait_for_version(
    connection: psycopg.Connection[Any], publications: Sequence[str], timeout_s: float
) -> PublicationVersion:
    """Wait for transactions that may have written under an earlier version of the publications.

    Raises TransactionsStillOpen.
    """
    version = read_version(
        connection, publications
    )  # Read before the wait, so that a later ALTER changes the version.
    wait_for_old_transactions(connection, timeout_s)
    return PublicationVersion(tuple(publications), version, timeout_s)


def wait_for_version_again(
    connection: psycopg.Connection[Any], drained: PublicationVersion
) -> PublicationVersion:
    """Wait again, for a copy that starts again, only when the publications were altered since."""
    if read_version(connection, drained.publications) == drained.version:
        return drained
    return wait_for_version(connection, drained.publications, drained.timeout_s)


def check_version(holder: SnapshotHolder, drained: PublicationVersion) -> None:
    """Raise SnapshotLost when the snapshot sees publications that were altered after the wait."""
    if read_version_as_of(holder, drained) != drained.version:
        raise SnapshotLost("the publications were altered before the snapshot was taken: run again")


def read_version_as_of(
    holder: SnapshotHolder, drained: PublicationVersion, oids: Sequence[int] | None = None
) -> str:
    """Returns read_version() as the snapshot sees it; raises SnapshotLost when its session has
    ended.
    """
    try:
        return read_version(holder.connection, drained.publications, oids)
    except psycopg.Error as err:
        raise SnapshotLost(
            f"the publications can't be read in the snapshot ({without_values(err)}): run again"
        ) from None


def read_version(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    oids: Sequence[int] | None = None,
) -> str:
    """Returns a text that changes with every change of the publications, even after one that was
    reverted.

    With the ``oids`` of tables, it changes only with how these are published; setting publication
    options doesn't count.
    """
    params = {"publications": list(publications), "oids": None if oids is None else list(oids)}
    ((version,),) = connection.execute(_VERSION.encode(), params).fetchall()
    return str(version)


# ALTER PUBLICATION replaces a row, or removes it and adds another one: oid and xmin never come
# back.
_VERSION = """
with publication as (
    select oid, xmin from pg_publication where pubname = any(%(publications)s::name[])
),
named as (
    select w.oid from unnest(%(oids)s::oid[]) as w (oid)
    union
    select a.relid from unnest(%(oids)s::oid[]) as w (oid), pg_partition_ancestors(w.oid) a
)
select md5(coalesce(string_agg(version, ' ' order by version), ''))
from (
    select format('p %%s %%s', oid, case when %(oids)s::oid[] is null then xmin::text end)
      as version
    from publication
    union all
    select format('r %%s %%s', r.oid, r.xmin)
    from pg_publication_rel r
    join publication p on p.oid = r.prpubid
    where %(oids)s::oid[] is null or r.prrelid in (select oid from named)
    union all
    select format('n %%s %%s', n.oid, n.xmin)
    from pg_publication_namespace n
    join publication p on p.oid = n.pnpubid
    where %(oids)s::oid[] is null
       or n.pnnspid in (select relnamespace from pg_class where oid in (select oid from named))
) as v
"""
