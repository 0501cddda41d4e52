"""Sync: copies published tables into their targets from one snapshot each, while the stream goes
on.

Per table: lock the target, take a snapshot, plan chunks, read them in Spark's tasks, replace the
target in one commit, and record the snapshot in the ledger. Apply then adds every landed change
that the snapshot doesn't see.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import tenacity

from waldelta.changes.decode.route import plan_routing
from waldelta.changes.merge.target_table import target_columns
from waldelta.errors import (
    ConfigError,
    LateWriter,
    ModeRefused,
    SnapshotLost,
    SparkUnreachable,
    StateError,
    SyncFailed,
    WaldeltaError,
)
from waldelta.failpoints import fault_point
from waldelta.lake import check_writable
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.ledger import next_generation
from waldelta.lake.ledger.records import COPYING, FAILED, NEEDS_SYNC, SYNCED, StorageState, now
from waldelta.pipeline import AdvisoryLock, Job, SlotIdentity, target_lock
from waldelta.pipeline.drift.catalog_state import read_catalog_tables, stored
from waldelta.pipeline.targets import ReplicatedTarget, RequiredAction
from waldelta.pipeline.targets.lifecycle import lives, requiring
from waldelta.pipeline.targets.target_filter import column_states, read_target_filter, to_text
from waldelta.pipeline.targets.target_sources import read_target, read_unlocked_sources
from waldelta.pipeline.task_errors import first_line
from waldelta.postgres import TableId
from waldelta.postgres.connection import named_loss
from waldelta.quantities import counted
from waldelta.row_filter import RowFilter
from waldelta.slot.failover import check_source
from waldelta.slot.gaps import close_gaps
from waldelta.snapshot import SnapshotHolder, TableCopy, plan_copy
from waldelta.snapshot.chunks import Chunk, bytes_per_task, plan_chunks, plan_tasks
from waldelta.snapshot.exported_snapshot import not_primary, read_clock, reader_name
from waldelta.snapshot.publication_version import (
    PublicationVersion,
    check_version,
    read_version,
    read_version_as_of,
    wait_for_version,
    wait_for_version_again,
)
from waldelta.snapshot.read_table import read_chunks
from waldelta.stages.sync._held_snapshot import CopySnapshot
from waldelta.stages.sync._progress import progress
from waldelta.stages.sync._snapshot_diff import Former, RowDiff
from waldelta.stages.sync._write import CopyRows, keep_target, write_copy
from waldelta.stages.sync._write_files import ChunkReader
from waldelta.stages.sync._write_states import SnapshotMoment, keeps_rows
from waldelta.stages.sync.copied_table import SyncResult, synced_state
from waldelta.stages.sync.skipped_copy import check_skipped_copy, skip_copy
from waldelta.stages.sync.unfinished_repairs import end_killed_repairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ATTEMPTS = 4
COPIED_AT_ONCE = 4
OLD_TRANSACTIONS_TIMEOUT_S = 600.0
_ATTEMPTS_PER_GENERATION = 1000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to copy a table under one generation; ``version`` grows with both."""

    generation: int
    number: int

    @property
    def version(self) -> int:
        """Returns Delta's transaction version of what the attempt commits."""
        return self.generation * _ATTEMPTS_PER_GENERATION + self.number


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A table to copy, the reason, and, where rows are compared first, its former copy.

    ``known`` is its ledger row when it was chosen. With ``insists`` the table is copied even if
    another run has copied it since.
    """

    table_id: TableId
    reason: str | None
    former: Former | None
    known: TableState | None
    insists: bool

    def is_done(self, last: TableState | None, incarnation: str) -> bool:
        """Returns whether another run has copied the table since, in this slot incarnation.

        ``last`` is the ledger's latest row of the table.
        """
        if self.insists or last is None or (last.status, last.incarnation) != (SYNCED, incarnation):
            return False
        return self.known is None or (self.known.generation, self.known.status) != (
            last.generation,
            SYNCED,
        )


def sync(  # noqa: PLR0913 - what is copied, why and how, of which callers name what isn't as usual
    spark: SparkSession,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    *,
    by_diff: bool = False,
    only_waiting: bool = False,
    old_transactions_timeout_s: float = OLD_TRANSACTIONS_TIMEOUT_S,
) -> list[SyncResult]:
    """Copy these tables, or without names those without a complete copy; returns what was copied.

    ``only_waiting``: copies only tables that get no changes until they are copied, and that no
    other run is copying. ``by_diff``: tables with a copy from any slot incarnation are compared
    with the snapshot, and only rows that differ are written, where that is exact (see
    _snapshot_diff). The same applies to a table whose copy in the current incarnation was begun and
    didn't end, if an earlier incarnation has one: a killed resync is continued this way. A table
    that fails doesn't stop the others. Raises SyncFailed at the end with all failures. Raises
    ConfigError for a table that isn't published and ModeRefused for a named table whose mode
    doesn't allow it. Raises TransactionsStillOpen, NotPrimary or SlotMissing before anything is
    copied.
    """
    with job.source.connect("sync") as connection:
        check_source(connection, job)
        known, insists = job.ledger.table_states(), tables is not None and not only_waiting
        wanted = _choose(spark, _read_targets(connection, job), job, tables, insists=insists)
        if not wanted:
            close_gaps(job)
            return []
        refused = _refused(job, wanted)
        if insists and refused:  # Raised before anything is changed.
            raise next(iter(refused.values()))
        check_writable(job.pipeline.target.root)
        drained = wait_for_version(
            connection, job.pipeline.source.publication_names, old_transactions_timeout_s
        )
    allowed = [target for target in wanted if str(target.id) not in refused]
    log.info(
        "copying %s: %s",
        counted(len(allowed), "table"),
        ", ".join(str(found.id) for found in allowed),
    )
    results: list[SyncResult] = []
    failures: dict[str, WaldeltaError] = dict(refused)
    ledger_lock = threading.Lock()
    formers = _formers(job, [str(target.id) for target in allowed], by_diff=by_diff)

    def one(wanted: ReplicatedTarget) -> None:
        try:
            order = CopyRequest(
                wanted.id, reason, formers.get(str(wanted.id)), known.get(str(wanted.id)), insists
            )
            if (done := _sync_locked(spark, job, order, ledger_lock, drained)) is not None:
                results.append(done)
        except WaldeltaError as err:
            failures[str(wanted.id)] = err
        except Exception as err:
            # A defect of waldelta or Spark in one table's copy must not stop the others.
            log.exception("table=%s", wanted.id)
            failures[str(wanted.id)] = WaldeltaError(f"{type(err).__name__}: {first_line(err)}")

    # The largest tables come first, so that small ones fill the gaps at the end. A MERGE needs the
    # session's settings for itself, so it runs alone.
    kept = [t for t in allowed if job.pipeline.target.mode_of(str(t.id)).keeps_rows]
    alone = (
        allowed if formers else [t for t in kept if keeps_rows(job, str(t.id), t.table.key_columns)]
    )
    with ThreadPoolExecutor(COPIED_AT_ONCE, thread_name_prefix="sync") as pool:
        list(
            pool.map(
                one,
                sorted((t for t in allowed if t not in alone), key=lambda t: -t.table.size_bytes),
            )
        )
    for target in alone:
        one(target)
    if failures:
        raise SyncFailed(failures, results)
    close_gaps(job)
    return sorted(results, key=lambda result: result.table)


def _formers(job: Job, names: Sequence[str], *, by_diff: bool) -> dict[str, Former]:
    """Returns by name the complete copies of those tables that are compared with their copy.

    ``Former(None)`` is a table that never had one.
    """
    known = job.ledger.table_rows()
    rows = [row for row in known if row.status == SYNCED]
    copied = {row.table_name: row for row in rows}
    if by_diff:
        return {name: Former(copied.get(name)) for name in names}
    identity = job.read_identity()
    begun = {
        name
        for name, life in lives(identity.states_of(known)).items()
        if not life.copied and life.attempts
    }
    earlier = {row.table_name: row for row in rows if row.incarnation != identity.incarnation}
    return {name: Former(earlier[name]) for name in names if name in begun and name in earlier}


def _refused(job: Job, wanted: Sequence[ReplicatedTarget]) -> dict[str, WaldeltaError]:
    """Returns by name why targets can't be synced as the pipeline file requires."""
    found: dict[str, WaldeltaError] = {}
    for target in wanted:
        try:
            keeps_rows(job, str(target.id), target.table.key_columns)
            check_skipped_copy(job, target)
        except (ConfigError, ModeRefused) as err:
            found[str(target.id)] = err
    return found


