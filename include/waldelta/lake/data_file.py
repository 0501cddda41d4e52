"""Writes a data file of a Delta table part by part with Arrow, and the statistics for its
commit.

Bounds of a column in Delta's statistics of a file: which types have some, how they are written, and
how others' are read.

Delta's protocol, "Per-file Statistics": readers skip a file whose bounds exclude the values that
they search. A column without bounds never causes a skip. So columns that a reader might compare
differently have no bounds. These are floats (NaN), and decimals other than whole numbers with at
most as many digits as a double stores exactly (delta-rs reads them as doubles). Long texts are cut
as Spark cuts them. Other writers' bounds are read, too, so more types are read than written.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema
from deltalake.exceptions import DeltaError
from pyarrow.fs import FileSelector, FileSystem

from waldelta.lake.delta_log import Overtaken, Tag
from waldelta.lake.delta_target import DeltaTarget, TargetVersion
from waldelta.lake.layout import (
    CHANGE_FOLDER,
    Layout,
    NewFile,
    Partition,
    Redefinition,
    TableFile,
    bounded_columns,
    folder_of,
    redefined_fields,
    statistics_within,
)
from waldelta.pgoutput.commit_time import UNIX_EPOCH

_LONGEST_TEXT = 32
# A double stores this many digits exactly.
_DOUBLE_DIGITS = 15
_LAST_ASCII, _LAST = "\x7f", "\U0010ffff"
# Characters beyond 16 bits: delta-rs (arrow-json) reads an escaped one, which older files of ours
# have, as a lesser character.
_MISREAD = "[\U00010000-\U0010ffff]"
# Years that every reader's calendar has: 0001 to 9999.
_LEAST_DAY, _MOST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000
_WITHIN_A_MILLISECOND = pa.scalar(999, pa.duration("us"))


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an Arrow type's values, in which bounds are written and read; of integers here.

    Bounds in memory, ``least`` and ``most``, are integers or texts.
    """

    kind: Any

    def comparable(self, column: Any) -> Any:
        """Returns the column as integers or texts; None where it gets no bounds."""
        return column

    def has_bounds(self, _least: Any, _most: Any, /) -> bool:
        """Returns whether all readers understand these bounds."""
        return True

    def least_text(self, least: Any) -> Any:
        """Returns the least value as the file's statistics have it."""
        return least

    def most_text(self, most: Any) -> Any:
        """Returns the greatest value as the file's statistics have it, or one beyond it."""
        return most

    def shared(self, _other: Order, /) -> Order | None:
        """Returns the order that bounds and values of this and of the other type have in common."""
        return Order(pa.int64())

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        """Returns the greatest values that files with these upper bounds may have; null for any."""
        return most


class _Texts(Order):
    """Texts, ordered by code points; the bounds of long texts are cut.

    A cut text still is a bound: the greatest gets a last character that sorts after all others.
    """

    def has_bounds(self, _least: Any, most: Any, /) -> bool:
        return bool(most[_LONGEST_TEXT : _LONGEST_TEXT + 1] != _LAST)

    def least_text(self, least: Any) -> Any:
        return least[:_LONGEST_TEXT]

    def most_text(self, most: Any) -> Any:
        cut = most[_LONGEST_TEXT : _LONGEST_TEXT + 1]
        return most[:_LONGEST_TEXT] + (cut and (_LAST_ASCII if cut < _LAST_ASCII else _LAST))

    def shared(self, _other: Order, /) -> Order | None:
        return _Texts(pa.large_string())

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.if_else(pc.match_substring_regex(most, _MISREAD), None, most)


class _Decimals(Order):
    """Of few digits, since delta-rs converts bounds to doubles."""

    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int64()) if self.kind.scale == 0 else None

    def shared(self, other: Order, /) -> Order | None:
        return _Decimals(pa.decimal128(2 * _DOUBLE_DIGITS, max(self.kind.scale, other.kind.scale)))


class _Days(Order):
    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int32())

    def has_bounds(self, least: Any, most: Any, /) -> bool:
        return bool(least >= _LEAST_DAY and most <= _MOST_DAY)

    def least_text(self, least: Any) -> Any:
        return (UNIX_EPOCH + timedelta(days=least)).date().isoformat()

    def most_text(self, most: Any) -> Any:
        return self.least_text(most)

    def shared(self, other: Order, /) -> Order | None:
        return other


