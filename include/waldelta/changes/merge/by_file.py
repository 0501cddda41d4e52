"""Merge files: many net changes, or few into a large target, as one commit, by Spark's tasks with
Arrow, file by file.

A MERGE of Spark's makes Spark's rows of all that it reads, joins and shuffles them and writes them
as it has them then. Here a task reads a few of the target's files that may hold a key of the net
changes, looks their keys up in the changes', and writes each file that has one anew, its rows in
the order that they had: files keep to their ranges of keys, so that later changes of some rows go
on touching few of them. What found no row is added by the tasks that follow. The commit carries
what a MERGE's would and is a compare-and-swap on the version that was read (as merge_in_driver's).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyarrow.fs import FileSystem

from waldelta.arrow import Ints
from waldelta.changes.decode import TargetPlan
from waldelta.changes.decode.collapse import net_changes
from waldelta.changes.merge._arrow import MergedRows, WrittenColumns, are_new, match, matched_by
from waldelta.changes.merge._file_bounds import may_hold
from waldelta.changes.merge.by_driver import (
    TARGET_CHECKPOINT_INTERVAL,
    arrow_schema,
    is_for_arrow,
    written_columns,
)
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    ROWS_PER_FILE,
    CommitTag,
)
from waldelta.changes.stage.net_files import (
    NetFiles,
    at_places,
    batches,
    grouped,
    packed,
    unpacked,
)
from waldelta.errors import WaldeltaError
from waldelta.lake import DeltaLog, files_of
from waldelta.lake.data_file import DataFile, discard, new_prefix, replacement
from waldelta.lake.storage import SPARKS_TIMESTAMPS, checkpoint, only_if_unchanged, rooted
from waldelta.pipeline import Job
from waldelta.pipeline.targets.watermarks import uri_of
from waldelta.pipeline.task_errors import first_line
from waldelta.spark.tasks import RunTask, shares

log = logging.getLogger(__name__)

# The net changes of a task's files, which it holds in memory; beyond, Spark, which can spill.
MOST_NET_BYTES = 512 << 20
# A task reads at least so many of the target's rows, and half as many as there are net changes,
# whose keys it reads too.
MERGED_ROWS_PER_TASK = 250_000
# Or so many bytes of its files, as they are stored.
MERGED_BYTES_PER_TASK = 64 << 20
MERGED = pa.schema(
    [
        ("removed", pa.string()),
        ("removed_size", pa.int64()),
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("updated", pa.int64()),
        ("deleted", pa.int64()),
        ("inserted", pa.int64()),
        ("matched", pa.binary()),
        ("is_possible", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class _File:
    """A data file of a target."""

    path: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Target:
    """What a task has to know of a target; the names of all files of this attempt begin with
    ``prefix``.
    """

    uri: str
    storage_options: dict[str, str] | None
    schema: pa.Schema
    written: WrittenColumns
    prefix: str

    def files(self) -> FileSystem:
        return rooted(self.uri, self.storage_options)


def merge_files(
    run: RunTask,
    job: Job,
    plan: TargetPlan,
    folder: str,
    tag: CommitTag,
    check: Callable[[], object],
) -> CommitTag | None:
    """Commit the net changes that are staged in ``folder`` under ``tag``; returns the tag that
    tells what they did.

    ``run`` has tasks done (tasks.run_tasks). ``check`` is asked, and None returned, as by
    merge_in_driver.
    """
    if not is_for_arrow(plan, tag):
        return None
    table = DeltaTable(uri_of(job, plan.state.table_name), storage_options=job.storage_options)
    if (table.transaction_version(tag.app_id) or 0) >= tag.batch:
        return tag  # as Delta skips a MERGE that is repeated
    try:
        merge = _begun(run, job, plan, folder, tag, table)
        return None if merge is None else _merged(merge, table, tag, check)
    except WaldeltaError:
        raise
    except Exception as err:
        # Somebody else committed meanwhile, or removed a file; a value or worker is too much for a
        # task. Spark does it, or says why not; what is committed all the same it won't repeat.
        log.warning(
            "table=%s isn't merged file by file: %s", plan.state.table_name, first_line(err)
        )
        return None


def _merged(
    merge: _Merge, table: DeltaTable, tag: CommitTag, check: Callable[[], object]
) -> CommitTag | None:
    try:
        if not merge.rewrite():
            merge.discard()
            return None
        merge.insert()
        tag = replace(tag, counts=tag.counts | merge.counts)
        check()
    except Exception:
        merge.discard()
        raise
    try:
        _commit(table, merge, tag)
    except CommitFailedError:
        # An answer that was lost would be a commit all the same: only somebody else's in its place
        # shows that there is none.
        other = merge.log.read(table.version() + 1)
        if other is not None and other.info.get("userMetadata") != tag.metadata:
            merge.discard()
        raise
    table.update_incremental()
    checkpoint(table, TARGET_CHECKPOINT_INTERVAL)
    return tag


def _begun(
    run: RunTask, job: Job, plan: TargetPlan, folder: str, tag: CommitTag, table: DeltaTable
) -> _Merge | None:
    """The merge, unless this target or these net changes are Spark's."""
    if (written := written_columns(job, plan, table)) is None:
        return None
    target = _Target(
        uri_of(job, plan.state.table_name),
        job.storage_options,
        arrow_schema(table),
        written,
        new_prefix(),
    )
    net = NetFiles.of(folder, job.storage_options)
    files = files_of(table)
    is_whole = sum(net.rows) == net_changes(tag.counts)
    # A path of more than a name is of a partitioned table, or of a clone's.
    if not is_whole or any("/" in path or "%" in path for path in files["path"].to_pylist()):
        return None
    return _Merge(run, target, net, files, truncated=plan.is_truncated)


