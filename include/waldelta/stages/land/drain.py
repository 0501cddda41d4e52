"""Drain: lands and consumes the slot in read windows, up to the server's position when the run
began.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import tenacity

from waldelta.config import Source
from waldelta.errors import (
    DecodeError,
    LockHeld,
    PeekTimeout,
    PeekTooLarge,
    SlotUnreadable,
    SnapshotLost,
    SourceDiskFull,
    SourceError,
    StandbyAway,
)
from waldelta.failpoints import fault_point
from waldelta.lake import UNFENCED, WRITE_FAILURES, Fence, check_writable
from waldelta.lake.changelog import ChangeLog, Landed
from waldelta.lake.changelog.batch_file import BatchFile
from waldelta.lake.write_errors import change_log_write_error
from waldelta.lsn import Lsn
from waldelta.pgoutput.messages import UnreadMessage
from waldelta.pipeline import AdvisoryLock, Job, SourceLoad, named_error, slot_lock
from waldelta.pipeline.source import SlotMeter, moves, peeks
from waldelta.pipeline.targets import record_unreadable
from waldelta.pipeline.targets.unreadable_messages import skipped_messages
from waldelta.postgres import ServerPosition
from waldelta.quantities import counted, size
from waldelta.slot.acknowledge import consume, move_idle_slot
from waldelta.slot.read.decode_failure import Reading
from waldelta.slot.read.peek import (
    LANDING_SCHEMA,
    PeekBound,
    PeekTimes,
    ReadRequest,
    most_messages,
    peek,
)
from waldelta.slot.read.read_window import ReadWindows
from waldelta.slot.recovery import check_unmoved, recover, slot_move
from waldelta.slot.slot import check_received
from waldelta.slot.standby import check_followed, slot_position
from waldelta.spark import Runner
from waldelta.spark.runner import Answer, Task
from waldelta.spark.runner import error_text as task_error

log = logging.getLogger(__name__)

# Errors that the server may avoid with a smaller read window.
_SMALLER = (PeekTooLarge, SourceDiskFull, PeekTimeout, StandbyAway)


@dataclass
class Drained:
    """The result of a drain, which lands all of the WAL from ``start`` to ``end``.

    Afterwards the slot may be up to one WAL file before ``end``.
    """

    start: Lsn
    end: Lsn
    batches: list[Landed] = field(default_factory=list)
    seconds_landing: float = 0.0
    seconds_consuming: float = 0.0
    load: SourceLoad = field(default_factory=SourceLoad)
    # The change that PostgreSQL can't decode; everything before it has landed.
    unreadable: SlotUnreadable | None = None

    @property
    def changes(self) -> int:
        """Returns the number of row changes landed."""
        return sum(batch.transactions.changes for batch in self.batches)

    def before(self, later: Drained) -> Drained:
        """Returns the sum of two drains, of which this one was first."""
        load = SourceLoad()
        for drained in (self, later):
            load.add(drained.load)
        return Drained(
            self.start,
            later.end,
            [*self.batches, *later.batches],
            self.seconds_landing + later.seconds_landing,
            self.seconds_consuming + later.seconds_consuming,
            load,
            later.unreadable,
        )

    def check_read(self) -> None:
        """Raise SlotUnreadable when the slot could not be read to the end."""
        if self.unreadable is not None:
            raise self.unreadable


def drain(
    runner: Runner,
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
    check_writable(job.pipeline.target.root)
    with job.source.connect_slot("drain") as connection:
        slot = _SlotDrain(runner, job, connection, fence)
        drained = slot.drained
        while slot.has_more and drained.unreadable is None:
            landed = slot.land_next()
            if landed is not None and landed.rows and slot.has_more:
                on_landed(landed)
        drained.load = slot.meter.load(drained.seconds_landing + drained.seconds_consuming)
    return drained


class _SlotDrain:
    """Lands the slot's read windows one after the other."""

    def __init__(
        self,
        runner: Runner,
        job: Job,
        connection: psycopg.Connection[tuple[Any, ...]],
        fence: Fence,
    ) -> None:
        self._runner, self._job, self._connection = runner, job, connection
        self._fence = fence
        identity = job.read_identity()
        self._change_log = job.change_log(identity)
        self._server = slot_position(connection, job)
        self.meter = SlotMeter(connection, identity.slot)
        recovered = recover(connection, job, identity, self._change_log, self._server)
        # Created only now, because a change log that was lost must be restored first.
        self._change_log.create(LANDING_SCHEMA)
        self._position, self._batch = recovered.confirmed, recovered.next_batch
        self._identity = recovered.identity
        self.drained = Drained(self._position, self._position)
        self._windows, self._reading = ReadWindows(job), Reading(job)
        self._limit = self._most_messages
        self._skipped = skipped_messages(job)

    @property
    def has_more(self) -> bool:
        """Returns whether the server has WAL that wasn't read."""
        return self.drained.end < self._server.flush_lsn

    @property
    def _most_messages(self) -> int | None:
        return most_messages(self._job.pipeline.source, self._job.pipeline.batch.max_changes)

    def land_next(self) -> Landed | None:
        """Land and consume the next read window; returns None when PostgreSQL couldn't answer."""
        bound = self._next_bound()
        self._fence.verify()
        check_followed(self._job, self._identity)
        restart = self.meter.restart()
        try:
            landed, times = self._land(bound)
        except SourceError as err:
            self.drained.unreadable = self._read_otherwise(err, bound)
            if self.drained.unreadable is not None:
                self._check_unmoved()
            return None
        self._reading.answered()
        is_cut_off = bound.upto_nchanges is not None and times.messages >= bound.upto_nchanges
        # A call that was cut off before any transaction had ended, by discarded messages only,
        # must return more.
        if self._limit is not None and is_cut_off and not landed.end_lsn:
            self._limit *= 2
        else:
            self._limit = self._most_messages
        is_whole = not is_cut_off and bound.upto_lsn < self._server.flush_lsn
        self._windows.answered(times.total_s, is_whole=is_whole)
        read_upto = Lsn(landed.end_lsn) if is_cut_off else bound.upto_lsn
        self.meter.add(peeks(self._job.pipeline.source), restart, read_upto, times.server_s)
        self._fence.verify()
        began = time.monotonic()
        if landed.end_lsn:
            self.meter.add(moves(self._job.pipeline.source), restart, Lsn(landed.end_lsn))
            self._consume(landed)
        self.drained.end = self._position
        if not is_cut_off:
            self._finish_window(bound.upto_lsn)
        self.drained.seconds_consuming += time.monotonic() - began
        self._batch += 1
        _report_progress(self._job, self.drained, self._server)
        return landed

    def _next_bound(self) -> PeekBound:
        window = self._windows.next
        upto = min(self._server.flush_lsn, self.drained.end + window.window_bytes)
        return self._reading.within(
            PeekBound(
                upto,
                self._limit,
                window.timeout_s,
                self._server.next_xid8,
                self._position,
                self._skipped,
            )
        )

    def _check_unmoved(self) -> None:
        check_unmoved(self._connection, self._job, self._identity, self._position)

    def _land(self, bound: PeekBound) -> tuple[Landed, PeekTimes]:
        job, change_log, batch, drained = self._job, self._change_log, self._batch, self.drained
        began, source = time.monotonic(), self._reading.source
        try:
            times = land(
                self._runner,
                job.source.slot_conninfo,
                source,
                bound,
                change_log,
                batch,
                self._check_unmoved,
            )
            landed = change_log.landed(batch)
        except DecodeError as err:
            raise (
                record_unreadable(job, err.unread, err) if err.unread is not None else err
            ) from err
        finally:
            drained.seconds_landing += time.monotonic() - began
        if landed.rows:
            drained.batches.append(landed)
        return landed, times

    def _read_otherwise(self, err: SourceError, bound: PeekBound) -> SlotUnreadable | None:
        """Have the next call read less after one that failed, or return what PostgreSQL can't
        decode.

        Raises ``err`` otherwise.
        """
        try:
            if not isinstance(err, _SMALLER):
                return self._reading.refused(err, bound)
        except _SMALLER as slower:
            err = slower
        self._take_less(err, bound)
        return None

    def _take_less(self, err: SourceError, bound: PeekBound) -> None:
        """Make the next read window smaller after one that the server couldn't answer.

        Raises where no smaller one is left, or a smaller one wouldn't help.
        """
        if isinstance(err, PeekTimeout):
            check_received(self._connection, self._identity.slot, bound.upto_lsn)
            self.meter.timed_out(self._windows.next.timeout_s)
            self._windows.timed_out()
            return
        log.warning("%s", err)
        if isinstance(err, StandbyAway):  # A shorter read may end before replay conflicts with it.
            has_narrowed = self._windows.ended_by_replay()
        else:
            has_narrowed = self._windows.lacks_room(is_disk_full=isinstance(err, SourceDiskFull))
        if not has_narrowed:
            raise err

    def _consume(self, landed: Landed) -> None:
        """Move the slot past the batch."""
        end, job = Lsn(landed.end_lsn), self._job
        consume(
            self._connection,
            job.pipeline.source,
            job.ledger,
            slot_move(
                self._identity,
                job.run_id,
                end.value,
                landed.batch,
                landed.rows,
                landed.transactions.changes,
            ),
            landed.transactions,
            lambda: self.meter.timed(job.source.connect_slot("count")),
        )
        self._position = end

    def _finish_window(self, upto: Lsn) -> None:
        """Note that all of a read window was read; moves the slot over what had nothing to land."""
        job = self._job
        self.drained.end = max(self._position, upto)
        if not self._server.must_move(self._position, upto):
            return
        self.meter.add(1, self.meter.restart(), upto)
        move = slot_move(self._identity, job.run_id, upto.value)
        move_idle_slot(self._connection, job.pipeline.source.slot, job.ledger, move)
        self._position = upto


