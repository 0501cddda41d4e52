"""Target tables: their columns, their creation, and replacing their whole content.

reshape() changes a target's columns to the source's current ones in one commit, before dependent
changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from waldelta.changes.merge.reshape import partitions_after, reshape_small
from waldelta.changes.merge.statements import CommitTag
from waldelta.config import TypeOptions
from waldelta.errors import (
    ConfigError,
    LateWriter,
    NeedsSync,
    TargetNotWritable,
    WaldeltaError,
    raised_as,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake import (
    READ_FAILURES,
    DeltaTarget,
    Overtaken,
    Tag,
    TargetVersion,
    not_writable_by_spark,
    query,
    remove_folder,
    staging_folder,
    write_parquet,
)
from waldelta.lake.delta_statements import (
    USER_METADATA,
    add_feature,
    create_table,
    find_commit,
    is_absent,
    map_columns,
    needs_mapping,
    schema_option,
    set_properties,
    write_frame,
)
from waldelta.lake.layout import PLAIN, ROWS_PER_FILE, TableOptions, statistics_within
from waldelta.lake.ledger import TableState, now
from waldelta.lake.storage import remove_empty_log
from waldelta.metadata_columns import COMMIT_TS, LSN, METADATA_TYPES, RAW
from waldelta.pipeline import Job, is_conflict, named_error
from waldelta.pipeline.drift import Evolution, NewColumn
from waldelta.pipeline.targets import check_columns
from waldelta.pipeline.targets.target_definition import check_new_columns, foreign_columns, refusal
from waldelta.postgres import PublishedTable
from waldelta.snapshot.read_table import METADATA_COLUMNS
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl, sql_type
from waldelta.spark.session import session_settings
from waldelta.spark_sql import quote, string
from waldelta.target_modes.column_names import clashes
from waldelta.target_modes.target_mode import TargetMode
from waldelta.types import TargetType, column_types
from waldelta.types.json import Variant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of a target; only key columns aren't nullable."""

    name: str
    spark_type: str
    arrow: pa.DataType
    nullable: bool


@dataclass(frozen=True, slots=True)
class CopyCommit:
    """A copy's commit: its version, the rows of the copy, and the bytes it wrote (0: only what
    differed).
    """

    version: int
    rows: int
    bytes: int


def read_query(table: TargetVersion, text: str) -> pa.RecordBatchReader:
    """Returns the rows of a query whose ``{rows}`` are a version, a few at a time; its columns have
    the types that they have there.

    Raises what query() raises.
    """
    rows = query(text.format(rows="target"), {"target": table})
    types = {field.name: field.type for field in table.schema}
    return rows.cast(pa.schema([(f.name, types.get(f.name, f.type)) for f in rows.schema]))


def only_row(runner: Runner, table: TargetVersion, text: str) -> dict[str, Any]:
    """Returns the only row of a query whose ``{rows}`` are a version: by Spark where this process
    doesn't know the table's features.
    """
    try:
        rows = read_query(table, text).read_all()
    except READ_FAILURES:
        frame = table.place.frame(runner.spark(), table.version)
        rows = runner.spark().sql(text, rows=frame).toArrow()
    (row,) = rows.to_pylist()
    return dict(row)


def target_columns(
    table: PublishedTable, options: TypeOptions, metadata_columns: bool
) -> list[TargetColumn]:
    """Returns the columns of a table's target: the published ones in attnum order, then waldelta's
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
    """Returns the columns as the DDL of a DataFrame's schema."""
    return ddl(pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in columns]))


def stored_frame(frame: DataFrame, columns: Iterable[tuple[str, TargetType]]) -> DataFrame:
    """Returns the frame, with columns as Arrow carries them, with these columns as the target
    stores them.
    """
    forms = {name: kind.stored_sql(quote(name)) for name, kind in columns}
    return frame.selectExpr(
        *(f"{forms.get(name, quote(name))} as {quote(name)}" for name in frame.columns)
    )


