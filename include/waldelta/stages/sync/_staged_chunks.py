"""Staged chunks: lets a copy continue where a killed one ended.

Each task of a copy that Arrow writes records its chunks, their snapshot and its files beside the
staged changes (copy_folder()). So does a task of a resync, whose files are rows to compare with the
target's. The next attempt takes these files over, reads the other chunks as of its own snapshot,
and lands the log up to it. Keys that changes touched since the first of the recorded snapshots are
left out of the files, and read again as far as their rows are in the recorded chunks now. Only a
change moves a row from one block to another, so every row is then as of the new snapshot.

A copy starts again where a change may be in no message (without a key, or where not every change is
published), and where the table, its files, what is published of it, or the slot is another one than
recorded. The folder is removed with the copy's commit, and by maintenance like other leftovers.
Files that no commit names are left to VACUUM, because a process that was taken for dead may still
commit them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FileSystem

from waldelta.changes.merge.compare import without_keys
from waldelta.changes.stage.net_files import parts_at_once
from waldelta.errors import NeedsSync, SnapshotLost, WaldeltaError, raised_as, without_values
from waldelta.failpoints import fault_point
from waldelta.lake import Lake, TargetVersion, remove_folder, staging_folder
from waldelta.lake.changelog import Snapshot
from waldelta.lake.layout import TableFile, log_path
from waldelta.lake.ledger import TableState
from waldelta.lake.staging_leftovers import read_records, write_record
from waldelta.lake.storage import sync_files
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, unexpected_error
from waldelta.pipeline.drift import is_dear
from waldelta.postgres import Leaf, PublishedTable, named_loss
from waldelta.quantities import counted
from waldelta.snapshot.chunks import Chunk, divide_blocks
from waldelta.snapshot.exported_snapshot import reader_name
from waldelta.snapshot.read_selected import KEYS_PER_READ, read_keys, whole_table
from waldelta.snapshot.read_table import TableCopy, filter_conditions, read_chunks
from waldelta.snapshot.source_columns import key_columns
from waldelta.spark import Runner
from waldelta.spark.runner import Answer
from waldelta.stages.land.drain import land_through
from waldelta.stages.repair.mend.mend import ExpectedRows
from waldelta.stages.repair.mend.touched_keys import waiting_keys

log = logging.getLogger(__name__)

_STAGED = pa.schema([("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64())])
_CHANGES = {"insert", "update", "delete"}
_KEYS_PER_TASK = 50_000
# What a copy and an earlier attempt must have in common, by the words with which the log names a
# difference.
Origin = Mapping[str, Any]
# What tasks wrote: paths, sizes and rows.
Files = list[dict[str, Any]]
# Writes rows as files, in whose names there may be this text.
WriteRows = Callable[[str, Iterator[pa.RecordBatch]], Files]


def why_not_resumable(job: Job, table: PublishedTable) -> str | None:
    """Returns why a later attempt can't resume a copy of the table, or None when it can."""
    if not table.key_columns:
        return "it has no key"
    if "n" in {table.replica_identity, *(leaf.replica_identity for leaf in table.leaves)}:
        return "its replica identity is nothing"
    if any(not member.publishes >= _CHANGES for member in table.entries) or not table.entries:
        return "not every change of its rows is published"
    if job.pipeline.source.options.origin != "any":
        return "changes of other origins aren't published"
    if any(leaf.through is not None or not leaf.has_ctid for leaf in table.stored_leaves):
        return "its blocks can't be read one by one"
    return None


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """What one task wrote: the chunks, as (leaf, first block, last block), and its data files.

    ``files`` are as a task of copy_files() returns them, ``snapshot`` and ``lsn`` of the snapshot.
    """

    snapshot: str
    lsn: int
    chunks: tuple[tuple[int, int, int | None], ...]
    files: tuple[dict[str, Any], ...]

    @property
    def rows(self) -> int:
        """Returns how many rows the files have."""
        return sum(file["rows"] for file in self.files)


