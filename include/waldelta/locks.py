"""Advisory locks on the source: one run at a time per slot, one per target, one for the lake's table of logical messages, and one per
keyed session of Spark Connect.

Airflow's max_active_runs doesn't cover backfills and a pool only helps scheduling, so correctness rests on these.
A lock lives on a connection of its own: it is gone when its holder is, whatever killed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from waldelta.catalog import TableId
from waldelta.connection import connect, named_loss
from waldelta.errors import LockHeld

if TYPE_CHECKING:
    from waldelta.job import Job


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
    connection: psycopg.Connection[tuple[Any, ...]]

    @property
    def pid(self) -> int:
        """The backend that holds the lock."""
        return self.connection.info.backend_pid

    def check(self) -> None:
        """Raises LockHeld when the lock's connection was lost, so another run may have it now."""
        try:
            holder = self.connection.execute(_HOLDER, _halves(self.name)).fetchone()
        except psycopg.Error as err:
            raise LockHeld(f"lock {self.name.text!r} was lost with its connection: run again") from err
        if holder is None or holder[0] != self.pid:
            raise LockHeld(f"lock {self.name.text!r} is no longer held by this run: run again")


@contextmanager
def slot_lock(job: Job) -> Iterator[AdvisoryLock]:
    """Hold the lock of the job's slot; raises LockHeld at once when another run has it."""
    slot = job.pipeline.source.slot
    with advisory_lock(job.conninfo, slot_lock_name(slot), f"waldelta lock {slot}") as lock:
        yield lock


@contextmanager
def target_lock(job: Job, table: TableId | str) -> Iterator[AdvisoryLock]:
    """Hold the lock of one of the job's targets; raises LockHeld at once when another run has it."""
    table = TableId.parse(table) if isinstance(table, str) else table
    name = target_lock_name(job.pipeline.target.root, table)
    with advisory_lock(job.conninfo, name, f"waldelta lock {table}") as lock:
        yield lock


@contextmanager
def messages_lock(job: Job) -> Iterator[AdvisoryLock]:
    """Hold the lock of the job's table of logical messages; raises LockHeld at once when another run has it."""
    name = messages_lock_name(job.pipeline.target.root)
    with advisory_lock(job.conninfo, name, f"waldelta lock messages {job.pipeline.source.slot}"[:63]) as lock:
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
    connection = connect(conninfo, application_name)
    try:
        with named_loss(conninfo):
            row = connection.execute("select pg_try_advisory_lock(%s)", (name.key,)).fetchone()
            if row is None or not row[0]:
                raise LockHeld(_held_by(connection, name))
        try:
            yield AdvisoryLock(name, connection)
        finally:
            _release(connection, name)
    finally:
        connection.close()


def _release(connection: psycopg.Connection[tuple[Any, ...]], name: LockName) -> None:
    # Closing alone ends the backend only some time later, and the run that follows at once would find the lock held.
    with suppress(psycopg.Error):  # a lost connection has lost the lock too
        connection.execute("select pg_advisory_unlock(%s)", (name.key,))


def _halves(name: LockName) -> dict[str, int]:
    unsigned = name.key & 0xFFFFFFFFFFFFFFFF
    return {"high": unsigned >> 32, "low": unsigned & 0xFFFFFFFF}


def _held_by(connection: psycopg.Connection[tuple[Any, ...]], name: LockName) -> str:
    holder = connection.execute(_HOLDER, _halves(name)).fetchone()
    if holder is None:
        return f"lock {name.text!r} was held by a run that has just ended: run again"
    pid, application_name, started = holder
    since = f" since {started:%Y-%m-%d %H:%M:%S} UTC" if started else ""
    return (
        f"lock {name.text!r} is held by another run, pid {pid} ({application_name or 'no name'}){since}: "
        "wait until it ends, or end that run"
    )


# A bigint key is split into classid (high half) and objid (low half), with objsubid 1.
_HOLDER = """
select l.pid, a.application_name, a.backend_start at time zone 'UTC'
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory'
  and l.granted
  and l.objsubid = 1
  and l.classid = %(high)s::oid
  and l.objid = %(low)s::oid
  and l.database = (select oid from pg_database where datname = current_database())
"""
