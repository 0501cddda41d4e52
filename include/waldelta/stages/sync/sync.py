"""Sync: copies published tables into their targets from one snapshot each, while the stream goes
on.

Per table: lock the target, take a snapshot, plan chunks, read them in Spark's tasks, replace the
target in one commit, and record the snapshot in the ledger. Apply then adds every landed change
that the snapshot doesn't see.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import tenacity

from waldelta.errors import (
    ConfigError,
    LateWriter,
    ModeRefused,
    SparkUnreachable,
    SyncFailed,
    WaldeltaError,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake import check_writable
from waldelta.lake.ledger import COPYING, FAILED, NEEDS_SYNC, REMOVED, SYNCED, TableState, now
from waldelta.lake.ledger.ledger import next_generation
from waldelta.pipeline import AdvisoryLock, Job, SlotIdentity, target_lock, unexpected_error
from waldelta.pipeline.advisory_locks import LockSessions
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    RequiredAction,
    read_unlocked_sources,
    requiring,
    unknown_tables,
)
from waldelta.pipeline.targets.lifecycle import NOT_PUBLISHED, check_not_removed, latest_by_name
from waldelta.pipeline.targets.move_target import move_targets, name_problems
from waldelta.postgres import TableId
from waldelta.quantities import counted
from waldelta.slot.gaps import close_gaps
from waldelta.slot.standby import check_source
from waldelta.snapshot.chunks import COPIED_AT_ONCE
from waldelta.snapshot.exported_snapshot import (
    PublicationVersion,
    wait_for_version,
    wait_for_version_again,
)
from waldelta.spark import Runner
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs
from waldelta.stages.sync._write import Former, keeps_earlier_rows
from waldelta.stages.sync.copy_table import (
    Attempt,
    SyncResult,
    check_primary,
    sync_table,
)
from waldelta.stages.sync.skipped_copy import check_skipped_copy

log = logging.getLogger(__name__)

ATTEMPTS = 4
OLD_TRANSACTIONS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A target to copy, the reason, and, where rows are compared first, its former copy.

    ``state`` is its ledger row when it was chosen. With ``insists`` the target is copied even if
    another run has copied it since.
    """

    target: ReplicatedTarget
    reason: str | None
    former: Former | None
    state: TableState | None
    insists: bool

    def is_done(self, last: TableState | None, incarnation: str) -> bool:
        """Returns whether another run has copied the table since, in this slot incarnation.

        ``last`` is the ledger's latest row of the table.
        """
        if self.insists or last is None or (last.status, last.incarnation) != (SYNCED, incarnation):
            return False
        return self.state is None or (self.state.generation, self.state.status) != (
            last.generation,
            SYNCED,
        )


def sync(  # noqa: PLR0913 - what is copied, why and how, of which callers name what isn't as usual
    runner: Runner,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    *,
    by_diff: bool = False,
    only_waiting: bool = False,
    old_transactions_timeout_s: float = OLD_TRANSACTIONS_TIMEOUT_S,
    results: list[SyncResult] | None = None,
) -> list[SyncResult]:
    """Copy these tables, or without names those without a complete copy; returns what was copied.

    ``only_waiting``: copies only tables that get no changes until they are copied, and that no
    other run is copying. ``by_diff``: tables with a copy from any slot incarnation are compared
    with the snapshot, and only rows that differ are written, where that is exact (mend_target). So
    are tables whose copy in the current incarnation didn't end, if an earlier one has a copy: this
    continues a killed resync. ``results`` gets each copy. Raises SyncFailed with all failures when
    the other tables are copied; before that ConfigError for a table that isn't published,
    ModeRefused for a named one, TransactionsStillOpen, NotPrimary or SlotMissing.
    """
    with job.source.connect("sync") as connection:
        check_source(connection, job)
        check_primary(connection, job)
        move_targets(job)
        states, insists = job.ledger.table_states(), tables is not None and not only_waiting
        # Tables whose size can't be read now come last.
        _, targets, _ = read_unlocked_sources(connection, job.pipeline)
        choice = _choose(runner, targets, job, tables, states, insists=insists)
        if not choice:
            close_gaps(job)
            return []
        refused = _refused_targets(job, choice, states)
        if insists and refused:  # The error is raised before anything is changed.
            raise next(iter(refused.values()))
        check_writable(job.pipeline.target.root)
        names = job.pipeline.source.publication_names
        drained = wait_for_version(connection, names, old_transactions_timeout_s)
    allowed = [target for target in choice if str(target.id) not in refused]
    orders = _orders(job, allowed, states, reason, by_diff=by_diff, insists=insists)
    results = [] if results is None else results
    if failures := refused | _copy_each(runner, job, orders, drained, results):
        raise SyncFailed(failures, len(results))
    close_gaps(job)
    return sorted(results, key=lambda result: TableId.parse(result.table_name))


