"""Advisory locks on the source: one run at a time per slot, per target, per lake's table of logical
messages, and per keyed session of Spark Connect.

Correctness rests on these locks: Airflow's max_active_runs doesn't cover backfills, and a pool only
helps scheduling. A lock has a database session to itself. The server releases it when its
holder ends, whatever ended the holder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import psycopg
import tenacity

from waldelta.errors import LockHeld, WaldeltaError
from waldelta.pipeline.job import Job
from waldelta.postgres import NAME_BYTES, Connection, TableId, connect, named_loss


@dataclass(frozen=True, slots=True)
class LockName:
    """The name of a lock, and the 64-bit key by which PostgreSQL knows it.

    >>> LockName("slot flights_cdc").key == LockName("slot flights_cdc").key
    True
    """

    text: str

    @property
    def key(self) -> int:
        """A signed 64-bit hash that is the same in every process and on every machine."""
        digest = hashlib.sha256(f"waldelta {self.text}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


def slot_lock_name(slot: str) -> LockName:
    """The lock that a run holds to land changes or to move the slot; so do setup and teardown.

    Slot names are unique on a server.
    """
    return LockName(f"slot {slot}")


def target_lock_name(root: str, table: TableId) -> LockName:
    """The lock that covers apply, sync, replay and repair of one target."""
    return LockName(f"target {root.rstrip('/')} {table}")


@dataclass(slots=True)
class AdvisoryLock:
    """A lock that this process holds: the fence of effects that only the holder may have."""

    name: LockName
    connection: Connection

    @property
    def pid(self) -> int:
        """The backend that holds the lock."""
        return self.connection.info.backend_pid

    def verify(self) -> None:
        """Raise LockHeld when the lock's connection was lost, because another run may hold the lock
        now.
        """
        try:
            holder = self.connection.execute(_HOLDERS, _halves(self.name)).fetchone()
        except psycopg.Error as err:
            raise LockHeld(
                f"lock {self.name.text!r} was lost with its connection: run again"
            ) from err
        if holder is None or holder[0] != self.pid:
            raise LockHeld(f"lock {self.name.text!r} is no longer held by this run: run again")


class HeldLocks(list[AdvisoryLock]):
    """Several locks as one fence."""

    def verify(self) -> None:
        """Raise LockHeld when one of the locks was lost."""
        for lock in self:
            lock.verify()


def slot_lock(job: Job) -> AbstractContextManager[AdvisoryLock]:
    """Hold the lock of the job's slot; raises LockHeld at once when another run holds it."""
    slot = job.pipeline.source.slot
    return advisory_lock(job.source.conninfo, slot_lock_name(slot), f"waldelta lock {slot}")


@contextmanager
def target_lock(
    job: Job, table: TableId | str, sessions: LockSessions | None = None
) -> Iterator[AdvisoryLock]:
    """Hold the lock of one of the job's targets; raises LockHeld at once when another run holds it.

    A caller that locks many targets one after the other passes its ``sessions``.
    """
    table = TableId.parse(table) if isinstance(table, str) else table
    name = target_lock_name(job.pipeline.target.root, table)
    opened = LockSessions(job.source.conninfo) if sessions is None else nullcontext(sessions)
    with opened as session, session.hold(name, f"waldelta lock {table}") as lock:
        yield lock


def messages_lock(job: Job) -> AbstractContextManager[AdvisoryLock]:
    """Hold the lock that covers writing the job's table of logical messages.

    Raises LockHeld at once when another run holds it.
    """
    name = LockName(f"messages {job.pipeline.target.root.rstrip('/')}")
    application_name = f"waldelta lock messages {job.pipeline.source.slot}"
    return advisory_lock(job.source.conninfo, name, application_name)


def session_lock(job: Job, session_key: str) -> AbstractContextManager[AdvisoryLock]:
    """Hold the lock that a caller needs to use a Spark Connect session of a fixed key.

    Raises LockHeld at once when another run holds it.
    """
    name = LockName(f"session {session_key}")
    return advisory_lock(job.source.conninfo, name, f"waldelta session {job.pipeline.source.slot}")


@contextmanager
def advisory_lock(conninfo: str, name: LockName, application_name: str) -> Iterator[AdvisoryLock]:
    """Hold a lock on a connection of its own; raises LockHeld with the holder's name."""
    with LockSessions(conninfo) as sessions, sessions.hold(name, application_name) as lock:
        yield lock


class LockSessions(AbstractContextManager["LockSessions"]):
    """Sessions that hold one lock after the other; threads may share them.

    With many small targets, a backend for each lock would be most of what a run costs the source.

    A session never holds two locks at once: PostgreSQL grants a session a lock that it already
    holds, so a run would not be refused its own target. A lost session is replaced. Leaving the
    ``with`` block closes the idle sessions.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._idle: list[Connection] = []

    @contextmanager
    def hold(self, name: LockName, application_name: str) -> Iterator[AdvisoryLock]:
        """Hold a lock in a session of this application name.

        Raises LockHeld with the name of the holder and the start of its session.
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
        """Returns a session, and whether it got the lock."""
        while True:
            try:
                idle = self._idle.pop()
            except IndexError:
                return _try_lock(connect(self._conninfo, application_name), name, application_name)
            with suppress(
                psycopg.Error
            ):  # The server or a firewall may have ended the session while it was idle.
                return _try_lock(idle, name, application_name)

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()


def _try_lock(
    connection: Connection, name: LockName, application_name: str
) -> tuple[Connection, bool]:
    try:
        row = connection.execute(_TRY, (application_name[:NAME_BYTES], name.key)).fetchone()
    except BaseException:
        connection.close()
        raise
    return connection, row is not None and bool(row[1])


def _release(connection: Connection, name: LockName) -> bool:
    """Release a lock; returns whether the session still held it (a lost connection has lost it)."""
    # Closing alone ends the backend only some time later, and the run that follows at once would
    # find the lock taken.
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
# Only this query joins pg_stat_activity: planning that view's tables alone takes a server longer
# than finding the lock.
_HOLDER = f"""
select l.pid, a.application_name, a.backend_start at time zone 'UTC'
from ({_HOLDERS}) l
left join pg_stat_activity a on a.pid = l.pid
"""  # noqa: S608 - no value in it


# --- waits for locks of other runs while holding none: a run, or one of its stages, begins again

T = TypeVar("T")
log = logging.getLogger(__name__)

_PAUSE_S: Final = 5.0


def waiting_for_locks(
    seconds: float, attempt: Callable[[], T], note: Callable[[str], None] = lambda _: None
) -> T:
    """Returns the result of an attempt, which begins again while only locks of other runs stop it.

    The session of a waiting attempt is closed, so it holds back neither vacuum nor a new slot, and
    it has no lock for which another run may wait. After ``seconds`` the error is raised. ``note``
    is called with each reason to wait.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        err = state.outcome.exception() if state.outcome is not None else None
        remaining = seconds - (state.seconds_since_start or 0.0)
        log.info("waiting for another run, for at most %.0f s more: %s", remaining, err)
        note(str(err))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_of_locks),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_fixed(_PAUSE_S),
        before_sleep=before_sleep,
        reraise=True,
    )
    return retrying(attempt)


def is_of_locks(err: BaseException) -> bool:
    """Returns whether locks of other runs are the only reason of an error."""
    if isinstance(err, LockHeld):
        return True
    causes = err.causes if isinstance(err, WaldeltaError) else ()
    return bool(causes) and all(map(is_of_locks, causes))
