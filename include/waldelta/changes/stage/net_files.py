"""Net files: net changes that were staged as Parquet, read by the tasks that merge them; a row's
number is its place among all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector

from waldelta.arrow import Bools, Ints
from waldelta.lake.storage import SPARKS_TIMESTAMPS, by_row_group, rooted

# Read in small pieces: what repeats itself is a thousandth in a file of what it is in memory.
ROWS_PER_READ = 8_192
# What is worked on at once.
ROWS_PER_PART = 131_072
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NetFiles:
    """The files in their order, and how many rows each has."""

    folder: str
    storage_options: dict[str, str] | None
    paths: Sequence[str]
    rows: Sequence[int]

    @classmethod
    def of(cls, folder: str, storage_options: dict[str, str] | None) -> NetFiles:
        """Those of a folder, whether Spark or Arrow wrote them."""
        files = rooted(folder, storage_options)
        listed = sorted(info.path for info in files.get_file_info(FileSelector("")))
        # S3A marks a folder by an object of no bytes, which is listed as an entry without a name.
        paths = [path for path in listed if path.rpartition("/")[2][:1] not in ("", ".", "_")]
        rows = []
        for path in paths:
            with files.open_input_file(path) as source:
                rows.append(pq.ParquetFile(source).metadata.num_rows)
        return cls(folder, storage_options, paths, rows)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Some columns of all of them."""
        return self._opened(self.paths).to_table(columns=list(columns))

    def take(self, chosen: Bools, most_bytes: int) -> pa.Table | None:
        """The chosen of all of them; None when they are more."""
        dataset = self._opened(self.paths)
        parts, taken = [], 0
        for part in _chosen(dataset, chosen):
            taken += part.nbytes
            if taken > most_bytes:
                return None
            parts.append(part)
        return pa.Table.from_batches(parts, dataset.schema)

    def parts_of(self, number: int, chosen: Bools) -> Iterator[pa.Table]:
        """The chosen of one file, so many at once as memory is meant to hold."""
        return grouped(_chosen(self._opened([self.paths[number]]), chosen))

    def _opened(self, paths: Sequence[str]) -> ds.Dataset:
        layout = ds.ParquetFileFormat(read_options=SPARKS_TIMESTAMPS)
        return ds.dataset(
            list(paths), filesystem=rooted(self.folder, self.storage_options), format=layout
        )


def packed(chosen: Bools) -> bytes:
    """Which are chosen, as bits or as numbers, whichever are fewer bytes (unpacked)."""
    places, bits = np.flatnonzero(chosen).astype("<u4"), np.packbits(chosen)
    return (places if places.nbytes < bits.nbytes else bits).tobytes()


def unpacked(chosen: bytes, count: int) -> Ints:
    """The places of the chosen among so many."""
    if len(chosen) < -(-count // 8):
        return np.frombuffer(chosen, "<u4").astype(np.int64)
    return np.flatnonzero(np.unpackbits(np.frombuffer(chosen, np.uint8), count=count))


def rows_at_once(rows: pa.Table) -> int:
    """So many of these rows as are worked on at once."""
    bytes_ = max(int(rows.nbytes), 1)
    return max(1, min(ROWS_PER_PART, PART_BYTES * len(rows) // bytes_))


def at_places(rows: pa.Table, places: Ints) -> pa.Table:
    """The rows at ascending places. ``Table.take`` would first make one piece of all there are: a
    copy of them for each few.
    """
    chosen = np.zeros(len(rows), np.bool_)
    chosen[places] = True
    return rows.filter(pa.array(chosen))


def batches(
    dataset: ds.Dataset, columns: dict[str, pc.Expression] | None = None
) -> Iterator[pa.RecordBatch]:
    """Rows in their order, a few at once; with ``columns``, these under their names instead of
    all.
    """
    scanner = by_row_group(dataset).scanner(
        columns=columns, batch_size=ROWS_PER_READ, batch_readahead=2, fragment_readahead=1
    )
    return iter(scanner.to_batches())


def grouped(parts: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """As many of these together as are worked on at once."""
    held: list[pa.RecordBatch] = []
    rows = taken = 0
    for part in parts:
        held.append(part)
        rows, taken = rows + len(part), taken + part.nbytes
        if rows >= ROWS_PER_PART or taken >= PART_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, taken = [], 0, 0
    if rows:
        yield pa.Table.from_batches(held)


def _chosen(dataset: ds.Dataset, chosen: Bools) -> Iterator[pa.RecordBatch]:
    begin = 0
    for part in batches(dataset):
        here = chosen[begin : begin + len(part)]
        begin += len(part)
        if here.any():
            yield part.take(pa.array(np.flatnonzero(here)))
