"""Copies one table into its target: takes a snapshot, reads it in Spark's tasks, and replaces the
target in one commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import psycopg

from waldelta.background import run_concurrently
from waldelta.changes.decode.route import plan_routing
from waldelta.changes.merge.target_table import only_row, target_columns
from waldelta.config import PipelineFile
from waldelta.errors import (
    ConfigError,
    SnapshotLost,
    StateError,
    WaldeltaError,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake import UNFENCED, Fence, Tag
from waldelta.lake.ledger import SYNCED, StorageState, TableState
from waldelta.lake.staging_leftovers import copy_folder
from waldelta.metadata_columns import RAW
from waldelta.pipeline import Job, SourceLoad
from waldelta.pipeline.drift import CatalogTable, as_published, read_catalog_tables, stored
from waldelta.pipeline.source import xmin_age
from waldelta.pipeline.targets import ReplicatedTarget, column_states, read_target_filter
from waldelta.pipeline.targets.target_sources import read_target, to_text
from waldelta.pipeline.targets.watermarks import sync_app_id
from waldelta.postgres import TableId, is_standby, named_loss
from waldelta.quantities import counted
from waldelta.row_filter import RowFilter
from waldelta.snapshot.chunks import Chunk, bytes_per_task, plan_chunks, plan_tasks
from waldelta.snapshot.exported_snapshot import (
    PublicationVersion,
    SnapshotHolder,
    check_version,
    not_primary,
    read_clock,
    read_version,
    read_version_as_of,
)
from waldelta.snapshot.read_table import plan_copy
from waldelta.spark import Runner
from waldelta.stages.repair.mend.mend import bucket_count
from waldelta.stages.sync._staged_chunks import (
    ChunkLog,
    CopySource,
    StagedCopy,
    resume_copy,
    why_not_resumable,
)
from waldelta.stages.sync._write import (
    CopyRows,
    Former,
    SnapshotMoment,
    keep_target,
    keeps_earlier_rows,
    write_copy,
)
from waldelta.stages.sync._write_files import ChunkReader, WrittenCopy
from waldelta.stages.sync.skipped_copy import SkippedCopy, skip_copy
from waldelta.target_modes.target_mode import TargetMode


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One table's copy: its ledger row, which has the snapshot that the stream continues from, and
    what it wrote and cost.

    ``skipped`` is set for a table with ``copy: false``, of which nothing was read.
    """

    state: TableState
    copy: WrittenCopy
    attempts: int
    load: SourceLoad = field(default_factory=SourceLoad)
    skipped: SkippedCopy | None = None

    @property
    def table_name(self) -> str:
        """Returns the target's name."""
        return self.state.table_name

    @property
    def version(self) -> int:
        """Returns the target's version that has the copy."""
        return self.copy.commit.version

    @property
    def rows(self) -> int:
        """Returns the number of rows in the snapshot."""
        return self.state.rows

    @property
    def written(self) -> int:
        """Returns the number of rows that were written or removed."""
        return self.rows if self.copy.diff is None else self.copy.diff.cut.written


def synced_state(
    state: TableState, copy: WrittenCopy, begins: SnapshotHolder | SkippedCopy, mode: TargetMode
) -> TableState:
    """Returns the ledger row of a complete copy.

    ``state`` has the source's columns and filter as the snapshot sees them, and the stream
    continues where it ``begins``.
    """
    state = replace(
        state,
        status=SYNCED,
        snapshot=begins.snapshot,
        snapshot_lsn=begins.lsn.value,
        rows=copy.commit.rows,
        bytes=copy.commit.bytes,
        version=copy.commit.version,
        mode=mode.name if mode.keeps_rows else None,
    )
    if not isinstance(begins, SkippedCopy):
        return state
    state = replace(state, copy_skipped=True, reason=str(begins))
    if (former := begins.former) is None:
        return state
    # The target keeps its columns: Relation messages contain later changes.
    return replace(state, columns=former.columns, key_columns=former.key_columns)


def published_state(
    first_row: TableState,
    replicated: ReplicatedTarget,
    storage: StorageState,
    target_filter: str | None,
    pipeline: PipelineFile,
) -> TableState:
    """Returns a copy's first ledger row with what the source publishes of the table."""
    table, types = replicated.table, pipeline.target.types_of(first_row.table_name)
    return replace(
        as_published(first_row, table, storage, target_filter, types),
        key_columns=list(table.key_columns),
        source_table=replicated.other_source,
        root_id=replicated.mapping.root_id,
    )


