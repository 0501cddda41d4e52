"""A standby that has the slot (source.read_from): its position relative to its primary, and waiting
for it.

Its WAL equals the primary's byte by byte, so positions and transaction ids mean the same on both.
Only what it has replayed can be read there. Copies need snapshots of the primary, so they are ahead
of that, and fit the stream by transaction visibility.

Failover: follows a standby that became the primary, when its timeline is shown to be exact.

WAL positions mean the same on two timelines up to where one branched off the other. So a lake may
follow a promotion when all of its data is from before that. PostgreSQL kept the slot on the
standby, where it may lag behind; it is moved up to what has landed, as after any crash. A lake that
is ahead has changes that the source lost, and is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from threading import Event
from typing import Any

import psycopg

from waldelta.background import run_concurrently
from waldelta.config.pipeline_file import SlotLimits
from waldelta.errors import (
    LateWriter,
    NotStandby,
    SourceChanged,
    StandbyAway,
)
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import SYNCED, SlotMove, TableState, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity, target_lock
from waldelta.pipeline.job import incarnation_of
from waldelta.pipeline.targets.lifecycle import mark_for_copy
from waldelta.postgres import (
    READABLE_LSN,
    WRITTEN_SQL,
    Connection,
    ServerPosition,
    describe,
    describe_server,
    read_position,
    read_standby_position,
)
from waldelta.postgres.walsender import read_timeline, read_timeline_ends, unread_timeline
from waldelta.quantities import size
from waldelta.slot.health import SlotWarning
from waldelta.slot.slot import SlotState, check_health, read_slot

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 60
_PAUSE_S = 0.05
_NUDGE_S = 0.5


def slot_position(
    connection: Connection, job: Job, primary: Connection | None = None
) -> ServerPosition:
    """Returns the position of the server that has the slot, to which ``connection`` leads.

    A caller that is connected to the primary passes that as ``primary``. Raises NotPrimary. With
    source.read_from, it raises NotStandby when that isn't a standby of conn_id's server,
    SourceChanged when it has WAL that the primary lacks, and SourceUnreachable when it doesn't
    report what it replays.
    """
    if job.pipeline.source.read_from is None:
        return read_position(connection)
    # A server that isn't in recovery may have no free walsender, so what it is comes first.
    standby = read_standby_position(connection)
    with (
        nullcontext(primary) if primary is not None else job.source.connect("primary") as connected
    ):
        # The primary's position is read after the standby's, so it isn't behind what the standby
        # has replayed: a primary sends only what it has flushed.
        ahead = read_position(connected)
    standby = replace(standby, timeline=_timeline(job), primary_lsn=ahead.flush_lsn)
    _check_follows(connection, standby, ahead)
    return standby


def committed_upto(
    connection: Connection, server: ServerPosition, requested_at: datetime
) -> datetime:
    """Returns a time up to which all commits of the primary can be read through ``connection``.

    That is ``requested_at``, a time before the position was read. For a standby that was behind
    then, it is the commit time of the last transaction that it has replayed.
    """
    if not server.replay_lag:
        return requested_at
    ((replayed,),) = connection.execute("select pg_last_xact_replay_timestamp()").fetchall()
    return replayed or requested_at


def check_slot(connection: Connection, job: Job) -> SlotState:
    """Returns the slot on the server to which ``connection`` leads; raises as check_health()
    does.
    """
    source = job.pipeline.source
    return check_health(
        read_slot(connection, source.slot),
        source.slot,
        two_phase=source.options.two_phase,
        standby=describe_server(connection) if source.read_from is not None else None,
    )


def standby_warnings(
    primary: Connection, connection: Connection, job: Job, server: ServerPosition
) -> list[SlotWarning]:
    """Returns warnings, before a run, about the standby that has the slot; none for a primary.

    ``connection`` leads to ``server``, which has the slot, and is ``primary`` where that is the
    primary.
    """
    warnings = remaining_on_primary(primary, connection, job.pipeline.source.slot)
    return [
        *replay_warnings(server, job.pipeline.slot_limits),
        *(SlotWarning("warning", text) for text in warnings),
    ]


def replay_warnings(server: ServerPosition, limits: SlotLimits) -> list[SlotWarning]:
    """Returns warnings about a standby that is behind its primary; the slot's backlog doesn't show
    that.
    """
    behind = server.replay_lag or 0
    if behind <= limits.warn_mb << 20:
        return []
    return [
        SlotWarning(
            "critical" if behind > limits.critical_mb << 20 else "warning",
            f"the standby of source.read_from is {size(behind)} of WAL behind its primary, and"
            " runs can't read WAL that it hasn't replayed: check whether it is connected"
            " (pg_stat_wal_receiver) and replays (pg_is_wal_replay_paused())",
        )
    ]


def remaining_on_primary(primary: Connection, connection: Connection, name: str) -> list[str]:
    """Returns a warning about the primary's slot of that name, when a standby has the pipeline's.

    ``connection`` leads to the server that has the pipeline's slot.
    """
    slot = read_slot(primary, name) if connection is not primary else None
    if slot is None:
        return []
    return [
        (
            f"the primary also has a slot {name!r}, which this pipeline doesn't read and which"
            f" keeps more and more WAL (now {size(slot.retained_bytes)}): unless another program"
            f" reads it, drop it there: select pg_drop_replication_slot('{name}')"
        )
    ]


def wait_replayed(
    primary: Connection, connection: Connection, timeout_s: float = REPLAY_TIMEOUT_S
) -> None:
    """Wait until the server that has the slot has replayed what the primary has written so far.

    Returns at once when it is the primary. Raises StandbyAway after ``timeout_s``.
    """
    if connection is primary:
        return
    ((written, segment_bytes),) = primary.execute(f"select {WRITTEN_SQL}".encode()).fetchall()
    target, deadline = Lsn.parse(written).of_record(segment_bytes), time.monotonic() + timeout_s
    statement = f"select ({READABLE_LSN})::text".encode()
    while (replayed := Lsn.parse(connection.execute(statement).fetchall()[0][0])) < target:
        if time.monotonic() > deadline:
            raise StandbyAway(
                f"the standby {describe_server(connection)} has replayed WAL up to {replayed}, but"
                f" not up to {target} within {timeout_s:g} s: check whether it is connected"
                " (pg_stat_wal_receiver) and replays (pg_is_wal_replay_paused())"
            )
        time.sleep(_PAUSE_S)


@contextmanager
def snapshots_logged(primary: Connection) -> Iterator[None]:
    """Make the primary log its running transactions repeatedly while a slot is created on its
    standby.

    The slot waits for such records, which an idle primary doesn't write by itself.
    """

    def nudge(ended: Event) -> None:
        while not ended.wait(_NUDGE_S / 10):
            try:
                primary.execute("select pg_log_standby_snapshot()")
            except psycopg.Error as err:
                log.info(
                    "can't make the primary log its running transactions; waiting until it does so"
                    " by itself: %s",
                    err,
                )
                return
            ended.wait(_NUDGE_S)

    with run_concurrently(nudge, "standby snapshots"):
        yield


def _timeline(job: Job) -> int:
    with unread_timeline(
        f"the timeline that the standby {describe(job.source.slot_conninfo)} replays",
        "its max_wal_senders (docs/how-to/read-from-a-standby.md)",
    ):
        return read_timeline(job.source.slot_conninfo)


def _check_follows(
    connection: Connection, standby: ServerPosition, primary: ServerPosition
) -> None:
    theirs, ours = (
        f"system {at.system_identifier}, timeline {at.timeline}" for at in (primary, standby)
    )
    if theirs != ours:
        raise NotStandby(
            f"source.read_from leads to {describe_server(connection)}, which replays {ours}, and"
            f" conn_id to {theirs}: point read_from at a standby of that server"
            " (docs/how-to/read-from-a-standby.md)"
        )
    if standby.database != primary.database:
        # A slot on a server with another history would have none of our changes, and every run
        # would find none and move it on.
        raise NotStandby(
            f"source.read_from leads to database {standby.database!r} of"
            f" {describe_server(connection)}, and conn_id to {primary.database!r}: point both at"
            " the same database (docs/how-to/read-from-a-standby.md)"
        )
    if standby.flush_lsn > primary.flush_lsn:
        raise SourceChanged(
            f"the standby {describe_server(connection)} of source.read_from has replayed WAL up to"
            f" {standby.flush_lsn}, and its primary has written no further than"
            f" {primary.flush_lsn}: they don't share their WAL any more, as after a restore of the"
            " primary's disk; recreate the standby from the primary, then run resync"
            " (docs/how-to/read-from-a-standby.md)"
        )


RUNBOOK = "docs/how-to/failover.md"


@dataclass(frozen=True, slots=True)
class Promotion:
    """The slot on the server's current timeline, which left the lake's timeline at
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
    """Returns the promotion between lake and server; None when the server is on the lake's
    timeline.

    Raises SourceChanged unless everything that has landed is shown to belong to the server's
    history, and SourceUnreachable when that history can't be read. Changes nothing.
    """
    if (identity.system_identifier, identity.timeline) == (
        server.system_identifier,
        server.timeline,
    ):
        return None
    check_system(identity, server)
    if refused := _not_followed(identity, server, read_slot(connection, identity.slot)):
        raise SourceChanged(f"{_move(identity, server)}; {refused}")
    ends = _read_ends(job, identity, server)
    moves = [
        m for m in job.ledger.slot_events(identity.slot) if m.incarnation == identity.incarnation
    ]
    ends_of_lake = known_ends(incarnation_of(identity.slot, moves), moves)
    switchpoint = judge_history(
        identity, server, ends, ends_of_lake, _landed_upto(job, change_log, identity.floor)
    )
    return Promotion(replace(identity, timeline=server.timeline), switchpoint)


