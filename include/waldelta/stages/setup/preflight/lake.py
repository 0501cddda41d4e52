"""Problems with the lake: a store that can't be written or loses commits, targets that an external
writer altered, layouts that can't be or would hurt; part of preflight.

A store is probed before anything is made: whether delta-rs and Spark can write and read it, and
whether it lets two writers make the same commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa

from waldelta.config import PipelineFile
from waldelta.config.layout_options import LayoutOptions
from waldelta.config.pipeline_file import Target
from waldelta.config.stores import store_of
from waldelta.errors import (
    ConfigError,
    NeedsSync,
    PreflightFailed,
    SlotMissing,
    StateError,
    TargetAltered,
    raised_as,
    without_values,
)
from waldelta.findings import Finding, problem, problem_if, warning, warning_if
from waldelta.lake import (
    DeltaTarget,
    Lake,
    Overtaken,
    TableError,
    Tag,
    local_path,
    named_write_errors,
    remove_folder,
    replace_by_rows,
    staging_folder,
    why_not_writable,
)
from waldelta.lake.delta_statements import needs_mapping, write_frame
from waldelta.lake.layout import MOST_COLUMNS, ROWS_PER_FILE, divides, layout_properties
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.pipeline import Job
from waldelta.pipeline.targets import check_columns, why_division_stays
from waldelta.postgres import Connection
from waldelta.quantities import counted
from waldelta.spark.session import borrowed_session, read_log_store
from waldelta.stages.setup.preflight.targets import PlannedTargets
from waldelta.types import TargetType
from waldelta.types.json import Variant

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Delta's own log stores. Only the one with a DynamoDB table prevents conflicts of several writers,
# if all of them use it.
_DELTAS_STORES = ("io.delta.storage.", "org.apache.spark.sql.delta.storage.")
# Targets that are opened at once; in an object store, opening one waits for requests.
_AT_ONCE = 8
_ROW = pa.table({"writer": ["waldelta"]})
_SPARK = "Spark can't write the lake that delta-rs writes"
_DYNAMODB = "io.delta.storage.S3DynamoDBLogStore"


def judge_store(target: Target) -> Iterable[Finding]:
    """Returns a warning where commits may be lost and the pipeline file accepts that."""
    return warning_if(
        target.accept_unsafe_store and _is_on_s3(target),
        f"{target.root}: target.accept_unsafe_store is set: unless Spark's log store commits"
        " conditionally, its commits may overwrite others, whose changes are lost then",
    )


def judge_copied(job: Job) -> Iterator[Finding]:
    """Yields a warning for each copied target whose columns an external writer altered, or which
    can't get the pipeline file's layout.

    Other damage to a target is an error of its next run.
    """
    states: list[TableState] = []
    with suppress(SlotMissing):  # Before the first setup there are no targets.
        states = [state for state in job.read_states().values() if state.status == SYNCED]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="check targets") as pool:
        for why in pool.map(partial(_difference, job), states):
            if why is not None:
                yield warning(why)


def _difference(job: Job, state: TableState) -> str | None:
    name = state.table_name
    try:
        check_columns(job, state)
        by = job.pipeline.target.layout_of(name).divided_by
        table = job.lake.target(name).open_known()
        why_not = None if by is None else why_division_stays(table, by)
    except TargetAltered as err:
        return str(err)
    except (StateError, NeedsSync, TableError):
        return None
    return why_not and f"{name} keeps its layout: {why_not}"


def _is_on_s3(target: Target) -> bool:
    """On S3, Spark's default log store checks whether a commit exists and then writes it,
    overwriting one written in between.
    """
    return store_of(target.root) == "s3"


def check_log_store(target: Target, store: str, lake: Lake) -> None:
    """Raise PreflightFailed where Spark may overwrite a commit by delta-rs, unless that is
    accepted.

    ``store`` is the class of Spark's log store for the root's scheme, empty if none is configured.
    """
    if not _is_on_s3(target) or target.accept_unsafe_store:
        return
    if is_conditional(store, lake.storage_options or {}):
        return
    scheme = urlsplit(target.root).scheme
    text = (
        f"{target.root}: Spark commits by"
        f" {store or 'the log store that Delta has for S3 by default'}, so that commits of Spark"
        " and delta-rs may overwrite each other, and changes be lost: `waldelta jars --stores s3`"
        " compiles one that commits conditionally; or configure another"
        f" (spark.delta.logStore.{scheme}.impl), or accept the loss"
        " (target.accept_unsafe_store: true)"
    )
    raise PreflightFailed([text])


def is_conditional(log_store: str, storage_options: Mapping[str, str]) -> bool:
    """Returns whether Spark's log store respects delta-rs's commits, and delta-rs those of Spark.

    A class that isn't Delta's is assumed to do so, because it was configured on purpose.
    """
    options = {name.upper(): value.lower() for name, value in storage_options.items()}
    if log_store == _DYNAMODB:
        return options.get("AWS_S3_LOCKING_PROVIDER") == "dynamodb"
    is_kept = options.get("AWS_S3_ALLOW_UNSAFE_RENAME", "false") not in ("true", "1")
    return bool(log_store) and not log_store.startswith(_DELTAS_STORES) and is_kept


def probe_store(target: Target, lake: Lake, spark: SparkSession | None) -> None:
    """Commit to a Delta table of the probe's own, by delta-rs and by Spark; it is removed again.

    Without ``spark``, a session as jobs have is opened. Nothing is done for a lake on a disk.
    Raises TargetNotWritable when delta-rs can't write and read there, and PreflightFailed when
    Spark can't, or when a commit could overwrite another writer's. A killed probe leaves a staged
    folder, which maintenance removes.
    """
    if local_path(target.root) is not None:
        return
    with probe_commits(target, lake) as probe, borrowed_session(spark) as session:
        check_log_store(target, read_log_store(session, urlsplit(target.root).scheme), lake)
        _probe_spark(session, probe)


def why_not_writable_in_task(spark: SparkSession, root: str) -> str | None:
    """Run why_not_writable() in a task, whose process may be another user's, on another machine."""

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict(
                {"problem": pa.array([why_not_writable(root)], pa.string())}
            )

    answer: str | None = spark.range(0, 1, 1, 1).mapInArrow(ask, "problem string").collect()[0][0]
    return answer if answer is None else f"in Spark's tasks {answer}"


