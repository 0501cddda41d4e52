"""How a Delta table's rows are divided into data files: by partition, and up to a size.

A partition's folder is named as Spark names it. Delta itself reads the values from the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.schema import ArrayType, MapType, PrimitiveType, StructType, VariantType

from waldelta.arrow import Ints
from waldelta.config.layout_options import LayoutOptions
from waldelta.errors import ConfigError, EmptyPartitionValue
from waldelta.lake.storage import parquet_format
from waldelta.spark_sql import quote as quoted
from waldelta.spark_sql import simple_type

if TYPE_CHECKING:
    from waldelta.lake.lake import Lake

# A merge rewrites every file that it touches. With smaller files, changes of neighbouring rows
# rewrite less.
ROWS_PER_FILE = 250_000
# The number of columns with bounds that is Spark's default.
MOST_COLUMNS = 32
# The property of a table whose commits show what they change.
CHANGE_DATA_FEED = "delta.enableChangeDataFeed"
CHANGE_FOLDER, CHANGE_TYPE = "_change_data", "_change_type"
TARGET_FILE_SIZE, STATISTICS_COLUMNS = "delta.targetFileSize", "delta.dataSkippingStatsColumns"
_NO_FEATURE = "leave it out: waldelta doesn't write tables that require this feature"
# Delta properties that waldelta depends on, by how their names begin, and what to write instead.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        TARGET_FILE_SIZE: "write file_size",
        STATISTICS_COLUMNS: "write statistics",
        "delta.dataskippingnumindexedcols": "write statistics",
        "delta.enabledeletionvectors": "write deletion_vectors",
        "delta.enablechangedatafeed": "write change_data_feed",
        "delta.deletedfileretentionduration": "write maintenance.keep_versions_hours",
        "delta.logretentionduration": "write maintenance.keep_versions_hours",
        "delta.enableexpiredlogcleanup": "leave it out: maintenance needs it",
        "delta.appendonly": "leave it out: waldelta updates and deletes rows",
        "delta.constraints.": "write an expectation with a gate",
        "delta.columnmapping.": "leave it out: waldelta maps columns whose names need it",
        "delta.checkpoint": "leave it out: waldelta writes checkpoints",
        "delta.minreaderversion": "leave it out: Delta raises it",
        "delta.minwriterversion": "leave it out: Delta raises it",
        "delta.feature.": _NO_FEATURE,
        "delta.enable": _NO_FEATURE,
        "delta.universalformat.": _NO_FEATURE,
        "delta.coordinatedcommits.": _NO_FEATURE,
        "delta.rowtracking.": _NO_FEATURE,
        "delta.isolationlevel": "leave it out: each commit of waldelta is a compare-and-swap",
        "delta.randomizefileprefixes": "leave it out: waldelta names files",
        "waldelta.": "leave it out: it is waldelta's own",
    }
)
_NULL = "__HIVE_DEFAULT_PARTITION__"
# What Spark escapes in the name of a partition's folder (ExternalCatalogUtils.escapePathName).
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
# File systems take names of up to 255 bytes.
_LONGEST_NAME = 200

# The values of a table's partition columns as Delta's log writes them; empty without such columns.
Partition = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that was written, as a commit adds it."""

    path: str
    size: int
    stats: str
    partition: Partition = field(default_factory=dict)

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> NewFile:
        """Returns a file as a task describes it, or DataFiles.close()."""
        partition = json.loads(written["partition"])
        return cls(written["path"], written["size"], written["stats"], partition)


@dataclass(frozen=True, slots=True)
class TableFile:
    """A data file of a table; ``path`` is percent-encoded, as the log has it."""

    path: str
    bytes: int
    rows: int = ROWS_PER_FILE
    partition: Partition = field(default_factory=dict)

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> TableFile:
        """Returns a file that no commit has added yet, as a task describes it."""
        partition = json.loads(written.get("partition") or "{}")
        return cls(log_path(written["path"]), written["size"], written["rows"], partition)

    def open(self, lake: Lake, uri: str, schema: pa.Schema) -> ds.Dataset:
        """Returns its rows, with the values of its partition; ``uri`` is the table's folder."""
        return open_files([self], lake, uri, schema)

    def partition_values(self, schema: pa.Schema) -> pc.Expression:
        """Returns the values of its partition, which all its rows have."""
        values = pc.scalar(True)
        for name, text in self.partition.items():
            value = pa.scalar(text).cast(schema.field(name).type)
            values &= pc.field(name).is_null() if text is None else pc.field(name) == value
        return values


