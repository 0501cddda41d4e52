"""Land: one bite of the slot becomes one batch of the change log, raw messages with their envelope."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from spark_jobs.task_error import named_error
from spark_jobs.writable import write_error
from waldelta.change_log import ChangeLog
from waldelta.errors import LateWriter
from waldelta.fault import fault_point
from waldelta.peek import LANDING_SCHEMA, PeekBound, peek
from waldelta.pipeline_file import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_TYPES = {
    pa.int64(): "bigint",
    pa.string(): "string",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.timestamp("us", tz="UTC"): "timestamp",
}
_DDL = ", ".join(f"{field.name} {_SPARK_TYPES[field.type]}" for field in LANDING_SCHEMA)
# What files are pruned by and the landed end is read from; each statistic more costs time for every message.
_STATISTICS = "relation_id,xid8,end_lsn"
# Small row groups let both cores decode one batch, and readers of the timeline skip those without any.
_ROW_GROUP_BYTES = 16 << 20


def create_change_log(spark: SparkSession, uri: str) -> None:
    """Create the empty change log when there is none; raises TargetNotWritable."""
    try:
        spark.sql(
            f"create table if not exists delta.`{uri}` (batch bigint, {_DDL}) using delta partitioned by (batch) "
            f"tblproperties ('delta.dataSkippingStatsColumns' = '{_STATISTICS}', 'delta.checkpointInterval' = '50')"
        )
    except Exception as err:
        raise write_error(uri, err) or err from None


def land(
    spark: SparkSession, conninfo: str, source: Source, bound: PeekBound, change_log: ChangeLog, batch: int
) -> None:
    """Peek up to ``bound`` in one Spark task and append what came as ``batch``; durable when it returns.

    Raises what the task raised: SlotInUse, PeekTimeout, DecodeError, or TargetNotWritable (nothing is landed then, the slot
    keeps everything).
    Delta skips an append whose batch is already there, silently: raises LateWriter when the commit isn't ours.
    """

    def read(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from peek(conninfo, source, bound)

    metadata = json.dumps(
        {
            "waldelta": {
                "batch": batch,
                "slot": source.slot,
                "upto_lsn": str(bound.upto_lsn),
                "attempt": uuid.uuid4().hex,
            }
        }
    )
    try:
        (
            spark.range(0, 1, 1, 1)
            .mapInArrow(read, _DDL)
            .select(F.lit(batch).cast("bigint").alias("batch"), "*")
            .write.format("delta")
            .mode("append")
            .partitionBy("batch")
            .option("txnAppId", change_log.app_id)
            .option("txnVersion", batch)
            .option("userMetadata", metadata)
            .option("parquet.block.size", _ROW_GROUP_BYTES)
            .save(change_log.uri)
        )
    except Exception as err:
        # The task's own error, not Spark's account of it: a bite that took too long is taken again, smaller.
        raise named_error(err) or write_error(change_log.uri, err) or err from err
    fault_point("land.committed")
    change_log.make_durable()
    if not change_log.has_commit(metadata):
        raise LateWriter(f"batch {batch} of slot {source.slot!r} was landed by another run: run again")