def prepare_target(
    runner: Runner,
    target: DeltaTarget,
    columns: Sequence[TargetColumn],
    options: TableOptions = PLAIN,
) -> None:
    """Create the empty target, with these options, when there is none; raises TargetNotWritable.

    Columns of an existing one may be null where these may. Only CREATE TABLE gives Delta NOT NULL
    columns: those of a DataFrame are all nullable once written.
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
            create_table(runner.spark(), target, listed, options, mapped=mapped)
            return
        if mapped and not needs_mapping(existing.names):
            map_columns(runner.spark(), target)
        # Delta takes such a column into an existing table only if the table lists its feature.
        types = " ".join(column.spark_type for column in columns)
        if _NTZ in types and _NTZ not in existing.simpleString():
            add_feature(runner.spark(), target, "timestampNtz")
        nullable = {column.name for column in columns if column.nullable}
        for name in (f.name for f in existing.fields if not f.nullable and f.name in nullable):
            runner.spark().sql(
                f"alter table {target.relation} alter column {quote(name)} drop not null"
            )


def replace_target(
    runner: Runner,
    target: DeltaTarget,
    frame: DataFrame,
    tag: Tag,
    partition_by: Sequence[str] | None = None,
) -> CopyCommit:
    """Replace the target's content, and its schema when that differs, in one durable commit.

    ``partition_by`` divides it, by default the columns that divide it already. Raises the named
    error of a task, or LateWriter when another writer committed at the same time.
    """
    options = {"maxRecordsPerFile": str(ROWS_PER_FILE)}
    option = schema_option(_read_schema(runner, target), frame.schema)
    current = () if (table := target.find()) is None else table.layout.partition_by
    if partition_by is None:
        partition_by = [name for name in current if name in frame.columns]
    if table is not None and [*partition_by] != [*current]:
        option = "overwriteSchema"
    if option is not None:
        frame, options[option] = _plainly_typed(frame), "true"
    with writing_target(target):
        if table is not None:
            statistics = statistics_within(table.properties, frame.columns, partition_by)
            set_properties(runner.spark, table, statistics)
        write_frame(target, frame, "overwrite", tag, options, partition_by)
    if (commit := find_commit(runner.spark(), target, tag.metadata)) is None:
        # Delta silently skips a repeated txnVersion.
        raise LateWriter(
            f"{target.uri}: the commit isn't in the table's history: run the sync again"
        )
    version, metrics = commit
    target.sync_commit(version)
    return CopyCommit(
        version, int(metrics.get("numOutputRows", 0)), int(metrics.get("numOutputBytes", 0))
    )


def _plainly_typed(frame: DataFrame) -> DataFrame:
    """Returns the same columns with types as SQL names them.

    A Connect client sends strings with an explicit collation, which would become part of the
    table's schema; delta-rs can't open such a table.
    """
    return frame.selectExpr(
        *(
            f"cast({quote(f.name)} as {sql_type(f.dataType)}) as {quote(f.name)}"
            for f in frame.schema.fields
        )
    )


def writing_target(target: DeltaTarget) -> AbstractContextManager[None]:
    """Raise a failure to write a target as a named error."""
    return raised_as(partial(target_write_error, target))


def target_write_error(target: DeltaTarget, err: Exception) -> WaldeltaError:
    """Returns a failure to write a target as a named error: a task's, another writer's, the lake's,
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
    except Exception as err:
        if is_absent(err):
            return None
        raise


_NTZ = "timestamp_ntz"
# A temporary column, by number, with the value that existing rows get in a new column; no target
# has a column of this name.
_FILL = "_wd_fill_{}"


