"""One table of the ledger on disk: appended in a total order, read through a filter, kept in few
files.

Every append is a compare-and-swap on the table's Delta version, so a writer has always seen the row
before its own. Therefore ``at`` always grows within a table, whatever the machines' clocks say.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Generic, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import tenacity
from deltalake import WriterProperties
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem

from waldelta.errors import LateWriter
from waldelta.failpoints import fault_point
from waldelta.lake.data_file import replace_by_rows
from waldelta.lake.delta_log import Tag
from waldelta.lake.delta_target import DeltaTarget, TargetVersion
from waldelta.lake.fence import UNFENCED, Fence
from waldelta.lake.lake import Lake
from waldelta.lake.layout import TableFile
from waldelta.lake.ledger.records import R, rows_of, schema_of, values_of
from waldelta.lake.object_store import store_folder
from waldelta.lake.storage import is_local
from waldelta.lake.write_errors import target_not_writable

log = logging.getLogger(__name__)

_ATTEMPTS = 20
# For kinds of which a check writes up to hundreds of short rows, and readers read many of them at
# once.
SHORT_ROWS_PER_GROUP = 20_000
# Larger files aren't written again by each compaction, whatever the age of the ledger.
_SMALL_BYTES = 256 << 10
# Large files are also written as one beyond this number of files.
_MOST_FILES = 64
# In an object store, files are written as one beyond this number: a reader waits for a request for
# each file.
_MOST_IN_STORE = 4
# The transaction id of compactions.
_COMPACTION = "waldelta-compaction"
# A reader that opened the table before a rewrite still finds its files.
_KEEP_FILES_HOURS = 24

_again_when_changed = tenacity.retry(
    retry=tenacity.retry_if_exception_type(CommitFailedError),
    wait=tenacity.wait_random(0.01, 0.2),
    stop=tenacity.stop_after_attempt(_ATTEMPTS),
    reraise=True,
)
# Repeats a caller that reads a table's rows and appends rows that depend on them (see Newest), if
# another run appended in between.
again_when_late = tenacity.retry(
    retry=tenacity.retry_if_exception_type(LateWriter),
    wait=tenacity.wait_random(0.01, 0.2),
    stop=tenacity.stop_after_attempt(_ATTEMPTS),
    reraise=True,
)
# Files with more rows come from compaction, and are few. The rows of others are kept in memory:
# Delta's files never change, and a run reads the same ones repeatedly.
_SMALL_ROWS = 2_000
_MOST_CACHED = 512
# The name under which all rows of a small table are kept for its version.
_FEW = "rows"
# The same as objects.
_OBJECTS = "objects"
# An object store answers a request for a part of a file no sooner than one for all of it.
_ONE_REQUEST_BYTES = 32 << 10
# File statistics have timestamps in milliseconds, rounded down.
STATISTIC = timedelta(milliseconds=1)

# The URI of a table's folder, and the options of its object store.
_Place = tuple[str, frozenset[tuple[str, str]]]


def of_run(run_id: str, verb: str) -> pc.Expression:
    """Select the rows of a run, in the table of runs."""
    return (pc.field("run_id") == run_id) & (pc.field("verb") == verb)


def of_tables(names: Iterable[str]) -> pc.Expression:
    """Select the rows about these tables, by ``table_name``."""
    return pc.field("table_name").isin(pa.array(sorted(names), pa.string()))


def in_order(rows: Sequence[R]) -> list[R]:
    """Returns rows of one moment, each a microsecond later than the one before.

    Rows are read back in the order of ``at``.
    """
    return [replace(row, at=row.at + timedelta(microseconds=n)) for n, row in enumerate(rows)]


def last_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Returns the last row of each group, in the rows' order."""
    numbered = rows.select(list(keys)).append_column("n", pa.array(np.arange(rows.num_rows)))
    return rows.take(
        numbered.group_by(list(keys), use_threads=False)
        .aggregate([("n", "max")])["n_max"]
        .combine_chunks()
        .sort()
    )