def sync_table(
    spark: SparkSession,
    job: Job,
    table_id: TableId,
    attempt: Attempt,
    drained: PublicationVersion,
    former: Former | None = None,
) -> tuple[SyncResult, ReplicatedTarget]:
    """Copy one target's source from its own snapshot, and replace the target in one commit.

    With its ``former`` copy, only rows that differ are written, where that is exact. With ``copy:
    false`` no row is read: the target begins empty, or keeps its rows. Published columns, filter
    and leaf partitions are those that the snapshot sees. Raises SnapshotLost, and commits nothing,
    when the table was rewritten or the snapshot's session ended, or when the publications were
    altered after old transactions had ``drained``.
    """
    began = time.monotonic()
    target = job.pipeline.target
    with (
        named_loss(job.source.conninfo),
        SnapshotHolder(
            job.source.conninfo, f"waldelta snapshot {job.pipeline.source.slot} {table_id}"
        ) as holder,
    ):
        taken_at = read_clock(holder.connection)
        check_version(holder, drained)
        replicated, storage = source_as_of(holder, job, table_id)
        table = replicated.table
        membership = read_version_as_of(holder, drained, table.relation_ids)
        options, where = target.types_of(str(table_id)), _target_filter(job, replicated)
        columns = target_columns(table, options, target.metadata_columns)
        keeps = keeps_rows(job, str(table_id), table.key_columns)
        leaves = [leaf for leaf in table.leaves if leaf.relkind == "r"]
        files = holder.relfilenodes([leaf.oid for leaf in leaves])
        lsn = holder.lsn.value if target.metadata_columns else None
        copy = plan_copy(table, holder.snapshot_id, files, lsn, options, where)
        size = bytes_per_task(table.size_bytes)
        skipped = None if target.copies(str(table_id)) else skip_copy(job, replicated, holder)
        tasks = plan_tasks(plan_chunks(leaves, size), size) if skipped is None else []
        log.info(
            "table=%s generation=%d snapshot=%s lsn=%s chunks=%d bytes=%d",
            table_id,
            attempt.generation,
            holder.snapshot,
            holder.lsn,
            sum(map(len, tasks)),
            table.size_bytes,
        )
        reader = _reader(job.source.conninfo, copy, tasks, holder.pid)
        metadata = {
            "verb": "sync",
            "run_id": job.run_id,
            "table": str(table_id),
            "generation": attempt.generation,
            "attempt": attempt.number,
            "snapshot": holder.snapshot,
            "lsn": str(holder.lsn),
        }
        # Both numbers grow, so Delta skips an attempt that commits too late; the attempt then
        # raises LateWriter.
        txn = (f"{job.read_identity().app_id}:sync:{table_id}", attempt.version)
        fault_point("sync.planned")
        with ExitStack() as beside:
            beside.enter_context(progress(holder, table_id, tasks))
            held = CopySnapshot(job, holder, began, beside)
            rows = CopyRows(
                table_id,
                copy,
                columns,
                max(1, len(tasks)),
                reader,
                txn,
                metadata,
                SnapshotMoment(holder.lsn, taken_at),
                held.end,
                keeps,
            )
            if skipped is None or skipped.former is None:
                compared = former if skipped is None else None
                written, verbatim, diff = write_copy(spark, job, rows, attempt.generation, compared)
            else:
                written, verbatim, diff = (
                    keep_target(spark, job, str(table_id), attempt.generation),
                    None,
                    None,
                )
            held.end()
        check_unaltered(job, replicated, membership)
        begins = holder if skipped is None else skipped
        seconds = time.monotonic() - began
        log.info(
            "table=%s copied rows=%d bytes=%d seconds=%.1f",
            table_id,
            written.rows,
            written.bytes,
            seconds,
        )
        return (
            SyncResult(
                table_id,
                attempt.generation,
                written.version,
                begins.snapshot,
                begins.lsn,
                written.rows,
                written.bytes,
                seconds,
                attempt.number,
                table.relation_ids,
                storage,
                to_text(where),
                held.bill,
                diff if isinstance(diff, RowDiff) else None,
                diff if isinstance(diff, str) else None,
                verbatim,
                skipped,
            ),
            replicated,
        )


