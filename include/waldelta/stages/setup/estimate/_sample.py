"""Samples of tables: some of their blocks, read and encoded as a copy does it, within seconds.

Nothing is kept: the encoded files are only counted.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from waldelta.config.pipeline_file import Target
from waldelta.lake.data_file import DataFile
from waldelta.snapshot import SnapshotHolder, TableCopy, plan_copy
from waldelta.snapshot.chunks import COPY_ROW_GROUP_BYTES, Chunk, plan_chunks
from waldelta.snapshot.read_table import (
    begin_snapshot,
    chunk_query,
    fetch_rows,
    lock_query,
    run_statement,
    snapshot_reader,
)
from waldelta.stages.setup.estimate.planned_copies import PlannedCopy

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi as adbc

# Sampled tables wait no longer for a lock, nor for their first blocks.
_LOCK_TIMEOUT_MS, _STATEMENT_TIMEOUT_MS = 1_000, 10_000
# Parts of a table that a sample is spread over.
_PLACES = 256
_LEAST_PLACE_BYTES = 1 << 20
# A reader begins with one block, whose values may be large, and then reads for about this long.
_FIRST_BLOCKS = 1
_SECONDS_PER_READ = 0.25
_MOST_READERS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read of a copy: blocks and rows, how many bytes its files have, how long it took."""

    blocks: int
    rows: int
    file_bytes: int
    seconds: float


class _Counted:
    """Stands for a file system: what is written to it is counted and forgotten."""

    def create_dir(self, _: str) -> None:
        """Do nothing."""

    def delete_file(self, _: str) -> None:
        """Do nothing."""

    def open_output_stream(self, _: str) -> Any:
        """Return a file that only counts."""
        return pa.MockOutputStream()


def readers() -> int:
    """Returns how many tasks a local Spark session runs at once, which read concurrently."""
    return min(_MOST_READERS, os.cpu_count() or 1)


def sample_copy(
    conninfo: str, holder: SnapshotHolder, copy: PlannedCopy, target: Target, seconds: float
) -> Sample:
    """Read parts of a copy for about these seconds, by as many readers as a copy has.

    Raises as read_chunks() does.
    """
    lsn = holder.lsn.value if target.metadata_columns else None
    leaves = copy.table.stored_leaves
    files = holder.relfilenodes([leaf.oid for leaf in leaves])
    planned = plan_copy(copy.table, holder.snapshot_id, files, lsn, target.types_of(copy.target))
    planned = replace(planned, where=copy.where)
    places = plan_chunks(leaves, max(_LEAST_PLACE_BYTES, copy.table.size_bytes // _PLACES))
    random.Random(0).shuffle(places)  # noqa: S311 - any order that is spread over the table
    read = _Sampling(conninfo, planned, places, time.monotonic() + seconds)
    began = time.monotonic()
    with ThreadPoolExecutor(min(readers(), len(places)), thread_name_prefix="sample") as pool:
        parts = list(pool.map(lambda _: read.run(), range(min(readers(), len(places)))))
    # The readers' connections are open before the first of them reads.
    took = time.monotonic() - max(began, read.began)
    return Sample(
        sum(part.blocks for part in parts),
        sum(part.rows for part in parts),
        sum(part.file_bytes for part in parts),
        took,
    )


class _Sampling:
    """The sample of one copy, whose places several readers share."""

    def __init__(
        self, conninfo: str, copy: TableCopy, places: Sequence[Chunk], until: float
    ) -> None:
        self._conninfo, self._copy, self._until = conninfo, copy, until
        # What a reader leaves of a place comes last, so that a short sample is spread over all.
        self._places = deque(places)
        self.began = 0.0

    def run(self) -> Sample:
        """Read places until the time is over."""
        blocks = rows = size = 0
        with snapshot_reader(self._conninfo, self._copy, "waldelta estimate") as connection:
            begin_snapshot(connection, self._copy)
            run_statement(connection, f"set local lock_timeout = {_LOCK_TIMEOUT_MS}")
            run_statement(connection, f"set local statement_timeout = {_STATEMENT_TIMEOUT_MS}")
            began = time.monotonic()
            self.began = max(self.began, began)
            with DataFile(_Counted(), self._copy.schema) as file:
                for count, table in self._groups(connection):
                    blocks += count
                    rows += len(table)
                    file.write(table)
                size = file.close().get("size", 0)
            run_statement(connection, "commit")
        return Sample(blocks, rows, size, time.monotonic() - began)

    def _groups(self, connection: adbc.Connection) -> Iterator[tuple[int, pa.Table]]:
        """Yields the rows read, in row groups, and how many blocks each group came from."""
        held: list[pa.RecordBatch] = []
        blocks, step = 0, float(_FIRST_BLOCKS)
        for place in self._next():
            began = time.monotonic()
            chunk, count, rest = _part(place, int(step))
            if rest is not None:
                self._places.append(rest)
            with connection.cursor() as cursor:
                cursor.execute(lock_query(self._copy, chunk))
                ((_, bounds),) = cursor.fetchall()
            query = chunk_query(self._copy, chunk, bounds)
            for batch in fetch_rows(connection, self._copy, query):
                held.append(batch)
                if sum(one.nbytes for one in held) >= COPY_ROW_GROUP_BYTES:
                    yield blocks, pa.Table.from_batches(held)
                    held, blocks = [], 0
            blocks += count
            took = max(time.monotonic() - began, 0.001)
            step = max(1.0, step * min(4.0, _SECONDS_PER_READ / took))
        if blocks:
            yield blocks, pa.Table.from_batches(held, self._copy.schema)

    def _next(self) -> Iterator[Chunk]:
        while time.monotonic() < self._until:
            try:
                yield self._places.popleft()
            except IndexError:
                return


def _part(place: Chunk, most_blocks: int) -> tuple[Chunk, int, Chunk | None]:
    """Returns the first blocks of a place, how many of its leaves' blocks these are, and the rest,
    if any.
    """
    end = max(leaf.blocks for leaf in place.leaves)
    last = end if place.last_block is None else min(place.last_block, end)
    rest = None
    if all(leaf.has_ctid for leaf in place.leaves) and last - place.first_block > most_blocks:
        middle = place.first_block + most_blocks
        place, rest, last = (
            replace(place, last_block=middle),
            replace(place, first_block=middle),
            middle,
        )
    blocks = sum(max(0, min(last, leaf.blocks) - place.first_block) for leaf in place.leaves)
    return place, blocks, rest
