"""Advisory locks on the source: one run at a time per slot, one per target, one for the lake's
table of logical messages, and one per keyed session of Spark Connect.

Airflow's max_active_runs doesn't cover backfills and a pool only helps scheduling, so correctness
rests on these. While it is held, a lock has a session to itself: it is gone when its holder is,
whatever killed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psycopg

from waldelta.errors import LockHeld
from waldelta.postgres import Connection, TableId, connect
from waldelta.postgres.connection import named_loss

if TYPE_CHECKING:
    from waldelta.pipeline.job import Job


@dataclass(frozen=True, slots=True)
class LockName:
    """What is locked, and the 64-bit key that PostgreSQL knows it by.

    >>> LockName("slot flights_cdc").key == LockName("slot flights_cdc").key
    True
    """

    text: str

    @property
    def key(self) -> int:
        """A signed 64-bit hash that is the same in every process and on every machine."""
        digest = hashlib.sha256(f"waldelta {self.text}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    @property
    def fence(self) -> str:
        """The same key as text, for names derived from the lock."""
        return f"{self.key & 0xFFFFFFFFFFFFFFFF:016x}"


def slot_lock_name(slot: str) -> LockName:
    """The lock that covers landing and consuming; slot names are unique on a server."""
    return LockName(f"slot {slot}")


def target_lock_name(root: str, table: TableId) -> LockName:
    """The lock that covers apply, sync, replay and repair of one target."""
    return LockName(f"target {root.rstrip('/')} {table}")


def messages_lock_name(root: str) -> LockName:
    """The lock that covers writing the table of logical messages."""
    return LockName(f"messages {root.rstrip('/')}")


def session_lock_name(session_key: str) -> LockName:
    """The lock that whoever reaches a Spark Connect session of a fixed key must hold."""
    return LockName(f"session {session_key}")


@dataclass(slots=True)
class AdvisoryLock:
    """A lock that is held; ``check()`` before an effect that only its holder may have."""

    name: LockName
    connection: Connection

    @property
    def pid(self) -> int:
        """The backend that holds the lock."""
        return self.connection.info.backend_pid

    def check(self) -> None:
        """Raises LockHeld when the lock's connection was lost, so another run may have it now."""
        try:
            holder = self.connection.execute(_HOLDERS, _halves(self.name)).fetchone()
        except psycopg.Error as err:
            raise LockHeld(
                f"lock {self.name.text!r} was lost with its connection: run again"
            ) from err
        if holder is None or holder[0] != self.pid:
            raise LockHeld(f"lock {self.name.text!r} is no longer held by this run: run again")


@contextmanager
def slot_lock(job: Job) -> Iterator[AdvisoryLock]:
    """Hold the lock of the job's slot; raises LockHeld at once when another run has it."""
    slot = job.pipeline.source.slot
    with advisory_lock(job.conninfo, slot_lock_name(slot), f"waldelta lock {slot}") as lock:
        yield lock


@contextmanager
def target_lock(
    job: Job, table: TableId | str, sessions: LockSessions | None = None
) -> Iterator[AdvisoryLock]:
    """Hold the lock of one of the job's targets; raises LockHeld at once when another run has it.

    ``sessions`` are those of whoever locks many targets one after the other.
    """
    table = TableId.parse(table) if isinstance(table, str) else table
    name = target_lock_name(job.pipeline.target.root, table)
    opened = LockSessions(job.conninfo) if sessions is None else nullcontext(sessions)
    with opened as own, own.hold(name, f"waldelta lock {table}") as lock:
        yield lock


@contextmanager
def messages_lock(job: Job) -> Iterator[AdvisoryLock]:
    """Hold the lock of the job's table of logical messages; raises LockHeld at once when another
    run has it.
    """
    name = messages_lock_name(job.pipeline.target.root)
    with advisory_lock(
        job.conninfo, name, f"waldelta lock messages {job.pipeline.source.slot}"[:63]
    ) as lock:
        yield lock


