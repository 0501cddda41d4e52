"""A standby that has the slot (source.read_from): its position relative to its primary, and waiting
for it.

Its WAL equals the primary's byte by byte, so positions and transaction ids mean the same on both.
Only what it has replayed can be read there. Copies need snapshots of the primary, so they are ahead
of that, and fit the stream by transaction visibility.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from threading import Event

import psycopg

from waldelta.background import run_concurrently
from waldelta.config.pipeline_file import SlotLimits
from waldelta.errors import (
    NotStandby,
    SourceChanged,
    StandbyAway,
)
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
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
from waldelta.postgres.walsender import read_timeline, unread_timeline
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
    """Return the position of the server that has the slot, to which ``connection`` leads.

    A caller that is connected to the primary passes that as ``primary``. Raises NotPrimary. With
    source.read_from, it raises NotStandby when that isn't a standby of conn_id's server,
    SourceChanged when it has WAL that the primary lacks, and SourceUnreachable when it doesn't
    report what it replays.
    """
    if job.pipeline.source.read_from is None:
        return read_position(connection)
    # A server that isn't in recovery may have no free walsender, so what it is comes first.
    standby = read_standby_position(connection, timeline=0)
    with (
        nullcontext(primary) if primary is not None else job.source.connect("primary") as connected
    ):
        # Read afterwards, so that it isn't behind what the standby has replayed: a primary sends
        # only what it has flushed.
        ahead = read_position(connected)
    standby = replace(standby, timeline=_timeline(job), primary_lsn=ahead.flush_lsn)
    _check_follows(connection, standby, ahead)
    return standby


def committed_upto(
    connection: Connection, server: ServerPosition, requested_at: datetime
) -> datetime:
    """Return a time up to which all commits of the primary can be read through ``connection``.

    That is ``requested_at``, a time before the position was read. For a standby that was behind
    then, it is the commit time of the last transaction that it has replayed.
    """
    if not server.replay_lag:
        return requested_at
    ((replayed,),) = connection.execute("select pg_last_xact_replay_timestamp()").fetchall()
    return replayed or requested_at


def check_slot(connection: Connection, job: Job) -> SlotState:
    """Return the slot on the server to which ``connection`` leads; raises as check_health()
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
    """Return warnings, before a run, about the standby that has the slot; none for a primary.

    ``connection`` leads to ``server``, which has the slot, and is ``primary`` where that is the
    primary.
    """
    left = remaining_on_primary(primary, connection, job.pipeline.source.slot)
    return [
        *replay_warnings(server, job.pipeline.slot_limits),
        *(SlotWarning("warning", text) for text in left),
    ]


def replay_warnings(server: ServerPosition, limits: SlotLimits) -> list[SlotWarning]:
    """Return warnings about a standby that is behind its primary; the slot's backlog doesn't show
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
    """Return a warning about the primary's slot of that name, when a standby has the pipeline's.

    ``connection`` leads to the server that has the pipeline's slot.
    """
    left = read_slot(primary, name) if connection is not primary else None
    if left is None:
        return []
    line = (
        f"the primary also has a slot {name!r}, which this pipeline doesn't read and which keeps"
        f" more and more WAL (now {size(left.retained_bytes)}): unless another program reads it,"
        f" drop it there: select pg_drop_replication_slot('{name}')"
    )
    return [line]


def wait_replayed(
    primary: Connection, connection: Connection, timeout_s: float = REPLAY_TIMEOUT_S
) -> None:
    """Wait until the server that has the slot has replayed what the primary has written so far.

    Returns at once when it is the primary. Raises StandbyAway after ``timeout_s``.
    """
    if connection is primary:
        return
    ((written, segment_bytes),) = primary.execute(f"select {WRITTEN_SQL}".encode()).fetchall()
    wanted, deadline = Lsn.parse(written).of_record(segment_bytes), time.monotonic() + timeout_s
    statement = f"select ({READABLE_LSN})::text".encode()
    while (replayed := Lsn.parse(connection.execute(statement).fetchall()[0][0])) < wanted:
        if time.monotonic() > deadline:
            raise StandbyAway(
                f"the standby {describe_server(connection)} has replayed WAL up to {replayed}, but"
                f" not up to {wanted} within {timeout_s:g} s: check whether it is connected"
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
        # A slot there would have none of our changes, and every run would find none and move it on.
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
