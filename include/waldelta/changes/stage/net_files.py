"""Net files: net changes staged as Parquet, which the merging tasks read.

A row's number is its position among the rows of all files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from waldelta.arrow import Bools, Ints, group_batches, table_of
from waldelta.errors import StagedLost
from waldelta.lake import (
    MOST_DRIVER_BYTES,
    Lake,
    TargetVersion,
    by_row_group,
    parquet_format,
    write_parquet,
)
from waldelta.lake.layout import open_files
from waldelta.lake.storage import data_paths, row_group_bytes
from waldelta.quantities import counted
from waldelta.spark import Runner

# Rows are read in small pieces, because repeated values take a thousandth of their memory in a
# file.
ROWS_PER_READ = 8_192
# The number of rows that are processed at once.
ROWS_PER_PART = 131_072
PART_BYTES = 64 << 20
# The net changes of a task's files, which the task keeps in memory. Beyond this, Spark merges,
# which can spill.
MOST_NET_BYTES = 512 << 20
# Shorter runs of rows are copied, because each one becomes a piece of its own.
_ROWS_PER_RUN = 256
_WRITTEN = pa.schema([("rows", pa.int64())])


def check_rows(path: str, count: int, rows: int) -> None:
    """Raise StagedLost unless a staged file or folder has as many rows as were written to it."""
    if count != rows:
        raise StagedLost(
            f"staged rows are gone: {path} has {counted(count, 'row')} of {rows:,}: run again"
        )


@dataclass(frozen=True, slots=True)
class NetFiles:
    """The files in their order, and the number of rows of each."""

    folder: str
    lake: Lake
    paths: Sequence[str]
    rows: Sequence[int]

    @classmethod
    def of(cls, folder: str, lake: Lake, names: Container[str] | None = None) -> NetFiles:
        """Returns the files of a folder, or those with these names, whether Spark or Arrow wrote
        them.
        """
        files = lake.unchanging_files(folder)
        paths = [path for path in data_paths(files) if names is None or path in names]
        rows = []
        for path in paths:
            with files.open_input_file(path) as source:
                rows.append(pq.ParquetFile(source).metadata.num_rows)
        return cls(folder, lake, paths, rows)

    def in_memory(self, most_bytes: int) -> NetTable | None:
        """Returns all rows in memory; None when they take more than ``most_bytes``."""
        rows = self.take(np.ones(sum(self.rows), np.bool_), most_bytes)
        return None if rows is None else NetTable.of_rows(self.folder, self.lake, rows)

    def on_disk(self) -> NetFiles:
        """Returns the files, which Spark's tasks can read, too."""
        return self

    @property
    def schema(self) -> pa.Schema:
        """The columns of all files."""
        return self._open_dataset(self.paths).schema

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Returns some columns of all files."""
        return self._open_dataset(self.paths).to_table(columns=list(columns))

    def all_of(self, number: int) -> pa.Table:
        """Returns all rows of one file."""
        return self._open_dataset([self.paths[number]]).to_table()

    def take(
        self, mask: Bools, most_bytes: int, columns: Sequence[str] | None = None
    ) -> pa.Table | None:
        """Returns the chosen rows of all files; None when they take more than ``most_bytes``.

        ``columns`` selects columns, instead of all.
        """
        schema = self.schema
        read = [name for name in schema.names if columns is None or name in columns]
        parts = self._batches(mask, {name: pc.field(name) for name in read})
        return table_of(parts, pa.schema([schema.field(name) for name in read]), most_bytes)

    def at(self, numbers: Ints) -> pa.Table:
        """Returns the rows with these numbers, in the files' order."""
        return pa.Table.from_batches(self._batches(self.are_in(numbers)), self.schema)

    def are_in(self, numbers: Ints) -> Bools:
        """Returns of each row of all files whether it has one of these numbers."""
        mask = np.zeros(sum(self.rows), np.bool_)
        mask[numbers] = True
        return mask

    def by_file(self, mask: Bools) -> Iterator[tuple[int, Bools]]:
        """Yields the files that have any of the chosen rows, each with its part of the mask."""
        for number, of_file in enumerate(np.split(mask, np.cumsum(self.rows)[:-1])):
            if of_file.any():
                yield number, of_file

    def parts_of(self, number: int, mask: Bools) -> Iterator[pa.Table]:
        """Returns the chosen rows of one file, in parts of limited memory."""
        return parts_at_once(chosen_rows(self._open_dataset([self.paths[number]]), mask))

    def columns_of(self, number: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Returns some columns of one file, in parts of limited memory."""
        read = {name: pc.field(name) for name in columns}
        return parts_at_once(batches(self._open_dataset([self.paths[number]]), read))

    def without(self, runner: Runner, numbers: Ints, folder: str, begin: int = 0) -> NetFiles:
        """Write all rows but these into another folder, by a task for each file.

        The folder may already have ``begin`` files of other rows. Returns all its files. Raises
        StagedLost when one is missing.
        """
        masks = np.split(~self.are_in(numbers), np.cumsum(self.rows)[:-1])
        first = max(1, begin)
        if not begin:  # As a task's file, this would also remove what others have written.
            write_parquet(folder, self.schema.empty_table())

        def write(number: int) -> pa.Table:
            parts = self.parts_of(number, masks[number])
            rows = pa.concat_tables([self.schema.empty_table(), *parts])
            write_parquet(folder, rows, first + number)
            return pa.table([[len(rows)]], schema=_WRITTEN)

        written = sum(row["rows"] for row in runner.run(len(self.paths), _WRITTEN, write))
        files = NetFiles.of(folder, self.lake)
        names = {f"part-{first + number}.parquet" for number in range(len(self.paths))}
        rows = zip(files.paths, files.rows, strict=True)
        check_rows(folder, sum(count for path, count in rows if path in names), written)
        return files

    def _batches(
        self, mask: Bools, columns: dict[str, pc.Expression] | None = None
    ) -> Iterator[pa.RecordBatch]:
        for number, of_file in self.by_file(mask):
            yield from chosen_rows(self._open_dataset([self.paths[number]]), of_file, columns)

    def _open_dataset(self, paths: Sequence[str]) -> ds.Dataset:
        files = self.lake.unchanging_files(self.folder)
        return ds.dataset(list(paths), filesystem=files, format=parquet_format(self.folder))


@dataclass(frozen=True, slots=True)
class NetTable(NetFiles):
    """Net changes in memory, as if they were one file of the folder."""

    table: pa.Table

    @classmethod
    def of_rows(cls, folder: str, lake: Lake, rows: pa.Table) -> NetTable:
        """Returns net changes that are in memory."""
        return cls(folder, lake, [""], [len(rows)], rows)

    def in_memory(self, most_bytes: int) -> NetTable | None:
        """Returns these rows, unless they take more than ``most_bytes``."""
        return self if self.table.nbytes <= most_bytes else None

    def on_disk(self) -> NetFiles:
        """Write the rows into the folder, and return them as a file."""
        write_net(self.lake, self.folder, self.table)
        return NetFiles.of(self.folder, self.lake)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Returns some columns."""
        return self.table.select(columns)

    def take(
        self,
        mask: Bools,
        most_bytes: int,  # noqa: ARG002
        columns: Sequence[str] | None = None,
    ) -> pa.Table | None:
        """Returns the chosen rows."""
        return self.table.filter(pa.array(mask)).select(columns or self.table.column_names)

    def parts_of(self, number: int, mask: Bools) -> Iterator[pa.Table]:  # noqa: ARG002
        """Yields the chosen rows."""
        yield self.table.filter(pa.array(mask))


def parent_files(lake: Lake, folder: str) -> tuple[FileSystem, str]:
    """Returns the file system of a folder's parent, and the folder's name in it."""
    base, _, name = folder.rpartition("/")
    return lake.files(base), name


def write_net(lake: Lake, folder: str, rows: pa.Table, number: int = 0) -> None:
    """Write net changes as a file of a folder.

    A repeated task writes the same bytes under the same name, since readers take all files of the
    folder.
    """
    files, name = parent_files(lake, folder)
    files.create_dir(name)
    # Readers read no more than a row group at once.
    path, size = f"{name}/part-{number}.parquet", rows_at_once(rows)
    pq.write_table(rows, path, filesystem=files, row_group_size=size)


def packed(mask: Bools) -> bytes:
    """Returns which rows are chosen, as bits or as numbers, whichever takes fewer bytes (see
    unpacked()).
    """
    places, bits = np.flatnonzero(mask).astype("<u4"), np.packbits(mask)
    return (places if places.nbytes < bits.nbytes else bits).tobytes()


def unpacked(data: bytes, count: int) -> Ints:
    """Returns the positions of the chosen rows among ``count``."""
    if len(data) < -(-count // 8):
        return np.frombuffer(data, "<u4").astype(np.int64)
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), count=count))