@contextmanager
def probe_commits(target: Target, lake: Lake) -> Iterator[DeltaTarget]:
    """Commit to a Delta table of the probe's own by delta-rs alone; the block's end removes it.

    Raises TargetNotWritable, and PreflightFailed as probe_store() does.
    """
    probe = DeltaTarget(lake, staging_folder(lake, "probe", 0, 0, ""))
    try:
        with named_write_errors(lake.root):
            is_exclusive = _is_exclusive(probe)
        if not (is_exclusive or target.accept_unsafe_store):
            text = (
                f"{lake.root}: the store let two writers make the same commit, so that one of them"
                " would be lost: it ignores If-None-Match (conditional writes); use another store,"
                " or a release of it that respects them, or accept the loss"
                " (target.accept_unsafe_store: true)"
            )
            raise PreflightFailed([text])
        yield probe
    finally:
        remove_folder(probe.uri)


def _is_exclusive(probe: DeltaTarget) -> bool:
    """Returns whether only the first of two writers who have read the same version commits."""
    probe.create(_ROW.schema)
    first, second = probe.open(), probe.open()
    replace_by_rows(first, [], _ROW, Tag("probe", 0, "first"))
    try:
        replace_by_rows(second, [], _ROW, Tag("probe", 1, "second"))
    except Overtaken:
        return True
    return False