def check_system(identity: SlotIdentity, server: ServerPosition) -> None:
    """Raise SourceChanged when the connection leads to another cluster.

    This is checked first, since the slot doesn't exist there either.
    """
    if identity.system_identifier != server.system_identifier:
        raise SourceChanged(
            f"{_move(identity, server)}; WAL positions of one are meaningless on the other; point"
            f" the connection back, or run resync (after a major upgrade or a restore: {RUNBOOK})"
        )


def check_source(connection: psycopg.Connection[tuple[Any, ...]], job: Job) -> SlotIdentity:
    """Returns the slot's identity when the connection leads to its server and timeline.

    Copies need this, because their snapshots are valid only there. Raises SourceChanged, also for a
    promoted standby that no run has followed yet.
    """
    identity, server = job.read_identity(), read_position(connection)
    check_system(identity, server)
    if identity.timeline != server.timeline:
        raise SourceChanged(
            f"{_move(identity, server)}; if a standby was promoted, let a CDC run follow it"
            f" first, otherwise point the connection back ({RUNBOOK})"
        )
    return identity


def check_followed(job: Job, identity: SlotIdentity) -> None:
    """Raise LateWriter when another run has recorded a promotion after this run read the slot's
    identity.

    This run then still reads the earlier server.
    """
    if (present := job.read_identity()).timeline > identity.timeline:
        raise LateWriter(
            f"another run has followed slot {identity.slot!r} to timeline {present.timeline},"
            f" while this run reads timeline {identity.timeline}: stop the server from before the"
            f" failover ({RUNBOOK}), and run again"
        )


