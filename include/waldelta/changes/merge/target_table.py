"""Target tables: their columns, their creation, and replacing their whole content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from waldelta.changes.merge.statements import ROWS_PER_FILE
from waldelta.config import TypeOptions
from waldelta.errors import (
    ConfigError,
    LateWriter,
    TargetNotWritable,
    WaldeltaError,
    raised_as,
    without_values,
)
from waldelta.lake import DeltaTarget, Tag, not_writable_by_spark
from waldelta.lake.delta_statements import (
    create_table,
    find_commit,
    is_absent,
    map_columns,
    needs_mapping,
    schema_option,
)
from waldelta.lake.storage import remove_empty_log
from waldelta.metadata_columns import METADATA_TYPES
from waldelta.pipeline import is_conflict, named_error
from waldelta.pipeline.targets.target_definition import refusal
from waldelta.postgres import PublishedTable
from waldelta.snapshot.read_table import METADATA_COLUMNS
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl, sql_type
from waldelta.spark_sql import quote
from waldelta.target_modes.column_names import clashes
from waldelta.types import TargetType, column_types


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of a target; only key columns aren't nullable."""

    name: str
    spark_type: str
    arrow: pa.DataType
    nullable: bool


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit wrote."""

    version: int
    rows: int
    bytes: int


def target_columns(
    table: PublishedTable, options: TypeOptions, metadata_columns: bool
) -> list[TargetColumn]:
    """Return the columns of a table's target: the published ones in attnum order, then waldelta's
    own.

    Raises ConfigError for names that Delta, which ignores case, can't distinguish.
    """
    types = column_types({c.name: c.type for c in table.columns}, table.key_columns, options)
    columns = [
        TargetColumn(name, kind.spark, kind.arrow, name not in table.key_columns)
        for name, kind in types.items()
    ]
    for clash in clashes(types, metadata_columns=metadata_columns):
        raise ConfigError(f"{table.id}: {clash}")
    if metadata_columns:
        columns += [
            TargetColumn(name, METADATA_TYPES[name], arrow, True)
            for name, arrow in METADATA_COLUMNS.items()
        ]
    return columns


def target_schema(columns: Sequence[TargetColumn]) -> str:
    """Return the columns as the DDL of a DataFrame's schema."""
    fields = [pa.field(c.name, c.arrow, c.nullable) for c in columns]
    return ddl(pa.schema(fields))


def stored_frame(frame: DataFrame, columns: Iterable[tuple[str, TargetType]]) -> DataFrame:
    """Return the frame, with columns as Arrow carries them, with these columns as the target stores
    them.
    """
    forms = {name: kind.stored_sql(quote(name)) for name, kind in columns}
    return frame.select(
        *(F.expr(forms.get(name, quote(name))).alias(name) for name in frame.columns)
    )


def prepare_target(runner: Runner, target: DeltaTarget, columns: Sequence[TargetColumn]) -> None:
    """Create the empty target when there is none; raises TargetNotWritable.

    Only CREATE TABLE gives Delta NOT NULL columns: those of a DataFrame are all nullable once
    written.
    """

    def not_writable(err: Exception) -> WaldeltaError:
        return TargetNotWritable(
            f"{target.uri} can't be written ({without_values(err)}): check target.root and the"
            " permissions of the user that runs Spark"
        )

    mapped = needs_mapping(column.name for column in columns)
    with raised_as(not_writable):
        existing = _read_schema(runner, target)
        if existing is None:
            remove_empty_log(target.uri)
            listed = ", ".join(
                f"{quote(c.name)} {c.spark_type}{'' if c.nullable else ' not null'}"
                for c in columns
            )
            create_table(runner.spark(), target, listed, mapped=mapped)
        elif mapped and not needs_mapping(existing.names):
            map_columns(runner.spark(), target)


def replace_target(
    runner: Runner,
    target: DeltaTarget,
    frame: DataFrame,
    tag: Tag,
) -> CommitResult:
    """Replace the target's content, and its schema when that differs, in one durable commit.

    Raises the named error of a task, or LateWriter when another writer committed at the same time.
    """
    options = {"maxRecordsPerFile": str(ROWS_PER_FILE)}
    if (option := schema_option(_read_schema(runner, target), frame.schema)) is not None:
        frame, options[option] = plainly_typed(frame), "true"
    with writing_target(target):
        target.write(frame, "overwrite", tag, options)
    if (commit := find_commit(runner.spark(), target, tag.metadata)) is None:
        # Delta silently skips a repeated txnVersion.
        raise LateWriter(
            f"{target.uri}: the commit isn't in the table's history: run the sync again"
        )
    version, metrics = commit
    target.sync_commit(version)
    return CommitResult(
        version, int(metrics.get("numOutputRows", 0)), int(metrics.get("numOutputBytes", 0))
    )


def plainly_typed(frame: DataFrame) -> DataFrame:
    """Return the same columns with types as SQL names them.

    A Connect client sends strings with an explicit collation, which would become part of the
    table's schema; delta-rs can't open such a table.
    """
    return frame.select(
        *(
            F.expr(f"cast({quote(f.name)} as {sql_type(f.dataType)})").alias(f.name)
            for f in frame.schema.fields
        )
    )


def writing_target(target: DeltaTarget) -> AbstractContextManager[None]:
    """Raise a failure to write a target as a named error."""
    return raised_as(partial(target_write_error, target))


def target_write_error(target: DeltaTarget, err: Exception) -> WaldeltaError:
    """Return a failure to write a target as a named error: a task's, another writer's, the lake's,
    or one of the target's definition.
    """
    uri = target.uri
    if (named := named_error(err) or refusal(target, uri, err)) is not None:
        return named
    if is_conflict(err):
        return LateWriter(
            f"another writer changed {uri} while this run replaced it: run the sync again"
        )
    return not_writable_by_spark(uri, err, without_values(err))


def _read_schema(runner: Runner, target: DeltaTarget) -> StructType | None:
    try:
        return target.frame(runner.spark()).schema
    except AnalysisException as err:
        if is_absent(err):
            return None
        raise
