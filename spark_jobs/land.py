"""Land: one bite of the slot becomes one batch of the change log, raw messages with their envelope."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError

from spark_jobs.identifier import ddl, path
from spark_jobs.task_error import named_error
from spark_jobs.writable import write_error
from waldelta.batch_file import CHECKPOINT_INTERVAL, STATISTICS, BatchFile
from waldelta.change_log import ChangeLog
from waldelta.fault import fault_point
from waldelta.peek import LANDING_SCHEMA, PeekBound, peek
from waldelta.pipeline_file import Source
from waldelta.private import lake_umask, private_files

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
_FILE = pa.schema([("path", pa.string()), ("size", pa.int64()), ("stats", pa.string())])


def create_change_log(spark: SparkSession, uri: str) -> None:
    """Create the empty change log when there is none; raises TargetNotWritable."""
    try:
        spark.sql(
            f"create table if not exists {path(uri)} (batch bigint, {_DDL}) using delta partitioned by (batch) "
            f"tblproperties ('delta.dataSkippingStatsColumns' = '{','.join(STATISTICS)}', "
            f"'delta.checkpointInterval' = '{CHECKPOINT_INTERVAL}')"
        )
    except Exception as err:
        raise write_error(uri, err) or err from None


def land(
    spark: SparkSession, conninfo: str, source: Source, bound: PeekBound, change_log: ChangeLog, batch: int
) -> None:
    """Peek up to ``bound`` in one Spark task, which writes what came as a file, and commit it as ``batch``; durable when it returns.

    Messages never become Spark's rows: that cost more than to decode them.
    Raises what the task raised: SlotInUse, PeekTimeout, DecodeError, or TargetNotWritable (nothing is landed then, the slot
    keeps everything); LateWriter when another run has landed the batch.
    """

    umask = lake_umask()

    def read(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with private_files(umask):  # the task's process may be anybody's: a server's, a cluster's
            file = change_log.write(batch, peek(conninfo, source, bound), LANDING_SCHEMA)
        yield pa.RecordBatch.from_pylist([] if file is None else [asdict(file)], schema=_FILE)

    told = {"batch": batch, "slot": source.slot, "upto_lsn": str(bound.upto_lsn), "attempt": uuid.uuid4().hex}
    try:
        written = spark.range(0, 1, 1, 1).mapInArrow(read, ddl(_FILE)).collect()
    except Exception as err:
        # The task's own error, not Spark's account of it: a bite that took too long is taken again, smaller.
        raise named_error(err) or write_error(change_log.uri, err) or err from err
    file = BatchFile(*written[0]) if written else None
    try:
        change_log.add(batch, file, json.dumps({"waldelta": told}))
    except (DeltaError, OSError) as err:
        raise write_error(change_log.uri, err) or err from err
    fault_point("land.committed")