def reshape(
    runner: Runner,
    job: Job,
    state: TableState,
    evolution: Evolution,
    column_types: Sequence[TargetType],
    tag: CommitTag,
) -> None:
    """Change a target and its state in the ledger from one set of columns to the next.

    ``column_types`` are the types of the new columns, ``tag`` is of the changes that follow. Adding
    columns without a value for existing rows only changes metadata. Any other change rewrites the
    table in one commit, so that no reader sees an intermediate state. When a run was killed in
    between, the next one finds its commit and only records the state. Raises NeedsSync when the
    columns have changed further since then.
    """
    fault_point("reshape.begun")
    types = {
        column.state.name: kind
        for column, kind in zip(evolution.columns, column_types, strict=True)
    }
    target = job.lake.target(state.table_name)
    entries = {
        "verb": "reshape",
        "since": state.at.isoformat(),
        "columns": [c.state.name for c in evolution.columns],
        "change": evolution.describe(),
        "run_id": job.run_id,
    }
    if evolution.alters and not _is_done(target, state, entries):
        _check_target(job, state, evolution)
        commit = Tag.of(f"{tag.app_id}:reshape", tag.batch, entries)
        if evolution.only_adds:
            _add_columns(runner, target, evolution, types, commit)
        else:
            _rewrite(runner, job, state, evolution, types, commit)
    fault_point("reshape.committed")
    log.info("table=%s columns changed: %s", state.table_name, evolution.describe())
    evolved = replace(
        state, at=now(), run_id=job.run_id, columns=[c.state for c in evolution.columns],
        key_columns=list(evolution.key_columns), reason=f"columns changed: {evolution.describe()}",
    )  # fmt: skip
    job.ledger.append_state(evolved, state)
    fault_point("reshape.recorded")


def _check_target(job: Job, state: TableState, evolution: Evolution) -> None:
    check_columns(job, state)
    new = [column.state.name for column in evolution.columns if column.source != column.state.name]
    check_new_columns(job, state, new)


def _rewrite(
    runner: Runner,
    job: Job,
    state: TableState,
    evolution: Evolution,
    types: dict[str, TargetType],
    tag: Tag,
) -> None:
    """Replace the target's rows by those with the new columns; external writers' columns stay."""
    name, target = state.table_name, job.lake.target(state.table_name)
    has_metadata = job.pipeline.target.metadata_columns
    mode, foreign = state.target_mode if has_metadata else None, foreign_columns(job, state)
    with writing_target(target):
        if reshape_small(target, evolution, types, tag, mode, foreign):
            return
    fills = staging_folder(job.lake, name, state.generation, tag.number, job.run_id) + "-fills"
    prepare_target(runner, target, _target_columns(evolution, types))
    try:
        frame = _reshaped(target.frame(runner.spark()), evolution, types, fills, mode, foreign)
        table = target.open()
        partition_by = partitions_after(table, evolution, types)
        statistics = statistics_within(
            table.properties, frame.columns, partition_by, evolution.names
        )
        replace_target(runner, target, frame, tag, partition_by)
        with writing_target(target):
            set_properties(runner.spark, target.open(), statistics)
    finally:
        remove_folder(fills)


def _target_columns(evolution: Evolution, types: dict[str, TargetType]) -> list[TargetColumn]:
    keys, names = evolution.key_columns, [column.state.name for column in evolution.columns]
    return [
        TargetColumn(name, types[name].spark, types[name].arrow, name not in keys) for name in names
    ]


def _is_done(target: DeltaTarget, state: TableState, metadata: dict[str, Any]) -> bool:
    """Returns whether a killed run has committed this change already, and only the ledger lacks it.

    Raises NeedsSync when the columns have changed further since.
    """
    for entry in target.open().commits(50):
        done = entry["waldelta"]
        if done.get("verb") == "reshape" and done.get("since") == metadata["since"]:
            if (done["columns"], done["change"]) == (metadata["columns"], metadata["change"]):
                return True
            raise NeedsSync(
                f"{state.table_name}: its columns changed again before a run had recorded the"
                " previous change"
            )
    return False


def _add_columns(
    runner: Runner,
    target: DeltaTarget,
    evolution: Evolution,
    types: dict[str, TargetType],
    tag: Tag,
) -> None:
    added = [column for column in evolution.columns if column.source is None]
    if not added:  # Only the source's own types have changed, such as a varchar's length.
        return
    last = [c.state.name for c in evolution.columns if c.source is not None][-1]
    fields = [pa.field(c.state.name, types[c.state.name].arrow) for c in added]
    mapped = needs_mapping(field.name for field in fields)
    varies = any(types[field.name].spark == Variant.spark for field in fields)
    if not (target.lake.on_spark or mapped or varies):
        try:
            if target.open().add_columns(fields, last, tag):
                return
        except Overtaken as err:  # After any other error, the commit may exist.
            log.info("Spark adds columns to %s: %s", target.uri, without_values(err))
    prepare_target(runner, target, _target_columns(evolution, types))
    listed = []
    for column in added:
        listed.append(
            f"{quote(column.state.name)} {types[column.state.name].spark} after {quote(last)}"
        )
        last = column.state.name
    with session_settings(runner.spark(), {USER_METADATA: tag.metadata}):
        runner.spark().sql(f"alter table {target.relation} add columns ({', '.join(listed)})")


