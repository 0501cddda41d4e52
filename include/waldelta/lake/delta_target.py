"""A Delta table of the lake: where it is, its versions, and the protocol of every commit to it.

Another table format would be written in this package: no module outside of it opens a Delta table,
reads, writes or names one for Spark, or commits to one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    TableFeatures,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from psycopg import sql

from waldelta.lake import driver_limits
from waldelta.lake.commit_files import FileChange, commit_files, creates_entries, transaction
from waldelta.lake.delta_log import Definition, DeltaLog, Overtaken, Tag
from waldelta.lake.layout import (
    CHANGE_DATA_FEED,
    Layout,
    NewFile,
    Redefinition,
    TableFile,
    spark_type,
    table_files,
)
from waldelta.lake.log_copy import CopiedTable, NotCopied, StoredLog
from waldelta.lake.storage import (
    INT96_AS_MICROSECONDS,
    NO_HOOKS,
    check_log_files,
    entry_path,
    is_local,
    sync_behind,
    sync_commit,
    sync_commits,
    write_checkpoint,
)
from waldelta.permissions import private_files
from waldelta.spark_sql import quote

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from pyspark.sql import DataFrame, SparkSession

    from waldelta.lake.lake import Lake

T = TypeVar("T")
# The properties by which columns have other names in files, and by which Spark's commits mark rows
# as deleted, instead of rewriting their files.
COLUMN_MAPPING, DELETION_VECTORS = "delta.columnMapping.mode", "delta.enableDeletionVectors"
# delta-rs's error about a table, as DeltaTarget.open() raises it.
TableError = DeltaError
# Another writer's commit came before ours.
CommitConflict = CommitFailedError
# What reading a table may raise, and what writing to it may.
READ_FAILURES = (TableError, OSError, pa.ArrowException)
WRITE_FAILURES = (TableError, OSError)
# Delta writer features implemented without Spark, by Delta's names. A table that requires any other
# feature is written by Spark.
# Version 4 adds the change data feed, and CHECK constraints and generated columns, which aren't.
_LEGACY_WRITER = 4
_NOT_NULL, _NTZ = "invariants", "timestampNtz"
# delta-rs commits to no such table; files of it are committed without delta-rs.
_CLUSTERED = ("clustering", "domainMetadata")
_KNOWN = frozenset({"appendOnly", _NOT_NULL, _NTZ, "changeDataFeed", *_CLUSTERED})
# Spark writes checkpoints of targets at the same interval, in versions.
CHECKPOINT_INTERVAL = 10
_ONE_COMMIT: dict[str, Any] = {
    "commit_properties": CommitProperties(max_commit_retries=0),
    "post_commithook_properties": NO_HOOKS,
}


@dataclass(frozen=True, slots=True)
class DeltaTarget:
    """One Delta table of the lake, at ``uri``.

    Each call reads the table's newest version; ``known_log`` and what is named ``known`` use the
    log as this process last read it. A checkpoint is written at every multiple of
    CHECKPOINT_INTERVAL versions.
    """

    lake: Lake
    uri: str

    @property
    def exists(self) -> bool:
        """Whether there is a Delta table; one that this process has opened counts."""
        log = self.known_log
        if log is not None and log.is_seen:
            return True
        # is_deltatable() holds Python's lock until a store has answered, which takes up to a
        # minute. No other thread could run in that time.
        return DeltaTable.is_deltatable(self.uri) if is_local(self.uri) else self.find() is not None

    def sync_commit(self, version: int) -> None:
        """Force a commit and those before it to disk; a commit in an object store is durable
        already.

        Raises OSError when one of its files is missing.
        """
        sync_commit(self.uri, version)

    def sync_commits(self, versions: Iterable[int]) -> None:
        """Make commits durable that may be external, except for files that are gone."""
        sync_commits(self.uri, versions)

    def sync_behind(self, version: int) -> int:
        """Make the commits after a version durable, as sync_commits() does; returns the last."""
        return sync_behind(self.uri, version)

    @property
    def relation(self) -> str:
        """The newest version as a relation of Spark SQL, also to be written."""
        return f"delta.{quote(self.uri)}"

    @property
    def files(self) -> FileSystem:
        """The table's folder."""
        return self.lake.files(self.uri)

    @property
    def log(self) -> DeltaLog:
        """The table's log, commit by commit."""
        return DeltaLog(self)

    @property
    def version(self) -> int:
        """The newest version."""
        return self.open().version

    def open(self, version: int | None = None) -> TargetVersion:
        """Open the table at a version (None: the newest), without Spark.

        Raises TableError: TableNotFoundError when there is no table, another when it can't be read.
        Raises StateError as check_log_files() does.
        """
        table = self.lake.cache.take(self.uri, version)
        if table is not None and (version is not None or self._is_updated(table)):
            return TargetVersion(self, table)
        return self._open_version(version, StoredLog.read_newest)

    def open_known(self) -> TargetVersion:
        """Open the newest version that this process knows, or the newest one.

        In an object store, this needs no request after another call. It is for a caller that has
        just opened the table, or whose commit is a compare-and-swap on the version.
        """
        log = self.known_log
        if log is None or not log.is_seen or log.known.version < 0:
            return self.open()
        table = self.lake.cache.take(self.uri)
        with suppress(DeltaError, NotCopied):
            if isinstance(table, CopiedTable):
                table.update_known()
                return TargetVersion(self, table)
        return self._open_version(None, lambda _: None)

    def open_from_log(self, version: int | None = None) -> TargetVersion:
        """Open the table as open() does, by reading its log whatever was opened before."""
        return self._open_version(version, StoredLog.read_all)

    def _open_version(
        self, version: int | None, read: Callable[[StoredLog], None]
    ) -> TargetVersion:
        options, log = self.lake.storage_options, self.known_log
        if log is not None:
            with suppress(NotCopied):
                read(log)
                copied = CopiedTable(self.uri, log, options or {}, version)
                return TargetVersion(self, copied, is_kept=version is None)
        check_log_files(self.uri)
        table = DeltaTable(self.uri, version=version, storage_options=options)
        return TargetVersion(self, table, is_kept=version is None)

    @property
    def known_log(self) -> StoredLog | None:
        """What this process knows of the table's log; None where delta-rs alone reads it."""
        return self.lake.cache.log(self.lake, self.uri)

    def _is_updated(self, table: DeltaTable) -> bool:
        """Bring a table to the newest version; returns whether that succeeded.

        Whether there is a newer one is asked first, by one request instead of two.
        """
        try:
            if isinstance(table, CopiedTable) or self.lake.has(
                f"{self.uri}/{entry_path(table.version() + 1)}"
            ):
                check_log_files(self.uri)
                table.update_incremental()
        except (DeltaError, OSError, NotCopied):  # Opening the table reports why.
            return False
        return True

    def find(
        self, opened: Callable[[DeltaTarget], TargetVersion] | None = None
    ) -> TargetVersion | None:
        """Open the table by open(), which returns the newest version, or by another method; None
        when there is no table.
        """
        try:
            return self.open() if opened is None else opened(self)
        except TableNotFoundError:
            return None

    def committed(self, app_id: str) -> tuple[int, int] | None:
        """Returns what read_once() does, with the number of a transaction id's last commit."""
        return self.read_once(app_id, lambda table: table.committed(app_id))

    def read_once(self, name: str, read: Callable[[TargetVersion], T]) -> tuple[int, T] | None:
        """Returns the newest version, and what TargetVersion.read_once() returns for it.

        None without a table. One that this process has read at that version isn't opened again.
        """
        result = self.lake.cache.unchanged(self.lake, self.uri, name)
        if result is None and (table := self.find()) is not None:
            result = table.version, table.read_once(name, lambda: read(table))
        return result

    def create_with(self, rows: pa.Table) -> None:
        """Create the table with its first rows, durably; raises TableError when there is one."""
        storage = self.lake.storage_options
        write_deltalake(self.uri, rows, mode="error", storage_options=storage, **_ONE_COMMIT)
        self.sync_commit(0)

    def create(self, columns: pa.Schema, **options: Any) -> TargetVersion:
        """Create the empty table with these columns; ``options`` as of delta-rs."""
        with private_files():
            schema, storage = Schema.from_arrow(columns), self.lake.storage_options
            DeltaTable.create(self.uri, schema, storage_options=storage, **options)
        return self.open_from_log()

    def frame(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        """Returns the rows of a version (None: the newest) for Spark, which reads them later."""
        reader = spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(self.uri)


@dataclass(slots=True)
class TargetVersion:
    """One version of a Delta table; ``table`` is delta-rs's, for this package alone.

    A commit makes it the version that was committed.
    """

    place: DeltaTarget
    table: DeltaTable
    is_kept: bool = True
    # By name: a version, and what was read of it.
    _values: dict[str, tuple[int, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __del__(self) -> None:
        """Leave the table to the next caller that opens it, unless it is an old version."""
        if self.is_kept:
            self.place.lake.cache.give_back(self.place.uri, self.table)

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.table.version()

    def files_since(self, version: int) -> pa.Table:
        """Returns the files that an earlier version lacks, with all rows that were written since.

        Raises what open() raises of that version.
        """
        files, former_paths = self.files, self.place.open(version).files["path"].combine_chunks()
        return files.filter(pc.invert(pc.is_in(files["path"], value_set=former_paths)))

    @property
    def is_small(self) -> bool:
        """Whether this process reads all rows; False where they aren't counted."""
        return self.is_at_most(driver_limits.MOST_DRIVER_ROWS, driver_limits.MOST_FILE_BYTES)

    def is_at_most(self, rows: int, size: int) -> bool:
        """Returns whether this process reads the table itself, without Spark.

        It does when the table's files have at most ``rows`` rows and ``size`` bytes.
        """
        return not self.place.lake.on_spark and driver_limits.is_at_most(self.files, rows, size)

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._once("schema", lambda: pa.schema(self.table.schema().to_arrow()))

    def can_store(self, columns: pa.Schema) -> bool:
        """Returns whether the table has these columns and their types, and no others.

        It may have fewer NOT NULL constraints, not more.
        """
        fields, new_fields = (
            {field.name: field for field in schema.fields}
            for schema in (self.table.schema(), Schema.from_arrow(columns))
        )
        return fields.keys() == new_fields.keys() and all(
            fields[name].type == field.type and (fields[name].nullable or not field.nullable)
            for name, field in new_fields.items()
        )

    @property
    def spark_types(self) -> dict[str, str]:
        """The type of each column as Spark's ``simpleString`` writes it."""
        return {field.name: spark_type(field.type) for field in self.table.schema().fields}

    @property
    def definition(self) -> Definition:
        """The columns and properties, as the commits of Delta's log have them."""
        return Definition(self.table.schema().to_json(), self.properties)

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties."""
        return self.table.metadata().configuration

    @property
    def files(self) -> pa.Table:
        """The log's entries of the files, one row for each file."""
        return self._once("files", lambda: pa.table(self.table.get_add_actions(flatten=True)))

    @property
    def table_files(self) -> list[TableFile]:
        """The files."""
        return table_files(self.files)

    @property
    def layout(self) -> Layout:
        """How rows are divided into files."""
        metadata = self.table.metadata()
        return Layout.of(self.schema, metadata.partition_columns, metadata.configuration)

    @property
    def has_deletion_vectors(self) -> bool:
        """Whether files may have deleted rows, which the log's row counts of a file include."""
        return "deletionVectors" in (self.table.protocol().reader_features or ())

    @property
    def writes_deletion_vectors(self) -> bool:
        """Whether commits mark rows as deleted instead of rewriting files; a new table's don't."""
        return self.properties.get(DELETION_VECTORS, "false").lower() == "true"

    @property
    def maps_columns(self) -> bool:
        """Whether columns have other names in files, and in the files' statistics."""
        return self.properties.get(COLUMN_MAPPING, "none") != "none"

    @property
    def is_definable(self) -> bool:
        """Whether its columns or partitions can be changed without Spark."""
        return self.is_writable and creates_entries(self.table, self.place.uri)

    @property
    def is_clustered(self) -> bool:
        """Whether OPTIMIZE clusters rows by some columns."""
        return not {*_CLUSTERED}.isdisjoint(self.table.protocol().writer_features or ())

    @property
    def shows_changes(self) -> bool:
        """Whether commits must show the rows that they change."""
        return self.properties.get(CHANGE_DATA_FEED, "false").lower() == "true"

    @property
    def is_writable(self) -> bool:
        """Whether all writer features that the table requires are implemented without Spark."""
        return self._once("is_writable", self._requires_no_spark)

    def _requires_no_spark(self) -> bool:
        protocol, definition = self.table.protocol(), self.definition
        required = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        version_is_known = (
            protocol.min_writer_version <= _LEGACY_WRITER or protocol.writer_features is not None
        )
        return (
            version_is_known
            and required <= _KNOWN
            and not definition.is_append_only
            and not (definition.constraints or definition.generated)
            and (
                not (self.shows_changes or self.is_clustered)
                or creates_entries(self.table, self.place.uri)
            )
            and not any("delta.invariants" in f.metadata for f in self.table.schema().fields)
            and self.layout.is_known
        )

    def dataset(self) -> ds.Dataset:
        """Returns the rows as a dataset; its timestamps are in microseconds, also in files of
        external writers.

        A filter by a float column finds wrong rows in files that Spark wrote with a bound of NaN.
        Raises TableError for columns that have other names in the files: delta-rs would read nulls.
        """
        if self.maps_columns:
            raise TableError(f"{self.place.uri} maps column names")
        read = partial(self.table.to_pyarrow_dataset, parquet_read_options=INT96_AS_MICROSECONDS)
        return self._once("dataset", read)

    def hold(self, rows: pa.Table) -> None:
        """Let dataset() return these, which are all rows of this version, from memory."""
        self._values["dataset"] = self.version, ds.dataset(rows)

    def _once(self, name: str, read: Callable[[], T]) -> T:
        """Unlike read_once(), this keeps what is large only as long as this object lives."""
        version, value = self._values.get(name, (-1, None))
        if version != self.version:
            self._values[name] = self.version, (value := read())
        result: T = value
        return result

    def read_column(self, name: str) -> Iterator[pa.Array]:
        """Yields the values of a column, a batch at a time, whatever features the table has."""
        text = sql.SQL("select {} from target").format(sql.Identifier(name)).as_string()
        for batch in query(text, {"target": self}):
            yield batch.column(0)

    def committed(self, app_id: str) -> int:
        """Returns the number of a transaction id's last commit; 0 without any."""
        return self.read_once(app_id, lambda: self.table.transaction_version(app_id) or 0)

    def read_once(self, name: str, read: Callable[[], T]) -> T:
        """Returns the result of ``read`` for this version; the next call with the same name gets it
        from memory.
        """
        return self.place.lake.cache.read_once(self.table, self.place.uri, name, read)

    def commits(self, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields the commits, newest first, as delta-rs reads them from the table's log.

        Under "waldelta", each has what waldelta wrote into it; empty for an external commit. In an
        object store, each is read when it is needed.
        """
        return (
            commit.info | {"version": commit.version, "waldelta": commit.metadata}
            for commit in islice(self.place.log.before(self.version + 1), limit)
        )

    def append(self, rows: pa.Table, schema_mode: Literal["merge"] | None = None) -> None:
        """Add rows in one commit, a compare-and-swap on this version; it is durable on return.

        ``schema_mode`` "merge" adds columns that the table lacks. Raises CommitFailedError.
        """
        version = self.version
        write_deltalake(self.table, rows, mode="append", schema_mode=schema_mode, **_ONE_COMMIT)
        if isinstance(self.table, CopiedTable):
            self.table.push(version)
        self.keep(self.version)

    def overwrite(self, rows: pa.Table, **options: Any) -> None:
        """Replace the rows, or those that a predicate selects, in one commit as append() makes it.

        ``options`` are those of delta-rs, such as ``predicate``.
        """
        write_deltalake(self.stored, rows, mode="overwrite", **options, **_ONE_COMMIT)
        self.update()
        self.keep(self.version)

    def delete(self, predicate: str, app_id: str, number: int) -> None:
        """Delete the rows of a predicate in one commit with this transaction id and number.

        These are whole files where it names partitions alone. The commit isn't durable yet.
        """
        properties = CommitProperties(app_transactions=[transaction(app_id, number)])
        self.stored.delete(
            predicate, commit_properties=properties, post_commithook_properties=NO_HOOKS
        )
        self.update()

    def list_features(self, columns: pa.Schema) -> None:
        """Add the table features that the table with these columns needs, in a durable commit.

        A table whose protocol lists no features gets them only with its first timestamp_ntz column.
        A clustered table, or one that only Spark can write, stays as it is. delta-rs lists
        timestampNtz without invariants, which NOT NULL needs, and Spark refuses to read that.
        """
        listed = self.table.protocol().writer_features
        fields = [*self.table.schema().fields, *Schema.from_arrow(columns).fields]
        has_ntz = any('"timestamp_ntz"' in field.type.to_json() for field in fields)
        if self.is_clustered or not self.is_writable or (listed is None and not has_ntz):
            return
        needed = {
            _NTZ: (TableFeatures.TimestampWithoutTimezone, has_ntz),
            _NOT_NULL: (TableFeatures.Invariants, not all(field.nullable for field in fields)),
            "changeDataFeed": (TableFeatures.ChangeDataFeed, self.shows_changes),
        }
        missing = needed.keys() - {*(listed or ())}
        if lacking := [needed[name][0] for name in sorted(missing) if needed[name][1]]:
            alter = self.stored.alter
            alter.add_feature(lacking, allow_protocol_versions_increase=True, **_ONE_COMMIT)
            self.update()
            self.keep(self.version)

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties of the table in one commit, which is durable on return.

        delta-rs lists features for it that the table doesn't use, and other readers lack.
        """
        if self.is_definable and not any(name.startswith("delta.enable") for name in properties):
            action = self.defined(configuration={**self.properties, **properties})
            commit_files(self.table, self.place.uri, FileChange([], [], definition=action), None)
            self.keep(self.version + 1)
        else:
            alter = self.stored.alter
            alter.set_table_properties({**properties}, raise_if_not_exists=False, **_ONE_COMMIT)
            self.update()
            self.keep(self.version)

    @property
    def stored(self) -> DeltaTable:
        """The table as delta-rs opens it in the store; ``table`` may read a copy of its log."""
        return self.table.stored() if isinstance(self.table, CopiedTable) else self.table

    def replace_files(
        self,
        removed: Iterable[TableFile],
        added: Iterable[NewFile],
        tag: Tag,
        *,
        changes_data: bool = True,
        changes: Sequence[NewFile] = (),
        redefinition: Redefinition | None = None,
    ) -> int:
        """Replace files by others; returns the version.

        Without ``changes_data`` they have the same rows. ``changes`` are files of the change data
        feed, where it needs any. ``redefinition`` is for a commit that replaces all files. The
        commit is a compare-and-swap on this version, and durable on return. When only its answer
        was lost, it is found by its userMetadata. Raises Overtaken, or CommitFailedError when it
        isn't known whether the commit exists.
        """
        definition = None if redefinition is None else redefinition.action
        files = FileChange([*removed], [*added], changes, changes_data, definition)
        return self._commit(files, tag)

    def add_columns(self, columns: Sequence[pa.Field], after: str, tag: Tag) -> bool:
        """Add nullable columns behind another one, in a commit as of replace_files().

        Returns False where only Spark can: for features of Delta that the table lacks, or that only
        Spark writes.
        """
        schema = json.loads(self.table.schema().to_json())
        names = [field["name"] for field in schema["fields"]]
        added = json.loads(Schema.from_arrow(pa.schema(columns)).to_json())["fields"]
        self.list_features(pa.schema(columns))
        if not self.may_have(added):
            return False
        behind = names.index(after) + 1
        schema["fields"][behind:behind] = added
        definition = self.defined(schemaString=json.dumps(schema, ensure_ascii=False))
        self._commit(FileChange([], [], definition=definition), tag)
        return True

    def may_have(self, fields: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether columns (as of Delta's log) may be the table's without Spark."""
        features = self.table.protocol().writer_features or ()
        types = json.dumps([field["type"] for field in fields])
        return self.is_definable and (_NTZ in features or '"timestamp_ntz"' not in types)

    def _commit(self, files: FileChange, tag: Tag) -> int:
        version = self.version + 1
        try:
            commit_files(self.table, self.place.uri, files, tag)
        except CommitFailedError as err:
            later = list(self.place.log.behind(self.version))
            versions = [c.version for c in later if c.info.get("userMetadata") == tag.metadata]
            if later and not versions:
                raise Overtaken(later) from err
            if not versions:
                raise
            version = versions[0]
        self.keep(version)
        return version

    def defined(self, **changed: Any) -> dict[str, Any]:
        """Returns the table's metaData action, with these changes."""
        metadata = self.table.metadata()
        return {
            "id": metadata.id,
            "name": metadata.name,
            "description": metadata.description,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": self.table.schema().to_json(),
            "partitionColumns": metadata.partition_columns,
            "configuration": metadata.configuration,
            "createdTime": metadata.created_time,
        } | changed

    def update(self) -> None:
        """Make it the newest version; reads only the commits since this one."""
        self.table.update_incremental()

    def keep(self, version: int) -> None:
        """Make a commit durable, and write a checkpoint at regular intervals.

        A failure to write a checkpoint undoes no commit, and a later version gets one.
        """
        self.place.sync_commit(version)
        if self.version < version:
            self.update()
        if self.version % CHECKPOINT_INTERVAL == 0:
            write_checkpoint(self.table)

    def vacuum(self, hours: int, *, full: bool = False) -> None:
        """Delete the files that no version of the last ``hours`` needs.

        With ``full``, this includes files that no commit ever named.
        """
        self.stored.vacuum(
            hours,
            dry_run=False,
            enforce_retention_duration=False,
            post_commithook_properties=NO_HOOKS,
            full=full,
        )

    def drop_old_entries(self) -> None:
        """Write a checkpoint, and drop the log's old entries, which it replaces."""
        if write_checkpoint(self.table):
            self.stored.cleanup_metadata()


def query(text: str, versions: Mapping[str, TargetVersion]) -> pa.RecordBatchReader:
    """Returns the rows of a query in DataFusion's SQL on versions by their names in it, whatever
    features the tables have.

    Raises TableError for what it doesn't know.
    """
    builder = QueryBuilder()
    for name, version in versions.items():
        builder.register(name, version.stored)
    return pa.RecordBatchReader.from_stream(builder.execute(text))
