"""Recovery: completes the slot moves that a killed run has recorded but not made, before a run
begins anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg

from waldelta.errors import (
    ConsumeMismatch,
    LateWriter,
    PeekTimeout,
    PeekTooLarge,
    SlotGap,
    SourceChanged,
    SourceDiskFull,
    StandbyAway,
)
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import BatchNumbers, ChangeLog
from waldelta.lake.ledger import SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity
from waldelta.postgres import ServerPosition
from waldelta.slot.acknowledge import (
    VerifiedRange,
    check_behind,
    check_no_mismatch,
    confirmed_lsn,
    move_idle_slot,
)
from waldelta.slot.read.peek import ReadRequest
from waldelta.slot.read.read_window import ReadWindows
from waldelta.slot.standby import Promotion, find_promotion, record_promotion

log = logging.getLogger(__name__)
# The longest time from an intent to the end of its move: counting a large batch takes minutes.
MOVING = timedelta(hours=1)

# PostgreSQL writes a slot's position to disk with its checkpoints, and after a stop without one has
# the slot at the last written position. An idle server makes no checkpoint for days.
# When the last finished checkpoint began: moves before that are on disk. It is read as an age,
# since clocks differ.
_WRITTEN_DOWN = """
select slot.confirmed_flush_lsn::text,
       (select extract(epoch from clock_timestamp() - checkpoint_time)::float
         from pg_control_checkpoint())
from pg_replication_slots as slot
where slot.slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state of slot and lake once they agree; ``identity`` has the server's current
    timeline.
    """

    confirmed: Lsn
    next_batch: int
    identity: SlotIdentity


def recover(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    server: ServerPosition,
    *,
    one_window: bool = False,
) -> Recovered:
    """Bring the slot to the end of what has landed, or refuse with a named error.

    The slot may be behind: a run died between landing and consuming, or an immediate stop of the
    server moved the slot back. It is then advanced, one read window at a time, after its changes
    were compared with what has landed. Raises SlotGap when another process consumed the slot, or
    the log lacks a consumed batch, and SourceChanged or StandbyAway when the server lacks WAL that
    has landed. After the promotion of a standby that kept the slot, all this is judged by what the
    new timeline has in common with the old one (waldelta.slot.standby). With ``one_window``,
    PeekTimeout is raised when one window wasn't enough.
    """
    check_log(job, identity, change_log)
    promotion = find_promotion(connection, job, identity, change_log, server)
    check_no_mismatch(connection, identity.slot)
    confirmed = confirmed_lsn(connection, identity.slot)
    furthest = Lsn(job.ledger.furthest_lsn(identity.slot, identity.incarnation))
    if promotion is not None:
        # After the switchpoint, the server has other WAL, which no run has read.
        identity, furthest = promotion.identity, min(furthest, promotion.switchpoint)
    _no_gap(identity, furthest, confirmed)
    last = change_log.last_batch() or 0
    log_end = max(Lsn(change_log.end_lsn(last)), furthest) if last else Lsn(0)
    _check_has_landed_wal(server, log_end)
    if log_end > confirmed:
        slot = _SlotBehind(connection, job, identity, promotion, confirmed)
        slot.catch_up(change_log, last, log_end, one_window=one_window)
    elif promotion is not None:
        record_promotion(job, promotion)
    # A batch without rows leaves no partition, only its transaction id; Delta would skip that
    # number.
    newest = max(change_log.highest_batch(), last, identity.floor)
    return Recovered(max(confirmed, log_end), newest + 1, identity)


def _check_has_landed_wal(server: ServerPosition, log_end: Lsn) -> None:
    """Raise StandbyAway or SourceChanged when the server's WAL ends before what has landed."""
    if log_end <= server.flush_lsn:
        return
    if server.primary_lsn is not None and log_end <= server.primary_lsn:
        raise StandbyAway(
            f"the lake holds changes up to {log_end} but the standby has replayed WAL only up"
            f" to {server.flush_lsn}, as after a restart: run again"
        )
    raise SourceChanged(
        f"the lake holds changes up to {log_end} but the server's WAL ends at"
        f" {server.flush_lsn}: it was restored to an earlier state; run resync"
    )