@dataclass(frozen=True, slots=True)
class ChunkLog:
    """The files that a copy's tasks recorded, so that a later attempt needn't read the same rows
    again.

    ``origin`` is what all attempts must have in common: a record with another origin isn't valid.
    The files are the target's, or, with ``buckets``, rows to compare in the folder ``rows``.
    """

    lake: Lake
    folder: str
    origin: Origin
    snapshot: str
    lsn: int
    buckets: int = 0

    @property
    def rows(self) -> str:
        """Returns the folder of the rows to compare."""
        return f"{self.folder}/rows"

    def record(self, uri: str, chunks: Sequence[Chunk], files: Sequence[dict[str, Any]]) -> None:
        """Record a task's files, once they are durable; a task that runs again replaces it."""
        sync_files(uri, [file["path"] for file in files])
        ranges = [(c.leaves[0].oid, c.first_block, c.last_block) for c in chunks]
        entry = {"origin": self.origin, "snapshot": self.snapshot, "lsn": self.lsn}
        entry |= {"chunks": ranges, "files": list(files)}
        leaf, first, _ = ranges[0]
        write_record(self.lake, self.folder, f"{leaf}-{first}", entry)
        fault_point("sync.staged")

    def read(self, table: TargetVersion) -> list[ChunkFiles]:
        """Returns the files that earlier attempts of this copy recorded, of attempts whose files
        all exist.

        Raises NeedsSync if an attempt had another ``origin``, or if the target already contains its
        files.
        """
        attempts = []
        for entry in read_records(self.lake, self.folder):
            of = entry["origin"]
            if changes := sorted(name for name in self.origin if of.get(name) != self.origin[name]):
                raise NeedsSync(f"{' and '.join(changes)} changed since")
            chunks = tuple((leaf, first, last) for leaf, first, last in entry["chunks"])
            attempts.append(
                ChunkFiles(entry["snapshot"], entry["lsn"], chunks, tuple(entry["files"]))
            )
        place = self.lake.files(self.rows) if self.buckets else table.place.files
        live_paths = {file.path for file in table.table_files}
        if any(log_path(file["path"]) in live_paths for one in attempts for file in one.files):
            raise NeedsSync("an earlier attempt was committed")
        return [one for one in attempts if _are_there(place, one.files)]

    def paths(self) -> set[str]:
        """Returns the recorded files, of whatever origin."""
        return {
            file["path"]
            for entry in read_records(self.lake, self.folder)
            for file in entry["files"]
        }

    def remove(self) -> bool:
        """Remove the records; the files stay. Returns whether there were any."""
        had_records = bool(self.paths())
        remove_folder(self.folder)
        return had_records


def _are_there(place: FileSystem, files: Iterable[Mapping[str, Any]]) -> bool:
    sizes = {file["path"]: file["size"] for file in files}
    infos = place.get_file_info(list(sizes))
    return all(info.size == sizes[info.path] for info in infos)


