"""Resync on PostgreSQL's side: recreates a pipeline's permanently broken slot; waldelta.jobs.sync
repairs the targets afterwards.

First the gap is recorded. Then the slot incarnation ends, and the slot is dropped if it is this
pipeline's. Last, publications and slot are set up again, which begins another incarnation. If a
resync is killed in between, the next resync, or setup, continues.
"""

from __future__ import annotations

import logging

from waldelta.errors import SlotError, SlotForeign, SlotMissing, SourceChanged
from waldelta.failpoints import fault_point
from waldelta.lake import check_writable
from waldelta.lake.ledger import Gap
from waldelta.pipeline import Job, slot_lock
from waldelta.postgres import Connection, read_position
from waldelta.slot.gaps import BREAKS, describe, open_gaps, record_gap
from waldelta.slot.read.peek import end_old_backends
from waldelta.slot.recovery import recover
from waldelta.slot.slot import check_health, check_ours, read_slot
from waldelta.slot.standby import check_system, slot_position
from waldelta.stages.setup._slot_setup import beyond, incarnation_events, was_created_by_pipeline
from waldelta.stages.setup.setup import carry_out

log = logging.getLogger(__name__)


def renew_slot(
    job: Job,
    *,
    accept_server: str | None = None,
    broken: SlotError | None = None,
) -> Gap | None:
    """Recreate the slot, and missing parts of the publications, if the stream can't continue.

    Returns the gap. Returns None, and does nothing, while the slot seems fine without reading it:
    ``broken`` is an error found by reading it. Raises before anything is changed: SlotMissing when
    the pipeline was never set up, SlotForeign for a slot that another owner must drop, SlotInUse
    for a slot that is being read, and PreflightFailed. Raises SourceChanged for a server that
    isn't, or doesn't continue, the lake's source, unless ``accept_server`` names it ("system
    identifier/timeline").
    """
    check_writable(job.pipeline.target.root)
    with (
        slot_lock(job) as lock,
        job.source.connect("resync") as connection,
        job.source.connect_slot("resync", connection) as slot_connection,
    ):
        try:
            job.read_identity()
        except SlotMissing:
            # A resync was killed between the end of one incarnation and the beginning of the next.
            opened = open_gaps(job.ledger.gaps(job.pipeline.source.slot))
            if not opened:
                raise
            carry_out(connection, job, lock)
            return opened[-1]
        err = _broken(slot_connection, job) or broken
        if err is None:
            return None
        if isinstance(err, SourceChanged):
            _check_accepted(connection, err, accept_server)
        _check_droppable(slot_connection, job)
        gap = record_gap(job, err)
        fault_point("resync.recorded")
        plan = carry_out(connection, job, lock, renew=True)
        for text in plan.warnings:
            log.warning("%s", text)
        slot, span = job.pipeline.source.slot, describe(gap) if gap else ""
        log.info("slot=%s recreated after the gap %s", slot, span)
        return gap


def _check_accepted(connection: Connection, err: SourceChanged, accepted: str | None) -> None:
    """Raise SourceChanged unless the operator accepted this server, which may be a clone or a test.

    A resync makes the targets equal to it.
    """
    server = read_position(connection)
    identity = f"{server.system_identifier}/{server.timeline}"
    if accepted != identity:
        raise SourceChanged(
            f"{err}. A resync makes the targets equal to this server: only if this is the intended"
            f" server, run it with --accept-server {identity} (in Airflow: the param accept_server)"
        ) from err


def _broken(connection: Connection, job: Job) -> SlotError | None:
    """Returns the error that keeps the stream from continuing, or None; raises other errors."""
    name, identity = job.pipeline.source.slot, job.read_identity()
    try:
        server = slot_position(connection, job)
        check_system(identity, server)
        end_old_backends(connection, name)
        check_health(read_slot(connection, name), name)
        recover(connection, job, identity, job.change_log(identity), server)
    except BREAKS as err:
        return err
    return None


def _check_droppable(connection: Connection, job: Job) -> None:
    """Raise SlotForeign for a slot that this pipeline isn't known to have created.

    Only its owner may drop it.
    """
    name = job.pipeline.source.slot
    slot, moves = read_slot(connection, name), incarnation_events(job)
    if slot is None:
        return
    check_ours(slot)
    if not was_created_by_pipeline(moves) or slot.system_identifier != moves[-1].system_identifier:
        raise SlotForeign(
            f"slot {name!r} can't be used any more, but this pipeline did not create it: once no"
            f" other program needs it, drop it (select pg_drop_replication_slot('{name}')) and run"
            " resync again"
        )
    if (furthest := beyond(job, slot)) is not None:
        raise SlotForeign(
            f"slot {name!r} is at {slot.confirmed_flush_lsn}, beyond {furthest}, the furthest this"
            " pipeline ever moved it, so another program may have moved it, or dropped and"
            " recreated it: find out which; once no other program needs it, drop it (select"
            f" pg_drop_replication_slot('{name}')) and run resync again"
        )