def open_files(files: Iterable[TableFile], lake: Lake, uri: str, schema: pa.Schema) -> ds.Dataset:
    """Returns the rows of files of a table, with the values of their partitions."""
    place, layout = lake.unchanging_files(uri), parquet_format(uri)
    fragments = [
        layout.make_fragment(
            unquote(file.path), place, partition_expression=file.partition_values(schema)
        )
        for file in files
    ]
    return ds.FileSystemDataset(fragments, schema, layout, place)


def log_path(path: str) -> str:
    """Returns a path as Delta's log has it."""
    return quote(path, safe="/=")


def table_files(files: pa.Table) -> list[TableFile]:
    """Returns the data files that a version's add actions (``TargetVersion.files``) describe."""
    prefix = "partition."
    names = [name for name in files.column_names if name.startswith(prefix)]
    texts = [files[name].cast(pa.string()).to_pylist() for name in names]
    keys = [name.removeprefix(prefix) for name in names]
    partitions = (
        [dict(zip(keys, values, strict=True)) for values in zip(*texts, strict=True)]
        if names
        else [{}] * len(files)
    )
    columns = (files["path"], files["size_bytes"], files["num_records"].fill_null(ROWS_PER_FILE))
    values = zip(*(column.to_pylist() for column in columns), partitions, strict=True)
    return [TableFile(*of_file) for of_file in values]


def empty_value(columns: Sequence[str]) -> EmptyPartitionValue:
    """Returns the error of columns with an empty text that divide a table, or are to."""
    return EmptyPartitionValue(
        f"{', '.join(columns)} has an empty text, which every reader takes for null in a partition:"
        " write cluster_by instead of partition_by, or have the source refuse such values"
    )


