"""Splits a range of many targets' messages: tasks read it once and write it again by relation.

A row group of the log has all messages of its time. Reading one table's messages means reading
every group that has any, with all columns: for many tables, the whole range once for each.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from waldelta.arrow import Ints
from waldelta.lake import Lake, parquet_format, remove_folder, staging_folder
from waldelta.lake.changelog import ChangeLog, RowMessages, Stream
from waldelta.lake.changelog.row_messages import ROW_SCHEMA, all_row_messages
from waldelta.lake.write_errors import change_log_write_error
from waldelta.pipeline import Job, named_error
from waldelta.spark import Runner
from waldelta.spark.runner import shares

log = logging.getLogger(__name__)

# The average number of tables, by bytes, waiting for a row group, from which splitting pays: it
# costs about as much as reading the group twice.
SPLIT_FROM_TABLES = 4
# Relations with fewer messages share a row group: the headers of its columns, and a reader's
# request for them, cost as much as that many messages.
ROWS_PER_GROUP = 2_048
# The largest row group that is written, so that readers hold no more than that at once.
GROUP_ROWS, GROUP_BYTES = 131_072, 16 << 20
_WRITTEN = pa.schema([("path", pa.string())])


@dataclass
class Split(RowMessages):
    """The row messages of a range, in files sorted by relation."""

    uri: str
    lake: Lake
    paths: Sequence[str] = field(repr=False)

    def dataset(self) -> ds.Dataset | None:
        """Return all files as a dataset; None when there are no messages."""
        return self._dataset

    @cached_property
    def _dataset(self) -> ds.Dataset | None:
        # Cached, so that each file's footer is read once, not once for each table.
        if not self.paths:
            return None
        files, layout = self.lake.unchanging_files(self.uri), parquet_format(self.uri)
        fragments = [layout.make_fragment(path, files) for path in self.paths]
        return ds.FileSystemDataset(fragments, ROW_SCHEMA, layout, files)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the opened dataset: tasks read only the files that they are
        given.
        """
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}


@contextmanager
def splitting(
    runner: Runner,
    job: Job,
    change_log: ChangeLog,
    waiting: Callable[[Stream], Collection[int]],
) -> Iterator[Callable[[Stream], Split | None]]:
    """Yield a function that splits a range, where that pays for the relations that wait for it.

    A range's files are removed when the next range is split. The function raises TargetNotWritable
    when they can't be written.
    """
    folders: list[str] = []

    def split_up(stream: Stream) -> Split | None:
        _remove(folders)
        if not is_worth_it(change_log, stream, waiting(stream)):
            return None
        folders.append(staging_folder(job.lake, "messages", 0, stream.segments.upto, job.run_id))
        try:
            return split(runner, change_log, stream, folders[0])
        except Exception as err:
            raise named_error(err) or change_log_write_error(folders[0], err) or err from err

    try:
        yield split_up
    finally:
        _remove(folders)


def _remove(folders: list[str]) -> None:
    while folders:
        remove_folder(folders.pop())


def is_worth_it(change_log: ChangeLog, stream: Stream, relation_ids: Collection[int]) -> bool:
    """Return whether enough of these relations have messages in the same row groups, by
    statistics.
    """
    ids = np.sort(np.fromiter(relation_ids, np.int64))
    if len(ids) < SPLIT_FROM_TABLES:
        return False
    weighed = total = 0
    for group in change_log.groups(all_row_messages(stream.segments)):
        (held,) = group.row_groups
        bounds = held.statistics.get("relation_id")
        least, most = (bounds["min"], bounds["max"]) if bounds else (ids[0], ids[-1])
        waiting = int(np.searchsorted(ids, most, "right") - np.searchsorted(ids, least, "left"))
        weighed, total = weighed + waiting * held.total_byte_size, total + held.total_byte_size
    return weighed >= SPLIT_FROM_TABLES * max(total, 1)


def split(runner: Runner, change_log: ChangeLog, stream: Stream, folder: str) -> Split:
    """Write the row messages of a range into files of a folder, each sorted by relation.

    Messages of one relation stay in the order of the log.
    """
    began = time.monotonic()
    chosen, lake = all_row_messages(stream.segments), change_log.lake
    dealt = shares(change_log.pieces(chosen))
    base, _, name = folder.rpartition("/")

    def write(number: int) -> pa.Table:
        # The name is unique to this attempt: an earlier one, taken for lost, may still be writing.
        path = f"part-{number}-{uuid.uuid4().hex}.parquet"
        files = lake.files(base)
        files.create_dir(name)
        parts = list(change_log.read(dealt[number], chosen, ROW_SCHEMA.names))
        with (
            files.open_output_stream(f"{name}/{path}") as sink,
            pq.ParquetWriter(sink, ROW_SCHEMA, compression="lz4") as writer,
        ):
            for group in _groups(pa.Table.from_batches(parts, ROW_SCHEMA)):
                writer.write_table(group, row_group_size=GROUP_ROWS)
        return pa.table([[path]], schema=_WRITTEN)

    told = runner.run(len(dealt), _WRITTEN, write)
    log.info(
        "rewrote the messages of many tables, sorted by table, in %.1f s", time.monotonic() - began
    )
    return Split(folder, lake, [row["path"] for row in told])


def _groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows by relation, a row group at a time.

    A row group has one relation's rows, or those of several relations with few.
    """
    # Combined once: taking rows from many pieces would combine them each time.
    rows = rows.combine_chunks()
    relation_id = rows["relation_id"].to_numpy()
    order = np.argsort(relation_id, kind="stable")
    most = max(1, min(GROUP_ROWS, GROUP_BYTES * len(rows) // max(rows.nbytes, 1)))
    for begin, end in _cuts(relation_id[order], most):
        yield rows.take(pa.array(order[begin:end]))


def _cuts(relation_id: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Yield where row groups of sorted relations begin and end."""
    if not len(relation_id):
        return
    starts = np.flatnonzero(relation_id[1:] != relation_id[:-1]) + 1
    begin, least = 0, min(ROWS_PER_GROUP, most)
    for end in [*map(int, starts), len(relation_id)]:
        if end - begin >= least or end == len(relation_id):
            for first in range(begin, end, most):
                yield first, min(first + most, end)
            begin = end