def _orders(
    job: Job,
    targets: Sequence[ReplicatedTarget],
    states: Mapping[str, TableState],
    reason: str | None,
    *,
    by_diff: bool,
    insists: bool,
) -> list[CopyRequest]:
    names = [str(target.id) for target in targets]
    log.info("copying %s: %s", counted(len(targets), "table"), ", ".join(names))
    formers = _formers(job, names, by_diff=by_diff)
    return [
        CopyRequest(target, reason, formers.get(name), states.get(name), insists)
        for name, target in zip(names, targets, strict=True)
    ]


def _copy_each(
    runner: Runner,
    job: Job,
    orders: Sequence[CopyRequest],
    drained: PublicationVersion,
    results: list[SyncResult],
) -> dict[str, WaldeltaError]:
    """Copy targets, several at once; adds the results, and returns the errors by name."""
    failures: dict[str, WaldeltaError] = {}
    ledger_lock = threading.Lock()

    def attempt(order: CopyRequest) -> None:
        name = str(order.target.id)
        try:
            result = _sync_locked(runner, job, order, locks, ledger_lock, drained)
            if result is not None:
                results.append(result)
        except Exception as err:
            # A defect of waldelta or Spark in one table's copy must not stop the others.
            if not isinstance(err, WaldeltaError):
                log.exception("table=%s copy failed", name)
            failures[name] = unexpected_error(name, err)

    def is_merged(target: ReplicatedTarget) -> bool:
        name = str(target.id)
        mode = job.pipeline.target.mode_of(name)
        return mode.keeps_rows and keeps_earlier_rows(job, name, target.table.key_columns)

    # A MERGE needs the session's settings for itself, so it runs alone.
    compares = any(order.former is not None for order in orders)
    alone = [order for order in orders if compares or is_merged(order.target)]
    # The largest tables come first, so that small ones fill the gaps at the end.
    together = sorted(
        (order for order in orders if order not in alone),
        key=lambda order: -order.target.table.size_bytes,
    )
    with LockSessions(job.source.conninfo) as locks:
        with ThreadPoolExecutor(COPIED_AT_ONCE, thread_name_prefix="sync") as pool:
            list(pool.map(attempt, together))
        for order in alone:
            attempt(order)
    return failures


def _formers(job: Job, names: Sequence[str], *, by_diff: bool) -> dict[str, Former]:
    """Returns by name the complete copies of those tables that are compared with their copy.

    ``Former(None)`` is a table that never had one.
    """
    ledger_rows = job.ledger.table_rows()
    rows = [row for row in ledger_rows if row.status == SYNCED]
    copied = {row.table_name: row for row in rows}
    if by_diff:
        return {name: Former(copied.get(name)) for name in names}
    identity = job.read_identity()
    interrupted_names = {
        name
        for name, latest in latest_by_name(identity.states_of(ledger_rows)).items()
        if not latest.copied and latest.attempts
    }
    earlier = {row.table_name: row for row in rows if row.incarnation != identity.incarnation}
    return {
        name: Former(earlier[name])
        for name in names
        if name in interrupted_names and name in earlier
    }


def _refused_targets(
    job: Job, targets: Sequence[ReplicatedTarget], names: Iterable[str]
) -> dict[str, WaldeltaError]:
    """Returns by name why targets can't be synced as the pipeline file requires.

    ``names`` are the targets that the ledger has.
    """
    owners = {name: job.lake.stored_name(name) for name in names}
    new = {str(target.id) for target in targets} - owners.keys()
    problems = name_problems(job.lake.names, new, owners)
    errors: dict[str, WaldeltaError] = {name: ConfigError(why) for name, why in problems.items()}
    for target in targets:
        try:
            keeps_earlier_rows(job, str(target.id), target.table.key_columns)
            check_skipped_copy(job, target)
        except (ConfigError, ModeRefused) as err:
            errors[str(target.id)] = err
    return errors


def _sync_locked(
    runner: Runner,
    job: Job,
    order: CopyRequest,
    sessions: LockSessions,
    ledger_lock: threading.Lock,
    drained: PublicationVersion,
) -> SyncResult | None:
    """Copy a table as its next generation under its target's lock; a lost snapshot starts it again.

    Returns None when another run has copied it since it was chosen.
    """
    name = str(order.target.id)
    # Read before the snapshot: a slot that is recreated during the copy has not seen what this copy
    # lacks.
    identity = job.read_identity()
    with target_lock(job, order.target.id, sessions) as lock:
        rows = job.ledger.table_rows(name)
        last = next(reversed(rows), None)
        if order.is_done(last, identity.incarnation):
            log.info("table=%s was already copied by another run, nothing to do", name)
            return None
        reason = (
            last.reason
            if order.reason is None and last and last.status == NEEDS_SYNC
            else order.reason
        )
        row = TableState(now(), job.run_id, name, next_generation(rows), COPYING, reason=reason)
        row = replace(row, incarnation=identity.incarnation)
        lock.verify()
        state = _append(job, ledger_lock, row, last)
        fault_point("sync.begun")
        try:
            result = _copy(runner, job, order, state, drained, lock)
        except Exception as err:
            _record_failure(job, ledger_lock, last, state, err)
            raise
        fault_point("sync.committed")
        lock.verify()
        check_not_removed(job, state, "copied")
        _check_same_server(job, name, identity)
        _append(job, ledger_lock, result.state, state)
        fault_point("sync.recorded")
        return result