def _files(files: pa.Table) -> list[_File]:
    """The target's files, by what its log tells of them."""
    rows = files["num_records"].fill_null(ROWS_PER_FILE)
    columns = (files["path"], files["size_bytes"], rows)
    return [
        _File(*values) for values in zip(*(column.to_pylist() for column in columns), strict=True)
    ]


class _Merge:
    """One merge under way: the files that are removed and added, and how many rows of which kind
    that makes.
    """

    def __init__(
        self, run: RunTask, target: _Target, net: NetFiles, files: pa.Table, *, truncated: bool
    ) -> None:
        self._run, self._target, self._net, self._files, self._truncated = (
            run,
            target,
            net,
            files,
            truncated,
        )
        self._held = _files(files)
        self._keys = net.read(["action", *target.written.bases])
        self._matched = np.zeros(len(self._keys), np.bool_)
        self.added: list[Any] = []
        self.removed: list[tuple[str, int]] = (
            [(file.path, file.bytes) for file in self._held] if truncated else []
        )
        self.counts = {MERGED_INSERTS: 0, MERGED_UPDATES: 0, MERGED_DELETES: 0}

    def rewrite(self) -> bool:
        """Write the files anew that hold a row of the net changes; False when one of them can't be
        by Arrow.
        """
        target, net, count = self._target, self._net, len(self._keys)
        parts = shares(
            self._touched(), max(MERGED_ROWS_PER_TASK, count // 2), MERGED_BYTES_PER_TASK
        )
        told = self._run(
            len(parts), MERGED, lambda number: _rewrite(target, net, count, parts[number])
        )
        for row in told:
            if row["matched"] is not None:
                self._matched[unpacked(row["matched"], count)] = True
            if row["removed"] is not None:
                self.removed.append((row["removed"], row["removed_size"]))
            self._add(row)
        return all(row["is_possible"] for row in told)

    def insert(self) -> None:
        """Write the net changes that are new rows as files of their own."""
        target, net = self._target, self._net
        parts = np.split(are_new(self._keys, self._matched), np.cumsum(net.rows)[:-1])
        chosen = [(number, np.packbits(part)) for number, part in enumerate(parts) if part.any()]
        for row in self._run(
            len(chosen), MERGED, lambda number: _insert(target, net, *chosen[number])
        ):
            self._add(row)

    @property
    def log(self) -> DeltaLog:
        """The target's."""
        return DeltaLog(self._target.uri, self._target.storage_options)

    def discard(self) -> None:
        """Remove the files that nobody will read."""
        discard(self._target.uri, self._target.storage_options, self._target.prefix)

    def _add(self, row: Any) -> None:
        if row["path"] is not None:
            self.added.append((row["path"], row["size"], row["stats"]))
        for name, count in zip(
            self.counts, (row["inserted"], row["updated"], row["deleted"]), strict=True
        ):
            self.counts[name] += count

    def _touched(self) -> list[_File]:
        """The files that may hold a row of the net changes."""
        written = self._target.written
        if self._truncated or not written.shape.key:
            return []
        chosen = may_hold(
            self._files, written.key_names, [self._keys[base] for base in written.bases]
        )
        return list(compress(self._held, chosen))


def _rewrite(target: _Target, net: NetFiles, count: int, share: Sequence[_File]) -> pa.Table:
    """A task: write those of these files anew that hold a row of the net changes; tells what it
    did, and which changes met one.
    """
    files = target.files()
    keys = [_open(target, files, file).to_table(columns=target.written.key_names) for file in share]
    of_row = match(
        pa.concat_tables(keys), net.read(["action", *target.written.bases]), target.written
    )
    matched = matched_by(of_row, count)
    changes, wanted = net.take(matched, MOST_NET_BYTES), np.flatnonzero(matched)
    if changes is None:  # told, not raised: Spark would have it read as much again
        return pa.Table.from_pylist([_rows_of(is_possible=False)], MERGED)
    # From here on rows point at the changes that are wanted, not at all there are.
    of_row = np.where(of_row >= 0, np.searchsorted(wanted, of_row), -1)
    told = [_rows_of(matched=packed(matched))]
    for file, of_file in zip(
        share, np.split(of_row, np.cumsum([len(part) for part in keys])[:-1]), strict=True
    ):
        if (of_file >= 0).any():
            told.append(_rewrite_file(target, files, file, changes, of_file))
    return pa.Table.from_pylist(told, MERGED)


def _rewrite_file(
    target: _Target, files: FileSystem, file: _File, changes: pa.Table, of_row: Ints
) -> dict[str, Any]:
    with DataFile(files, target.schema, target.prefix) as new:
        updated = deleted = begin = 0
        for part in grouped(batches(_open(target, files, file))):
            held = part.cast(target.schema)
            of_part = of_row[begin : begin + len(held)]
            begin += len(held)
            chosen = np.unique(of_part[of_part >= 0])
            place = np.where(of_part >= 0, np.searchsorted(chosen, of_part), -1)
            merged = MergedRows(
                held, at_places(changes, chosen), place, np.zeros(0, np.int64), target.written
            )
            if not merged.is_possible:
                return _rows_of(is_possible=False)
            new.write(merged.rows())
            counts = merged.counts
            updated, deleted = updated + counts[MERGED_UPDATES], deleted + counts[MERGED_DELETES]
        return _rows_of(
            removed=file.path,
            removed_size=file.bytes,
            updated=updated,
            deleted=deleted,
            **new.close(),
        )


def _insert(target: _Target, net: NetFiles, number: int, chosen: Any) -> pa.Table:
    """A task: write the chosen of one of the net changes' files as new rows."""
    files, told = target.files(), []
    parts = net.parts_of(number, np.unpackbits(chosen, count=net.rows[number]).astype(np.bool_))
    nothing, nowhere = target.schema.empty_table(), np.zeros(0, np.int64)
    part = next(parts, None)
    while part is not None:
        with DataFile(files, target.schema, target.prefix) as new:
            while part is not None and new.rows < ROWS_PER_FILE:
                new.write(
                    MergedRows(
                        nothing, part, nowhere, np.arange(len(part)), target.written
                    ).new_rows()
                )
                part = next(parts, None)
            told.append(_rows_of(inserted=new.rows, **new.close()))
    return pa.Table.from_pylist(told, MERGED)


def _rows_of(**what: Any) -> dict[str, Any]:
    return {"updated": 0, "deleted": 0, "inserted": 0, "is_possible": True} | what


def _open(target: _Target, files: FileSystem, file: _File) -> ds.Dataset:
    layout = ds.ParquetFileFormat(read_options=SPARKS_TIMESTAMPS)
    return ds.FileSystemDataset(
        [layout.make_fragment(file.path, files)], target.schema, layout, files
    )


def _commit(table: DeltaTable, merge: _Merge, tag: CommitTag) -> None:
    """Put the new files in the place of the others; raises DeltaError when the table isn't what was
    read any more.
    """
    table.create_write_transaction(
        replacement(merge.removed, merge.added),
        mode="append",
        schema=table.schema(),
        **only_if_unchanged(tag.app_id, tag.batch, tag.metadata),
    )