def _sync_locked(
    spark: SparkSession,
    job: Job,
    order: CopyRequest,
    ledger_lock: threading.Lock,
    drained: PublicationVersion,
) -> SyncResult | None:
    """Copy a table as its next generation under its target's lock; a lost snapshot starts it again.

    Returns None when another run has copied it since it was chosen.
    """
    name = str(order.table_id)
    # Read before the snapshot: a slot that is recreated during the copy has not seen what this copy
    # lacks.
    identity = job.read_identity()
    life = identity.incarnation
    with target_lock(job, order.table_id) as lock:
        rows = job.ledger.table_rows(name)
        last = next(reversed(rows), None)
        if order.is_done(last, life):
            log.info("table=%s was already copied by another run, nothing to do", name)
            return None
        reason = (
            last.reason
            if order.reason is None and last and last.status == NEEDS_SYNC
            else order.reason
        )
        row = TableState(
            now(), job.run_id, name, next_generation(rows), COPYING, reason=reason, incarnation=life
        )
        lock.verify()
        begun = _append(job, ledger_lock, row, last)
        fault_point("sync.begun")
        try:
            result, replicated = _copy(spark, job, order, begun.generation, drained, lock)
        except Exception as err:
            _record_failure(job, ledger_lock, last, begun, err)
            raise
        fault_point("sync.committed")
        lock.verify()
        _check_not_removed(job, name, begun.generation)
        _check_same_server(job, name, identity)
        _append(job, ledger_lock, synced_state(begun, result, replicated, job.pipeline), begun)
        fault_point("sync.recorded")
        return result