def _probe_spark(spark: SparkSession, probe: DeltaTarget) -> None:
    """Let Spark append to the table, and delta-rs read what it wrote."""
    root = probe.lake.root
    with raised_as(lambda err: PreflightFailed([f"{root}: {_SPARK}: {without_values(err)}"])):
        write_frame(probe, spark.createDataFrame([("Spark",)], "writer string"), "append")
    with named_write_errors(root):
        written = probe.open().dataset().to_table()["writer"].to_pylist()
    if sorted(written) != ["Spark", "waldelta"]:
        text = (
            f"{root}: {_SPARK}: it wrote to another store; give both the same endpoint"
            " (AWS_ENDPOINT_URL and spark.hadoop.fs.s3a.endpoint)"
        )
        raise PreflightFailed([text])


# --- layouts: columns that can't divide or cluster rows, and partitions that would hold less than a
# file.

# A column without statistics of the planner isn't returned. They have the least and greatest
# values of a sample, and so infinities, NaN and years before Christ, in either of two lists.
_STATISTICS = """
    select s.attname, s.n_distinct, s.null_frac, c.reltuples, s.avg_width,
        concat(s.most_common_vals, s.histogram_bounds) ~ 'NaN|nfinity| BC'
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    join pg_catalog.pg_stats s on s.schemaname = n.nspname and s.tablename = c.relname
    where c.oid = any(%s::oid[]) and c.reltuples > 0 and s.inherited = (c.relkind = 'p')
"""


def judge_layouts(
    conn: Connection, pipeline: PipelineFile, planned: PlannedTargets
) -> Iterator[Finding]:
    """Yields findings about each target's layout, by the columns that its source publishes."""
    for name in sorted(planned.sources):
        options, where = pipeline.target.layout_of(name), f"target.tables.{name}"
        try:
            layout_properties(options)
        except ConfigError as err:
            yield problem(f"{where}.properties: {err}")
        tables = planned.tables_of(name)
        columns = [options.partition_by, options.cluster_by, options.z_order]
        if not tables or not (any(columns) or options.statistics):
            continue
        renames = pipeline.target.columns_of(name)
        kinds = {c.name: c.stored_as for c in planned.columns_of(name, pipeline.target)}
        there = {name for table in tables for name in planned.relations[table.oid].column_names}
        absent = list(_judge_names(where, options, kinds, there))
        yield from absent
        if absent:
            continue
        statistics = conn.execute(_STATISTICS, ([table.oid for table in tables],)).fetchall()
        rows = [(renames.get(column, column), *of) for column, *of in statistics]
        yield from _judge_types(where, options, kinds)
        yield from _judge_floats(where, options, rows, kinds)
        yield from _judge_texts(where, pipeline.target, name, options, kinds)
        if options.partition_by:
            yield from _judge_partitions(where, options, rows, kinds)


def _judge_texts(
    where: str, target: Target, name: str, options: LayoutOptions, kinds: Mapping[str, TargetType]
) -> Iterator[Finding]:
    if not (texts := [n for n in options.partition_by or () if pa.types.is_string(kinds[n].arrow)]):
        return
    is_by_spark = (
        target.mode_of(name).keeps_rows
        or target.deletion_vectors_of(name)
        or needs_mapping(kinds)
        or any(kind.spark == Variant.spark for kind in kinds.values())
    )
    yield from problem_if(
        is_by_spark,
        f"{where}.partition_by: Spark writes this target, and stores an empty text of"
        f" {', '.join(texts)} as null: write cluster_by instead",
    )
    yield from warning_if(
        not is_by_spark,
        f"{where}.partition_by: no partition can have an empty text of {', '.join(texts)}: the"
        " first one makes the run write the whole target again, without partitions",
    )