class _Timestamps(Order):
    """Timestamps, with a time zone or without; their bounds are written in whole milliseconds."""

    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int64())

    def has_bounds(self, least: Any, most: Any, /) -> bool:
        first, last = least // _DAY_MICROSECONDS, most // _DAY_MICROSECONDS
        return bool(first >= _LEAST_DAY and last < _MOST_DAY)

    def least_text(self, least: Any) -> Any:
        moment = UNIX_EPOCH + timedelta(microseconds=least - least % 1000)
        text = moment.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return f"{text}Z" if self.kind.tz else text

    def most_text(self, most: Any) -> Any:
        # The bound is rounded up: some readers don't add a millisecond, and would skip values
        # within the last one.
        return self.least_text(most + -most % 1000)

    def shared(self, other: Order, /) -> Order | None:
        return other if bool(self.kind.tz) == bool(other.kind.tz) else None

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.add(most, _WITHIN_A_MILLISECOND)


def order_of(kind: pa.DataType) -> Order | None:
    """Returns the order of a type's values; None where readers might have another."""
    is_type = pa.types
    if is_type.is_integer(kind):
        return Order(kind)
    if is_type.is_string(kind) or is_type.is_large_string(kind):
        return _Texts(kind)
    if is_type.is_decimal(kind) and kind.precision <= _DOUBLE_DIGITS:
        return _Decimals(kind)
    if is_type.is_date32(kind):
        return _Days(kind)
    return _Timestamps(kind) if is_type.is_timestamp(kind) and kind.unit == "us" else None


def shared_order(bounds: pa.DataType, values: pa.DataType) -> Order | None:
    """Returns the order in which bounds of one type and values of another are compared.

    None where it might not be the order of the bounds.
    """
    first, second = order_of(bounds), order_of(values)
    if first is None or second is None or type(first) is not type(second):
        return None
    return first.shared(second)


# Data files of a table as tasks return them (DataFiles.close()).
NEW_FILES = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("partition", pa.string()),
    ]
)
CODEC, _LEVEL = "zstd", 1
# A dictionary pays when, of this many rows at the beginning, at most half of a column's values are
# distinct.
_SAMPLED_ROWS = 10_000
# Rows of a table with partitions are divided when they have this many bytes, so that row groups
# aren't tiny.
_DIVIDED_BYTES = 64 << 20
# How many partitions' files are open at once.
_MOST_OPEN = 64


class DataFile(AbstractContextManager["DataFile"]):
    """A file being written in the folder at which ``files`` is rooted; it doesn't exist without
    rows.

    Unless it is closed, it is deleted again at the end of the ``with`` block. Its path begins with
    ``prefix``. ``options`` are those of Arrow's writer, and ``bounded`` the columns with bounds in
    the commit; without them, both follow from the values and the schema.
    """

    def __init__(
        self,
        files: FileSystem,
        schema: pa.Schema,
        prefix: str = "part-",
        options: Mapping[str, Any] | None = None,
        bounded: Sequence[str] | None = None,
    ) -> None:
        self._files, self._schema, self._options = files, schema, options
        compression = options["compression"] if options is not None else CODEC
        self._path = f"{prefix}{uuid.uuid4()}.{compression}.parquet"
        self._statistics = FileStatistics(bounded_columns(schema) if bounded is None else bounded)
        self._writer: pq.ParquetWriter | None = None
        self._sink: Any = None  # Opened before the writer.
        self._is_closed = False

    @property
    def rows(self) -> int:
        """How many rows were written."""
        return self._statistics.rows

    @property
    def size(self) -> int:
        """How many bytes were written."""
        return int(self._sink.tell()) if self._sink is not None else 0

    def write(self, rows: pa.Table) -> None:
        """Add rows as a row group."""
        if not len(rows):
            return
        if self._writer is None:
            self._writer = self._open_writer(rows)
        self._writer.write_table(rows)
        self._statistics.add(rows)

    def _open_writer(self, first: pa.Table) -> pq.ParquetWriter:
        folder, _, _ = self._path.rpartition("/")
        if folder:
            self._files.create_dir(folder)
        options = self._options or {
            "compression": CODEC,
            "compression_level": _LEVEL,
            "use_dictionary": recurring_columns(first.slice(0, _SAMPLED_ROWS)) or False,
            # Arrow leaves NaN out of a column's bounds. Spark, for which NaN is the greatest value,
            # would skip rows by them.
            "write_statistics": [
                f.name
                for f in self._schema
                if not (pa.types.is_floating(f.type) or pa.types.is_nested(f.type))
            ],
        }
        self._sink = self._files.open_output_stream(self._path)
        return pq.ParquetWriter(self._sink, self._schema, **options)

    def close(self) -> dict[str, Any]:
        """Finish the file; returns its ``path``, ``size`` and ``stats``, or nothing when there is
        no file.
        """
        if self._writer is None:
            return {}
        self._writer.close()
        size = self._sink.tell()
        self._sink.close()
        self._is_closed = True
        return {"path": self._path, "size": size, "stats": self._statistics.text()}

    def __exit__(self, *_: object) -> None:
        if self._sink is not None and not self._is_closed:
            # A full disk has no room for the footer either. The exception that ended the file is
            # raised, not its consequence.
            with suppress(OSError, pa.ArrowException):
                if self._writer is not None:
                    self._writer.close()
            with suppress(OSError, pa.ArrowException):
                self._sink.close()
            with suppress(OSError):
                self._files.delete_file(self._path)


