"""Stages a range of landed batches: writes one target's net changes as files for the merge.

The driver decodes and collapses a small range itself: four Spark jobs would take seconds for
milliseconds of work. A larger range goes through Spark's Python tasks, with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from waldelta.changes.decode import DecodePlan, TargetPlan
from waldelta.changes.decode.collapse import ACTION_INSERT, ACTION_UPSERT, net_changes
from waldelta.changes.decode.counts import RAW_ROWS
from waldelta.changes.decode.decode import collapse_events, decode_all
from waldelta.changes.decode.route import Routing, route, route_in_driver
from waldelta.changes.stage.net_files import NetFiles, rows_at_once
from waldelta.changes.stage.read_changes import read_row_changes
from waldelta.changes.stage.stage_tasks import (
    Counted,
    added_up,
    count,
    stage_in_tasks,
    tasks_of,
)
from waldelta.errors import StagedLost
from waldelta.lake import write_parquet
from waldelta.lake.changelog import ChangeLog
from waldelta.quantities import counted
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.task_attempts import once
from waldelta.spark_sql import parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Staged:
    """Net changes ready to be merged: their files, the SQL that the merge reads, the number by
    action.

    ``incomplete``: a new row arrived without the value of a large column, which must be read from
    the source. ``net`` has the rows themselves, when the driver collapsed them and they are
    complete.
    """

    folder: str
    source: str
    counts: dict[str, int]
    incomplete: bool = False
    net: pa.Table | None = None

    @property
    def files(self) -> str | None:
        """The folder, when its files are all there is to merge."""
        return self.folder if self.source == parquet(self.folder) else None


def stage(spark: SparkSession, change_log: ChangeLog, plan: TargetPlan, folder: str) -> Staged:
    """Write the net changes as Parquet into ``folder``."""
    if plan.rows is not None:
        return _stage_in_driver(spark, plan.rows, plan, folder)
    if plan.decode.routing is not None:
        return _staged(folder, _stage_routed(spark, change_log, plan, plan.decode.routing, folder))
    staged = _staged(folder, stage_in_tasks(spark, plan.split or change_log, plan, folder))
    _require(staged, sum(NetFiles.of(folder, change_log.lake).rows))
    return staged


def check_whole(spark: SparkSession, staged: Staged) -> None:
    """Raise StagedLost unless Spark finds all rows that the tasks reported.

    Spark's listing of the folder may be older than ours.
    """
    _require(staged, spark.read.parquet(staged.folder).count())


def _require(staged: Staged, rows: int) -> None:
    if rows != (expected := net_changes(staged.counts)):
        raise StagedLost(
            f"staged net changes are gone: {staged.folder} has {counted(rows, 'row')} of"
            f" {expected:,}: run again"
        )


def _stage_in_driver(spark: SparkSession, rows: pa.Table, plan: TargetPlan, folder: str) -> Staged:
    events = list(decode_all(rows.to_batches(), plan.decode))
    if plan.decode.routing is not None and events:
        events = route_in_driver(
            spark, pa.Table.from_batches(events), plan.decode, f"{folder}-routed"
        ).to_batches()
    batches = list(_collapse_all(events, plan.decode))
    net = pa.Table.from_batches(batches, plan.decode.net_schema)
    write_parquet(folder, net)
    return _staged(folder, added_up(count(net, plan.decode).to_pylist()), net)


def _staged(folder: str, counted: Counted, net: pa.Table | None = None) -> Staged:
    counts = counted.by_action | {RAW_ROWS: counted.raw_rows}
    return Staged(folder, parquet(folder), counts, counted.incomplete, net)


def _stage_routed(
    spark: SparkSession, change_log: ChangeLog, plan: TargetPlan, routing: Routing, folder: str
) -> Counted:
    changes = read_row_changes(spark, change_log, plan.decode, plan.state.relation_ids)
    changes.transform(_collapsed(plan, routing)).write.mode("overwrite").parquet(folder)
    flags = [F.col(flag) for flag in plan.decode.shape.flags]
    fresh = F.col("action").isin(ACTION_INSERT, ACTION_UPSERT)
    lacking = fresh & F.greatest(F.lit(False), *flags) if flags else F.lit(False)
    by_action = (
        spark.read.parquet(folder)
        .groupBy("action")
        .agg(
            F.count("*").alias("rows"),
            F.count("raw").alias("verbatim"),
            F.max(lacking).alias("incomplete"),
        )
        .collect()
    )
    return added_up(by_action)


def _collapsed(plan: TargetPlan, routing: Routing) -> Callable[[DataFrame], DataFrame]:
    """Return the transformation from raw messages to net changes, by a filter that Spark
    evaluates.
    """
    decode_plan, shape = plan.decode, plan.decode.shape
    events_schema, result_schema = ddl(decode_plan.decoded_schema), ddl(decode_plan.net_schema)
    names = decode_plan.event_schema.names

    def decode_part(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return decode_all(parts, decode_plan)

    def collapse_part(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _collapse_all(list(parts), decode_plan)

    def transform(changes: DataFrame) -> DataFrame:
        tasks = tasks_of(plan)
        key = [
            F.expr(decode_plan.types[i].equal_texts_sql(f"coalesce(o{k}, c{i})"))
            for k, i in enumerate(shape.key)
        ]
        events = route(changes.mapInArrow(once(decode_part), events_schema), routing, names)
        if tasks <= 1:
            return events.coalesce(1).mapInArrow(collapse_part, result_schema)
        return events.repartition(tasks, *key).mapInArrow(collapse_part, result_schema)

    return transform


def _collapse_all(parts: Sequence[pa.RecordBatch], plan: DecodePlan) -> Iterator[pa.RecordBatch]:
    if parts:
        events = pa.Table.from_batches(parts, plan.event_schema)
        net = collapse_events(events, plan)
        yield from net.to_batches(max_chunksize=rows_at_once(net))
