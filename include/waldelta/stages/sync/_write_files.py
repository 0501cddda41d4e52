"""Copy files: Spark's tasks write a copy's rows as the target's files with Arrow, and one commit
replaces the old files.

Rows never become Spark's own: the tasks that read them also write them, which saves the JVM's rows,
its Parquet writer and conversions. delta-rs commits, with the same transaction id and userMetadata
as Spark would. The commit is a compare-and-swap on the table's version: if another waldelta run
commits first, this copy raises LateWriter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow.fs import FileSelector

from waldelta.changes.merge.target_table import (
    CopyCommit,
    TargetColumn,
    target_write_error,
)
from waldelta.errors import LateWriter, WaldeltaError, without_values
from waldelta.lake import (
    WRITE_FAILURES,
    DeltaTarget,
    Overtaken,
    Tag,
    TargetVersion,
    named_write_errors,
)
from waldelta.lake.data_file import NEW_FILES, DataFiles, discard, new_prefix, redefine
from waldelta.lake.delta_statements import needs_mapping
from waldelta.lake.layout import PLAIN, Layout, NewFile, TableOptions
from waldelta.lake.ledger import TargetCut
from waldelta.lake.storage import is_within
from waldelta.metadata_columns import RAW
from waldelta.permissions import private_files
from waldelta.snapshot.read_table import row_groups
from waldelta.spark import Runner
from waldelta.stages.sync._staged_chunks import (
    ChunkFolder,
    Files,
    StagedCopy,
    WriteRows,
    write_chunks,
)
from waldelta.types.json import Variant

log = logging.getLogger(__name__)

_WRITTEN = pa.schema(
    [
        *NEW_FILES,
        ("rows", pa.int64()),
        ("raw_rows", pa.int64()),
    ]
)
# How many times external commits may come in between.
_ATTEMPTS = 10

# Reads the rows of the task with this number.
ChunkReader = Callable[[int], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class RowDiff:
    """What the comparison with a target found and its commit did: ``cut``, and the number of rows
    that were ``unchanged``.
    """

    cut: TargetCut
    unchanged: int

    @property
    def compared(self) -> int:
        """Returns the number of rows in the snapshot, which the target has now."""
        return self.cut.inserted + self.cut.updated + self.unchanged


@dataclass(frozen=True, slots=True)
class WrittenCopy:
    """The effect of writing a copy.

    ``raw_rows`` counts the rows with a value that its column's type can't store; None: unknown.
    ``diff`` counts the differing rows, where only those were written. ``full_rewrite_reason`` is
    why all rows were written although only differing ones were requested.
    """

    commit: CopyCommit
    raw_rows: int | None = None
    diff: RowDiff | None = None
    full_rewrite_reason: str | None = None


def open_target(
    place: DeltaTarget,
    columns: Sequence[TargetColumn],
    options: TableOptions = PLAIN,
) -> TargetVersion | None:
    """Returns the target with these columns, created if missing; None when Spark must write it.

    Spark must write tables with column mapping, variants, deletion vectors or other features, and
    tables that delta-rs can't access. A table with other columns gets these when copy_files()
    replaces its rows.
    """
    mapped = needs_mapping(column.name for column in columns)
    if mapped or any(column.spark_type == Variant.spark for column in columns):
        return None
    try:
        table = _open_or_create(place, columns, options)
        if table is None:
            return None
        with private_files():
            table.list_features(columns_of(columns))
        return table if _fits(table, columns_of(columns)) else None
    except WRITE_FAILURES as err:
        log.info("Spark writes %s, since the driver can't: %s", place.uri, without_values(err))
        return None


def columns_of(columns: Sequence[TargetColumn]) -> pa.Schema:
    """Returns columns of a target as Arrow's."""
    return pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in columns])


def _open_or_create(
    place: DeltaTarget, columns: Sequence[TargetColumn], options: TableOptions
) -> TargetVersion | None:
    """Returns the table, created if missing; None when only Spark can create it.

    Raises OSError for a folder with other files in it.
    """
    if (table := place.find()) is not None:
        return table
    if place.files.get_file_info(FileSelector("", allow_not_found=True)):
        raise FileExistsError(f"{place.uri} has files and no Delta log")
    if options.cluster_by:
        return None
    return place.create(
        columns_of(columns),
        configuration={**options.properties},
        partition_by=[*options.partition_by] or None,
        raise_if_key_not_exists=False,
    )