@dataclass(slots=True)
class _SlotBehind:
    """A slot that is at ``position``, behind what has landed.

    Before it moves, it is compared, whatever ``acknowledge`` says. Only this comparison reveals a
    server restored to an earlier state, or a batch read from the server before a failover; moving
    on would lose what the slot holds there. ``promotion`` is recorded after the last comparison.
    """

    connection: psycopg.Connection[tuple[Any, ...]]
    job: Job
    identity: SlotIdentity
    promotion: Promotion | None
    position: Lsn

    def catch_up(self, change_log: ChangeLog, last: int, log_end: Lsn, *, one_window: bool) -> None:
        """Advance the slot to ``log_end``, where batch ``last`` ends.

        Raises ConsumeMismatch when the slot holds other changes than have landed, and PeekTimeout
        when ``one_window`` wasn't enough.
        """
        log.info(
            "slot %s is behind the landed end: advancing %s",
            self.identity.slot,
            f"{self.position}..{log_end}",
        )
        windows = ReadWindows(self.job)
        behind = landed_behind(
            change_log,
            BatchNumbers(self.identity.floor, last),
            self.position,
            max_messages=self.job.pipeline.batch.max_changes,
            max_bytes=windows.next.window_bytes,
        )
        messages = change_log.sizes(last - 1, last).get(last, 0)
        whole = slot_move(self.identity, self.job.run_id, log_end.value, last, messages)
        try:
            self._pass_each(behind, whole, one_window=one_window)
        except (PeekTooLarge, SourceDiskFull) as err:
            # The next run compares less at once.
            windows.lacks_room(is_disk_full=isinstance(err, SourceDiskFull))
            raise

    def _pass_each(
        self, behind: Sequence[VerifiedRange], whole: SlotMove, *, one_window: bool
    ) -> None:
        """Advance the slot past one range after the other, until the move ``whole`` is made.

        It doesn't compare everything at once: any number of windows may have landed between two
        checkpoints, and one answer for all may exceed the server's disk or time.
        """
        for verified, move in _moves_past(behind, whole):
            is_last = move is whole
            is_compared = self._compare(verified, move)
            if is_last and self.promotion is not None:
                record_promotion(self.job, self.promotion)
            # A range that couldn't be compared isn't passed until a later one was compared.
            if not is_compared and not is_last:
                continue
            self._move(move, is_compared=is_compared)
            if one_window and not is_last:
                raise PeekTimeout(
                    f"slot {move.slot!r} is at {self.position}, and the change log ends at"
                    f" {Lsn(whole.lsn)}: the idle check advances the slot by one read window, and"
                    " the run's land stage by the rest"
                )

    def _compare(self, verified: VerifiedRange, move: SlotMove) -> bool:
        """Returns whether the slot was compared with a range, and holds what has landed of it.

        Raises ConsumeMismatch when it holds something else.
        """
        try:
            with _other_session(self.connection, self.job) as session:
                return check_behind(
                    session, self.job.pipeline.source, move, verified, self.position.value
                )
        except ConsumeMismatch:
            # Another run may have moved the slot.
            check_unmoved(self.connection, self.job, self.identity, self.position)
            raise

    def _move(self, move: SlotMove, *, is_compared: bool) -> None:
        fault_point("recover.compared")
        unverified = not is_compared and self.job.pipeline.source.options.acknowledge != "advance"
        move_idle_slot(
            self.connection, move.slot, self.job.ledger, replace(move, compared_after=unverified)
        )
        self.position = Lsn(move.lsn)


def _moves_past(
    behind: Sequence[VerifiedRange], whole: SlotMove
) -> Iterator[tuple[VerifiedRange, SlotMove]]:
    """Yields each range with the move past it; the last one's is ``whole``."""
    for verified, following in pairwise(behind):
        end = min(following.begins, whole.lsn)
        # The other batches were counted when the slot was first moved past them.
        yield verified, replace(whole, lsn=end, batch=verified.last, messages=None, changes=None)
    yield behind[-1], whole


