"""Land through: continues landing until everything that a snapshot sees is in the change log.

A snapshot delays vacuum on the whole server. So a backlog is landed before it is taken, and only
the rest while it is open.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tenacity

from waldelta.errors import LockHeld, SnapshotLost, StandbyAway
from waldelta.lsn import Lsn
from waldelta.pipeline import AdvisoryLock, Job, slot_lock
from waldelta.spark import Runner
from waldelta.stages.land.drain import Drained, drain

FLUSH_TIMEOUT_S = 60.0
SLOT_LOCK_TIMEOUT_S = 30.0


def land_backlog(runner: Runner, job: Job) -> Drained:
    """Land what is pending in the slot.

    Raises SlotUnreadable, after landing what precedes it, when PostgreSQL can't decode a change.
    """
    with _slot_lock(job) as lock:
        return _drain(runner, job, lock)


def land_through(runner: Runner, job: Job, needed: Lsn) -> Drained:
    """Land until the change log has everything up to ``needed``, the last position a snapshot sees.

    Raises SlotUnreadable as land_backlog() does.
    """
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    with _slot_lock(job) as lock:
        drained = _drain(runner, job, lock)
        if drained.end < needed:
            _have_wal_flushed(job)
        while drained.end < needed:
            # With synchronous_commit = off a commit is visible before it is flushed, and only
            # flushed WAL is decoded; on a standby, only replayed WAL.
            if time.monotonic() > deadline:
                if job.pipeline.source.read_from is not None:
                    raise StandbyAway(
                        f"the standby didn't replay WAL up to {needed} within {FLUSH_TIMEOUT_S:g}"
                        " s: run again"
                    )
                raise SnapshotLost(
                    f"WAL up to {needed} wasn't flushed within {FLUSH_TIMEOUT_S:g} s"
                )
            time.sleep(0.2)
            drained = drained.before(_drain(runner, job, lock))
    return drained


def _have_wal_flushed(job: Job) -> None:
    """Have the primary flush what it has written so far.

    On a quiet server the record of a LOCK TABLE stays in the WAL buffers until another transaction
    ends. The end of a transaction with an id makes PostgreSQL's WAL writer flush within
    wal_writer_delay.
    """
    with job.source.connect("flush") as connection:
        connection.execute("select pg_current_xact_id()")


def _drain(runner: Runner, job: Job, lock: AdvisoryLock) -> Drained:
    drained = drain(runner, job, lock)
    drained.check_read()
    return drained


@contextmanager
def _slot_lock(job: Job) -> Iterator[AdvisoryLock]:
    """Acquire the slot's lock, which an idle check or maintenance may have briefly."""
    patient = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(LockHeld),
        stop=tenacity.stop_after_delay(SLOT_LOCK_TIMEOUT_S),
        wait=tenacity.wait_fixed(0.5),
        reraise=True,
    )
    with ExitStack() as stack:
        yield patient(lambda: stack.enter_context(slot_lock(job)))
