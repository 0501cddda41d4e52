"""Caches the rows of a ledger table's files in memory.

Delta's files never change, and a run reads the same ones repeatedly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem

from waldelta.lake.delta_target import DeltaTarget, TargetVersion
from waldelta.lake.object_store import store_folder

# Larger files come from compaction, and are few.
_SMALL_ROWS = 2_000
_MOST_FILES = 512
# An object store answers a request for a part of a file no sooner than one for all of it.
_SMALL_BYTES = 32 << 10
# File statistics have timestamps in milliseconds, rounded down.
STATISTIC = timedelta(milliseconds=1)

_cached: OrderedDict[tuple[str, str, str], pa.Table] = OrderedDict()
_lock = Lock()


def read_sorted(
    table: TargetVersion,
    columns: Sequence[str] | None = None,
    since: datetime | None = None,
    chosen: pc.Expression | None = None,
    *,
    kept: bool = True,
) -> pa.Table:
    """Return columns (None: all) of the rows from ``since`` on that a filter selects, oldest first.

    Columns that a file lacks, because it is older than the column, are null; the same is true for
    tables. Files whose rows are all older aren't opened. Of large files, only the needed row groups
    and columns are read. Others are read whole and cached; without ``kept``, only the smallest.
    """
    schema, actions = table.schema, table.files
    sizes = dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))
    if chosen is not None:
        actions = _may_have(actions, schema, chosen)
    if since is not None:
        recent = pc.field("at") >= since
        chosen = recent if chosen is None else recent & chosen
        if "max.at" in actions.column_names:  # The statistic is in milliseconds, rounded down.
            ends = pc.field("max.at")
            actions = actions.filter(
                ends.is_null() | (ends >= pa.scalar(since - STATISTIC, pa.timestamp("us", "UTC")))
            )
    reader = _Reader(table.place, schema, sizes)
    wanted = schema.names if columns is None else (*columns, "at")
    held = [name for name in dict.fromkeys(wanted) if name in schema.names]
    files = actions.select(["path", "num_records"]).to_pylist()
    parts = [
        reader.read(file["path"], file["num_records"], held, chosen, kept=kept) for file in files
    ]
    empty = pa.schema([schema.field(name) for name in held]).empty_table()
    return pa.concat_tables(parts or [empty]).sort_by("at")


def _may_have(actions: pa.Table, schema: pa.Schema, chosen: pc.Expression) -> pa.Table:
    """Return the files that may have rows of a filter, by the bounds of their texts."""
    texts = [
        field.name
        for field in schema
        if pa.types.is_string(field.type) and f"min.{field.name}" in actions.column_names
    ]
    layout, files = ds.ParquetFileFormat(), LocalFileSystem()
    bounds = actions.select([f"{end}.{name}" for name in texts for end in ("min", "max")])
    fragments = [
        layout.make_fragment(str(number), files, _within(texts, row))
        for number, row in enumerate(bounds.to_pylist())
    ]
    # Arrow opens no file to choose among them.
    found = ds.FileSystemDataset(fragments, schema, layout, files).get_fragments(chosen)
    return actions.take(pa.array([int(fragment.path) for fragment in found], pa.int64()))


def _within(texts: Sequence[str], bounds: Mapping[str, str | None]) -> pc.Expression:
    """Return what is true of all rows of a file with these bounds."""
    sure = pc.scalar(True)
    for name in texts:
        column, least, most = pc.field(name), bounds[f"min.{name}"], bounds[f"max.{name}"]
        if least is not None and most is not None:
            sure &= ((column >= least) | column.is_null()) & ((column <= most) | column.is_null())
    return sure


def read_files(table: TargetVersion, files: Sequence[tuple[str, int]]) -> pa.Table:
    """Return all rows of some files (path, bytes), oldest first, by the table's current schema."""
    reader = _Reader(table.place, table.schema, dict(files))
    return pa.concat_tables([reader.read_whole(path) for path, _ in files]).sort_by("at")


class _Reader:
    def __init__(self, place: DeltaTarget, schema: pa.Schema, sizes: dict[str, int]) -> None:
        self.place, self.schema, self._sizes = place, schema, sizes
        # Columns, and fields of structs, are added over time; every file is read with the table's
        # current schema.
        self._columns = str(schema)

    def read(
        self,
        path: str,
        row_count: int,
        columns: list[str],
        chosen: pc.Expression | None,
        *,
        kept: bool,
    ) -> pa.Table:
        """Return some columns of the rows of a file that the filter selects."""
        is_large = self._sizes[path] > _SMALL_BYTES
        if row_count > _SMALL_ROWS or (is_large and not kept):
            return self._open(path).to_table(columns, filter=chosen)
        rows = self.read_whole(path)
        return (rows if chosen is None else rows.filter(chosen)).select(columns)

    def read_whole(self, path: str) -> pa.Table:
        """Return all rows of a file, from the cache if they are in it."""
        key = (self.place.uri, path, self._columns)
        with _lock:
            if (rows := _cached.get(key)) is not None:
                _cached.move_to_end(key)
                return rows
        with self._files.open_input_file(path) as file:  # By one request to an object store.
            whole = ds.ParquetFileFormat().make_fragment(pa.BufferReader(file.read()))
        rows = whole.to_table(schema=self.schema)
        with _lock:
            _cached[key] = rows
            if len(_cached) > _MOST_FILES:
                _cached.popitem(last=False)
        return rows

    @cached_property
    def _files(self) -> FileSystem:
        # Errors of this file system name the whole path, which those of a folder's own don't.
        uri, options = self.place.uri, self.place.lake.storage_options
        return store_folder(uri, options or {}, unchanging=True) or PyFileSystem(
            DeltaStorageHandler(uri, options, self._sizes)
        )

    def _open(self, path: str) -> ds.Dataset:
        return ds.dataset([path], schema=self.schema, filesystem=self._files, format="parquet")