def _append(
    job: Job, ledger_lock: threading.Lock, row: TableState, after: TableState | None
) -> TableState:
    # One writer at a time, because concurrent appends to one Delta table would only conflict.
    with ledger_lock:
        return job.ledger.append_state(replace(row, at=now()), after)


def _copy(
    runner: Runner,
    job: Job,
    order: CopyRequest,
    first_row: TableState,
    drained: PublicationVersion,
    lock: AdvisoryLock,
) -> SyncResult:
    for attempt in _attempts(str(order.target.id)):
        with attempt:
            lock.verify()
            number = attempt.retry_state.attempt_number
            if number > 1:
                with job.source.connect("sync") as connection:
                    drained = wait_for_version_again(connection, drained)
            copied = sync_table(
                runner,
                job,
                order.target.id,
                Attempt(first_row, number, lock),
                drained,
                order.former,
            )
    return copied


def _record_failure(
    job: Job,
    ledger_lock: threading.Lock,
    last: TableState | None,
    first_row: TableState,
    err: Exception,
) -> None:
    """Record how the copy begun by ``first_row`` ended; ``last`` is the ledger row before it."""
    # A copy that was refused before it changed a target with changes, which then continue.
    is_kept = last and (last.status, last.incarnation) == (SYNCED, first_row.incarnation)
    if last and is_kept and isinstance(err, ModeRefused):
        row = replace(last, run_id=job.run_id)
    else:
        row = replace(
            first_row, status=FAILED, reason=f"{type(err).__name__}: {without_values(err)}"
        )
    with suppress(LateWriter):  # Another run owns the table now.
        _append(job, ledger_lock, row, first_row)


def _check_same_server(job: Job, name: str, identity: SlotIdentity) -> None:
    with job.source.connect("sync") as connection:
        if check_source(connection, job).timeline != identity.timeline:
            raise LateWriter(
                f"{name} was copied from the server that was the primary before a failover: sync"
                " it again"
            )


def _attempts(name: str) -> tenacity.Retrying:
    def again(err: BaseException) -> bool:
        # Without Spark, no further attempt of this process can succeed.
        return (
            isinstance(err, WaldeltaError)
            and err.retryable
            and not isinstance(err, SparkUnreachable)
        )

    def log_retry(state: tenacity.RetryCallState) -> None:
        err = state.outcome.exception() if state.outcome else None
        log.warning("table=%s starts again (attempt %d): %s", name, state.attempt_number + 1, err)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(again),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=0.25, max=10),
        before_sleep=log_retry,
        reraise=True,
    )


def _choose(
    runner: Runner,
    targets: Sequence[ReplicatedTarget],
    job: Job,
    names: Sequence[str] | None,
    states: Mapping[str, TableState],
    *,
    insists: bool,
) -> list[ReplicatedTarget]:
    """Returns the targets of these names, or all; without ``insists`` only those that need a
    copy.
    """
    ids, published = None if names is None else _table_ids(names), {target.id for target in targets}
    absent = (ids or set()) - published
    removed = {name for name, state in states.items() if state.status == REMOVED}
    if insists and (lacking := removed & set(map(str, absent))):
        raise ConfigError(f"{min(lacking)} {NOT_PUBLISHED}")
    # Without ``insists`` the names may be outdated: a table that was published once is no error.
    if unknown := sorted(absent - (set() if insists else _table_ids(states))):
        raise unknown_tables(list(map(str, unknown)), set(map(str, published)))
    choice = [target for target in targets if ids is None or target.id in ids]
    if insists:
        return choice
    all_lifecycles, _ = end_killed_repairs(runner, job, {str(t.id): t.mapping for t in targets})
    fine = {lifecycle.table_name for lifecycle in requiring(all_lifecycles, RequiredAction.APPLY)}
    return [target for target in choice if str(target.id) not in fine]


def _table_ids(names: Iterable[str]) -> set[TableId]:
    try:
        return {TableId.parse(name) for name in names}
    except ValueError as err:
        raise ConfigError(str(err)) from None