class DataFiles(AbstractContextManager["DataFiles"]):
    """Files being written as a table's layout divides its rows; no file without rows.

    Unless they are closed, all are deleted again at the end of the ``with`` block. ``files`` is
    rooted at the table's folder, and their names begin with ``prefix``.
    """

    def __init__(self, files: FileSystem, layout: Layout, prefix: str = "part-") -> None:
        self._files, self._layout, self._prefix = files, layout, prefix
        self._schema = layout.stored
        self._open: OrderedDict[tuple[str | None, ...], tuple[Partition, DataFile]] = OrderedDict()
        self._written: list[dict[str, Any]] = []
        self._waiting: list[pa.Table] = []
        self._is_closed = False

    def write(self, rows: pa.Table) -> None:
        """Add rows, which go to the files of their partitions."""
        if not self._layout.partition_by:
            self._add({}, rows)
            return
        self._waiting.append(rows)
        if sum(part.nbytes for part in self._waiting) >= _DIVIDED_BYTES:
            self._divide()

    def close(self) -> list[dict[str, Any]]:
        """Finish the files; returns for each its ``path``, ``size``, ``stats``, ``rows`` and
        ``partition`` (as JSON).
        """
        if self._waiting:
            self._divide()
        while self._open:
            self._end(*self._open.popitem()[1])
        self._is_closed = True
        return self._written

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1][1].__exit__(*error)
        if not self._is_closed:
            remove_files(self._files, (file["path"] for file in self._written))

    def _divide(self) -> None:
        rows = pa.concat_tables([self._layout.schema.empty_table(), *self._waiting])
        self._waiting.clear()
        for partition, places in self._layout.divide(rows):
            part = rows if len(places) == len(rows) else rows.take(pa.array(places))
            self._add(partition, part.select(self._schema.names))

    def _add(self, partition: Partition, rows: pa.Table) -> None:
        key, layout = tuple(partition.values()), self._layout
        for part in layout.slices(rows):
            _, file = self._open.pop(key, (partition, None))
            if file is not None and layout.is_full(file.size, file.rows, len(part)):
                self._end(partition, file)
                file = None
            if file is None:
                # delta-rs looks for files of changed rows by their paths as the log has them,
                # percent-encoded.
                prefix = f"{layout.folder or folder_of(partition)}{self._prefix}"
                file = DataFile(self._files, self._schema, prefix, bounded=layout.bounded)
            self._open[key] = partition, file
            file.write(part)
        if len(self._open) > _MOST_OPEN:
            self._end(*self._open.popitem(last=False)[1])

    def _end(self, partition: Partition, file: DataFile) -> None:
        with file:
            written = {"rows": file.rows, "partition": json.dumps(partition), **file.close()}
        self._written.append(written)