@contextmanager
def _other_session(
    connection: psycopg.Connection[tuple[Any, ...]], job: Job
) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Open one more session with the same statement timeout.

    A session in which decoding has failed can't decode any more (verify.is_plain).
    """
    with job.source.connect_slot("compare") as session:
        ((limit,),) = connection.execute("select current_setting('statement_timeout')").fetchall()
        session.execute("select set_config('statement_timeout', %s, false)", (limit,))
        yield session


def check_unmoved(
    connection: psycopg.Connection[tuple[Any, ...]], job: Job, identity: SlotIdentity, position: Lsn
) -> None:
    """Check after a peek, before using its result, that the slot was still at ``position``.

    Then nothing is missing at the beginning. A later move is harmless, because what was read is
    complete. Raises SlotGap, or LateWriter when another run of this pipeline moved the slot.
    """
    confirmed = confirmed_lsn(connection, identity.slot)
    if confirmed <= position:
        return
    _no_gap(identity, Lsn(job.ledger.furthest_lsn(identity.slot, identity.incarnation)), confirmed)
    raise LateWriter(f"another run has moved slot {identity.slot!r} to {confirmed}: run again")


def landed_behind(
    change_log: ChangeLog,
    batches: BatchNumbers,
    confirmed: Lsn,
    *,
    max_messages: int,
    max_bytes: int,
) -> list[VerifiedRange]:
    """Returns the ranges that have landed after the slot's position, one for each read request.

    That is one batch after a kill, and several after an immediate stop, which had been compared
    before. They are compared again because only the content reveals a server whose files were
    restored to an earlier state: system identifier and timeline are the same, and its WAL may have
    grown past the landed end again.

    A range ends where the read request changed, even by an empty batch: up to there, the slot was
    moved only past WAL without changes for it. It has at most ``max_messages`` and ``max_bytes`` of
    WAL, like one read window, unless a single batch has more.
    """
    behind, first = set[int](), batches.upto
    for first in sorted(change_log.sizes(*batches), reverse=True):
        # A batch without a transaction's end doesn't show the slot's position.
        if 0 < change_log.end_lsn(first) <= confirmed.value:
            break
        behind.add(first)
    infos = change_log.commit_infos(range(first, batches.upto + 1))
    ranges: list[VerifiedRange] = []
    ended = confirmed.value
    for batch in range(first, batches.upto + 1):
        of_batch = infos.get(batch, {})
        request = ReadRequest.read(of_batch)
        told_from = Lsn.parse(of_batch["from_lsn"]).value if of_batch.get("from_lsn") else ended
        this = VerifiedRange(request, max(told_from, confirmed.value), batch, batch)
        if batch in behind:
            landed = change_log.landed(batch)
            this = replace(this, messages=landed.rows, transactions=landed.transactions)
            ended = max(ended, landed.end_lsn)
        elif request is None:
            continue
        upto = max(ended, this.begins)
        if ranges and _is_one_window(ranges[-1], this, upto, max_messages, max_bytes):
            ranges[-1] += this
        else:
            ranges.append(this)
    return ranges or [VerifiedRange(None, ended, batches.after + 1, batches.upto)]


def _is_one_window(
    one: VerifiedRange, behind: VerifiedRange, ended: int, max_messages: int, max_bytes: int
) -> bool:
    messages = one.messages + behind.messages
    is_small = messages <= max_messages and ended - one.begins <= max_bytes
    return one.request == behind.request and is_small


def slot_move(
    identity: SlotIdentity,
    run_id: str,
    lsn: int,
    batch: int | None = None,
    messages: int | None = None,
    changes: int | None = None,
) -> SlotMove:
    """Returns an intent to move the slot to ``lsn``, past ``batch``, as a row for the ledger."""
    return SlotMove(
        now(),
        run_id,
        "intent",
        identity.slot,
        identity.system_identifier,
        identity.timeline,
        identity.incarnation,
        lsn,
        batch,
        messages=messages,
        changes=changes,
    )


def never_compared(
    connection: psycopg.Connection[tuple[Any, ...]], job: Job, identity: SlotIdentity
) -> list[str]:
    """Returns a warning when the last consumed batch may not have been compared with what has
    landed.

    Call this before recover(), which compares what the slot still holds, or holds again.
    """
    move = job.ledger.uncompared(identity.slot, identity.incarnation)
    if move is None or confirmed_lsn(connection, identity.slot).value < move.lsn:
        return []
    notice = (
        f"batch {move.batch} was consumed, but the run ended before it recorded that PostgreSQL"
        " had returned exactly what had landed: run reconcile, which compares tables with their"
        " source (docs/how-to/recover-a-slot.md#consumemismatch)"
    )
    log.warning("%s", notice)
    return [notice]


def check_log(job: Job, identity: SlotIdentity, change_log: ChangeLog) -> None:
    """Raise SlotGap when the change log lacks a consumed batch, or messages of one.

    An intent is written once its batch is durable, so the log has every batch with an intent. New
    batches with reused numbers would count as applied wherever batches of the same numbers were. A
    batch that all targets have applied may be missing: no target lacks its changes, and a replay
    that needs it refuses.
    """
    consumed = job.ledger.consumed_batches(identity.slot, identity.incarnation)
    intended = max(consumed, default=0)
    if (last := change_log.last_batch() or 0) < intended:
        raise SlotGap(
            f"the change log {change_log.uri} ends at batch {last}, but batch {intended} had"
            " landed in it and was consumed from the slot: the batch was removed, or the change"
            " log was restored to an earlier state; bring the batch back, or run resync, because"
            " changes that targets hadn't applied are lost"
        )
    try:
        change_log.whole_sizes(consumed, 0, last)
    except SlotGap:
        if (cut := job.ledger.last_cut()) is None:
            raise
        change_log.whole_sizes(consumed, cut.batch, last)


def _no_gap(identity: SlotIdentity, furthest: Lsn, confirmed: Lsn) -> None:
    if confirmed > furthest:
        raise SlotGap(
            f"slot {identity.slot!r} is at {confirmed}, beyond {furthest}, the furthest this"
            " pipeline ever moved it: another program consumed changes in"
            f" {furthest}..{confirmed}, or the slot was recreated; find out which program"
            " did it, drop the slot once no other program needs it, and run resync"
        )


def durable_position(job: Job) -> Lsn:
    """Returns the position before which this pipeline's slot never goes back; 0 when not known
    now.
    """
    slot = job.pipeline.source.slot
    with job.source.connect_slot("maintain") as connection:
        row = connection.execute(_WRITTEN_DOWN, (slot,)).fetchone()
    if row is None or row[0] is None:
        return Lsn(0)
    incarnation = job.read_identity().incarnation
    moves = [
        move
        for move in job.ledger.slot_moves()
        if (move.slot, move.incarnation) == (slot, incarnation)
    ]
    return written_down(moves, Lsn.parse(row[0]), now() - timedelta(seconds=row[1]))


def written_down(moves: Sequence[SlotMove], confirmed: Lsn, checkpoint: datetime) -> Lsn:
    """Returns the position to which a slot, now at ``confirmed``, had been moved when the last
    ``checkpoint`` began.

    Returns 0 where the slot may have gone back since.
    """
    early_lsns = [move.lsn for move in moves if move.at < checkpoint - MOVING]
    since = [
        move.lsn for move in moves if move.at >= checkpoint - MOVING and move.event == "intent"
    ]
    furthest = max(early_lsns, default=0)
    # A repeated move to an earlier position shows that the slot had gone back, perhaps before the
    # checkpoint.
    if confirmed.value < furthest or any(lsn <= furthest for lsn in since):
        return Lsn(0)
    return Lsn(furthest)