def _fits(table: TargetVersion, schema: pa.Schema) -> bool:
    """Returns whether the table has the wanted columns, or may get them, without Spark."""
    if not table.is_writable or not (table.can_store(schema) or redefine(table, schema)):
        return False
    return all(is_within(file.path) for file in table.table_files)


def copy_files(  # noqa: PLR0913, PLR0917 - a target, what is written to it, and how
    runner: Runner,
    target: TargetVersion,
    columns: pa.Schema,
    tasks: int,
    reader: ChunkReader,
    tag: Tag,
    all_read: Callable[[], object],
    staged: StagedCopy | None = None,
) -> WrittenCopy:
    """Have tasks write what ``reader`` reads, and replace the target's files; durable on return.

    The target has these columns afterwards, as Spark would define it. ``all_read`` is called once
    all files are written. With ``staged``, files of earlier attempts are taken over, and a failed
    copy's stay. Raises a task's error, LateWriter after another run's commit, TargetNotWritable.
    """
    place, prefix = target.place, new_prefix()
    redefinition = None if target.can_store(columns) else redefine(target, columns)
    layout = target.layout if redefinition is None else redefinition.layout
    folder = ChunkFolder(place.uri, layout.schema, _writer(place, layout, prefix))

    def discard_files() -> None:
        discard(place, prefix, staged.records.paths() if staged is not None else ())

    try:
        answers = write_chunks(runner, tasks, reader, folder, _WRITTEN, staged)
        all_read()
    except Exception as err:
        discard_files()
        if isinstance(err, WaldeltaError):
            raise
        raise target_write_error(place, err) from None
    files = [NewFile.of(row) for row in answers if row["path"] is not None]
    try:
        with named_write_errors(place.uri), private_files():
            version = _commit(target, columns, files, tag)
    except LateWriter:
        # After any other error the commit may exist: its response was lost, or a later step failed.
        discard_files()
        raise
    if staged is not None:
        staged.records.remove()
    rows, size, raw = (sum(row[n] or 0 for row in answers) for n in ("rows", "size", "raw_rows"))
    return WrittenCopy(CopyCommit(version, rows, size), raw)


def _writer(place: DeltaTarget, layout: Layout, prefix: str) -> WriteRows:
    """Returns the function that writes a task's rows as files of the target, and returns a row for
    each file.
    """

    def write(_: str, rows: Iterable[pa.RecordBatch]) -> Files:
        schema, raw_rows = layout.schema, 0
        with (
            named_write_errors(place.uri, "Spark's tasks", kinds=OSError),
            DataFiles(place.files, layout, prefix) as files,
        ):
            for group in row_groups(rows, layout.file_rows):
                files.write(group.select(schema.names).cast(schema))
                if RAW in group.column_names:
                    raw_rows += len(group) - group[RAW].null_count
            entries = files.close()
        return [
            {**file, "raw_rows": raw_rows * (not number)} for number, file in enumerate(entries)
        ]

    return write


def _commit(table: TargetVersion, columns: pa.Schema, files: Sequence[NewFile], tag: Tag) -> int:
    """Replace the old files with the new ones; returns the version that has them, or raises
    LateWriter.
    """
    place, schema, partition_by = table.place, table.schema, [*table.layout.partition_by]
    late = LateWriter(
        f"{place.uri} was changed by another writer while it was replaced: run the sync again"
    )
    for _ in range(_ATTEMPTS):
        if table.committed(tag.app_id) >= tag.number:
            break
        try:
            redefinition = None if table.can_store(columns) else redefine(table, columns)
            return table.replace_files(table.table_files, files, tag, redefinition=redefinition)
        except Overtaken as err:
            if (ours := next((one for one in err.commits if one.metadata), None)) is not None:
                raise LateWriter(
                    f"version {ours.version} was committed by another run: run the sync again"
                ) from None
            # The copy replaces external rows like all others, as if they had come before it.
            table = place.open()
            is_other = table.schema != schema or [*table.layout.partition_by] != partition_by
            if is_other or not _fits(table, columns):
                raise late from err
    raise late