log = logging.getLogger(__name__)

_ATTEMPTS_PER_GENERATION = 1000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to copy a table, whose generation has this first ledger row.

    ``version`` grows with both numbers. ``fence`` is the target's lock.
    """

    first_row: TableState
    number: int
    fence: Fence = UNFENCED

    @property
    def version(self) -> int:
        """Returns Delta's transaction version of what the attempt commits."""
        return self.first_row.generation * _ATTEMPTS_PER_GENERATION + self.number


@dataclass
class CopySnapshot:
    """The snapshot that tables are copied from.

    ``began`` is when it was opened by this machine's monotonic clock, ``at`` by the server's.
    ``resources`` are closed before it ends. ``load`` is what it cost the source, measured then.
    """

    job: Job
    holder: SnapshotHolder
    began: float
    at: datetime
    resources: ExitStack
    load: SourceLoad = field(default_factory=SourceLoad)

    def end(self) -> None:
        """Release the snapshot, unless that is done."""
        if self.load.snapshot_seconds:
            return
        self.resources.close()
        self.holder.end()
        self.load = SourceLoad(snapshot_seconds=time.monotonic() - self.began, xmin_age=self._age())

    def _age(self) -> int:
        """Returns by how many transactions this snapshot holds back vacuum; 0 after an error, which
        must not fail a copy.
        """
        with suppress(WaldeltaError, psycopg.Error), self.job.source.connect("sync") as connection:
            return xmin_age(connection, self.holder.snapshot)
        return 0


def sync_table(
    runner: Runner,
    job: Job,
    table_id: TableId,
    attempt: Attempt,
    drained: PublicationVersion,
    former: Former | None = None,
) -> SyncResult:
    """Copy one target's source from its own snapshot, and replace the target in one commit.

    With its ``former`` copy, only rows that differ are written, where that is exact. With ``copy:
    false`` no row is read: the target begins empty, or keeps its rows. Published columns, filter
    and leaf partitions are those that the snapshot sees. Raises SnapshotLost, and commits nothing,
    when the table was rewritten or the snapshot's session ended, or when the publications were
    altered after old transactions had ``drained``.
    """
    began, name = time.monotonic(), f"waldelta snapshot {job.pipeline.source.slot} {table_id}"
    with (
        named_loss(job.source.conninfo),
        SnapshotHolder(job.source.conninfo, name) as holder,
        ExitStack() as watch,
    ):
        snapshot = CopySnapshot(job, holder, began, read_clock(holder.connection), watch)
        result = _copy_as_of(runner, snapshot, table_id, attempt, drained, former)
    state = result.state
    log.info(
        "table=%s copied rows=%d bytes=%d seconds=%.1f",
        table_id, state.rows, state.bytes, state.seconds,
    )  # fmt: skip
    return result


def _copy_as_of(
    runner: Runner,
    snapshot: CopySnapshot,
    table_id: TableId,
    attempt: Attempt,
    drained: PublicationVersion,
    former: Former | None,
) -> SyncResult:
    job, holder = snapshot.job, snapshot.holder
    check_version(holder, drained)
    replicated, storage = source_as_of(holder, job, table_id)
    membership = read_version_as_of(holder, drained, replicated.table.relation_ids)
    where = _target_filter(job, replicated)
    skipped = skip_copy(job, replicated, holder)
    records = _records(snapshot, replicated, where, drained, former) if skipped is None else None
    state = published_state(attempt.first_row, replicated, storage, to_text(where), job.pipeline)
    rows = _copy_rows(snapshot, _source(snapshot, replicated, where), state, attempt, records)
    fault_point("sync.planned")
    copy = _write(runner, job, rows, state, former, skipped)
    snapshot.end()
    check_unaltered(job, replicated, membership)
    state = synced_state(state, copy, skipped or holder, job.pipeline.target.mode_of(str(table_id)))
    state = replace(state, seconds=time.monotonic() - snapshot.began)
    return SyncResult(state, copy, attempt.number, snapshot.load, skipped)


