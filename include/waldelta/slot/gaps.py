"""Data gaps: changes that the lake lacks and the slot can no longer return.

A data gap arises when the slot was lost, dropped or moved, or when the source is another server:
the changes after the last landed position can't be read any more. A run records the gap once. The
changes themselves are lost, but their effect on rows is in the source: a resync copies that state
to the targets, which closes the gap.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import psycopg

from waldelta.errors import (
    LateWriter,
    SlotError,
    SlotGap,
    SlotLost,
    SlotMissing,
    SlotUnreadable,
    SourceChanged,
    SourceError,
)
from waldelta.lake.ledger import Gap, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.targets import RequiredAction, read_lifecycles, read_published, requiring
from waldelta.quantities import counted
from waldelta.slot.slot import read_slot
from waldelta.slot.standby import slot_position

log = logging.getLogger(__name__)

OPEN, CLOSED = "open", "closed"
# Errors after which a slot doesn't recover.
BREAKS = (SlotMissing, SlotLost, SlotGap, SlotUnreadable, SourceChanged)

_REMEDY = "run resync: it recreates the slot and repairs the targets"
_OTHER_SERVER = "point the connection back, if it leads to the wrong server; else "


@contextmanager
def gaps_recorded(job: Job) -> Iterator[None]:
    """Record a data gap if the block raises an error that means one; else close the slot
    incarnation's open gap.

    A gap can be closed without a resync if it was wrong: a run had connected to another server by
    mistake, and the connection now leads to the right one again.
    """
    with breaks_recorded(job):
        yield
    _close_false(job)


@contextmanager
def breaks_recorded(job: Job) -> Iterator[None]:
    """Record the gap that an error inside means; without an error, do nothing."""
    try:
        yield
    except BREAKS as err:
        try:
            record_gap(job, err)
        except Exception as other:
            # The error itself says what to do, and the next run that meets it tries to record the
            # gap again.
            log.warning("the data gap was not recorded: %s", other)
        raise


def record_gap(job: Job, err: SlotError) -> Gap | None:
    """Record once, in the ledger, the gap that ``err`` means.

    Returns None when the slot was never set up, or was torn down.
    """
    try:
        identity = job.read_identity()
    except SlotMissing:
        return None
    last = next(
        (
            gap
            for gap in reversed(job.ledger.gaps(identity.slot))
            if gap.incarnation == identity.incarnation
        ),
        None,
    )
    if last is not None and last.status == OPEN:
        return last
    begin, end = _gap_bounds(job, identity, err)
    gap = Gap(
        now(),
        job.run_id,
        OPEN,
        identity.slot,
        identity.system_identifier,
        identity.timeline,
        identity.incarnation,
        begin,
        end,
        type(err).__name__,
        str(err),
        _REMEDY if end else _OTHER_SERVER + _REMEDY,
    )
    with suppress(LateWriter):  # A run and an idle check may find the same gap at the same time.
        job.ledger.append_gap(gap, last)
    log.error(
        "slot=%s changes in %s can't reach the lake any more: %s",
        gap.slot,
        describe(gap),
        gap.cause,
    )
    return gap


def open_gaps(rows: Sequence[Gap]) -> list[Gap]:
    """Returns the gaps whose newest row is open; ``rows`` are oldest first."""
    newest = {(row.slot, row.incarnation): row for row in rows}
    return [row for row in newest.values() if row.status == OPEN]


def close_gaps(job: Job) -> list[Gap]:
    """Close the gaps of earlier slot incarnations once every published table is complete again.

    Each table must have been copied or repaired in the current incarnation. Returns the closed
    gaps. The run that completes the last table calls this: a resync, or a sync after a setup.
    """
    opened = open_gaps(job.ledger.gaps(job.pipeline.source.slot))
    identity = job.read_identity()
    earlier = [gap for gap in opened if gap.incarnation != identity.incarnation]
    if not earlier:
        return []
    with job.source.connect("gap") as connection:
        all_lifecycles = read_lifecycles(job, read_published(connection, job))
    if tables := requiring(
        all_lifecycles,
        RequiredAction.FIRST,
        RequiredAction.COPY,
        RequiredAction.WAIT,
        RequiredAction.BROKEN,
    ):
        log.info(
            "slot=%s its gap stays open until these are copied: %s",
            identity.slot,
            counted(len(tables), "table"),
        )
        return []
    return [_close(job, gap, identity.begins_at) for gap in earlier]


def describe(gap: Gap) -> str:
    """Returns the gap's bounds as text.

    >>> describe(Gap(now(), "r", OPEN, "s", "1", 1, "0/1", 0x10, None, "SlotMissing", "", ""))
    '0/10..?'
    """
    return f"{Lsn(gap.from_lsn)}..{Lsn(gap.to_lsn) if gap.to_lsn is not None else '?'}"


def _close(job: Job, gap: Gap, to_lsn: int | None) -> Gap:
    closed = replace(gap, at=now(), run_id=job.run_id, status=CLOSED, to_lsn=to_lsn)
    with suppress(LateWriter):
        job.ledger.append_gap(closed, gap)
    log.info("slot=%s gap closed: %s", gap.slot, describe(closed))
    return closed


def _close_false(job: Job) -> None:
    opened = open_gaps(job.ledger.gaps(job.pipeline.source.slot))
    present = job.read_identity().incarnation
    for gap in opened:
        if gap.incarnation == present:
            _close(job, gap, gap.from_lsn)
        else:  # The run that completed the last table was killed before it could close it.
            close_gaps(job)


def _gap_bounds(job: Job, identity: SlotIdentity, err: SlotError) -> tuple[int, int | None]:
    """Returns the positions between which the lost changes were committed; the end may not be
    known.
    """
    if isinstance(err, SlotGap) and err.lost is not None:
        begin, end = err.lost
        return identity.begins_at if begin is None else begin, end
    change_log = job.change_log(identity)
    last = change_log.last_batch()
    # An intent is written once its batch is durable; after a kill in between, only the batch shows
    # it. After a log was removed or restored to an earlier state, batches that the slot was moved
    # past aren't landed any more.
    return max(
        change_log.end_lsn(last) if last is not None else 0,
        job.ledger.furthest_lsn(identity.slot, identity.incarnation, last or 0),
    ), _position(job, identity, err)


def _position(job: Job, identity: SlotIdentity, err: SlotError) -> int | None:
    """Returns the slot's position if that is the gap, else the server's flushed position.

    None when it is another server.
    """
    with suppress(SourceError, psycopg.Error), job.source.connect_slot("gap") as connection:
        position, slot = slot_position(connection, job), read_slot(connection, identity.slot)
        if (position.system_identifier, position.timeline) == (
            identity.system_identifier,
            identity.timeline,
        ):
            at = (
                slot.confirmed_flush_lsn
                if slot is not None and isinstance(err, SlotGap)
                else position.flush_lsn
            )
            return at.value
    return None