@contextmanager
def session_lock(job: Job, session_key: str) -> Iterator[AdvisoryLock]:
    """Hold the lock of a Connect session; raises LockHeld at once when another run has it."""
    name = f"waldelta session {job.pipeline.source.slot}"
    with advisory_lock(job.conninfo, session_lock_name(session_key), name) as lock:
        yield lock


@contextmanager
def advisory_lock(conninfo: str, name: LockName, application_name: str) -> Iterator[AdvisoryLock]:
    """Hold a lock on a connection of its own; raises LockHeld that names the holder."""
    with LockSessions(conninfo) as sessions, sessions.hold(name, application_name) as lock:
        yield lock


class LockSessions:
    """Sessions that hold one lock after the other: with many small targets, a backend for each is
    most of what a run costs the source.

    Never two at once, since PostgreSQL gives a session again what it holds: a run would not be
    refused its own target. One that was lost is replaced. Those that hold nothing are closed with
    the ``with`` that this is in.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._idle: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def hold(self, name: LockName, application_name: str) -> Iterator[AdvisoryLock]:
        """Hold a lock in a session of that name; raises LockHeld that names the holder, and since
        when its session is there.
        """
        with named_loss(self._conninfo):
            connection, is_held = self._try(name, application_name)
            if not is_held:
                try:
                    raise LockHeld(_holder(connection, name))
                finally:
                    self._idle.append(connection)
        try:
            yield AdvisoryLock(name, connection)
        finally:
            if _release(connection, name):
                self._idle.append(connection)
            else:
                connection.close()

    def _try(self, name: LockName, application_name: str) -> tuple[Connection, bool]:
        """A session, and whether it has the lock now."""
        while self._idle:
            with suppress(
                psycopg.Error
            ):  # a server or a firewall may have ended it while it was idle
                return _tried(self._idle.pop(), name, application_name)
        return _tried(connect(self._conninfo, application_name), name, application_name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._idle:
            self._idle.pop().close()


def _tried(
    connection: Connection, name: LockName, application_name: str
) -> tuple[Connection, bool]:
    try:
        row = connection.execute(_TRY, (application_name[:63], name.key)).fetchone()
    except BaseException:
        connection.close()
        raise
    return connection, row is not None and bool(row[1])


def _release(connection: Connection, name: LockName) -> bool:
    """Give a lock back; whether it was there until now: a lost connection has lost it too."""
    # Closing alone ends the backend only some time later, and the run that follows at once would
    # find the lock held.
    try:
        row = connection.execute("select pg_advisory_unlock(%s)", (name.key,)).fetchone()
    except psycopg.Error:
        return False
    return row is not None and bool(row[0])


def _halves(name: LockName) -> dict[str, int]:
    unsigned = name.key & 0xFFFFFFFFFFFFFFFF
    return {"high": unsigned >> 32, "low": unsigned & 0xFFFFFFFF}


def _holder(connection: Connection, name: LockName) -> str:
    holder = connection.execute(_HOLDER, _halves(name)).fetchone()
    if holder is None:
        return f"lock {name.text!r} was held by a run that has just ended: run again"
    pid, application_name, started = holder
    since = f" since {started:%Y-%m-%d %H:%M:%S} UTC" if started else ""
    return (
        f"lock {name.text!r} is held by another run, pid {pid}"
        f" ({application_name or 'no name'}){since}: wait until it ends, or end that run"
    )


_TRY = "select set_config('application_name', %s, false), pg_try_advisory_lock(%s)"

# A bigint key is split into classid (high half) and objid (low half), with objsubid 1.
_HOLDERS = """
select l.pid
from pg_locks l
where l.locktype = 'advisory'
  and l.granted
  and l.objsubid = 1
  and l.classid = %(high)s::oid
  and l.objid = %(low)s::oid
  and l.database = (select oid from pg_database where datname = current_database())
"""
# Who that is: of the view's tables planning alone takes a server longer than looking for the lock.
_HOLDER = f"""
select l.pid, a.application_name, a.backend_start at time zone 'UTC'
from ({_HOLDERS}) l
left join pg_stat_activity a on a.pid = l.pid
"""  # noqa: S608 - no value in it