def _records(
    snapshot: CopySnapshot,
    replicated: ReplicatedTarget,
    where: RowFilter | None,
    drained: PublicationVersion,
    former: Former | None,
) -> ChunkLog | None:
    """Returns where tasks record what they wrote; None for a copy that can't be continued.

    Records of earlier attempts are then removed.
    """
    job, holder, table, name = snapshot.job, snapshot.holder, replicated.table, str(replicated.id)
    target, identity = job.pipeline.target, job.read_identity()
    columns = target_columns(table, target.types_of(name), target.metadata_columns)
    files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
    origin = {
        "its columns": [[c.attnum, c.name, c.type.oid, c.type.typmod] for c in table.columns],
        "its columns' types in the lake": [[c.name, c.spark_type, c.nullable] for c in columns],
        "its key": list(table.key_columns),
        "its filter": [table.row_filter, to_text(where)],
        "the files of its partitions" if table.relkind == "p" else "its file": sorted(
            map(list, files.items())
        ),
        "its publications": drained.version,
        "the slot": [identity.app_id, identity.timeline],
    }
    buckets = 0
    if former is not None:
        buckets = bucket_count(job.lake.target(name).find(), table.size_bytes)
        origin["its last copy"] = former.state.generation if former.state is not None else None
    origin["how it is copied"] = buckets
    folder = copy_folder(job.lake, name)
    records = ChunkLog(job.lake, folder, origin, holder.snapshot, holder.lsn.value, buckets)
    keeps = target.mode_of(name).keeps_rows or target.deletion_vectors_of(name)
    why = "tasks don't write its files" if keeps else why_not_resumable(job, table)
    if why is None:
        return records
    if records.remove():
        log.warning("table=%s its copy starts again: %s", name, why)
    return None


def _plan_tasks(
    snapshot: CopySnapshot,
    source: CopySource,
    state: TableState,
    records: ChunkLog | None,
) -> tuple[Sequence[Sequence[Chunk]], StagedCopy | None]:
    """Returns the chunks that each task reads, and what an earlier attempt has read already."""
    job, table = snapshot.job, source.table
    if not job.pipeline.target.copies(state.table_name):
        return [], None
    size = bytes_per_task(table.size_bytes)
    earlier = None if records is None else resume_copy(job, records, source, state, size)
    chunks = plan_chunks(table.stored_leaves, size) if earlier is None else earlier.chunks
    tasks = plan_tasks(chunks, size)
    return tasks, None if records is None else StagedCopy(records, tasks, earlier)


def _write(
    runner: Runner,
    job: Job,
    rows: CopyRows,
    state: TableState,
    former: Former | None,
    skipped: SkippedCopy | None,
) -> WrittenCopy:
    """Write the copy as write_copy() does; a target whose copy is skipped keeps its rows."""
    if skipped is not None and skipped.former is not None:
        return keep_target(runner, job, state)
    return write_copy(runner, job, rows, state, former if skipped is None else None)


def _source(
    snapshot: CopySnapshot, replicated: ReplicatedTarget, where: RowFilter | None
) -> CopySource:
    job, holder, table = snapshot.job, snapshot.holder, replicated.table
    target = job.pipeline.target
    files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
    lsn = holder.lsn.value if target.metadata_columns else None
    types = target.types_of(str(replicated.id))
    copy = plan_copy(table, holder.snapshot_id, files, lsn, types, where)
    return CopySource(job.source.conninfo, copy, table, holder.pid)


def _copy_rows(
    snapshot: CopySnapshot,
    source: CopySource,
    state: TableState,
    attempt: Attempt,
    records: ChunkLog | None,
) -> CopyRows:
    """Returns the rows to copy, as the snapshot sees them, with the names they are committed
    under.
    """
    job, holder, table, name = snapshot.job, snapshot.holder, source.table, state.table_name
    target = job.pipeline.target
    tasks, staged = _plan_tasks(snapshot, source, state, records)
    log.info(
        "table=%s generation=%d snapshot=%s lsn=%s chunks=%d bytes=%d",
        name, state.generation, holder.snapshot, holder.lsn, sum(map(len, tasks)),
        table.size_bytes,
    )  # fmt: skip
    snapshot.resources.enter_context(progress(holder, name, tasks))
    return CopyRows(
        TableId.parse(name),
        source.copy,
        target_columns(table, target.types_of(name), target.metadata_columns),
        max(1, len(tasks)),
        _reader(source, tasks),
        _tag(job, holder, name, attempt),
        SnapshotMoment(holder.lsn, snapshot.at),
        snapshot.end,
        table.size_bytes,
        attempt.fence,
        staged,
        keeps_earlier_rows(job, name, table.key_columns),
    )