def _append(
    job: Job, ledger_lock: threading.Lock, row: TableState, after: TableState | None
) -> TableState:
    # One writer at a time, because concurrent appends to one Delta table would only conflict.
    with ledger_lock:
        return job.ledger.append_state(replace(row, at=now()), after)


def _copy(
    spark: SparkSession,
    job: Job,
    order: CopyRequest,
    generation: int,
    drained: PublicationVersion,
    lock: AdvisoryLock,
) -> tuple[SyncResult, ReplicatedTarget]:
    for attempt in _attempts(str(order.table_id)):
        with attempt:
            lock.verify()
            number = attempt.retry_state.attempt_number
            if number > 1:
                with job.source.connect("sync") as connection:
                    drained = wait_for_version_again(connection, drained)
            copied = sync_table(
                spark, job, order.table_id, Attempt(generation, number), drained, order.former
            )
    return copied


def _record_failure(
    job: Job,
    ledger_lock: threading.Lock,
    last: TableState | None,
    begun: TableState,
    err: Exception,
) -> None:
    """Record how the copy begun by ``begun`` ended; ``last`` is the ledger row before it."""
    if last and _is_as_it_was(last, begun.incarnation, err):
        row = replace(last, run_id=job.run_id)
    else:
        row = replace(begun, status=FAILED, reason=f"{type(err).__name__}: {first_line(err)}")
    with suppress(LateWriter):  # Another run owns the table now.
        _append(job, ledger_lock, row, begun)


def _is_as_it_was(last: TableState, incarnation: str | None, err: Exception) -> bool:
    """Returns whether a copy was refused before it changed a target with changes, which then
    continue.
    """
    return (
        isinstance(err, ModeRefused) and last.status == SYNCED and last.incarnation == incarnation
    )


def _check_not_removed(job: Job, name: str, generation: int) -> None:
    """Raise LateWriter if a run recorded that the table left the publications.

    Changes of that time are in no copy begun before.
    """
    state = job.ledger.table_rows(name)[-1]
    if (state.generation, state.status) != (generation, COPYING):
        raise LateWriter(
            f"{name} left the publications while it was copied: sync it again once it is published"
        )


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


def _reader(
    conninfo: str, copy: TableCopy, tasks: Sequence[Sequence[Chunk]], holder_pid: int
) -> ChunkReader:
    """Returns the function that reads a task's rows in Spark; only it has the connection string."""

    def read(number: int) -> Iterator[pa.RecordBatch]:
        # A partition root without leaves has one task with nothing to read.
        for chunks in tasks[number : number + 1]:
            yield from read_chunks(
                conninfo, copy, chunks, reader_name(holder_pid, number, copy.table)
            )

    return read


