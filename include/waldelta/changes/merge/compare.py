"""Compares rows that a target should have, staged as net changes, with those of its files, in
shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from waldelta.arrow import Bools, Ints, one_array
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_UPDATE,
    ACTION_UPSERT,
)
from waldelta.changes.merge.rows import are_equal, match, match_keys
from waldelta.changes.merge.statements import NetColumns
from waldelta.changes.stage.net_files import (
    MOST_NET_BYTES,
    NetFiles,
    at_places,
    batches,
    chosen_rows,
    packed,
    parts_at_once,
    unpacked,
)
from waldelta.lake import Lake, TargetVersion
from waldelta.lake.data_file import shared_order
from waldelta.lake.layout import TableFile, table_files
from waldelta.lake.storage import is_within
from waldelta.spark import Runner
from waldelta.spark.runner import shares
from waldelta.types import TargetType

_COMPARED = pa.schema(
    [
        ("matched", pa.binary()),
        ("unlike", pa.binary()),
        ("extra", pa.int64()),
        ("is_doubled", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows in data files of one folder; ``entries`` are the files' add actions, as in
    ``TargetVersion.files``.
    """

    lake: Lake
    uri: str
    schema: pa.Schema
    entries: pa.Table

    @classmethod
    def of(cls, table: TargetVersion, net_columns: NetColumns) -> FileRows | None:
        """Returns the rows of a target; None when only Spark can read them, or write the
        columns.
        """
        entries, place = table.files, table.place
        is_own = all(is_within(path) for path in entries["path"].to_pylist())
        has_columns = set(table.schema.names).issuperset(net_columns.sources)
        if not (is_own and has_columns and table.is_writable):
            return None
        return cls(place.lake, place.uri, table.schema, entries)

    @classmethod
    def of_folder(cls, folder: str, lake: Lake) -> FileRows:
        """Returns the rows that are staged in a folder."""
        staged = NetFiles.of(folder, lake)
        columns = {
            "path": pa.array(staged.paths, pa.string()),
            "size_bytes": pa.array([0] * len(staged.paths), pa.int64()),
            "num_records": pa.array(staged.rows, pa.int64()),
        }
        return cls(lake, folder, staged.schema, pa.table(columns))

    @property
    def files(self) -> list[TableFile]:
        """The files that ``entries`` lists."""
        return table_files(self.entries)

    def files_with(self, names: Sequence[str], keys: Sequence[pa.ChunkedArray]) -> list[TableFile]:
        """Returns the files that may have a row with one of these keys.

        ``keys`` has the values of the columns ``names``.
        """
        return [*compress(self.files, may_hold(self.entries, names, keys))]

    def open(self, file: TableFile) -> ds.Dataset:
        """Returns the rows of one file."""
        return file.open(self.lake, self.uri, self.schema)