@dataclass(frozen=True, slots=True)
class Newest:
    """The row that must still be the newest of those that a filter selects (None: all rows).

    ``at`` identifies the row; None: there must be none. ``cache``: see read_sorted().
    """

    at: datetime | None
    where: pc.Expression | None = None
    cache: bool = True


class LedgerTable(Generic[R]):
    """The rows of one kind: a small Delta table, written and read without a JVM."""

    def __init__(self, kind: type[R], lake: Lake) -> None:
        self.schema = schema_of(kind)  # type: ignore[arg-type]
        self.place = lake.bookkeeping(kind.table)
        self.uri, self._kind = self.place.uri, kind
        self._groups = WriterProperties(max_row_group_size=kind.rows_per_group)

    def append(self, row: R, after: Newest | None = None) -> R:
        """Add a row after all others, creating the table with the first; returns it as it was
        written.

        The row is durable when this returns. A row whose ``at`` isn't later than the newest row's
        gets a later one. Raises LateWriter, and adds nothing, when the row that it must follow
        isn't the newest any more. Raises TargetNotWritable, with the cause, when it can't be
        written.
        """
        return self.extend([row], after)[0]

    @_again_when_changed
    def extend(
        self,
        rows: Sequence[R],
        after: Newest | None = None,
        fence: Fence = UNFENCED,
    ) -> list[R]:
        """Add rows, in the order of their ``at``, after all others in one commit, as append() does.

        ``fence`` is verified after the table was read.
        """
        with self._named_errors():
            # The commit is a compare-and-swap on the version, whichever it is: where there is a
            # later one, it fails, and that one is read.
            table = self.place.find(DeltaTarget.open_known)
            fence.verify()
            if after is not None and self._last_at(table, after) != after.at:
                raise LateWriter(
                    f"{self.uri}: another run replaced the rows that this run was about to replace:"
                    " run again"
                )
            if table is None:
                self._create(self._stored(rows))
                return list(rows)
            rows = self._behind(table, rows)
            table.append(self._stored(rows), self._schema_mode(table))
            self._compact_when_many(table)
            return rows

    def read(
        self,
        where: pc.Expression | None = None,
        since: datetime | None = None,
        columns: Sequence[str] | None = None,
        *,
        cache: bool = True,
    ) -> list[R]:
        """Returns the rows from ``since`` on that a filter selects, oldest first.

        Fields that aren't among ``columns`` (None: all) have their defaults. ``cache``: see
        read_sorted().
        """
        rows = self.scan(columns or self.schema.names, since, where, cache=cache)
        return rows_of(self._kind, rows)

    def scan(
        self,
        columns: Sequence[str],
        since: datetime | None = None,
        where: pc.Expression | None = None,
        *,
        cache: bool = True,
        version: TargetVersion | None = None,
    ) -> pa.Table:
        """Returns some columns of the rows from ``since`` on that a filter selects, oldest first;
        those of a ``version``, by default the newest.

        This reads little of a long history. It returns no rows when there is no table. A column
        that the table doesn't have yet is null. ``cache``: see read_sorted().
        """
        table = self.place.find() if version is None else version
        fields = [self.schema.field(name) for name in columns]
        if table is None:
            return pa.schema(fields).empty_table()
        rows = read_sorted(table, columns, since, where, cache=cache)
        for field in fields:
            if field.name not in rows.column_names:
                rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
        return rows.select(list(columns))

    def read_all(self) -> list[R]:
        """Returns all rows, oldest first; few rows come from memory, unless rows were added."""

        def read(table: TargetVersion) -> list[R] | None:
            rows = table.read_once(_FEW, lambda: _read_few(table))
            return None if rows is None else rows_of(self._kind, rows)

        _, rows = self.place.read_once(_OBJECTS, read) or (-1, [])
        return self.read() if rows is None else list(rows)

    def rows_in_memory(self) -> Sequence[R] | None:
        """Returns what read_all() keeps in memory; None where it keeps nothing, or rows were
        added.
        """
        _, rows = self.place.lake.cache.unchanged(self.place.lake, self.uri, _OBJECTS) or (-1, None)
        return rows

    def version(self) -> int:
        """Returns the table's Delta version; -1 when there is no table."""
        table = self.place.find()
        return -1 if table is None else table.version

    def newest(self) -> R | None:
        """Returns the row that was appended last."""
        table = self.place.find()
        at = self._newest_at(table) if table is not None else None
        if table is None or at is None:
            return None
        return rows_of(self._kind, read_sorted(table, since=at - STATISTIC))[-1]

    @_again_when_changed
    def replace(
        self,
        rows: Sequence[R],
        predicate: str,
        fence: Fence = UNFENCED,
    ) -> None:
        """Replace the rows that a predicate (in Delta's SQL) selects by these, after all others, in
        one commit.

        It is durable when this returns, and commits even when there is nothing to write; ``fence``
        as in extend().
        """
        with self._named_errors():
            table = self.place.find()
            fence.verify()
            if table is None:
                self._create(self._stored(rows))
                return
            table.overwrite(
                self._stored(self._behind(table, rows)),
                predicate=predicate,
                schema_mode=self._schema_mode(table),
            )

    @_again_when_changed
    def mark(self, flag: str, select: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> int:
        """Set a flag in the rows that ``select`` selects by their ``at``, in one commit.

        Returns how many didn't have the flag yet.
        """
        table = self.place.find()
        if table is None:
            return 0
        rows = read_sorted(table)
        flags = (
            rows[flag]
            if flag in rows.column_names
            else pa.chunked_array([pa.nulls(len(rows), pa.bool_())])
        )
        fresh = pc.and_not(select(rows["at"]), flags.fill_null(False))
        if not (marked := pc.sum(fresh).as_py()):
            return 0
        columns = {name: rows[name] for name in rows.column_names} | {
            flag: pc.or_(fresh, flags.fill_null(False))
        }
        with self._named_errors():
            table.overwrite(pa.table(columns), schema_mode="merge")
        return int(marked)

    @_again_when_changed
    def prune(self, keep: Callable[[Sequence[R]], Sequence[bool]]) -> int:
        """Drop the rows for which ``keep`` returns False, and compact into one file; returns how
        many.

        When another run appends rows in the meantime, everything is done again, so that these are
        judged, too.
        """
        table = self.place.find()
        if table is None:
            return 0
        rows = read_sorted(table)
        rows_kept = rows.filter(pa.array(keep(rows_of(self._kind, rows)), pa.bool_()))
        dropped = int(rows.num_rows - rows_kept.num_rows)
        if dropped or len(table.files) > 1:
            table.overwrite(rows_kept, writer_properties=self._groups)
            fault_point("maintain.pruned")
        table.vacuum(_KEEP_FILES_HOURS)
        table.drop_old_entries()
        return dropped

    def _create(self, data: pa.Table) -> None:
        try:
            self.place.create_with(data)
        except DeltaError as err:
            if self.place.find() is None:
                raise
            raise CommitFailedError("another run created the table") from err

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except CommitFailedError:
            raise
        except (DeltaError, OSError) as err:
            raise target_not_writable(self.uri, err) from None

    def _compact_when_many(self, table: TargetVersion) -> None:
        """Write many small files, or very many files, as one.

        The rows of the append are durable already, so a failure is only logged; a later append
        compacts.
        """
        files = table.table_files
        small = [file for file in files if file.bytes < _SMALL_BYTES]
        to_compact = files if len(files) > _MOST_FILES else small
        if len(to_compact) <= (self._kind.most_files if is_local(self.uri) else _MOST_IN_STORE):
            return
        try:
            self._compact(table, to_compact)
        except (DeltaError, OSError, pa.ArrowException) as err:
            log.info("%s not compacted: %s", self.uri, err)

    def _compact(self, table: TargetVersion, files: Sequence[TableFile]) -> None:
        """Write files as one; raises Overtaken when another run commits at the same
        time.

        delta-rs's OPTIMIZE commits although another one has replaced the same files since, and
        rows are there twice then, whatever ``max_commit_retries`` is.
        """
        tag = Tag(_COMPACTION, table.version, uuid.uuid4().hex)
        replace_by_rows(table, files, read_files(table, files), tag, self._kind.rows_per_group)

    def _schema_mode(self, table: TargetVersion) -> Literal["merge"] | None:
        """Returns the mode that adds columns, and fields of structs, which an earlier version's
        table lacks.
        """
        schema: pa.Schema = table.schema
        is_complete = all(
            f.name in schema.names and schema.field(f.name).type == f.type for f in self.schema
        )
        return None if is_complete else "merge"

    def _last_at(self, table: TargetVersion | None, after: Newest) -> datetime | None:
        if table is None:
            return None
        # Rows from before the expected one needn't be read: none of them can be the newest.
        since = None if after.at is None else after.at - STATISTIC
        rows = read_sorted(table, ["at"], since, after.where, cache=after.cache)["at"].to_pylist()
        return rows[-1] if rows else None

    def _behind(self, table: TargetVersion, rows: Sequence[R]) -> list[R]:
        """Returns the rows, moved to times after the newest row where the clock is behind."""
        newest = self._newest_at(table)
        early = newest + STATISTIC - rows[0].at if rows and newest is not None else timedelta(0)
        return (
            [replace(row, at=row.at + early) for row in rows]
            if early > timedelta(0)
            else list(rows)
        )

    def _stored(self, rows: Sequence[R]) -> pa.Table:
        return pa.Table.from_pylist([values_of(row) for row in rows], schema=self.schema)

    def _newest_at(self, table: TargetVersion) -> datetime | None:
        actions = table.files
        if "max.at" not in actions.column_names:
            return None
        newest: datetime | None = pc.max(actions["max.at"]).as_py()
        return newest


def read_sorted(
    table: TargetVersion,
    columns: Sequence[str] | None = None,
    since: datetime | None = None,
    where: pc.Expression | None = None,
    *,
    cache: bool = True,
) -> pa.Table:
    """Returns columns (None: all) of the rows from ``since`` on that a filter selects, oldest
    first.

    Columns that a file lacks, because it is older than the column, are null; the same is true for
    tables. Files whose rows are all older aren't opened. Of large files, only the needed row groups
    and columns are read. Others are read whole and cached; without ``cache``, only the smallest.
    """
    if cache and (rows := table.read_once(_FEW, lambda: _read_few(table))) is not None:
        if since is not None:
            rows = rows.filter(pc.field("at") >= since)
        selection = rows if columns is None else rows.select(_names(rows.schema, columns))
        return selection if where is None else rows.filter(where).select(selection.column_names)
    schema, actions = table.schema, table.read_once("files", lambda: table.files)
    if where is not None:
        bounds = table.read_once("bounds", lambda: _bounds(actions, schema))
        actions = _may_have(actions, bounds, where)
    if since is not None:
        recent = pc.field("at") >= since
        where = recent if where is None else recent & where
        if "max.at" in actions.column_names:  # The statistic is in milliseconds, rounded down.
            ends = pc.field("max.at")
            actions = actions.filter(
                ends.is_null() | (ends >= pa.scalar(since - STATISTIC, pa.timestamp("us", "UTC")))
            )
    names = schema.names if columns is None else _names(schema, columns)
    place, parts = _place_of(table), [schema.empty_table().select(names)]
    if "min.at" in actions.column_names:
        actions = actions.sort_by("min.at")
    for file in actions.select(["path", "size_bytes", "num_records"]).to_pylist():
        path, size = file["path"], file["size_bytes"]
        if file["num_records"] > _SMALL_ROWS or (size > _ONE_REQUEST_BYTES and not cache):
            large = _fragment(place, path, size, schema)
            parts.append(large.to_table(schema=schema, columns=names, filter=where))
        else:
            rows = _read_whole(place, path, size, schema)
            parts.append((rows if where is None else rows.filter(where)).select(names))
    return _sort_by_time(pa.concat_tables(parts))


def _sort_by_time(rows: pa.Table) -> pa.Table:
    """Returns rows by ``at``; they are in that order already unless files overlap in time."""
    times = pc.cast(rows["at"], pa.int64()).to_numpy()
    return rows if bool((times[1:] >= times[:-1]).all()) else rows.sort_by("at")


def _names(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Returns those of the columns, and ``at``, that a table has."""
    return [name for name in dict.fromkeys((*columns, "at")) if name in schema.names]


def _read_few(table: TargetVersion) -> pa.Table | None:
    """Returns all rows, oldest first; None where they are many."""
    many = (pc.sum(table.files["num_records"]).as_py() or 0) > _SMALL_ROWS
    return None if many else read_files(table, table.table_files)


def _may_have(actions: pa.Table, bounds: ds.Dataset, where: pc.Expression) -> pa.Table:
    """Returns the files that may have rows of a filter, by the bounds of their texts.

    Arrow opens no file to choose among them.
    """
    matching = bounds.get_fragments(where)
    return actions.take(pa.array([int(fragment.path) for fragment in matching], pa.int64()))


def _bounds(actions: pa.Table, schema: pa.Schema) -> ds.Dataset:
    """Returns a table's files, by their numbers, with the bounds of their texts."""
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
    return ds.FileSystemDataset(fragments, schema, layout, files)


def _within(texts: Sequence[str], bounds: Mapping[str, str | None]) -> pc.Expression:
    """Returns a condition that all rows of a file meet, by the file's bounds."""
    sure = pc.scalar(True)
    for name in texts:
        column, least, most = pc.field(name), bounds[f"min.{name}"], bounds[f"max.{name}"]
        if least is not None and most is not None:
            sure &= ((column >= least) | column.is_null()) & ((column <= most) | column.is_null())
    return sure


def read_files(table: TargetVersion, files: Sequence[TableFile]) -> pa.Table:
    """Returns all rows of some files, oldest first, by the table's current schema."""
    place, schema = _place_of(table), table.schema
    parts = [_read_whole(place, file.path, file.bytes, schema) for file in files]
    return _sort_by_time(pa.concat_tables([schema.empty_table(), *parts]))


def _place_of(table: TargetVersion) -> _Place:
    return table.place.uri, frozenset((table.place.lake.storage_options or {}).items())


@lru_cache(maxsize=_MOST_CACHED)
def _read_whole(place: _Place, path: str, size: int, schema: pa.Schema) -> pa.Table:
    """Returns all rows of a file with a table's current schema.

    Columns, and fields of structs, are added over time.
    """
    # The file is opened by one request to a store.
    with _files(place, path, size).open_input_file(path) as file:
        whole = ds.ParquetFileFormat().make_fragment(pa.BufferReader(file.read()))
    return whole.to_table(schema=schema)


@lru_cache(maxsize=_MOST_CACHED)
def _fragment(place: _Place, path: str, size: int, schema: pa.Schema) -> ds.ParquetFileFragment:
    """Returns a large file, whose footer is read once."""
    (fragment,) = ds.dataset(
        [path], schema=schema, filesystem=_files(place, path, size), format="parquet"
    ).get_fragments()
    fragment.ensure_complete_metadata()
    return fragment


def _files(place: _Place, path: str, size: int) -> FileSystem:
    # Errors of this file system name the whole path, which those of a folder's own don't.
    uri, options = place[0], dict(place[1])
    return store_folder(uri, options, unchanging=True) or PyFileSystem(
        DeltaStorageHandler(uri, options, {path: size})
    )