def divides(kind: pa.DataType) -> bool:
    """Returns whether waldelta writes partitions by columns of a type.

    Floats don't: NaN, and zero with two signs, are no values of the log. Moments don't, because
    writers print them in several ways. Fractions don't, because delta-rs can't read -0.5.
    """
    is_type = pa.types
    return bool(
        is_type.is_integer(kind)
        or is_type.is_boolean(kind)
        or is_type.is_string(kind)
        or is_type.is_date32(kind)
        or (is_type.is_decimal(kind) and kind.scale == 0)
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """A table's columns, those that divide its rows, the size of its files, and those with bounds.

    A file that has ``file_bytes``, or ``file_rows`` where no bytes are set, gets no further rows.
    ``folder`` has the files, with a slash at its end.
    """

    schema: pa.Schema
    partition_by: Sequence[str] = ()
    file_bytes: int | None = None
    bounded: Sequence[str] = ()
    file_rows: int = ROWS_PER_FILE
    folder: str = ""

    @classmethod
    def of(
        cls, schema: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> Layout:
        """Returns the layout that a table's log describes by its schema, partition columns and
        properties.
        """
        size = properties.get(TARGET_FILE_SIZE, "")
        listed = properties.get(STATISTICS_COLUMNS)
        bounded = bounded_columns(schema) if listed is None else _parse_columns(listed)
        return cls(
            schema,
            tuple(partition_by),
            int(size) if size.isdecimal() else None,
            [name for name in bounded if name in schema.names and name not in partition_by],
            ROWS_PER_FILE,
        )

    @property
    def is_known(self) -> bool:
        """Whether the writers of this package can write and read files divided by these partition
        columns.
        """
        return all(divides(self.schema.field(name).type) for name in self.partition_by)

    @property
    def texts(self) -> list[str]:
        """The columns among partition_by that are texts."""
        return [n for n in self.partition_by if pa.types.is_string(self.schema.field(n).type)]

    @property
    def of_changes(self) -> Layout:
        """The layout of the files with changed rows, for the table's change data feed."""
        schema = self.schema.append(pa.field(CHANGE_TYPE, pa.string()))
        return replace(self, schema=schema, bounded=(), folder=f"{CHANGE_FOLDER}/")

    @property
    def stored(self) -> pa.Schema:
        """The columns that the files have."""
        return pa.schema([f for f in self.schema if f.name not in self.partition_by])

    def is_full(self, size: int, rows: int, further: int) -> bool:
        """Returns whether a file of this size and rows gets no ``further`` rows."""
        if self.file_bytes is not None:
            return size >= self.file_bytes
        return rows + further > self.file_rows

    def slices(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Yields rows in parts, none larger than a file."""
        step = self.file_rows
        if self.file_bytes is not None:
            step = max(1, len(rows) * self.file_bytes // max(1, rows.nbytes))
        for start in range(0, len(rows), step):
            yield rows.slice(start, step)

    def divide(self, rows: pa.Table) -> Iterator[tuple[Partition, Ints]]:
        """Yields the partitions of rows, each with the positions of its rows, in their order."""
        if not self.partition_by:
            yield {}, np.arange(len(rows))
            return
        codes = np.zeros(len(rows), np.int64)
        for name in self.partition_by:
            encoded: Any = pa.chunked_array(rows[name]).combine_chunks().dictionary_encode("encode")
            codes = codes * max(1, len(encoded.dictionary)) + np.asarray(encoded.indices)
            codes = np.unique(codes, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        first = pa.array(order[starts])
        texts = [rows[n].take(first).cast(pa.string()).to_pylist() for n in self.partition_by]
        if empty := [n for n, of_n in zip(self.partition_by, texts, strict=True) if "" in of_n]:
            raise empty_value(empty)
        parts = np.split(order, starts[1:]) if len(starts) else []
        for values, places in zip(zip(*texts, strict=True), parts, strict=True):
            yield dict(zip(self.partition_by, values, strict=True)), places


@dataclass(frozen=True, slots=True)
class Redefinition:
    """A table's layout from a commit on, and the metaData action of that commit."""

    layout: Layout
    action: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """The properties with which a new table is created, its partition and clustering columns."""

    properties: Mapping[str, str] = field(default_factory=dict)
    partition_by: Sequence[str] = ()
    cluster_by: Sequence[str] = ()

    @classmethod
    def of(cls, options: LayoutOptions, properties: Mapping[str, str]) -> TableOptions:
        """Returns the options of a table with a layout and further properties.

        Raises ConfigError as layout_properties() does.
        """
        return cls(
            {**layout_properties(options), **properties},
            options.partition_by or (),
            options.cluster_by or (),
        )


PLAIN = TableOptions()


def bounded_columns(schema: pa.Schema) -> list[str]:
    """Returns the columns that get statistics: of Spark's first ones, those with single values."""
    return [
        field.name for field in list(schema)[:MOST_COLUMNS] if not pa.types.is_nested(field.type)
    ]


def layout_properties(options: LayoutOptions) -> dict[str, str]:
    """Returns the properties of a table that is laid out by the pipeline file.

    Raises ConfigError for one that waldelta depends on.

    >>> layout_properties(LayoutOptions(file_size="1mb", statistics=["id", "at `x`"]))
    {'delta.targetFileSize': '1048576', 'delta.dataSkippingStatsColumns': 'id,`at ``x```'}
    """
    for name in options.properties:
        for prefix, remedy in _REFUSED.items():
            if name.lower().startswith(prefix.lower()):
                raise ConfigError(f"property {name} can't be set: {remedy}")
    properties = dict(options.properties)
    if options.file_bytes is not None:
        properties[TARGET_FILE_SIZE] = str(options.file_bytes)
    if options.statistics is not None:
        # Spark refuses partition columns: the log has their values without statistics.
        partition_by = options.partition_by or ()
        names = [name for name in options.statistics if name not in partition_by]
        properties[STATISTICS_COLUMNS] = _column_list(names)
    return properties


def statistics_to_sort(options: LayoutOptions, properties: Mapping[str, str]) -> dict[str, str]:
    """Returns the property that also lists the columns by which a table's rows are to be sorted;
    empty where they have statistics, or the options name the columns that do.

    Delta sorts by no column without statistics.

    >>> statistics_to_sort(LayoutOptions(z_order=["at"]), {STATISTICS_COLUMNS: "id"})
    {'delta.dataSkippingStatsColumns': 'id,at'}
    """
    listed = properties.get(STATISTICS_COLUMNS)
    if listed is None or options.statistics is not None:
        return {}
    names = _parse_columns(listed)
    columns = options.cluster_by or options.z_order or ()
    new = [name for name in columns if name not in names]
    return {STATISTICS_COLUMNS: _column_list([*names, *new])} if new else {}


def _column_list(columns: Iterable[str]) -> str:
    """Returns names of columns as a property of the table lists them."""
    plain = re.compile(r"\A[A-Za-z_]\w*\Z")
    return ",".join(name if plain.match(name) else quoted(name) for name in columns)


def statistics_within(
    properties: Mapping[str, str],
    columns: Collection[str],
    partition_by: Collection[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns the property that lists columns with statistics, for a table that will have these
    columns and partitions; empty where it lists none.

    ``names`` are new names of columns. Spark writes no table whose list has an absent column, or
    one that divides it.

    >>> statistics_within({STATISTICS_COLUMNS: "id,`a b`,c"}, ["id", "x"], [], {"a b": "x"})
    {'delta.dataSkippingStatsColumns': 'id,x'}
    """
    listed = properties.get(STATISTICS_COLUMNS)
    if listed is None:
        return {}
    followed = [names.get(name, name) for name in _parse_columns(listed)]
    named_columns = [name for name in followed if name in columns and name not in partition_by]
    return {STATISTICS_COLUMNS: _column_list(named_columns)}


def _parse_columns(columns: str) -> list[str]:
    """Returns the names in a list of columns, as Spark writes one."""
    names = re.findall(r"`((?:[^`]|``)*)`|([^,`\s]+)", columns)
    return [quoted.replace("``", "`") or plain for quoted, plain in names]


def folder_of(partition: Partition) -> str:
    """Returns the folder of a partition's files, with a slash at its end; empty for none.

    >>> folder_of({"day": "2026-01-31", "place": "a/b", "who": None})
    'day=2026-01-31/place=a%2Fb/who=__HIVE_DEFAULT_PARTITION__/'
    """
    return "".join(f"{_name(name, value)}/" for name, value in partition.items())


def _name(name: str, value: str | None) -> str:
    text = f"{_escape_value(name)}={_NULL if value is None else _escape_value(value)}"
    return text.encode()[:_LONGEST_NAME].decode(errors="ignore")


def _escape_value(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def redefined_fields(
    stored: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a table's columns (as of Delta's log) once Spark has replaced its rows by some with
    the ``new`` columns.

    Further columns follow the others, whose NOT NULL stays where both have it. If a column is gone
    or has another type, all columns are the new ones, and may be null.
    """
    by_name = {field["name"]: field for field in new}
    names = {field["name"] for field in stored}
    if any(by_name.get(field["name"], {}).get("type") != field["type"] for field in stored):
        return [{**field, "nullable": True} for field in new]
    return [
        *(
            {**field, "nullable": field["nullable"] or by_name[field["name"]]["nullable"]}
            for field in stored
        ),
        *({**field, "nullable": True} for field in new if field["name"] not in names),
    ]


def spark_type(kind: PrimitiveType | ArrayType | MapType | StructType | VariantType) -> str:
    """Returns a type as Spark's ``simpleString`` writes it."""
    match kind:
        case ArrayType():
            return f"array<{spark_type(kind.element_type)}>"
        case MapType():
            return f"map<{spark_type(kind.key_type)},{spark_type(kind.value_type)}>"
        case StructType():
            fields = ",".join(f"{field.name}:{spark_type(field.type)}" for field in kind.fields)
            return f"struct<{fields}>"
        case _:
            return simple_type(kind.type)