def _report_progress(job: Job, drained: Drained, server: ServerPosition) -> None:
    seconds = max(drained.seconds_landing + drained.seconds_consuming, 1e-3)
    read, remaining = drained.end - drained.start, max(0, server.flush_lsn - drained.end)
    log.info(
        "slot %s at %s: %s landed, %.0f/s, %s of WAL left, about %.0f s",
        job.pipeline.source.slot,
        drained.end,
        counted(drained.changes, "change"),
        drained.changes / seconds,
        size(remaining),
        remaining * seconds / max(read, 1),
    )


# The task's result: its file (all null when no message came), the peek's duration, and its error.
_WRITTEN = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("server_s", pa.float64()),
        ("total_s", pa.float64()),
        ("messages", pa.int64()),
        ("failed", pa.string()),
        # The unreadable message, when the task failed by one.
        ("id", pa.string()),
        ("lsn", pa.int64()),
        ("xid", pa.int64()),
        ("raw", pa.binary()),
        ("streamed", pa.bool_()),
    ]
)


def land(  # noqa: PLR0913, PLR0917 - one call, with nothing that its parts would be together
    runner: Runner,
    conninfo: str,
    source: Source,
    bound: PeekBound,
    change_log: ChangeLog,
    batch: int,
    check_read: Callable[[], None] = lambda: None,
) -> PeekTimes:
    """Peek up to ``bound`` in one Spark task that writes a file, and commit the file as ``batch``.

    The batch is durable on return. Returns the peek's duration. Messages never become Spark's rows,
    which would cost more than decoding them. ``check_read`` is called before the commit, and raises
    when what was read must not land. Raises the task's error: SlotInUse, PeekTimeout, DecodeError
    with the message, or TargetNotWritable (nothing is landed then, and the slot keeps everything);
    LateWriter when another run has landed the batch.
    """

    def read(_: int) -> pa.Table:
        times = PeekTimes()
        try:
            file = change_log.write(batch, peek(conninfo, source, bound, times), LANDING_SCHEMA)
            row = (asdict(file) if file is not None else {}) | asdict(times)
        except OSError as err:
            # If this were raised, Spark would peek again and find no more disk space.
            row = {"failed": task_error(err)}
        except DecodeError as err:
            if err.unread is None:
                raise
            row = {"failed": task_error(err)} | asdict(err.unread.shortened())
        return pa.Table.from_pylist([row], schema=_WRITTEN)

    row = _write_batch_file(runner, change_log.uri, read)
    file = BatchFile(row["path"], row["size"], row["stats"]) if row["path"] is not None else None
    check_read()
    try:
        change_log.add(batch, file, _commit_metadata(batch, source, bound))
    except WRITE_FAILURES as err:
        raise change_log_write_error(change_log.uri, err) or err from err
    fault_point("land.committed")
    return PeekTimes(row["server_s"], row["total_s"], row["messages"])


def _commit_metadata(batch: int, source: Source, bound: PeekBound) -> str:
    info = {
        "batch": batch,
        "slot": source.slot,
        "from_lsn": str(bound.from_lsn) if bound.from_lsn is not None else None,
        "upto_lsn": str(bound.upto_lsn),
        "attempt": uuid.uuid4().hex,
        **asdict(ReadRequest.of(source)),
    }
    return json.dumps({"waldelta": info})


def _write_batch_file(runner: Runner, uri: str, read: Task) -> Answer:
    """Have a task write a batch's file; returns its result (_WRITTEN) or raises its error."""
    row = None
    try:
        (row,) = runner.run(1, _WRITTEN, read)
        if row["failed"] is not None:
            raise OSError(row["failed"])
    except Exception as err:
        # The task's own error is raised, not Spark's, because a read window that timed out is
        # retried with a smaller one.
        error = named_error(err)
        if isinstance(error, DecodeError) and row is not None and row["raw"] is not None:
            error.unread = UnreadMessage(
                row["id"], row["lsn"], row["xid"], bytes(row["raw"]), streamed=row["streamed"]
            )
        raise error or change_log_write_error(uri, err) or err from err
    return row


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
    """Make the primary flush the WAL that it has written.

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
