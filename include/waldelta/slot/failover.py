"""Failover: a standby became the primary, and the slot goes on in its timeline when that is shown
to be exact.

WAL positions mean the same on two timelines up to where the one was left for the other. So a lake
may follow a promotion when everything in it lies before that: the slot, which PostgreSQL kept on
the standby and which may lag behind, is then moved up to what has landed as after any crash. A lake
that is ahead holds what the source has lost, and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import psycopg

from waldelta.errors import (
    AuthenticationFailed,
    LateWriter,
    PrivilegeMissing,
    SourceChanged,
    SourceError,
    SourceUnreachable,
)
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import SYNCED, SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity, target_lock
from waldelta.pipeline.slot_identity import incarnation_of
from waldelta.pipeline.targets.needs_copy import mark
from waldelta.postgres.server_position import ServerPosition, read_position
from waldelta.postgres.walsender import read_timeline_ends
from waldelta.slot.slot import SlotState, read_slot

log = logging.getLogger(__name__)

RUNBOOK = "docs/how-to/failover.md"


@dataclass(frozen=True, slots=True)
class Promotion:
    """The slot on the server's present timeline, which left the one that the lake knows at
    ``switchpoint``.
    """

    identity: SlotIdentity
    switchpoint: Lsn


def find_promotion(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    server: ServerPosition,
) -> Promotion | None:
    """The promotion that lies between lake and server; None when the server is on the timeline that
    the lake knows.

    Raises SourceChanged unless it is shown that all that has landed belongs to the server's
    history, SourceUnreachable when that can't be read. Changes nothing.
    """
    if (identity.system_identifier, identity.timeline) == (
        server.system_identifier,
        server.timeline,
    ):
        return None
    check_system(identity, server)
    slot = read_slot(connection, identity.slot)
    if refused := _not_followed(identity, server, slot):
        raise SourceChanged(f"{_moved(identity, server)}; {refused}")
    ends = _read_ends(job, identity, server)
    moves = [
        m for m in job.ledger.slot_lives(identity.slot) if m.incarnation == identity.incarnation
    ]
    known = known_ends(incarnation_of(identity.slot, moves), moves)
    switchpoint = judge_history(identity, server, ends, known, _landed_upto(job, change_log))
    return Promotion(replace(identity, timeline=server.timeline), switchpoint)


def check_system(identity: SlotIdentity, server: ServerPosition) -> None:
    """Raises SourceChanged when the connection leads to another cluster: asked first, since a slot
    isn't there either.
    """
    if identity.system_identifier != server.system_identifier:
        raise SourceChanged(
            f"{_moved(identity, server)}; positions of one mean nothing on the other; point the"
            f" connection back, or run resync (after a major upgrade or a restore: {RUNBOOK})"
        )


def check_source(connection: psycopg.Connection[tuple[Any, ...]], job: Job) -> SlotIdentity:
    """The slot's identity, when the connection leads to its server and timeline; for copies, whose
    snapshots count there alone.

    Raises SourceChanged, also for a promoted standby that no run has followed yet.
    """
    identity, server = job.slot_identity(), read_position(connection)
    check_system(identity, server)
    if identity.timeline != server.timeline:
        raise SourceChanged(
            f"{_moved(identity, server)}; if a standby was promoted, let a run of the stream follow"
            f" it first, else point the connection back ({RUNBOOK})"
        )
    return identity


def check_followed(job: Job, identity: SlotIdentity) -> None:
    """Raises LateWriter when another run has followed a promotion meanwhile: this one still reads
    the server of before.
    """
    if (present := job.slot_identity()).timeline > identity.timeline:
        raise LateWriter(
            f"slot {identity.slot!r} was followed to timeline {present.timeline} by another run,"
            f" while this one reads timeline {identity.timeline}: stop the server from before the"
            f" failover ({RUNBOOK}), and run again"
        )


def _read_ends(job: Job, identity: SlotIdentity, server: ServerPosition) -> dict[int, Lsn]:
    """The server's timeline history; that it can't be read now doesn't make the server another
    one.
    """
    try:
        return read_timeline_ends(job.conninfo, server.timeline)
    except (
        AuthenticationFailed,
        PrivilegeMissing,
    ):  # as they say, and trying again changes nothing
        raise
    except SourceError as err:
        raise SourceUnreachable(
            f"{_moved(identity, server)}; whether it goes on from what has landed stands in its"
            f" timeline history, which couldn't be read: {err}; a free place in max_wal_senders is"
            f" needed ({RUNBOOK})"
        ) from err


def _landed_upto(job: Job, change_log: ChangeLog) -> Lsn:
    """The end of the last transaction that landed in the slot's present life, whatever of the log
    was dropped since.
    """
    floor, cut = job.first_batch(), job.ledger.last_cut()
    landed = change_log.end_after(floor)  # the last batch may be empty, and a cut held back
    return Lsn(max(landed, cut.end_lsn if cut is not None and cut.batch > floor else 0))


def judge_history(
    identity: SlotIdentity,
    server: ServerPosition,
    ends: dict[int, Lsn],
    known: dict[int, Lsn],
    landed_end: Lsn,
) -> Lsn:
    """Where the server's history left the lake's timeline; raises SourceChanged when the lake has
    what that history lacks.

    ``ends`` is the server's history (waldelta.postgres.walsender), ``known`` what the lake was
    shown of it at earlier promotions.
    """
    switchpoint = ends.get(identity.timeline)
    others = {timeline: end for timeline, end in known.items() if ends.get(timeline) != end}
    if switchpoint is None or others:
        raise SourceChanged(
            f"{_moved(identity, server)}; that one doesn't descend from it (its history:"
            f" {_print(ends)}; the lake's: {_print(known) or 'none'}): point the connection back,"
            f" or copy the tables anew ({RUNBOOK})"
        )
    if landed_end > switchpoint:
        raise SourceChanged(
            f"{_moved(identity, server)}, which left the former at {switchpoint}, but the lake"
            f" holds changes up to {landed_end}: the server lost {landed_end - switchpoint} bytes"
            " of WAL at the failover that have landed, so the lake is ahead of it; run resync, and"
            f" see synchronized_standby_slots for the next time ({RUNBOOK})"
        )
    return switchpoint


def known_ends(life: SlotMove, moves: Sequence[SlotMove]) -> dict[int, Lsn]:
    """Where the slot's earlier timelines were left, as its earlier promotions recorded it."""
    chain = [life, *(move for move in moves if move.event == "promoted")]
    return {older.timeline: Lsn(newer.lsn) for older, newer in pairwise(chain)}


