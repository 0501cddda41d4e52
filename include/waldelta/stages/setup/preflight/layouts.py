"""Problems with how targets are laid out: columns that can't divide or cluster rows, and partitions
that would hold less than a file; part of preflight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import pyarrow as pa

from waldelta.config import PipelineFile
from waldelta.config.layout_options import LayoutOptions
from waldelta.config.pipeline_file import Target
from waldelta.errors import ConfigError
from waldelta.findings import Finding, problem, problem_if, warning, warning_if
from waldelta.lake.delta_statements import needs_mapping
from waldelta.lake.layout import MOST_COLUMNS, ROWS_PER_FILE, divides, layout_properties
from waldelta.postgres import Connection
from waldelta.quantities import counted
from waldelta.stages.setup.preflight.targets import PlannedTargets
from waldelta.types import TargetType
from waldelta.types.json import Variant

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