def _reshaped(
    frame: DataFrame,
    evolution: Evolution,
    types: dict[str, TargetType],
    staged: str,
    mode: TargetMode | None,
    foreign: Sequence[str],
) -> DataFrame:
    """Returns the target's rows with the columns after an evolution.

    Columns with a value for existing rows get that value. The ``foreign`` columns, which external
    writers added, stay as they are. ``mode`` is None for a target without metadata columns.
    """
    fills = {c.state.name: c.fill for c in evolution.columns if c.fill is not None}
    typed = {
        name: types[name].from_text(pa.array([fill.encode()], pa.binary()))
        for name, fill in fills.items()
    }
    numbers = {name: k for k, name in enumerate(fills)}
    if typed:
        # A file is the only way in which a value of any type arrives unchanged.
        write_parquet(
            staged,
            pa.table({_FILL.format(numbers[name]): value for name, (value, _) in typed.items()}),
        )
        frame = frame.crossJoin(frame.sparkSession.read.parquet(staged).hint("broadcast"))
    columns = [
        f"{_value(c, numbers, types, metadata_columns=mode is not None)} as {quote(c.state.name)}"
        for c in evolution.columns
    ]
    if mode is not None:
        raws = {name: raw[0].as_py() for name, (_, raw) in typed.items() if raw is not None}
        columns += [LSN, COMMIT_TS, f"{_raw(evolution, types, raws)} as {RAW}"]
        sources = {c.state.name: c.source or c.state.name for c in evolution.columns}
        key = {name: (sources[name], types[name].spark) for name in evolution.key_columns}
        columns += mode.evolved_columns(key)
    return frame.selectExpr(*columns, *map(quote, foreign))


def _value(
    column: NewColumn,
    fills: dict[str, int],
    types: dict[str, TargetType],
    *,
    metadata_columns: bool,
) -> str:
    """Returns the value of a column after an evolution, in Spark SQL."""
    name = column.state.name
    if column.source is None:
        if name not in fills:
            return f"cast(null as {types[name].spark})"
        return types[name].stored_sql(_FILL.format(fills[name]))
    source = quote(column.source)
    if column.same_type:
        return source
    # A value that the narrower type couldn't hold is in the raw column. A string can hold it.
    widened = f"cast({source} as {types[name].spark})"
    verbatim = metadata_columns and types[name].is_text
    return f"coalesce({RAW}[{string(column.source)}], {widened})" if verbatim else widened


def _raw(evolution: Evolution, types: dict[str, TargetType], fills: dict[str, str]) -> str:
    """Returns in Spark SQL the raw values of retained columns, under the columns' new names, and
    those of new columns.
    """
    new_names = {
        c.source: c.state.name
        for c in evolution.columns
        if c.source is not None and (c.same_type or not types[c.state.name].is_text)
    }
    retained = ", ".join(map(string, new_names))
    raw = f"map_filter({RAW}, (k, v) -> k in ({retained}))" if new_names else "null"
    renamed = {old: new for old, new in new_names.items() if old != new}
    if renamed:
        raw = f"transform_keys({raw}, (k, v) -> coalesce({_map(renamed)}[k], k))"
    raw = f"cast({raw} as map<string,string>)"
    if fills:
        raw = f"map_concat(coalesce({raw}, cast(map() as map<string,string>)), {_map(fills)})"
    return f"case when size({raw}) > 0 then {raw} end"


def _map(texts: Mapping[str, str]) -> str:
    return f"map({', '.join(string(text) for pair in texts.items() for text in pair)})"