def record_promotion(job: Job, promotion: Promotion) -> None:
    """Enter it into the ledger, when the slot's changes were found to be those that landed;
    idempotent.

    Copies taken from what the server has lost are marked to be copied again first: their snapshots
    count transactions as seen whose numbers the server gives to others now.
    """
    identity, lsn = promotion.identity, promotion.switchpoint.value
    done = _recorded(job, identity)
    if done is None:
        return
    for state in copies_beyond(list(job.table_states().values()), promotion.switchpoint):
        with target_lock(job, state.table_name):
            latest = job.table_states().get(state.table_name)
            # Once it is recorded, by another run, what was copied is of the new timeline.
            if (
                latest is not None
                and copies_beyond([latest], promotion.switchpoint)
                and _recorded(job, identity) == done
            ):
                mark(
                    job,
                    latest,
                    f"copied at {Lsn(latest.snapshot_lsn)}, beyond the failover at"
                    f" {promotion.switchpoint}",
                )
    moved = SlotMove(
        now(),
        job.run_id,
        "promoted",
        identity.slot,
        identity.system_identifier,
        identity.timeline,
        identity.incarnation,
        lsn,
    )
    fault_point("failover.marked")
    job.ledger.append_life(moved, done)
    fault_point("failover.recorded")
    log.warning(
        "slot=%s: the server was promoted to timeline %d at %s, and everything landed lies before"
        " that: going on",
        identity.slot,
        identity.timeline,
        promotion.switchpoint,
    )


def _recorded(job: Job, identity: SlotIdentity) -> SlotMove | None:
    """What was done to the slot last; None when that is this promotion: twice, it would say that
    this timeline was left there, too.
    """
    last = job.ledger.slot_lives(identity.slot)[-1]
    is_it = (last.event, last.incarnation, last.timeline) == (
        "promoted",
        identity.incarnation,
        identity.timeline,
    )
    return None if is_it else last


def copies_beyond(states: Sequence[TableState], switchpoint: Lsn) -> list[TableState]:
    """Complete copies whose snapshot may hold what came after that position."""
    return [
        state
        for state in states
        if state.status == SYNCED and state.snapshot_lsn > switchpoint.value
    ]


def _not_followed(
    identity: SlotIdentity, server: ServerPosition, slot: SlotState | None
) -> str | None:
    """Why another timeline of the cluster isn't even a candidate."""
    if server.timeline < identity.timeline:
        return (
            "this is the server from before a failover, and what is written to it is lost: point"
            f" the connection at the primary ({RUNBOOK})"
        )
    if slot is None or not slot.synced:
        return (
            "its slot wasn't kept up to date by PostgreSQL's slot synchronization"
            " (source.failover), so nothing shows where it stands; point the connection back, or"
            f" run resync ({RUNBOOK})"
        )
    return None


def _moved(identity: SlotIdentity, server: ServerPosition) -> str:
    return (
        f"slot {identity.slot!r} was set up on system {identity.system_identifier}, timeline"
        f" {identity.timeline}; the connection now leads to system {server.system_identifier},"
        f" timeline {server.timeline}"
    )


def _print(ends: dict[int, Lsn]) -> str:
    return ", ".join(f"timeline {timeline} until {end}" for timeline, end in sorted(ends.items()))