def redefine(
    table: TargetVersion,
    columns: pa.Schema,
    partition_by: Sequence[str] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Redefinition | None:
    """Returns a table with these columns, as Spark defines it when it replaces all rows; None where
    only Spark can.

    ``partition_by`` divides it, by default the columns that divide it already. Other columns that
    do make all columns nullable. ``names`` are new names of columns.
    """
    stored, new = (
        json.loads(schema.to_json())["fields"]
        for schema in (table.table.schema(), Schema.from_arrow(columns))
    )
    if table.is_clustered or not table.may_have(new):
        return None
    current = [*table.layout.partition_by]
    if partition_by is None:
        partition_by = [name for name in current if name in columns.names]
    fields = redefined_fields(stored if [*partition_by] == current else [], new)
    text = json.dumps({"type": "struct", "fields": fields}, ensure_ascii=False)
    schema = pa.schema(Schema.from_json(text).to_arrow())
    properties = table.properties
    statistics = statistics_within(properties, schema.names, partition_by, names)
    configuration = {**properties, **statistics}
    layout = Layout.of(schema, partition_by, configuration)
    action = table.defined(
        schemaString=text, partitionColumns=[*partition_by], configuration=configuration
    )
    return Redefinition(layout, action) if layout.is_known else None


def replace_by_rows(
    table: TargetVersion,
    removed: Sequence[TableFile],
    rows: pa.Table,
    tag: Tag,
    rows_per_group: int | None = None,
    redefinition: Redefinition | None = None,
) -> int:
    """Replace files of a table by new ones with these rows, and return the new version.

    Without rows there is no new file. Errors and other parameters are those of replace_files().
    After Overtaken, the new files are removed, because no version will refer to them.
    """
    place = table.place.files
    layout = table.layout if redefinition is None else redefinition.layout
    with DataFiles(place, layout) as files:
        for start in range(0, len(rows), rows_per_group or max(1, len(rows))):
            files.write(rows.slice(start, rows_per_group))
        added = [*map(NewFile.of, files.close())]
    try:
        return table.replace_files(removed, added, tag, redefinition=redefinition)
    except Overtaken:
        remove_files(place, (file.path for file in added))
        raise


def remove_files(files: FileSystem, paths: Iterable[str]) -> None:
    """Remove files that were written and that no commit names, as far as that is possible."""
    for path in paths:
        with suppress(OSError):
            files.delete_file(path)


def new_prefix() -> str:
    """Returns a name prefix for one attempt's data files."""
    return f"part-{uuid.uuid4().hex}-"


def discard(table: DeltaTarget, prefix: str, exempt_paths: Collection[str] = ()) -> None:
    """Remove an attempt's files, without ``exempt_paths``, from a table whose log names none.

    This includes files of tasks that returned no result. Otherwise VACUUM would remove them.
    """
    with suppress(OSError, DeltaError):
        files, divided = table.files, bool(table.open_known().layout.partition_by)
        folders = [
            FileSelector(name, allow_not_found=True, recursive=divided)
            for name in ("", *(() if divided else (CHANGE_FOLDER,)))
        ]
        listed = (one for folder in folders for one in files.get_file_info(folder))
        paths = [one.path for one in listed if one.base_name.startswith(prefix)]
        remove_files(files, (path for path in paths if path not in exempt_paths))


def recurring_columns(sample: pa.Table) -> list[str]:
    """Returns the columns whose values repeat, judged by a sample.

    For other columns, Arrow would fill a dictionary only to throw it away.
    """
    return [
        field.name
        for field in sample.schema
        if not (pa.types.is_nested(field.type) or pa.types.is_boolean(field.type))
        and 2 * len(sample[field.name].unique()) <= len(sample)
    ]


class FileStatistics:
    """The number of rows; for some columns also the nulls, and the least and greatest values."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.rows = 0
        self._nulls = dict.fromkeys(columns, 0)
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._orders: dict[str, Order] = {}

    def add(self, part: pa.RecordBatch | pa.Table) -> None:
        """Count the rows of a part."""
        self.rows += len(part)
        for name in self._nulls:
            column = part[name]
            self._nulls[name] += column.null_count
            order = order_of(column.type)
            if order is not None and (counted := order.comparable(column)) is not None:
                self._orders[name] = order
                bounds = pc.min_max(counted).as_py()
                least, most = bounds["min"], bounds["max"]
                if least is not None:
                    self._least[name] = min(least, self._least.get(name, least))
                    self._most[name] = max(most, self._most.get(name, most))

    def text(self) -> str:
        """Returns the statistics as the text in an ``add`` action."""
        orders = {
            name: order
            for name, order in self._orders.items()
            if name in self._least and order.has_bounds(self._least[name], self._most[name])
        }
        statistics = {
            "numRecords": self.rows,
            "minValues": {n: order.least_text(self._least[n]) for n, order in orders.items()},
            "maxValues": {n: order.most_text(self._most[n]) for n, order in orders.items()},
            "nullCount": self._nulls,
        }
        # delta-rs (arrow-json) loses half of an escaped character beyond 16 bits, and then skips
        # files that contain the value it searches.
        return json.dumps(statistics, ensure_ascii=False)