def _read_ends(job: Job, identity: SlotIdentity, server: ServerPosition) -> dict[int, Lsn]:
    with unread_timeline(
        f"{_move(identity, server)}; only its timeline history shows whether it continues from"
        " what has landed, and that",
        f"max_wal_senders ({RUNBOOK})",
    ):
        return read_timeline_ends(job.source.conninfo, server.timeline)


def _landed_upto(job: Job, change_log: ChangeLog, floor: int) -> Lsn:
    """Returns the end of the last transaction that landed in the current slot incarnation.

    ``floor`` is the last batch of the incarnation before. A batch counts although maintenance has
    dropped it from the change log.
    """
    cut = job.ledger.last_cut()
    landed = change_log.end_after(floor)  # The last batch may be empty, and a cut may be behind.
    return Lsn(max(landed, cut.end_lsn if cut is not None and cut.batch > floor else 0))


def judge_history(
    identity: SlotIdentity,
    server: ServerPosition,
    ends: dict[int, Lsn],
    recorded_ends: dict[int, Lsn],
    log_end: Lsn,
) -> Lsn:
    """Returns where the server's history left the lake's timeline.

    ``ends`` is the server's history (waldelta.postgres.walsender), ``recorded_ends`` what earlier
    promotions recorded of it. ``log_end`` is where the changes end that have landed. Raises
    SourceChanged when the lake has changes that the history lacks.
    """
    switchpoint = ends.get(identity.timeline)
    contradictions = {
        timeline: end for timeline, end in recorded_ends.items() if ends.get(timeline) != end
    }
    if switchpoint is None or contradictions:
        raise SourceChanged(
            f"{_move(identity, server)}; the new timeline doesn't descend from the old one (its"
            f" history: {_print(ends)}; the lake's: {_print(recorded_ends) or 'none'}): point the"
            f" connection back, or copy the tables again ({RUNBOOK})"
        )
    if log_end > switchpoint:
        raise SourceChanged(
            f"{_move(identity, server)}, which branched off at {switchpoint}, but the lake holds"
            f" changes up to {log_end}: the server lost {log_end - switchpoint} bytes of WAL"
            " at the failover that have landed, so the lake is ahead of it; run resync, and see"
            f" synchronized_standby_slots for the next time ({RUNBOOK})"
        )
    return switchpoint


