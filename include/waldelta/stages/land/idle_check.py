"""Idle check: looks without Spark whether the slot has changes for this pipeline. If not, it moves
the slot, so that it keeps no WAL.

The slot is moved only when that frees a WAL file, or may: each move is recorded durably, and
smaller ones would free nothing.
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
from waldelta.lake.ledger import TableState, now
from waldelta.lsn import Lsn
from waldelta.permissions import private_files
from waldelta.pipeline import Job, SlotIdentity, slot_lock
from waldelta.pipeline.drift import (
    CatalogTable,
    find_drift,
    may_resync,
    outdated_columns,
    read_own_tables,
    read_published_now,
    unsent_changes,
    with_leaves,
)
from waldelta.pipeline.targets import (
    RequiredAction,
    TargetSource,
    Watermarks,
    messages_applied,
    read_lifecycles,
    record_removed,
    requiring,
)
from waldelta.pipeline.targets.corrected_expectations import find_corrected
from waldelta.pipeline.targets.lifecycle import copied_by_runs, never_copied, states_to_apply
from waldelta.pipeline.targets.target_sources import read_target_sources
from waldelta.postgres import LockedTables, ServerPosition, limited, read_around, read_oldest_xid
from waldelta.postgres.publication_checks import find_unpublished, warn_of_refused_writes
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.acknowledge import first_message, move_idle_slot
from waldelta.slot.gaps import gaps_recorded
from waldelta.slot.health import critical, log_warnings, slot_warnings
from waldelta.slot.read.decode_failure import Reading
from waldelta.slot.read.peek import (
    PeekBound,
    ReadRequest,
    end_old_backends,
    peek_error,
    without_streaming,
)
from waldelta.slot.recovery import Recovered, check_unmoved, recover, slot_move
from waldelta.slot.standby import check_slot, check_system, slot_position, standby_warnings
from waldelta.stages.setup.new_tables import adopt_or_report

log = logging.getLogger(__name__)

# An idle check must be short: what takes longer to read is left to Spark's stages. Airflow's task
# allows more.
IDLE_CHECK_BUDGET_S = 120.0
# Reading a row filter takes a lock on its table.
_LOCK_TIMEOUT_S = 1.0
# Limit of each earlier statement: at most two of them take long.
_STATEMENT_TIMEOUT_S = IDLE_CHECK_BUDGET_S / 2
# A shorter limit could also end the statement that puts the session's own limit back.
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class IdleCheck:
    """The result of an idle check; ``moved_to`` when the slot was moved over WAL without changes.

    ``lag_bytes`` is the slot's current lag. A slot without changes lags by up to one WAL file.
    ``critical`` are critical warnings about the slot before the check.
    """

    has_work: bool
    reason: str
    lag_bytes: int
    moved_to: str | None = None
    critical: tuple[str, ...] = ()


@private_files()
def check_idle(job: Job) -> IdleCheck:
    """Returns whether a run must be started, and why; moves the slot over WAL without changes
    where that may free some.

    Adopts new tables, as a run does. Raises the errors of a slot that is missing, lost, foreign,
    ahead of everything this pipeline consumed, or whose next transaction can't be decoded.
    """
    identity = job.read_identity()
    change_log = job.change_log(identity)
    with (
        gaps_recorded(job),
        job.source.connect("look") as primary,
        job.source.connect_slot("look", primary) as connection,
        slot_lock(job),
    ):
        server = slot_position(connection, job, primary)
        check_system(identity, server)
        end_old_backends(connection, job.pipeline.source.slot)
        slot = check_slot(connection, job)
        elsewhere = standby_warnings(primary, connection, job, server)
        slot_texts = slot_warnings(slot, job.pipeline.slot_limits, job.ledger.last_move(), now())
        warnings = [*slot_texts, *elsewhere]
        log_warnings(warnings)
        found_critical = tuple(critical(warnings))
        try:
            with limited(connection, "statement_timeout", _STATEMENT_TIMEOUT_S):
                recovered = recover(connection, job, identity, change_log, server, one_window=True)
        except (psycopg.errors.QueryCanceled, PeekTimeout, PeekTooLarge, SourceDiskFull):
            behind = "the slot is behind the change log, by more WAL than an idle check reads"
            lag_bytes = server.lag_of(slot.confirmed_flush_lsn)
            return IdleCheck(True, behind, lag_bytes, critical=found_critical)
        reason = _work_or_unknown(
            primary, job, recovered.identity, change_log, read_oldest_xid(connection)
        )
        position = recovered.confirmed
        if reason is None:
            reason, position = _search_wal(connection, job, recovered, server, slot.restart_lsn)
        return IdleCheck(
            reason is not None,
            reason or "no changes",
            server.lag_of(position),
            str(position) if position > recovered.confirmed else None,
            found_critical,
        )


def _search_wal(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    recovered: Recovered,
    server: ServerPosition,
    restart_lsn: Lsn | None,
) -> tuple[str | None, Lsn]:
    """Search the WAL behind the slot for a reason to run, and move the slot over what has none.

    Returns the reason, and the slot's new position.
    """
    position = slot_position = recovered.confirmed
    identity, reason = recovered.identity, None
    deadline = time.monotonic() + IDLE_CHECK_BUDGET_S
    while reason is None and position < server.flush_lsn:
        upto = min(server.flush_lsn, position + (job.pipeline.batch.wal_window_mb << 20))
        reason = _reason_to_run(connection, job, position, upto, deadline - time.monotonic())
        check_unmoved(connection, job, identity, slot_position)
        must_move = reason is None and server.must_move(slot_position, upto, restart_lsn)
        if must_move and (reason := _needs_other_request(job, job.change_log(identity))) is None:
            move = slot_move(identity, job.run_id, upto.value)
            move_idle_slot(connection, job.pipeline.source.slot, job.ledger, move)
            slot_position = upto
        position = upto
    return reason, slot_position


def _reason_to_run(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    after: Lsn,
    upto: Lsn,
    timeout_s: float,
) -> str | None:
    """Returns why a range of WAL is a reason to run; None when it has nothing.

    It is a reason when it has changes, or is too large to check in time.
    """
    between = f"between {after} and {upto}"
    too_much = (
        f"more WAL {between} than an idle check reads in {IDLE_CHECK_BUDGET_S:g} s, or than the"
        " server has room for"
    )
    if timeout_s < _LEAST_TIMEOUT_S:
        return too_much
    timeout_s = min(timeout_s, job.pipeline.batch.statement_timeout_s)
    # The slot is read without streaming, because an open transaction alone is no work, however
    # large.
    source = without_streaming(job.pipeline.source)
    try:
        with limited(connection, "statement_timeout", timeout_s):
            message = first_message(connection, source, upto)
    except (PeekTimeout, PeekTooLarge, SourceDiskFull):
        # Landing reads smaller windows until it succeeds, or reports what is missing.
        return too_much
    except psycopg.Error as err:
        # The error may be of the first transaction, or of one after messages that are discarded.
        error = peek_error(source.slot, ServerError.of(err))
        unreadable = Reading(job).refused(error, PeekBound(upto, 1, timeout_s, 0))
        if unreadable is not None:
            raise unreadable from None
        return f"changes {between}"
    return f"changes {between}" if message is not None else None


def _needs_other_request(job: Job, change_log: ChangeLog) -> str | None:
    """Returns why a run must move the slot, because it records a new read request.

    Otherwise, the skipped WAL would count as read with the last batch's publications and options.
    """
    last = change_log.last_batch()
    if last is None or ReadRequest.read(
        change_log.commit_infos([last]).get(last, {})
    ) == ReadRequest.of(job.pipeline.source):
        return None
    return "publications or options differ from those of the last batch"


def _work_or_unknown(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    oldest_xid: int,
) -> str | None:
    """Returns why a run is needed whatever the slot has, also when that is unknown.

    A run reports problems of a table or its target by name. Changes pending in the slot must not
    wait for these.
    """
    try:
        with limited(connection, "statement_timeout", _STATEMENT_TIMEOUT_S):
            return _remaining_work(connection, job, identity, change_log, oldest_xid)
    except Exception as err:
        if connection.closed:
            raise
        log.warning("the idle check can't determine whether work is left: %s", err)
        return f"whether work is left can't be determined ({str(err).partition(chr(10))[0]})"


def _remaining_work(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    identity: SlotIdentity,
    change_log: ChangeLog,
    oldest_xid: int,
) -> str | None:
    """Returns why a run is needed whatever the slot has; records tables that left the publications,
    and adopts new ones.

    ``oldest_xid`` is the oldest running transaction according to the slot's server.
    """
    # This is checked before removed tables are recorded, because a run then reports those.
    # A run that fails or is killed while landing may have applied some batches. After old results
    # are pruned, a run that finds nothing to report counts as the next one that has reported.
    cut = job.ledger.last_cut()
    if cut is not None and not job.ledger.is_reported(cut):
        return "a run ended before it reported what it applied"
    adopt_or_report(connection, job)
    published, locked = read_around(
        connection, _LOCK_TIMEOUT_S, partial(read_target_sources, connection, job.pipeline)
    )
    all_lifecycles = read_lifecycles(job, published)
    record_removed(job, all_lifecycles)
    adopted = copied_by_runs(job, published, all_lifecycles)
    if notice := never_copied(
        job, [lifecycle for lifecycle in all_lifecycles if lifecycle not in adopted]
    ):
        log.warning("%s", notice)
    for notice in warn_of_refused_writes(connection, job.pipeline.source.publication_names):
        log.warning("%s", notice)
    for notice in find_unpublished(connection, job.pipeline.source).warnings():
        log.warning("%s", notice)
    replicated = [with_leaves(state, published) for state in states_to_apply(all_lifecycles)]
    if behind := _behind(job, identity, change_log, replicated):
        return f"landed changes wait for {', '.join(behind)}"
    if edited := find_corrected(job, [state.table_name for state in replicated]):
        return f"expectations were edited since they failed: {', '.join(edited)}"
    if waiting := [*requiring(all_lifecycles, RequiredAction.COPY), *adopted]:
        return f"a new copy is needed: {', '.join(lifecycle.table_name for lifecycle in waiting)}"
    return _changed_on_source(connection, job, published, replicated, locked, oldest_xid)


def _changed_on_source(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    published: Mapping[str, TargetSource],
    replicated: Sequence[TableState],
    locked: LockedTables,
    oldest_xid: int,
) -> str | None:
    """Returns which tables were rewritten or have publication drift, as a reason for a run."""
    # A run couldn't judge what may not have landed either, and would be started for nothing until
    # then.
    replicated, catalog_tables = read_own_tables(connection, replicated, published, oldest_xid)
    if written_anew := [
        s.table_name
        for s in replicated
        for storage in [catalog_tables[s.table_name].storage]
        if unsent_changes(s, storage, outdated_columns(job, s, storage))
    ]:
        return f"rewritten on the source without replicated changes: {', '.join(written_anew)}"
    drifted, _ = read_around(
        connection,
        _LOCK_TIMEOUT_S,
        partial(_drifted_targets, connection, job, published, replicated, catalog_tables),
        locked,
    )
    if drifted:
        return f"publication drift: {', '.join(drifted)}"
    return None


def _drifted_targets(
    connection: psycopg.Connection[tuple[Any, ...]],
    job: Job,
    mappings: Mapping[str, TargetSource],
    replicated: Sequence[TableState],
    catalog_tables: Mapping[str, CatalogTable],
    locked: Collection[int],
) -> list[str]:
    """Returns targets whose drift a run would repair or hasn't reported; locked ones come later."""
    targets = read_published_now(connection, job, mappings, replicated, locked)
    names = []
    for state in replicated:
        target = targets.get(state.table_name)
        if target is None or target.is_unread or target.problem is not None:
            continue
        drift = find_drift(job.pipeline, state, catalog_tables[state.table_name], target)
        if (drift.mends and may_resync(job, state)) or (drift.is_new and drift.reasons):
            names.append(state.table_name)
    return names


def _behind(
    job: Job, identity: SlotIdentity, change_log: ChangeLog, replicated: Sequence[TableState]
) -> list[str]:
    """Returns targets that haven't applied everything that was landed for them."""
    last = change_log.last_batch()
    if last is None:
        return []
    watermarks = Watermarks(job, identity)
    behind = [
        state.table_name for state in replicated if _is_behind(watermarks, change_log, state, last)
    ]
    if job.pipeline.source.options.messages and messages_applied(job, identity) < last:
        behind.append("the table of logical messages")
    return behind


def _is_behind(watermarks: Watermarks, change_log: ChangeLog, state: TableState, last: int) -> bool:
    try:
        applied = watermarks.of(state)
    except StateError:
        # Apply reports by name that this target is gone; the slot's work must not wait for it.
        return True
    snapshot = Snapshot.parse(state.snapshot)
    if applied >= last:
        return False
    stream = change_log.stream(applied, last)
    return change_log.has_changes(stream, state.relation_ids, snapshot) or stream.has_truncates()
