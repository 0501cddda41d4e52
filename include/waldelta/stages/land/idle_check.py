"""A look at the slot without Spark: is there anything for us? If not, it is moved, so that it holds
no WAL back.

It is moved when that frees a WAL file, or may: each move is recorded durably, and smaller ones
would free nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from waldelta.errors import PeekTimeout, PeekTooLarge, SourceDiskFull, StateError
from waldelta.lake.changelog import ChangeLog, Snapshot
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import now
from waldelta.lsn import Lsn
from waldelta.permissions import private_files
from waldelta.pipeline import Job, SlotIdentity, slot_lock
from waldelta.pipeline.drift import CatalogTable, read_catalog_state
from waldelta.pipeline.drift.drift import find_drift
from waldelta.pipeline.drift.partitions import of_partition, with_leaves
from waldelta.pipeline.drift.rewrites import unsent_changes
from waldelta.pipeline.drift.unsent_truncates import with_truncated
from waldelta.pipeline.targets import RequiredAction, TargetSource, Watermarks
from waldelta.pipeline.targets.lifecycle import (
    never_copied,
    read_lifecycles,
    read_published,
    record_removed,
    requiring,
    states,
)
from waldelta.pipeline.targets.target_sources import read_targets
from waldelta.pipeline.targets.watermarks import messages_applied
from waldelta.postgres.lock_waits import limited, read_around
from waldelta.postgres.refused_statements import refused_statements
from waldelta.postgres.server_position import read_oldest_xid
from waldelta.postgres.unpublished_tables import not_published, unpublished
from waldelta.slot import slot_position
from waldelta.slot.acknowledge import move_idle_slot
from waldelta.slot.failover import check_system
from waldelta.slot.gaps import gaps_recorded
from waldelta.slot.health import critical, log_warnings, slot_warnings
from waldelta.slot.read import ReadRequest, peek_error
from waldelta.slot.read.decode_failure import check_next
from waldelta.slot.read.peek import NO_ROOM, PeekBound, end_old_backends, whole
from waldelta.slot.recovery import check_unmoved, recover, slot_move
from waldelta.slot.standby import check_slot, standby_warnings
from waldelta.slot.verify.slot_count import first_message

log = logging.getLogger(__name__)

# A look is to be short: what takes longer to read is what Spark's stages are for. Airflow's task
# allows more.
IDLE_CHECK_BUDGET_S = 120.0
# Reading a row filter takes a lock on its table.
_LOCK_TIMEOUT_S = 1.0
# Of each statement before that: at the most two of them take long.
_STATEMENT_TIMEOUT_S = IDLE_CHECK_BUDGET_S / 2


@dataclass(frozen=True, slots=True)
class IdleCheck:
    """What a look found; ``moved_to`` when the slot was moved over WAL without anything for us.

    ``lag_bytes`` is what the slot is behind now. A slot without changes stays up to one WAL file
    behind. ``critical`` is what was critical of the slot before.
    """

    has_work: bool
    reason: str
    lag_bytes: int
    moved_to: str | None = None
    critical: tuple[str, ...] = ()


@private_files()
def check_idle(job: Job) -> IdleCheck:
    """Say whether a run is worth starting Spark for; moves an idle slot.

    Raises the errors of a slot that is missing, lost, foreign, ahead of everything we ever
    consumed, or whose next transaction can't be decoded.
    """
    source, ledger = job.pipeline.source, job.ledger
    identity = job.slot_identity()
    change_log = job.change_log(identity)
    with (
        gaps_recorded(job),
        job.connect("look") as primary,
        job.connect_slot("look", primary) as connection,
        slot_lock(job),
    ):
        server = slot_position(connection, job, primary)
        check_system(identity, server)
        end_old_backends(connection, source.slot)
        slot = check_slot(connection, job)
        elsewhere = standby_warnings(primary, connection, job, server)
        warnings = [
            *slot_warnings(slot, job.pipeline.slot_limits, ledger.last_move(), now()),
            *elsewhere,
        ]
        log_warnings(warnings)
        try:
            with limited(connection, "statement_timeout", _STATEMENT_TIMEOUT_S):
                recovered = recover(connection, job, identity, change_log, server, one_window=True)
        except (psycopg.errors.QueryCanceled, PeekTimeout, PeekTooLarge, SourceDiskFull):
            behind = "the slot is behind what has landed, by more WAL than a look goes through"
            return IdleCheck(
                True,
                behind,
                server.lag_of(slot.confirmed_flush_lsn),
                critical=tuple(critical(warnings)),
            )
        stands, identity = recovered.confirmed, recovered.identity
        reason = _work_or_unknown(primary, job, identity, change_log, read_oldest_xid(connection))
        position, window = stands, job.pipeline.batch.wal_window_mb << 20
        deadline = time.monotonic() + IDLE_CHECK_BUDGET_S
        while reason is None and position < server.flush_lsn:
            upto = min(server.flush_lsn, position + window)
            reason = _reason_to_run(connection, job, (position, upto), deadline - time.monotonic())
            check_unmoved(connection, job, identity, stands)
            must_move = reason is None and server.must_move(stands, upto, slot.restart_lsn)
            if must_move and (reason := _needs_other_request(job, change_log)) is None:
                move_idle_slot(
                    connection, source.slot, ledger, slot_move(identity, job.run_id, upto.value)
                )
                stands = upto
            position = upto
        moved_to = str(stands) if stands > recovered.confirmed else None
        found = (reason is not None, reason or "no changes", server.lag_of(stands), moved_to)
        return IdleCheck(*found, tuple(critical(warnings)))


def _reason_to_run(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    span: tuple[Lsn, Lsn],
    timeout_s: float,
) -> str | None:
    """Changes for us in a stretch of WAL, or more WAL than can be looked through in time; None when
    there is nothing.
    """
    between = f"between {span[0]} and {span[1]}"
    too_much = (
        f"more WAL {between} than an idle check of {IDLE_CHECK_BUDGET_S:g} s goes through, or the"
        " server has room for"
    )
    if timeout_s <= 0:
        return too_much
    timeout_s = min(timeout_s, job.pipeline.batch.statement_timeout_s)
    # Without streaming: an open transaction alone is no work, however large.
    source = whole(job.pipeline.source)
    try:
        with limited(connection, "statement_timeout", timeout_s):
            found = first_message(connection, source, span[1])
    except (psycopg.errors.QueryCanceled, *NO_ROOM):
        return too_much  # landing takes smaller bites until it goes, or says what it lacks
    except (psycopg.errors.UndefinedObject, psycopg.errors.ObjectInUse) as err:
        raise peek_error(source.slot, str(err)) from None
    except (
        psycopg.Error
    ) as err:  # of the first transaction, or of one behind messages that are discarded
        check_next(job, err, PeekBound(span[1], 1, timeout_s, 0))
        return f"changes {between}"
    return f"changes {between}" if found is not None else None


def _needs_other_request(job: Job, change_log: ChangeLog) -> str | None:
    """Why a run is to move the slot, which tells by what the WAL was read: else what was passed
    over counts as read like the last batch.
    """
    last = change_log.last_batch()
    if last is None or ReadRequest.read(
        change_log.commit_infos([last]).get(last, {})
    ) == ReadRequest.of(job.pipeline.source):
        return None
    return "publications or options are others than those of the last batch"


def _work_or_unknown(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    oldest_xid: int,
) -> str | None:
    """Why a run is worth it whatever the slot holds, be it that this can't be told.

    Whatever is wrong with a table or its target, a run says by name; what waits in the slot doesn't
    wait for that.
    """
    try:
        with limited(connection, "statement_timeout", _STATEMENT_TIMEOUT_S):
            return _remaining_work(connection, job, identity, change_log, oldest_xid)
    except Exception as err:
        if connection.broken:
            raise
        log.warning("whether anything is left to do can't be told: %s", err)
        return f"whether anything is left to do can't be told ({str(err).partition(chr(10))[0]})"


def _remaining_work(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    oldest_xid: int,
) -> str | None:
    """Why a run is worth it whatever the slot holds; enters into the ledger what isn't published
    any more.

    ``oldest_xid`` is the oldest transaction that runs as the slot's server has it.
    """
    if _has_unreported(job):  # asked before what has left is recorded, of which a run tells then
        return "a run ended before it told what it applied"
    published, locked = read_around(
        connection, _LOCK_TIMEOUT_S, partial(read_published, connection, job)
    )
    standings = read_lifecycles(job, published)
    record_removed(job, standings)
    if notice := never_copied(job, standings):
        log.warning("%s", notice)
    for notice in refused_statements(connection, job.pipeline.source.publication_names):
        log.warning("%s", notice)
    if lacking := unpublished(connection, job.pipeline.source):
        log.warning("%s", not_published(lacking))
    replicated = [
        with_leaves(state, published) for state in states(standings, RequiredAction.APPLY)
    ]
    if behind := _behind(job, identity, change_log, replicated):
        return f"landed changes wait for {', '.join(behind)}"
    if waiting := requiring(standings, RequiredAction.COPY):
        return f"to be copied again: {', '.join(found.table_name for found in waiting)}"
    there = read_catalog_state(connection, replicated)
    found = [
        of_partition(state, there[state.table_name], published.get(state.table_name))
        for state in replicated
    ]
    replicated = [state for state, _ in found]
    # Of what may not have landed a run couldn't judge either, and would be started for nothing
    # until it has.
    catalog_tables = with_truncated(
        connection, replicated, {state.table_name: table for state, table in found}, oldest_xid
    )
    if written_anew := [
        s.table_name for s in replicated if unsent_changes(s, catalog_tables[s.table_name].storage)
    ]:
        return f"rows were written anew without being sent: {', '.join(written_anew)}"
    drifted, _ = read_around(
        connection,
        _LOCK_TIMEOUT_S,
        partial(_drifted, connection, job, published, replicated, catalog_tables),
        locked,
    )
    if drifted:
        return f"drifted from their source: {', '.join(drifted)}"
    return None


def _has_unreported(job: Job) -> bool:
    """Whether no run has told, and so checked and announced, what the newest cut's batch brought.

    A run that fails or is killed while it lands may have applied steps by then. Once results are
    forgotten, a run that finds nothing to tell is the next one that has told.
    """
    cut = job.ledger.last_cut()
    return cut is not None and not job.ledger.is_reported(cut)


def _drifted(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    mappings: Mapping[str, TargetSource],
    replicated: Sequence[TableState],
    catalog_tables: Mapping[str, CatalogTable],
    locked: Collection[int],
) -> list[str]:
    """Targets whose drift a run would mend, or hasn't told yet; what is locked now, a later look
    judges.
    """
    if not replicated:
        return []
    targets = {
        str(target.id): target
        for target in read_targets(connection, job.pipeline, mappings, sizes=False, locked=locked)
        if not target.is_unread
    }
    found = []
    for state in replicated:
        target = targets.get(state.table_name)
        if target is None or target.problem is not None:
            continue
        if drift := find_drift(
            job.pipeline, state, target.table, catalog_tables[state.table_name], target.mapping
        ):
            evolves = job.pipeline.target.recopies(state.table_name)
            if (drift.mends and evolves) or (drift.is_new and drift.reasons):
                found.append(state.table_name)
    return found


def _behind(
    job: Job, identity: SlotIdentity, change_log: ChangeLog, replicated: Sequence[TableState]
) -> list[str]:
    """Targets that haven't applied everything that was landed for them."""
    last = change_log.last_batch()
    if last is None:
        return []
    watermarks = Watermarks(job, identity)
    behind = [
        state.table_name for state in replicated if _is_behind(watermarks, change_log, state, last)
    ]
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