@dataclass(frozen=True, slots=True)
class Differences:
    """The result of comparing staged rows with a target: the action of each staged row; null where
    the target already has the same row.

    ``is_doubled``: the target has more than one row with the key of a staged upsert. ``extra``
    counts the target's rows whose keys aren't staged, if the comparison looks for them.
    """

    actions: pa.Array[pa.StringScalar]
    extra: int
    is_doubled: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares complete staged rows, all upserts or purges, with the target's rows of their keys.

    ``kinds`` are the types of the written columns, by name. With a folder ``extra``, the deletes of
    all other rows are staged there, in files named after the staged rows' folder.
    """

    net: NetFiles
    held: FileRows
    net_columns: NetColumns
    kinds: Mapping[str, TargetType]
    extra: str | None = None

    def run(self, runner: Runner) -> Differences:
        """Compare both sides in shares of the target's files."""
        files, count = self.held.files, sum(self.net.rows)
        if self.extra is None:
            keys = self.net.read(self.net_columns.bases)
            bases = [keys[base] for base in self.net_columns.bases]
            files = self.held.files_with(self.net_columns.key_names, bases)
        # A task reads at least half as many rows as are staged, because it reads all their keys.
        parts = shares(files, count // 2)
        matched, unlike = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        extra, is_doubled = 0, False
        for row in runner.run(len(parts), _COMPARED, lambda number: self._share(parts, number)):
            matched[unpacked(row["matched"], count)] += 1
            unlike[unpacked(row["unlike"], count)] = True
            extra, is_doubled = extra + row["extra"], is_doubled or row["is_doubled"]
        upserts = self._upserts(count)
        present = np.where(matched > 0, ACTION_UPDATE, ACTION_INSERT)
        differ = unlike | (upserts & (matched == 0))
        return Differences(
            pa.array(np.where(upserts, present, ACTION_DELETE), pa.string(), mask=~differ),
            extra,
            is_doubled or bool((matched[upserts] > 1).any()),
        )

    def _upserts(self, count: int) -> Bools:
        if self.extra is not None:  # A purge is only for a target whose other keys aren't read.
            return np.ones(count, np.bool_)
        return np.asarray(pc.equal(self.net.read(["action"])["action"], ACTION_UPSERT))

    def _share(self, shares_of_files: Sequence[Sequence[TableFile]], number: int) -> pa.Table:
        """Compare the rows of a share of the files, as a task."""
        share, staged = shares_of_files[number], self.net.read(self.net_columns.bases)
        columns = self.net_columns.key_names
        keys = pa.concat_tables([self.held.open(file).to_table(columns=columns) for file in share])
        kinds = [self.kinds[name] for name in columns]
        of_row = match(hashable(keys, kinds), hashable(staged, kinds), self.net_columns)
        extra = 0 if self.extra is None else self._stage_extra(keys, of_row < 0, number)
        hits = np.bincount(of_row[of_row >= 0], minlength=len(staged))
        upserts = self._upserts(len(staged))
        matched, unlike = hits > 0, self._unlike(share, of_row, hits > 0)
        row = [packed(matched)], [packed(unlike)], [extra], [bool((hits[upserts] > 1).any())]
        return pa.table(list(row), schema=_COMPARED)

    def _unlike(self, share: Sequence[TableFile], of_row: Ints, matched: Bools) -> Bools:
        """Returns which of the matched staged rows differ from a row of these files.

        Rows that are too large to compare in memory count as different.
        """
        compared = self.net_columns.compared
        changes = self.net.take(matched, MOST_NET_BYTES, [*compared.values()])
        if changes is None:
            return matched
        names = {name: pc.field(name) for name in compared}
        unlike, wanted, begin = np.zeros(len(matched), np.bool_), np.flatnonzero(matched), 0
        for file in share:
            for part in parts_at_once(batches(self.held.open(file), names)):
                of_part = of_row[begin : begin + len(part)]
                begin += len(part)
                places = np.flatnonzero(of_part >= 0)
                of_part = of_part[places]
                rows = at_places(part, places)
                sent = at_places(changes, np.searchsorted(wanted, of_part))
                unlike[of_part[~are_equal(rows, sent, self.net_columns, self.kinds)]] = True
        return unlike

    def _stage_extra(self, keys: pa.Table, chosen: Bools, number: int) -> int:
        """Stage the deletes of the rows that were chosen; returns how many there are."""
        gone, schema = keys.filter(pa.array(chosen)), self.net.schema
        if not len(gone):
            return 0
        columns = {
            base: gone[name]
            for base, name in zip(self.net_columns.bases, self.net_columns.key_names, strict=True)
        }
        columns["action"] = pa.array([ACTION_DELETE] * len(gone), pa.string())
        arrays = [columns.get(field.name, pa.nulls(len(gone), field.type)) for field in schema]
        (parent, _, name), of = (
            (self.extra or "").rpartition("/"),
            self.net.folder.rpartition("/")[2],
        )
        files = self.net.lake.files(parent)
        files.create_dir(name)
        rows = pa.table(arrays, names=schema.names).cast(schema)
        pq.write_table(rows, f"{name}/extra-{of}-{number}.parquet", filesystem=files)
        return len(gone)


def hashable(keys: pa.Table, kinds: Sequence[TargetType]) -> pa.Table:
    """Returns the columns of a key as values that Arrow can match; it can't match lists."""
    columns = [
        kind.equal_values(one_array(column.cast(kind.arrow)))
        for column, kind in zip(keys.columns, kinds, strict=True)
    ]
    return pa.table(columns, names=keys.column_names)


def without_keys(
    file: ds.Dataset, kinds: Mapping[str, TargetType], keys: Sequence[pa.ChunkedArray]
) -> Iterator[pa.RecordBatch] | None:
    """Returns a file's rows but those with one of these keys; None when it has none of them.

    ``kinds`` are the types of the key's columns by name, and ``keys`` has their values.
    """
    names, types = list(kinds), list(kinds.values())
    rows = hashable(file.to_table(columns=names), types)
    stays = match_keys(rows.columns, hashable(pa.table(list(keys), names=names), types).columns) < 0
    return None if stays.all() else chosen_rows(file, stays)


def may_hold(files: pa.Table, names: Sequence[str], keys: Sequence[pa.ChunkedArray]) -> Bools:
    """Returns which files (``TargetVersion.files``) may have a row with one of these keys.

    ``keys`` has the values of the columns ``names``.
    """
    verdicts = np.ones(len(files), np.bool_)
    for name, column in zip(names, keys, strict=True):
        sides = [f"partition.{name}"] * 2
        if sides[0] not in files.column_names:
            sides = [f"min.{name}", f"max.{name}"]
        least, most = map(files.schema.get_field_index, sides)
        if least >= 0 and most >= 0:
            verdicts &= _span_any(files.column(least), files.column(most), column.drop_null())
    return verdicts


def _span_any(least: pa.ChunkedArray, most: pa.ChunkedArray, values: pa.ChunkedArray) -> Bools:
    """Returns which ranges include one of the values; a range without an end may include any."""
    if (order := shared_order(least.type, values.type)) is None:
        return np.ones(len(least), np.bool_)
    values, least, most = (column.cast(order.kind) for column in (values, least, most))
    most = order.upper_ends(most)
    columns = (values, least, most)
    ranks = np.asarray(
        pc.rank(
            pa.chunked_array([c for column in columns for c in column.chunks], order.kind),
            tiebreaker="dense",
        )
    )
    of_values, of_least, of_most = np.split(ranks, np.cumsum([len(values), len(least)]))
    of_values = np.sort(of_values)
    spans = np.searchsorted(of_values, of_least) < np.searchsorted(of_values, of_most, side="right")
    return np.asarray(spans | np.asarray(least.is_null()) | np.asarray(most.is_null()))
