"""Drain: lands and consumes the slot in read windows, up to the server's position when the run
began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from waldelta.config import Source
from waldelta.errors import (
    DecodeError,
    PeekTimeout,
    PeekTooLarge,
    SlotUnreadable,
    SourceDiskFull,
    SourceError,
    StandbyAway,
)
from waldelta.lake import check_writable
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.changelog.transaction_counts import Landed
from waldelta.lake.fence import UNFENCED, Fence
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.source_load import SlotMeter, SourceBill, moves, peeks
from waldelta.pipeline.targets.unreadable_messages import record_unreadable, skipped_messages
from waldelta.postgres.server_position import ServerPosition
from waldelta.quantities import counted
from waldelta.slot import slot_position
from waldelta.slot.acknowledge import consume, move_idle_slot
from waldelta.slot.failover import check_followed
from waldelta.slot.read.decode_failure import Reading
from waldelta.slot.read.peek import LANDING_SCHEMA, PeekBound, PeekTimes, most_messages
from waldelta.slot.read.read_window import ReadWindows
from waldelta.slot.recovery import check_unmoved, recover, slot_move
from waldelta.slot.slot import check_received
from waldelta.stages.land.land import land

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# Errors that the server may avoid with a smaller read window.
_SMALLER = (PeekTooLarge, SourceDiskFull, PeekTimeout, StandbyAway)


@dataclass
class Drained:
    """What a drain landed: all of the WAL from ``start`` to ``end``.

    The slot may be up to one WAL file before ``end``.
    """

    start: Lsn
    end: Lsn
    batches: list[Landed] = field(default_factory=list)
    seconds_landing: float = 0.0
    seconds_consuming: float = 0.0
    bill: SourceBill = field(default_factory=SourceBill)
    # The change that PostgreSQL can't decode; everything before it has landed.
    unreadable: SlotUnreadable | None = None

    @property
    def changes(self) -> int:
        """Returns the number of row changes landed."""
        return sum(batch.transactions.changes for batch in self.batches)

    def before(self, later: Drained) -> Drained:
        """Returns what both landed, this one first."""
        bill = SourceBill()
        for drained in (self, later):
            bill.add(drained.bill)
        return Drained(
            self.start,
            later.end,
            [*self.batches, *later.batches],
            self.seconds_landing + later.seconds_landing,
            self.seconds_consuming + later.seconds_consuming,
            bill,
            later.unreadable,
        )

    def check_read(self) -> None:
        """Raise SlotUnreadable when the slot could not be read to the end."""
        if self.unreadable is not None:
            raise self.unreadable


def drain(
    spark: SparkSession,
    job: Job,
    fence: Fence = UNFENCED,
    on_landed: Callable[[Landed], object] = lambda _: None,
) -> Drained:
    """Land and consume everything up to the current end of the server's WAL.

    On a standby that is what it has replayed. The caller has the slot's lock; ``fence`` raises
    LockHeld when it was lost, and is verified before each effect. ``on_landed`` is called with each
    landed and consumed batch, unless nothing is left to land. A change that PostgreSQL can't decode
    ends the drain: see ``unreadable`` of the result. Raises TargetNotWritable before anything is
    read from the slot, as far as the driver's machine can detect it.
    """
    identity = job.read_identity()
    check_writable(job.pipeline.target.root)
    change_log = job.change_log(identity)
    with job.source.connect_slot("drain") as connection:
        server = slot_position(connection, job)
        meter = SlotMeter(connection, identity.slot)
        recovered = recover(connection, job, identity, change_log, server)
        # Created only now, because a change log that was lost must be restored first.
        change_log.create(LANDING_SCHEMA)
        position, batch, identity = recovered.confirmed, recovered.next_batch, recovered.identity
        drained, bites, reading, limit = (
            Drained(position, position),
            ReadWindows(job),
            Reading(job),
            _limit(job),
        )
        skipped = skipped_messages(job)
        while drained.end < server.flush_lsn:
            upto = min(server.flush_lsn, drained.end + bites.next.window_bytes)
            bound = reading.within(
                PeekBound(upto, limit, bites.next.timeout_s, server.next_xid8, position, skipped)
            )
            upto = bound.upto_lsn
            fence.verify()
            check_followed(job, identity)
            restart = meter.restart()
            try:
                landed, times = _land_one(
                    spark,
                    job,
                    reading.source,
                    change_log,
                    bound,
                    batch,
                    drained,
                    partial(check_unmoved, connection, job, identity, position),
                )
            except SourceError as err:
                check_standbys = partial(check_received, connection, identity.slot, upto)
                drained.unreadable = _read_otherwise(
                    err, reading, bound, bites, meter, check_standbys
                )
                if drained.unreadable is None:
                    continue
                check_unmoved(connection, job, identity, position)
                break
            reading.answered()
            is_cut_off = bound.upto_nchanges is not None and times.messages >= bound.upto_nchanges
            # A call that was cut off before any transaction had ended, by discarded messages only,
            # must return more.
            limit = (
                2 * limit
                if limit is not None and is_cut_off and not landed.end_lsn
                else _limit(job)
            )
            bites.answered(times.total_s, is_whole=not is_cut_off and upto < server.flush_lsn)
            meter.add(
                peeks(job.pipeline.source),
                restart,
                Lsn(landed.end_lsn) if is_cut_off else upto,
                times.server_s,
            )
            fence.verify()
            began = time.monotonic()
            if landed.end_lsn:
                meter.add(moves(job.pipeline.source), restart, Lsn(landed.end_lsn))
            position = _consume_one(connection, job, meter, identity, landed, position)
            drained.end = position
            if not is_cut_off:  # All of the read window was read.
                drained.end = max(position, upto)
                if server.must_move(position, upto):
                    meter.add(1, meter.restart(), upto)
                    position = _pass_over(connection, job, identity, upto)
            drained.seconds_consuming += time.monotonic() - began
            batch += 1
            _report_progress(job, drained, server)
            if landed.rows and drained.end < server.flush_lsn:
                on_landed(landed)
        drained.bill = meter.bill(drained.seconds_landing + drained.seconds_consuming)
    return drained


def _read_otherwise(
    err: SourceError,
    reading: Reading,
    bound: PeekBound,
    bites: ReadWindows,
    meter: SlotMeter,
    check_standbys: Callable[[], None],
) -> SlotUnreadable | None:
    """Have the next call read less after one that failed, or return what PostgreSQL can't decode.

    Raises ``err`` otherwise.
    """
    try:
        if not isinstance(err, _SMALLER):
            return reading.refused(err, bound)
    except _SMALLER as slower:
        err = slower
    _take_less(err, bites, meter, check_standbys)
    return None


def _take_less(
    err: SourceError, bites: ReadWindows, meter: SlotMeter, check_standbys: Callable[[], None]
) -> None:
    """Make the next read window smaller after one that the server couldn't answer.

    Raises where no smaller one is left, or a smaller one wouldn't help.
    """
    if isinstance(err, PeekTimeout):
        check_standbys()
        meter.timed_out(bites.next.timeout_s)
        bites.timed_out()
        return
    log.warning("%s", err)
    if isinstance(err, StandbyAway):  # A shorter read may end before replay conflicts with it.
        has_narrowed = bites.ended_by_replay()
    else:
        has_narrowed = bites.lacks_room(is_disk_full=isinstance(err, SourceDiskFull))
    if not has_narrowed:
        raise err


def _land_one(  # noqa: PLR0913, PLR0917 - as land() has them
    spark: SparkSession,
    job: Job,
    source: Source,
    change_log: ChangeLog,
    bound: PeekBound,
    batch: int,
    drained: Drained,
    check_read: Callable[[], None],
) -> tuple[Landed, PeekTimes]:
    began = time.monotonic()
    try:
        times = land(spark, job.source.slot_conninfo, source, bound, change_log, batch, check_read)
        landed = change_log.landed(batch)
    except DecodeError as err:
        raise record_unreadable(job, err.unread, err) if err.unread is not None else err from err
    finally:
        drained.seconds_landing += time.monotonic() - began
    if landed.rows:
        drained.batches.append(landed)
    return landed, times


def _consume_one(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    meter: SlotMeter,
    identity: SlotIdentity,
    landed: Landed,
    position: Lsn,
) -> Lsn:
    """Move the slot past the batch; returns its new position."""
    if not landed.end_lsn:
        return position
    end = Lsn(landed.end_lsn)
    move = slot_move(identity, job.run_id, end.value, landed.batch, landed.rows)
    consume(
        connection,
        job.pipeline.source,
        job.ledger,
        move,
        landed.transactions,
        lambda: meter.timed(job.source.connect_slot("count")),
    )
    return end


def _pass_over(
    connection: psycopg.Connection[tuple[Any, ...]], job: Job, identity: SlotIdentity, upto: Lsn
) -> Lsn:
    """Move the slot over WAL that was read and has nothing to land; returns its new position."""
    move_idle_slot(
        connection,
        job.pipeline.source.slot,
        job.ledger,
        slot_move(identity, job.run_id, upto.value),
    )
    return upto


def _limit(job: Job) -> int | None:
    return most_messages(job.pipeline.source, job.pipeline.batch.max_changes)


def _report_progress(job: Job, drained: Drained, server: ServerPosition) -> None:
    seconds = max(drained.seconds_landing + drained.seconds_consuming, 1e-3)
    done, left = drained.end - drained.start, max(0, server.flush_lsn - drained.end)
    log.info(
        "slot %s at %s: %s landed, %.0f/s, %.1f MB of WAL left, about %.0f s",
        job.pipeline.source.slot,
        drained.end,
        counted(drained.changes, "change"),
        drained.changes / seconds,
        left / 1e6,
        left * seconds / max(done, 1),
    )