def _tag(job: Job, holder: SnapshotHolder, name: str, attempt: Attempt) -> Tag:
    """Returns the names that an attempt to copy is committed under.

    Both numbers grow, so Delta skips an attempt that commits too late; the attempt then raises
    LateWriter.
    """
    entries = {
        "verb": "sync",
        "run_id": job.run_id,
        "table": name,
        "generation": attempt.first_row.generation,
        "attempt": attempt.number,
        "snapshot": holder.snapshot,
        "lsn": str(holder.lsn),
    }
    return Tag.of(sync_app_id(job.read_identity(), name), attempt.version, entries)


def _reader(source: CopySource, tasks: Sequence[Sequence[Chunk]]) -> ChunkReader:
    # A partition root without leaves has one task with nothing to read.
    return lambda number: source.read(number, tasks[number]) if tasks else iter(())


def source_as_of(
    holder: SnapshotHolder, job: Job, table_id: TableId
) -> tuple[ReplicatedTarget, StorageState]:
    """Returns the target, and how its source rows are stored, as the snapshot sees them."""
    try:
        target = read_target(holder.connection, job.pipeline, table_id)
        present = read_catalog_tables(
            holder.connection, [target.table.oid] if target is not None else []
        )
    except psycopg.Error as err:
        raise SnapshotLost(
            f"{table_id}: the catalog can't be read in the snapshot ({without_values(err)})"
        ) from None
    if target is None:
        raise StateError(
            f"{table_id} isn't published any more: run setup, or sync without naming it"
        )
    if target.problem is not None:
        raise ConfigError(target.problem)
    table = present.get(target.table.oid, CatalogTable())
    is_part = target.mapping.root_id is not None or target.mapping.partition is not None
    leaves = {leaf.oid for leaf in target.table.leaves}
    return target, stored(table, leaves) if is_part else table.storage


def check_primary(connection: psycopg.Connection[Any], job: Job) -> None:
    """Raise NotPrimary for a connection to a standby."""
    if is_standby(connection):
        raise not_primary(job.source.conninfo)


def check_unaltered(job: Job, copied: ReplicatedTarget, membership: str) -> None:
    """Check once, after all chunks are read, that columns and publications are unchanged.

    Chunks name columns. Raises SnapshotLost when something changed.
    """
    with job.source.connect("sync") as connection:
        check_primary(connection, job)
        target = read_target(connection, job.pipeline, copied.id, catalogs=True)
        present = target.table if target is not None else None
        is_unaltered = (
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
        raise SnapshotLost(f"{copied.id} was altered while its rows were read: run again")
    if not is_unaltered:
        raise SnapshotLost(
            f"what is published of {copied.id} changed while its rows were read: run again"
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


def count_raw_rows(runner: Runner, job: Job, table: str, version: int) -> int:
    """Returns the rows of a target's version with a value in ``_wd_raw``.

    It reads only that column, which is nearly always null.
    """
    if not job.pipeline.target.metadata_columns:
        return 0
    target = job.lake.target(table).open(version)
    text = f"select count({RAW}) as rows from {{rows}}"  # noqa: S608 - a column of ours
    return int(only_row(runner, target, text)["rows"])


_EVERY_S = 5.0


@contextmanager
def progress(
    holder: SnapshotHolder, table: str, tasks: Sequence[Sequence[Chunk]]
) -> Iterator[None]:
    """Log how far the copy is, from the server's view of its readers; works wherever Spark's tasks
    run.
    """

    def watch(ended: threading.Event) -> None:
        started = 0
        while not ended.wait(_EVERY_S):
            try:
                active = holder.active_tasks()
            except WaldeltaError as err:
                log.warning("table=%s %s", table, err)
                return
            started = max([started, *(task + 1 for task in active)])
            log.info("table=%s %s", table, describe_progress(tasks, started, active))

    with run_concurrently(watch, f"progress {table}"):
        yield


def describe_progress(
    tasks: Sequence[Sequence[Chunk]], started: int, active: dict[int, int]
) -> str:
    """Returns how much is read.

    Spark starts its tasks in order, so those before ``started`` that aren't active are done.
    """
    sizes = [max(1, sum(chunk.size_bytes for chunk in task)) for task in tasks]
    bytes_read = sum(size for number, size in enumerate(sizes[:started]) if number not in active)
    reading = (
        f", reading {len(active)} ({counted(sum(active.values()), 'row')} so far)" if active else ""
    )
    return (
        f"{100 * bytes_read // sum(sizes or [1])}%: {started - len(active)} of"
        f" {counted(len(tasks), 'task')} done{reading}"
    )
