"""Stage land: lands what the slot has up to now in the change log, and records the slot's state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from waldelta.errors import SlotUnreadable, WaldeltaError
from waldelta.lake import READ_FAILURES, Fence
from waldelta.lake.changelog import Landed
from waldelta.lake.ledger import now
from waldelta.lsn import Lsn
from waldelta.pipeline import AdvisoryLock, Job, RunResult, StageResult, slot_lock
from waldelta.postgres import read_oldest_xid
from waldelta.quantities import counted
from waldelta.slot.gaps import gaps_recorded
from waldelta.slot.health import critical, log_warnings, reading, slot_warnings
from waldelta.slot.read.peek import end_old_backends
from waldelta.slot.recovery import never_compared
from waldelta.slot.standby import (
    check_slot,
    check_system,
    committed_upto,
    slot_position,
    standby_warnings,
)
from waldelta.spark import Runner
from waldelta.stages.setup.new_tables import adopt_or_report

if TYPE_CHECKING:
    from waldelta.stages.land.drain import Drained

log = logging.getLogger(__name__)


def land_to_now(
    runner: Runner,
    job: Job,
    result: RunResult,
    stage: StageResult,
    on_landed: Callable[[Landed], object],
) -> None:
    """Land and consume up to the server's current position; add the state of slot and server.

    New tables are adopted before that, so that this run lands their first changes.
    ``on_landed`` is called with each landed batch. If PostgreSQL can't decode a change,
    ``result.landed.unreadable`` has the error; everything before that change has landed. The result
    includes what earlier attempts at the run landed, also if this one fails.
    """
    from waldelta.stages.land.drain import drain

    landed = result.landed
    landed.unreadable = None
    try:
        _land(job, result, stage, partial(drain, runner, job), on_landed)
    except Exception:  # Attempts are counted after any error, also after one of Spark.
        with suppress(WaldeltaError, *READ_FAILURES):
            _add_attempts(job, result)
        raise
    if job.again:
        _add_attempts(job, result)


def _add_attempts(job: Job, result: RunResult) -> None:
    """Count what all attempts at the run landed, instead of this one alone."""
    identity = job.read_identity()
    attempts = job.ledger.landed_by(identity.slot, identity.incarnation, job.run_id)
    if attempts is None:
        return
    log_of_changes = job.change_log(identity)
    landed = result.landed
    # A batch that was recovered wasn't counted when the slot was moved past it.
    landed.changes = sum(
        log_of_changes.landed(batch).transactions.changes if changes is None else changes
        for batch, changes in attempts.changes.items()
    )
    landed.start_lsn = str(Lsn(attempts.start_lsn))
    landed.end_lsn = landed.end_lsn or str(Lsn(attempts.end_lsn))


def _land(
    job: Job,
    result: RunResult,
    stage: StageResult,
    drain: Callable[[Fence, Callable[[Landed], object]], Drained],
    on_landed: Callable[[Landed], object],
) -> None:
    landed = result.landed
    try:
        with gaps_recorded(job), slot_lock(job) as lock:
            landed_as_of = _add_health(job, lock, result)
            lock.verify()  # The next statements may end another run's reader, and move the slot.
            drained = drain(lock, on_landed)
            drained.check_read()
    except SlotUnreadable as err:
        # Changes that landed before the error are applied first; the apply stage then raises the
        # error.
        log.error("%s", err)
        landed.unreadable, landed.as_of, landed_as_of = str(err), None, 0
    landed.landed_as_of = landed_as_of
    result.add_drained(drained)
    landed.start_lsn, landed.end_lsn = str(drained.start), str(drained.end)
    stage.detail = (
        f"{counted(drained.changes, 'change')} in"
        f" {counted(len(drained.batches), 'batch', 'batches')}, landed in"
        f" {drained.seconds_landing:.1f} s, consumed in {drained.seconds_consuming:.1f} s"
    )


def _add_health(job: Job, lock: AdvisoryLock, result: RunResult) -> int:
    """Add the state of slot and server, and new tables, to the result; returns the oldest running
    transaction.
    """
    with (
        job.source.connect("health") as primary,
        job.source.connect_slot("health", primary) as connection,
    ):
        at = now()
        # The servers are compared first: on a standby or another cluster the slot's state means
        # nothing.
        server = slot_position(connection, job, primary)
        identity = job.read_identity()
        check_system(identity, server)
        oldest_xid = read_oldest_xid(connection)
        lock.verify()
        end_old_backends(connection, job.pipeline.source.slot)
        new = adopt_or_report(primary, job)
        slot = check_slot(connection, job)
        elsewhere = standby_warnings(primary, connection, job, server)
        uncompared = never_compared(connection, job, identity)
        result.landed.as_of = committed_upto(connection, server, at).isoformat()
    result.warn(new.warnings)
    result.targets.new_tables = list(new.reported)
    result.landed.slot_before = reading(slot, server.lag_of(slot.confirmed_flush_lsn), at)
    texts = slot_warnings(slot, job.pipeline.slot_limits, job.ledger.last_move(), now())
    texts = [*texts, *elsewhere]
    result.landed.slot_critical = critical(texts)
    result.warnings += [f"when the run began, {text}" for text in log_warnings(texts)] + uncompared
    return oldest_xid
