"""A look at the slot without Spark: is there anything for us? If not, it is moved, so that it holds no WAL back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.change_log import ChangeLog
from waldelta.consume import SlotIdentity, confirmed_lsn, move_idle_slot
from waldelta.errors import StateError
from waldelta.job import Job
from waldelta.ledger import TableState
from waldelta.locks import slot_lock
from waldelta.lsn import Lsn
from waldelta.peek import call, end_old_readers, whole
from waldelta.recover import recover, slot_move
from waldelta.server import read_position
from waldelta.slot import check_health, read_slot
from waldelta.visibility import Snapshot
from waldelta.watermark import Watermarks, messages_applied, synced_states

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """What a look found; ``moved_to`` when the slot was moved over WAL without anything for us."""

    has_work: bool
    reason: str
    lag_bytes: int
    moved_to: str | None = None


def look(job: Job) -> Look:
    """Say whether a run is worth starting Spark for; moves an idle slot.

    Raises the errors of a slot that is missing, lost, foreign, or ahead of everything we ever consumed.
    """
    source, ledger = job.pipeline.source, job.ledger
    identity = job.slot_identity()
    change_log = job.change_log(identity)
    with job.connect("look") as connection, slot_lock(job):
        check_health(read_slot(connection, source.slot), source.slot, two_phase=source.options.two_phase)
        server = read_position(connection)
        end_old_readers(job.conninfo, source.slot)
        standing = recover(connection, identity, ledger, change_log, server, job.run_id)
        lag = max(0, server.flush_lsn - standing.confirmed)
        if behind := _behind(job, identity, change_log):
            return Look(True, f"landed changes wait for {', '.join(behind)}", lag)
        position, window = standing.confirmed, job.pipeline.batch.wal_window_mb << 20
        while position < server.flush_lsn:
            upto = min(server.flush_lsn, position + window)
            if _has_changes(connection, job, upto):
                return Look(True, f"changes between {position} and {upto}", lag)
            move_idle_slot(connection, source.slot, ledger, slot_move(identity, job.run_id, upto.value))
            position = upto
        return Look(False, "no changes", lag, str(confirmed_lsn(connection, source.slot)))


def _has_changes(connection: psycopg.Connection[tuple[Any, ...]], job: Job, upto: Lsn) -> bool:
    connection.execute(f"set statement_timeout = {job.pipeline.batch.statement_timeout_s * 1000}".encode())
    # Without streaming: an open transaction alone is no work, however large.
    statement = call("peek", whole(job.pipeline.source), upto, 1, "1")
    try:
        return connection.execute(f"{statement} limit 1".encode()).fetchone() is not None
    except psycopg.errors.QueryCanceled:
        # Too much WAL to look through in time; landing takes smaller bites until it goes.
        return True


def _behind(job: Job, identity: SlotIdentity, change_log: ChangeLog) -> list[str]:
    """Synced targets that haven't applied everything that was landed for them."""
    last = change_log.last_batch()
    if last is None:
        return []
    watermarks = Watermarks(job, identity)
    behind = [state.table_name for state in synced_states(job) if _is_behind(watermarks, change_log, state, last)]
    if job.pipeline.source.options.messages and messages_applied(job, identity) < last:
        behind.append("the table of messages")
    return behind


def _is_behind(watermarks: Watermarks, change_log: ChangeLog, state: TableState, last: int) -> bool:
    try:
        applied = watermarks.of(state)
    except StateError:
        # Apply says by name that this target is gone; the slot's work must not wait for it.
        return True
    snapshot = Snapshot.parse(state.snapshot)
    if applied >= last:
        return False
    stream = change_log.stream(applied, last)
    return change_log.has_changes(stream, state.relation_ids, snapshot) or stream.has_truncates()