def _check_primary(connection: psycopg.Connection[Any], job: Job) -> None:
    if connection.execute("select pg_is_in_recovery()").fetchone() == (True,):
        raise not_primary(job.source.conninfo)


def _read_targets(connection: psycopg.Connection[Any], job: Job) -> list[ReplicatedTarget]:
    _check_primary(connection, job)
    # Tables whose size can't be read now come last.
    _, targets, _ = read_unlocked_sources(connection, job.pipeline)
    return targets


def _choose(
    spark: SparkSession,
    targets: Sequence[ReplicatedTarget],
    job: Job,
    names: Sequence[str] | None,
    *,
    insists: bool,
) -> list[ReplicatedTarget]:
    """Returns the targets of these names, or all; without ``insists`` only those that need a
    copy.
    """
    named, published = None if names is None else _named(names), {target.id for target in targets}
    # Without ``insists`` the names may be outdated: a table that was published once is no error.
    if unknown := sorted(
        (named or set()) - published - (set() if insists else _named(job.ledger.table_states()))
    ):
        known = ", ".join(sorted(map(str, published))) or "none"
        raise ConfigError(
            f"not published: {', '.join(map(str, unknown))}; the pipeline's publications have:"
            f" {known}"
        )
    chosen = [target for target in targets if named is None or target.id in named]
    if insists:
        return chosen
    standings, _ = end_killed_repairs(spark, job, {str(t.id): t.mapping for t in targets})
    fine = {found.table_name for found in requiring(standings, RequiredAction.APPLY)}
    return [target for target in chosen if str(target.id) not in fine]


def _named(names: Iterable[str]) -> set[TableId]:
    try:
        return {TableId.parse(name) for name in names}
    except ValueError as err:
        raise ConfigError(str(err)) from None


def source_as_of(
    holder: SnapshotHolder, job: Job, table_id: TableId
) -> tuple[ReplicatedTarget, StorageState | None]:
    """Returns the target, and how its source rows are stored, as the snapshot sees them."""
    try:
        target = read_target(holder.connection, job.pipeline, table_id)
        present = read_catalog_tables(
            holder.connection, [target.table.oid] if target is not None else []
        )
    except psycopg.Error as err:
        raise SnapshotLost(
            f"{table_id}: the catalog can't be read in the snapshot ({first_line(err)})"
        ) from None
    if target is None:
        raise StateError(
            f"{table_id} isn't published any more: run setup, or sync without naming it"
        )
    if target.problem is not None:
        raise ConfigError(target.problem)
    now = present.get(target.table.oid)
    is_part = target.mapping.root_id is not None or target.mapping.partition is not None
    return target, stored(now, {leaf.oid for leaf in target.table.leaves} if is_part else None)


def check_unaltered(job: Job, copied: ReplicatedTarget, membership: str) -> None:
    """Check once, after all chunks are read, that columns and publications are unchanged.

    Chunks name columns. Raises SnapshotLost when something changed.
    """
    with job.source.connect("sync") as connection:
        _check_primary(connection, job)
        found = read_target(connection, job.pipeline, copied.id, catalogs=True)
        present = found.table if found is not None else None
        same = (
            read_version(
                connection, job.pipeline.source.publication_names, copied.table.relation_ids
            )
            == membership
        )
    then = {(c.attnum, c.name, c.type.oid, c.type.typmod) for c in copied.table.columns}
    if (
        present is None
        or present.oid != copied.table.oid
        or not then <= {(c.attnum, c.name, c.type.oid, c.type.typmod) for c in present.columns}
    ):
        raise SnapshotLost(f"{copied.id} was altered while it was copied: its copy starts again")
    if not same:
        raise SnapshotLost(
            f"what is published of {copied.id} changed while it was copied: its copy starts again"
        )


def _target_filter(job: Job, replicated: ReplicatedTarget) -> RowFilter | None:
    """Returns the target's filter, after checking that it can be translated.

    It is analysed on a separate connection, because the snapshot's connection is read-only.
    """
    if replicated.mapping.where is None:
        return None
    name, table = str(replicated.id), replicated.table
    with job.source.connect("sync") as connection:
        where = read_target_filter(connection, name, replicated.mapping.where, table)
    plan_routing(
        where, column_states(table.columns, table.key_columns, job.pipeline.target.types_of(name))
    )
    return where