def _judge_names(
    where: str, options: LayoutOptions, kinds: Mapping[str, Any], there: set[str]
) -> Iterator[Finding]:
    for key in ("partition_by", "cluster_by", "z_order", "statistics"):
        for name in getattr(options, key) or ():
            if name not in kinds:
                is_there = name in there
                why = "isn't published: publish it" if is_there else "doesn't exist: correct it"
                yield problem(f"{where}.{key}: column {name!r} {why}, or leave it out here")


def _judge_types(
    where: str, options: LayoutOptions, kinds: Mapping[str, TargetType]
) -> Iterator[Finding]:
    for name in options.partition_by or ():
        yield from problem_if(
            not divides(kinds[name].arrow),
            f"{where}.partition_by: column {name!r} is {kinds[name].spark} in the lake, and only"
            " whole numbers, dates, booleans and strings divide rows into partitions: write"
            " cluster_by instead",
        )
    first = list(kinds)[:MOST_COLUMNS] if options.statistics is None else options.statistics
    for key in ("cluster_by", "z_order", "statistics"):
        for name in getattr(options, key) or ():
            # Readers skip files by partition columns without statistics of theirs.
            if name in (options.partition_by or ()):
                continue
            kind, spark = kinds[name].arrow, kinds[name].spark
            where_key = f"{where}.{key}: column {name!r}"
            is_unfit = (
                pa.types.is_nested(kind) or pa.types.is_boolean(kind) or pa.types.is_binary(kind)
            )
            yield from problem_if(
                is_unfit,
                f"{where_key} is {spark} in the lake, which has no statistics: name another column",
            )
            yield from problem_if(
                not is_unfit and name not in first,
                f"{where_key} has no statistics, since it isn't among the first {MOST_COLUMNS}:"
                " name it under statistics, too",
            )


def _judge_floats(
    where: str, options: LayoutOptions, rows: list[Any], kinds: Mapping[str, TargetType]
) -> Iterator[Finding]:
    # Without statistics of the planner, a column may have NaN.
    without_nan = {name for name, *_, is_special in rows if not is_special}
    for key in ("cluster_by", "z_order"):
        for name in getattr(options, key) or ():
            yield from warning_if(
                pa.types.is_floating(kinds[name].arrow) and name not in without_nan,
                f"{where}.{key}: column {name!r} is {kinds[name].spark} in the lake: where it has"
                " NaN, some readers return rows that a filter by it excludes"
                " (docs/how-to/read-the-lake.md): name another column if they read the target",
            )


def _judge_partitions(
    where: str, options: LayoutOptions, rows: list[Any], kinds: Mapping[str, TargetType]
) -> Iterator[Finding]:
    statistics = {name: of for name, *of in rows if name in (options.partition_by or ())}
    if not statistics:
        yield warning(
            f"{where}.partition_by: PostgreSQL has no statistics of these columns, so how many"
            " partitions there will be isn't known: run ANALYZE, and check again"
        )
        return
    total, count = max(of[2] for of in statistics.values()), 1.0
    for name, (distinct, nulls, estimate, _, is_special) in statistics.items():
        count *= distinct if distinct > 0 else -distinct * estimate
        yield from warning_if(
            nulls > 0,
            f"{where}.partition_by: column {name!r} has nulls, whose rows get a partition of their"
            " own",
        )
        yield from warning_if(
            is_special and kinds[name].may_be_raw,
            f"{where}.partition_by: column {name!r} has values that the lake can't hold (NaN,"
            " infinity, years BC), whose rows get the partition of nulls",
        )
    count = min(max(count, 1.0), total)
    widths = {name: of[3] for name, *of in rows}
    width = max(1, sum(widths.values()))
    full = ROWS_PER_FILE if options.file_bytes is None else options.file_bytes // width
    if total / count < full and count > 1:
        yield warning(
            f"{where}.partition_by: about {counted(ceil(count), 'partition')} of"
            f" {counted(ceil(total / count), 'row')} each, and a file has up to {full:,}:"
            " choose columns with fewer values, or write cluster_by instead"
        )