@dataclass(frozen=True, slots=True)
class CopySource:
    """What tasks read a copy's rows from: the table, as a snapshot sees it."""

    conninfo: str
    copy: TableCopy
    table: PublishedTable
    holder_pid: int

    def read(self, number: int, chunks: Iterable[Chunk]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a task's chunks."""
        name = reader_name(self.holder_pid, number, self.copy.table)
        return read_chunks(self.conninfo, self.copy, chunks, name)


@dataclass(frozen=True, slots=True)
class ChunkFolder:
    """The folder to which tasks write a copy's rows, the columns of its files, and how they are
    written.

    ``rewrite`` writes the remaining rows of a file that is replaced; None: ``write`` does. ``key``
    are the key columns' names in these files; empty: their names on the source.
    """

    uri: str
    schema: pa.Schema
    write: WriteRows
    rewrite: WriteRows | None = None
    key: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows that a copy takes from earlier attempts: their files by task, the keys whose rows
    have changed since, and how to read those keys' rows again. It is sent to tasks.

    ``touched`` has the columns of touched_schema(), or no column when no key was touched.
    ``ranges`` is the SQL condition that a row is in a chunk of these files.
    """

    files: tuple[tuple[dict[str, Any], ...], ...]
    touched: pa.Table
    ranges: str
    source: CopySource

    def bring_up_to_date(
        self, runner: Runner, schema: pa.Schema, lake: Lake, folder: ChunkFolder
    ) -> list[Answer]:
        """Returns the copy's files, of ``schema``, with the current rows of touched keys.

        The files that this writes aren't recorded, so the next attempt reads these rows again.
        """
        if not (shares := -(-len(self.touched) // _KEYS_PER_TASK)):
            return [file for of_task in self.files for file in of_task]

        key, rewrite = folder.key or self.source.copy.key_columns, folder.rewrite or folder.write

        def write(number: int) -> pa.Table:
            if number < shares:
                rows = self._read(number)
                return pa.Table.from_pylist(folder.write(f"again-{number}", rows), schema)
            files: Files = []
            for place, file in enumerate(self.files[number - shares]):
                former = TableFile.of(file).open(lake, folder.uri, folder.schema)
                rows_kept = self._untouched_rows(former, key)
                files += (
                    [file] if rows_kept is None else rewrite(f"rest-{number}-{place}", rows_kept)
                )
            return pa.Table.from_pylist(files, schema)

        return runner.run(shares + len(self.files), schema, write, stops=True)

    def _read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yields the snapshot's rows of a share of the touched keys that are in recorded chunks."""
        copy, table = self.source.copy, self.source.table
        admitted = [part.as_string(None) for part in filter_conditions(copy)]
        condition = " and ".join([f"({self.ranges})", *admitted])
        choice = whole_table(table, condition, copy.relfilenodes)
        share = self.touched.slice(number * _KEYS_PER_TASK, _KEYS_PER_TASK)
        texts = share.select([f"t{k}" for k in range(len(copy.key_columns))])
        key = key_columns(table, copy.key_columns)
        name = reader_name(self.source.holder_pid, number, copy.table)
        parts = texts.to_batches(KEYS_PER_READ)
        return read_keys(self.source.conninfo, copy, choice, key, parts, name)

    def _untouched_rows(
        self, file: ds.Dataset, key: Sequence[str]
    ) -> Iterator[pa.RecordBatch] | None:
        """Returns a file's rows without those of touched keys; None when it has none of them."""
        types = dict(self.source.copy.columns)
        kinds = [types[name] for name in self.source.copy.key_columns]
        keys = [self.touched[f"k{k}"] for k in range(len(kinds))]
        return without_keys(file, dict(zip(key, kinds, strict=True)), keys)


@dataclass(frozen=True, slots=True)
class ContinuedCopy:
    """What earlier attempts recorded, and the chunks that they didn't; ``state`` is the target's
    ledger row, without a snapshot.
    """

    job: Job
    records: ChunkLog
    state: TableState
    source: CopySource
    files: Sequence[ChunkFiles]
    chunks: Sequence[Chunk]

    def take(self, runner: Runner, schema: pa.Schema, folder: ChunkFolder) -> list[Answer]:
        """Returns the recorded files, of ``schema``, brought up to date with the keys that changes
        touched since.

        Raises SnapshotLost when the copy must start again, and what a later attempt may not meet.
        """
        name = self.state.table_name
        try:
            with (
                raised_as(partial(unexpected_error, name), psycopg.Error),
                named_loss(self.source.conninfo),
            ):
                touched = _touched_keys(
                    runner, self.job, self.state, self.files, Lsn(self.records.lsn)
                )
        except WaldeltaError as err:
            if err.retryable:
                raise
            self.records.remove()
            raise SnapshotLost(
                f"{name}: its copy starts again without the rows of earlier attempts:"
                f" {without_values(err)}"
            ) from err
        log.info(
            "table=%s its copy continues: %s of %s are there, %s changed since",
            name, counted(sum(one.rows for one in self.files), "row"),
            counted(len(self.files), "task"), counted(len(touched), "key"),
        )  # fmt: skip
        files = tuple(one.files for one in self.files)
        rows = TakenRows(files, touched, _ranges(self.files), self.source)
        return rows.bring_up_to_date(runner, schema, self.job.lake, folder)


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """A copy whose tasks record what they wrote, and what it continues of earlier attempts."""

    records: ChunkLog
    tasks: Sequence[Sequence[Chunk]]
    earlier: ContinuedCopy | None = None


def write_chunks(
    runner: Runner,
    tasks: int,
    reader: Callable[[int], Iterator[pa.RecordBatch]],
    folder: ChunkFolder,
    schema: pa.Schema,
    staged: StagedCopy | None,
) -> list[Answer]:
    """Have tasks write a copy's rows; returns the files, of ``schema``, with those of earlier
    attempts.

    The log is landed, and those files are brought up to date, while tasks read what is missing.
    """
    records, chunks = (staged.records, staged.tasks) if staged is not None else (None, ())

    def write(number: int) -> pa.Table:
        files = folder.write(str(number), reader(number))
        # A copy without chunks has one task with nothing to read.
        if records is not None and number < len(chunks):
            records.record(folder.uri, chunks[number], files)
        return pa.Table.from_pylist(files, schema)

    if staged is None or staged.earlier is None:
        return runner.run(tasks, schema, write, stops=True)
    with ThreadPoolExecutor(1, "earlier chunks") as pool:
        future = pool.submit(staged.earlier.take, runner, schema, folder)
        return [*runner.run(tasks, schema, write, stops=True), *future.result()]


def stage_copy(
    runner: Runner,
    expected: ExpectedRows,
    tasks: int,
    reader: Callable[[int], Iterator[pa.RecordBatch]],
    staged: StagedCopy | None,
) -> tuple[ExpectedRows, int]:
    """Have tasks stage a copy's rows for a comparison, with those of earlier attempts.

    Returns where they are, and their number.
    """
    schema, key, attempt = expected.schema, expected.numbering.bases, uuid.uuid4().hex
    if staged is not None:
        expected = replace(expected, durable_folder=staged.records.rows)

    def write(name: str, rows: Iterator[pa.RecordBatch]) -> Files:
        return expected.stage(f"{attempt}-{name}.parquet", rows)

    def rewrite(name: str, rows: Iterator[pa.RecordBatch]) -> Files:
        path = f"{attempt}-{name}.parquet"
        return expected.divide_rows("expected", schema, path, parts_at_once(rows), key)

    folder = ChunkFolder(expected.durable_folder or expected.folder, schema, write, rewrite, key)
    files = write_chunks(runner, tasks, reader, folder, _STAGED, staged)
    if staged is not None:
        expected = replace(expected, files=frozenset(file["path"] for file in files))
    return expected, sum(file["rows"] for file in files)


def resume_copy(
    job: Job,
    records: ChunkLog,
    source: CopySource,
    state: TableState,
    chunk_bytes: int,
) -> ContinuedCopy | None:
    """Returns the earlier attempts' files and the chunks that they lack, for a copy as of the
    records' snapshot; None: the copy starts again.
    """
    name = state.table_name
    try:
        target = job.lake.target(name).find()
        files = records.read(target) if target is not None else []
        chunks = _missing(source.table.stored_leaves, files, chunk_bytes)
    except WaldeltaError as err:
        log.warning("table=%s its copy starts again: %s", name, without_values(err))
        records.remove()
        return None
    return ContinuedCopy(job, records, state, source, files, chunks) if files else None


def _missing(leaves: Sequence[Leaf], files: Sequence[ChunkFiles], chunk_bytes: int) -> list[Chunk]:
    """Returns the chunks of the blocks that no record has."""
    chunks: list[Chunk] = []
    for leaf in leaves:
        begin: int | None = 0
        ranges = ((first, last) for one in files for oid, first, last in one.chunks
                  if oid == leaf.oid)  # fmt: skip
        for first, last in sorted(ranges, key=lambda blocks: blocks[0]):
            if begin is None or first < begin:
                raise NeedsSync("its recorded chunks overlap")
            if first > begin:
                chunks += divide_blocks(leaf, begin, first, chunk_bytes)
            begin = last
        if begin is not None:
            chunks += divide_blocks(leaf, begin, None, chunk_bytes)
    return chunks


def _touched_keys(
    runner: Runner,
    job: Job,
    state: TableState,
    files: Sequence[ChunkFiles],
    upto: Lsn,
) -> pa.Table:
    """Returns the keys that changes touched since the first of the recorded snapshots."""
    # While no transaction id was assigned in between, transactions only ended.
    first = min(
        (Snapshot.parse(one.snapshot) for one in files),
        key=lambda snapshot: (snapshot.xmax, -len(snapshot.running)),
    )
    oldest = next(one for one in files if Snapshot.parse(one.snapshot) == first)
    state = replace(state, snapshot=oldest.snapshot, snapshot_lsn=oldest.lsn)
    land_through(runner, job, upto)
    folder = staging_folder(job.lake, state.table_name, state.generation, 0, job.run_id)
    touched = waiting_keys(runner, job, state, folder)
    fault_point("sync.touched")
    rows, count = sum(one.rows for one in files), 0 if touched is None else len(touched)
    if is_dear(count, rows):
        raise NeedsSync(f"{counted(count, 'row')} changed since, of {rows:,} that are there")
    return pa.table({}) if touched is None else touched


def _ranges(files: Sequence[ChunkFiles]) -> str:
    """Returns the condition that a row is in a recorded chunk."""
    parts = []
    for leaf, first, last in (chunk for one in files for chunk in one.chunks):
        part = f"tableoid = {leaf:d} and ctid >= '({first:d},0)'::pg_catalog.tid"
        parts.append(part if last is None else f"{part} and ctid < '({last:d},0)'::pg_catalog.tid")
    return " or ".join(f"({part})" for part in parts)