def known_ends(begin: SlotMove, moves: Sequence[SlotMove]) -> dict[int, Lsn]:
    """Returns by timeline the position where it ended, as recorded when a standby was promoted.

    ``begin`` is the event that began the slot's incarnation; its timeline is the first.
    """
    chain = [begin, *(move for move in moves if move.event == "promoted")]
    return {older.timeline: Lsn(newer.lsn) for older, newer in pairwise(chain)}


def record_promotion(job: Job, promotion: Promotion) -> None:
    """Record a promotion in the ledger, after the slot's changes were found to be those that
    landed.

    It is idempotent. Copies that include changes which the server has lost are first marked for a
    new copy: their snapshots treat transactions as visible whose numbers the server
    now reuses.
    """
    identity = promotion.identity
    begin = _last_event(job, identity)
    if begin is None:
        return
    for state in copies_beyond(list(job.read_states().values()), promotion.switchpoint):
        with target_lock(job, state.table_name):
            latest = job.read_state(state.table_name)
            # After another run has recorded the failover, new copies are of the new timeline.
            if (
                latest is not None
                and copies_beyond([latest], promotion.switchpoint)
                and _last_event(job, identity) == begin
            ):
                copied = Lsn(latest.snapshot_lsn)
                why = f"copied at {copied}, beyond the failover at {promotion.switchpoint}"
                mark_for_copy(job, latest, why)
    fault_point("failover.marked")
    moved = SlotMove(
        now(),
        job.run_id,
        "promoted",
        identity.slot,
        identity.system_identifier,
        identity.timeline,
        identity.incarnation,
        promotion.switchpoint.value,
    )
    job.ledger.append_slot_event(moved, begin)
    fault_point("failover.recorded")
    log.warning(
        "slot=%s: the server was promoted to timeline %d at %s, and all landed changes are before"
        " that: continuing",
        identity.slot,
        identity.timeline,
        promotion.switchpoint,
    )


def _last_event(job: Job, identity: SlotIdentity) -> SlotMove | None:
    """Returns the slot's last event; None when it is this promotion, so that no run records it
    twice.
    """
    last = job.ledger.slot_events(identity.slot)[-1]
    is_it = (last.event, last.incarnation, last.timeline) == (
        "promoted",
        identity.incarnation,
        identity.timeline,
    )
    return None if is_it else last


def copies_beyond(states: Sequence[TableState], switchpoint: Lsn) -> list[TableState]:
    """Returns complete copies whose snapshot may include changes from after that position."""
    return [
        state
        for state in states
        if state.status == SYNCED and state.snapshot_lsn > switchpoint.value
    ]


def _not_followed(
    identity: SlotIdentity, server: ServerPosition, slot: SlotState | None
) -> str | None:
    """Returns why another timeline of the cluster can't be followed at all."""
    if server.timeline < identity.timeline:
        return (
            "this is the server from before a failover, and what is written to it is lost: point"
            f" the connection at the primary ({RUNBOOK})"
        )
    if slot is None or not slot.synced:
        return (
            "its slot wasn't kept up to date by PostgreSQL's slot synchronization"
            " (source.failover), so its position can't be verified; point the connection back, or"
            f" run resync ({RUNBOOK})"
        )
    return None


def _move(identity: SlotIdentity, server: ServerPosition) -> str:
    return (
        f"slot {identity.slot!r} was set up on system {identity.system_identifier}, timeline"
        f" {identity.timeline}; the connection now leads to system {server.system_identifier},"
        f" timeline {server.timeline}"
    )


def _print(ends: dict[int, Lsn]) -> str:
    return ", ".join(f"timeline {timeline} until {end}" for timeline, end in sorted(ends.items()))
