"""Mend: finds what differs between the rows that a target should have and those it has, and merges
only that, so that mending a correct target changes nothing.

The expected rows are staged as net changes: upserts, and purges of keys that no row should have.
Tasks compare shares of the target's files with the staged rows of the same keys. When all rows of a
large target are expected, both sides are first divided by their keys into buckets, which are
compared one after the other, so that a task's memory doesn't grow with the target.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waldelta.arrow import Bools, Ints, one_array
from waldelta.changes.decode.collapse import ACTION_UPSERT, ColumnNumbering
from waldelta.changes.decode.net_rows import first_of_each, key_codes
from waldelta.changes.merge.compare import Comparison, FileRows
from waldelta.changes.merge.divide import without_partitions
from waldelta.changes.merge.file_merge import NetChanges, merge_files
from waldelta.changes.merge.statements import (
    CommitTag,
    NetColumns,
    as_stored,
    commit_statement,
    net_statement,
)
from waldelta.changes.merge.target_table import read_query
from waldelta.changes.stage.net_files import NetFiles, batches, check_rows, parts_at_once
from waldelta.changes.stage.stage import buckets_of
from waldelta.errors import NeedsSync, WaldeltaError, without_values
from waldelta.lake import (
    DeltaTarget,
    Fence,
    Lake,
    TargetVersion,
    remove_folder,
    row_count,
    write_parquet,
)
from waldelta.lake.layout import TableFile
from waldelta.metadata_columns import RAW
from waldelta.pipeline import Job
from waldelta.snapshot.read_table import TableCopy
from waldelta.spark import Runner
from waldelta.spark.runner import shares
from waldelta.spark_sql import parquet, quote
from waldelta.types import TargetType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# A task has the keys of a bucket's rows in memory, and the rows that match its share of the target.
BUCKET_ROWS, BUCKET_BYTES = 2_500_000, 512 << 20
# The keys of the differences are in the driver's memory. With more, a copy is cheaper.
MOST_DIFFERING = 10_000_000
STAGED_ROWS = pa.schema([("rows", pa.int64())])
# Rows that are read once aren't worth more.
_STAGED: Any = {
    "compression": "lz4",
    "use_dictionary": ["why", "action"],
    "write_statistics": False,
}
_DOUBLED = "its target has rows with the same key"


def bucket_count(target: TargetVersion | None, source_bytes: int) -> int:
    """Returns into how many buckets all rows of a table are divided."""
    target_rows = (row_count(target.files) or 0) if target is not None else 0
    return 1 + max(target_rows // BUCKET_ROWS, source_bytes // BUCKET_BYTES)


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows of a copy's table that a target should have, one for each key, staged in ``folder``.

    ``buckets``: the number of folders into which they are divided by key. ``is_whole``: the target
    should have no rows of other keys. ``durable_folder``: the folder that has the rows instead,
    also after a kill. ``files``: which of the folder's files are valid; None: all.
    """

    lake: Lake
    folder: str
    copy: TableCopy
    key: Sequence[str]
    buckets: int = 1
    is_whole: bool = False
    durable_folder: str | None = None
    files: frozenset[str] | None = None

    @property
    def numbering(self) -> ColumnNumbering:
        """Returns the positions of the key among the copy's columns."""
        names = [name for name, _ in self.copy.columns]
        return ColumnNumbering(len(names), tuple(names.index(column) for column in self.key))

    @property
    def key_types(self) -> list[TargetType]:
        """Returns the types of the key's columns."""
        types = dict(self.copy.columns)
        return [types[name] for name in self.key]

    @property
    def net_columns(self) -> NetColumns:
        """Returns the target's columns that its rows are written to."""
        names = [name for name, _ in self.copy.columns]
        return NetColumns(names, self.numbering, self.copy.lsn is not None)

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the staged rows: the reason, the action, the key, the values."""
        fields = zip(self.copy.schema, self.net_columns.sources.values(), strict=True)
        keys = zip(self.numbering.bases, self.key_types, strict=True)
        return pa.schema(
            [
                ("why", pa.string()),
                ("action", pa.string()),
                *((base, kind.arrow) for base, kind in keys),
                *(field.with_name(name) for field, name in fields),
            ]
        )

    @property
    def no_keys(self) -> pa.Table:
        """Returns reasons, actions and keys of no rows."""
        return self.schema.empty_table().select(["why", "action", *self.numbering.bases])

    def write(
        self, number: int, parts: Iterable[pa.RecordBatch], why: str | None = None
    ) -> pa.Table:
        """Stage a share's rows, as a task; returns their number (STAGED_ROWS)."""
        files = self.stage(f"part-{number + 1}.parquet", parts, why)
        return pa.table([[sum(file["rows"] for file in files)]], schema=STAGED_ROWS)

    def stage(
        self, name: str, parts: Iterable[pa.RecordBatch], why: str | None = None
    ) -> list[dict[str, Any]]:
        """Stage rows as files of this name, one a bucket; returns their paths, sizes and rows."""
        names, numbering, schema = self.net_columns.sources, self.numbering, self.schema

        def staged() -> Iterator[pa.Table]:
            for part in parts_at_once(parts):
                rows = part.rename_columns([*names.values()])
                constants = [
                    pa.repeat(pa.scalar(text, pa.string()), len(part))
                    for text in (why, ACTION_UPSERT)
                ]
                key = [rows[f"c{i}"] for i in numbering.key]
                yield pa.table([*constants, *key, *rows.columns], schema=schema)

        return self.divide_rows("expected", schema, name, staged(), numbering.bases)

    def divide(
        self, held: FileRows, key: Sequence[str], share: Sequence[TableFile], number: int
    ) -> pa.Table:
        """Stage a share of the target's rows in the buckets of their keys, as a task.

        ``key`` are the columns' names in its files.
        """
        parts = (part for file in share for part in parts_at_once(batches(held.open(file))))
        files = self.divide_rows("held", held.schema, f"part-{number + 1}.parquet", parts, key)
        return pa.table([[sum(file["rows"] for file in files)]], schema=STAGED_ROWS)

    def divide_rows(
        self,
        side: str,
        schema: pa.Schema,
        name: str,
        rows: Iterable[pa.Table],
        key: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Write rows of one side into files of this name, one a bucket, as stage() does."""
        files, counts = self.lake.files(self._folder(side)), [0] * self.buckets
        paths = [f"{side}-{bucket}/{name}" for bucket in range(self.buckets)]
        with ExitStack() as sinks:
            writers = []
            for path in paths:
                files.create_dir(path.rpartition("/")[0])
                writer = pq.ParquetWriter(path, schema, filesystem=files, **_STAGED)
                writers.append(sinks.enter_context(writer))
            for table in rows:
                of_row = self._buckets_of([table[column] for column in key])
                for bucket in np.unique(of_row):
                    part = table if self.buckets == 1 else table.filter(pa.array(of_row == bucket))
                    writers[bucket].write_table(part)
                    counts[bucket] += len(part)
        sizes = [info.size for info in files.get_file_info(paths)]
        return [
            {"path": path, "size": size, "rows": count}
            for path, size, count in zip(paths, sizes, counts, strict=True)
        ]

    def _buckets_of(self, key: Sequence[pa.ChunkedArray]) -> Ints:
        if self.buckets == 1:
            return np.zeros(min(1, len(key[0])), np.int64)
        columns = []
        for kind, column in zip(self.key_types, key, strict=True):
            values = kind.equal_values(one_array(column.cast(kind.arrow)))
            is_binary = pa.types.is_binary(values.type)
            columns.append(pa.chunked_array([values if is_binary else values.cast(pa.string())]))
        return buckets_of(columns, self.buckets)

    def bucket(self, name: str, number: int) -> str:
        """Returns the folder of a bucket: of the ``expected`` rows, or of those ``held``."""
        return f"{self._folder(name)}/{name}-{number}"

    def _folder(self, side: str) -> str:
        durable = self.durable_folder
        return durable if durable is not None and side == "expected" else self.folder

    def net_files(self, number: int) -> NetFiles:
        """Returns the expected rows of a bucket."""
        folder, names = self.bucket("expected", number), None
        if self.files is not None:
            places = (path.split("/") for path in self.files)
            names = {name for bucket, name in places if bucket == f"expected-{number}"}
        return NetFiles.of(folder, self.lake, names)


@dataclass(frozen=True, slots=True)
class NetRows:
    """Staged net changes: their files, and the reason, action and key (``b<k>``) of each."""

    files: NetFiles
    keys: pa.Table

    @classmethod
    def of(cls, folder: str, lake: Lake, bases: Sequence[str]) -> NetRows:
        """Returns the net changes that are staged in a folder."""
        files = NetFiles.of(folder, lake)
        return cls(files, files.read(["why", "action", *bases]))

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of net changes by reason and by action."""
        totals: Counter[str] = Counter()
        for name in ("why", "action"):
            for of in pc.value_counts(self.keys[name].drop_null()).to_pylist():
                totals[of["values"]] += of["counts"]
        return dict(totals)

    @property
    def bases(self) -> list[pa.ChunkedArray]:
        """The key columns (``b<k>``)."""
        return [self.keys[name] for name in self.keys.column_names if name.startswith("b")]

    def filter(self, mask: Bools, folder: str) -> NetRows:
        """Returns the net changes where ``mask`` is true; some of them are written to ``folder``,
        all stay where they are.
        """
        if mask.all():
            return self
        if not mask.any():
            return NetRows(NetFiles(folder, self.files.lake, [], []), self.keys.slice(0, 0))
        write_rows(self.files, mask, folder)
        bases = [name for name in self.keys.column_names if name.startswith("b")]
        return NetRows.of(folder, self.files.lake, bases)


def write_rows(
    net: NetFiles, mask: Bools, folder: str, further: pa.Table | None = None, first: int = 0
) -> int:
    """Write the chosen net changes into another folder, with further columns if given.

    The first file has the number ``first``; returns the number after the last one.
    """
    places, number, position = np.flatnonzero(mask), first, 0
    for of_file, mask_of_file in net.by_file(mask):
        for part in net.parts_of(of_file, mask_of_file):
            columns = dict(zip(part.column_names, part.columns, strict=True))
            if further is not None:
                columns_of_part = further.take(pa.array(places[position : position + len(part)]))
                columns |= dict(
                    zip(columns_of_part.column_names, columns_of_part.columns, strict=True)
                )
            write_parquet(folder, pa.table(columns), number)
            number, position = number + 1, position + len(part)
    return number


def differences(
    runner: Runner,
    expected: ExpectedRows,
    count: int,
    target: DeltaTarget,
    live: str | None = None,
) -> NetRows:
    """Stage the net changes from the target's rows to the expected ones: insert, update, delete.

    ``count`` rows were staged. ``live`` is the query of the rows to compare of a target that keeps
    more (TargetMode.live_query). Raises NeedsSync for a target with a key twice, or with too many
    differences, and StagedLost.
    """
    names = expected.net_columns.names
    try:
        table = target.open()
        rows = FileRows.of(table, expected.net_columns)
        if live is not None and rows is not None:
            rows = _read(expected, table, live)
        if rows is not None:
            return _differing(runner, expected, count, rows, names)
    except WaldeltaError:
        raise
    except Exception as err:
        log.warning("%s is read by Spark: %s", target.uri, without_values(err))
    frame = target.frame(runner.spark())
    if live is not None:
        frame = runner.spark().sql(live, rows=frame)
    exported = _export(runner, expected, frame)
    return _differing(runner, expected, count, exported, [f"c{i}" for i in range(len(names))])


def _read(expected: ExpectedRows, table: TargetVersion, live: str) -> FileRows | None:
    """Write the rows of a query on a small target as files; None for a larger one."""
    if not table.is_small:
        return None
    folder = f"{expected.folder}/exported"
    write_parquet(folder, read_query(table, live).read_all())
    return FileRows.of_folder(folder, expected.lake)


def _differing(
    runner: Runner, expected: ExpectedRows, count: int, target_rows: FileRows, names: Sequence[str]
) -> NetRows:
    """Compare with the target's rows, whose columns have these ``names`` in their files."""
    folder, bases = f"{expected.folder}/differing", expected.numbering.bases
    net_columns = replace(expected.net_columns, names=names)
    kinds = dict(zip(names, (kind for _, kind in expected.copy.columns), strict=True))
    remove_folder(folder)  # An attempt that failed may have written the folder.
    first, read, differing = 1, 0, 0
    for number, of_bucket in enumerate(
        _divide_into_buckets(runner, expected, target_rows, net_columns.key_names)
    ):
        net = expected.net_files(number)
        extra = folder if expected.is_whole else None
        comparison = Comparison(net, of_bucket, net_columns, kinds, extra).run(runner)
        if comparison.is_doubled:
            raise NeedsSync(_DOUBLED)
        mask = np.asarray(comparison.actions.is_valid())
        if not expected.is_whole:  # A key may have two printed forms, and was then read twice.
            once, keys = np.zeros(len(mask), np.bool_), net.read(bases).columns
            once[first_of_each(*key_codes(expected.key_types, keys))] = True
            mask &= once
        first = write_rows(net, mask, folder, pa.table({"action": comparison.actions}), first)
        read, differing = read + len(mask), differing + int(mask.sum()) + comparison.extra
        if differing > MOST_DIFFERING:
            raise NeedsSync(f"at least {differing:,} of its rows differ")
    check_rows(expected.folder, read, count)
    if not differing:
        return NetRows(NetFiles(folder, expected.lake, [], []), expected.no_keys)
    rows = NetRows.of(folder, expected.lake, bases)
    if len(first_of_each(*key_codes(expected.key_types, rows.bases))) < len(rows.keys):
        raise NeedsSync(_DOUBLED)
    return rows


def _divide_into_buckets(
    runner: Runner, expected: ExpectedRows, target_rows: FileRows, key: Sequence[str]
) -> list[FileRows]:
    """Returns the target's rows by bucket."""
    parts = shares(target_rows.files)
    if expected.buckets == 1 or not parts:
        return [target_rows] * expected.buckets

    runner.run(len(parts), STAGED_ROWS, lambda n: expected.divide(target_rows, key, parts[n], n))
    folders = (expected.bucket("held", number) for number in range(expected.buckets))
    return [FileRows.of_folder(folder, expected.lake) for folder in folders]


def _export(runner: Runner, expected: ExpectedRows, frame: DataFrame) -> FileRows:
    """Have Spark write the rows to compare as files that Arrow reads, with columns ``c<i>``."""
    folder, numbering = f"{expected.folder}/exported", expected.numbering
    values = [
        kind.exact_sql(quote(name)) if kind.stored_sql(name) != name else quote(name)
        for name, kind in expected.copy.columns
    ]
    raw = [RAW] if expected.net_columns.metadata else []
    rows = frame.selectExpr(*(f"{value} as c{i}" for i, value in enumerate(values)), *raw)
    if not expected.is_whole:
        names = [f"c{i}" for i in numbering.key]
        keys = runner.spark().read.parquet(expected.bucket("expected", 0))
        keys = keys.select(*numbering.bases).toDF(*names)
        rows = rows.join(keys, names, "left_semi")
    rows.write.mode("overwrite").parquet(folder)
    return FileRows.of_folder(folder, expected.lake)


def merge_differences(  # noqa: PLR0913 - a target, what is written to it, and how it is committed
    runner: Runner,
    job: Job,
    name: str,
    net_columns: NetColumns,
    copy: TableCopy,
    folder: str,
    *,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    """Commit the net changes of a copy's rows, staged in ``folder``, in one commit."""
    merge = partial(merge_files, runner, job, name, NetChanges(folder, net_columns), tag, fence)
    earlier_tag = without_partitions(runner, job.lake.target(name).open, name, merge)
    if earlier_tag is not None:
        return earlier_tag
    # A run that committed concurrently may have copied the target again.
    fence.verify()
    types = [kind for _, kind in copy.columns]
    target, source = job.lake.target(name), as_stored(parquet(folder), types)
    return commit_statement(runner, tag, net_statement(target.relation, source, net_columns))