def rows_at_once(rows: pa.Table) -> int:
    """Returns how many of these rows are processed at once."""
    bytes_ = max(int(rows.nbytes), 1)
    return max(1, min(ROWS_PER_PART, PART_BYTES * len(rows) // bytes_))


def at_places(rows: pa.Table, places: Ints) -> pa.Table:
    """Returns the rows at these positions, in any order; long runs of neighbours aren't copied.

    ``Table.take`` would first copy the whole table into one piece, for every few rows.
    """
    if not len(places):
        return rows.slice(0, 0)
    steps = np.diff(places)
    ends = np.append(np.flatnonzero(steps != 1) + 1, len(places))
    if len(places) >= len(ends) * _ROWS_PER_RUN:
        runs = np.split(places, ends[:-1])
        return pa.concat_tables([rows.slice(int(run[0]), len(run)) for run in runs])
    first, last = int(places.min()), int(places.max())
    span = rows.slice(first, last + 1 - first)
    if (steps > 0).all():
        mask = np.zeros(len(span), np.bool_)
        mask[places - first] = True
        return span.filter(pa.array(mask))
    return span.take(pa.array(places - first))


def batches(
    dataset: ds.Dataset, columns: dict[str, pc.Expression] | None = None
) -> Iterator[pa.RecordBatch]:
    """Returns rows in their order, a few at a time.

    ``columns`` selects and names the columns, instead of all.
    """
    scanner = by_row_group(dataset).scanner(
        columns=columns, batch_size=ROWS_PER_READ, batch_readahead=2, fragment_readahead=1
    )
    return iter(scanner.to_batches())


def small_rows(table: TargetVersion) -> pa.Table | None:
    """Returns all rows of a target that this process reads without Spark, else None.

    Its files are small, its features are implemented, and its rows take at most MOST_DRIVER_BYTES.
    The version's dataset() then has them, too.
    """
    if not (table.is_small and table.is_writable):
        return None
    dataset = open_files(table.table_files, table.place.lake, table.place.uri, table.schema)
    # A first batch of large rows would be in memory before it could be counted, so the footers are
    # checked first.
    if sum(row_group_bytes(dataset)) > MOST_DRIVER_BYTES:
        return None
    if (rows := table_of(batches(dataset), dataset.schema, MOST_DRIVER_BYTES)) is not None:
        table.hold(rows)
    return rows


def parts_at_once(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yields record batches as tables of the size that is processed at once."""
    return group_batches(rows, PART_BYTES, ROWS_PER_PART)


def chosen_rows(
    dataset: ds.Dataset, mask: Bools, columns: dict[str, pc.Expression] | None = None
) -> Iterator[pa.RecordBatch]:
    """Returns the chosen rows of a dataset, a few at a time; ``columns`` as in batches()."""
    begin = 0
    for part in batches(dataset, columns):
        mask_of_part = mask[begin : begin + len(part)]
        begin += len(part)
        if mask_of_part.all():
            yield part
        elif mask_of_part.any():
            yield part.take(pa.array(np.flatnonzero(mask_of_part)))
