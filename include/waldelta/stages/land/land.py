"""Land: one bite of the slot becomes one batch of the change log, raw messages with their
envelope.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError

from waldelta.config import Source
from waldelta.errors import DecodeError
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.changelog.batch_file import BatchFile
from waldelta.pgoutput import UnreadMessage
from waldelta.pipeline.task_errors import named_error
from waldelta.slot.read import ReadRequest
from waldelta.slot.read.peek import LANDING_SCHEMA, PeekBound, PeekTimes, peek
from waldelta.spark import run_tasks
from waldelta.spark.task_attempts import error_text as task_error
from waldelta.spark.write_errors import change_log_write_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What the task tells: its file, all null when nothing came, how long the peek took, and what it
# failed by.
_WRITTEN = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("server_s", pa.float64()),
        ("total_s", pa.float64()),
        ("messages", pa.int64()),
        ("failed", pa.string()),
        # The message that can't be read, when it failed by one.
        ("id", pa.string()),
        ("lsn", pa.int64()),
        ("xid", pa.int64()),
        ("raw", pa.binary()),
        ("streamed", pa.bool_()),
    ]
)


def land(  # noqa: PLR0913, PLR0917 - one call, with nothing that its parts would be together
    spark: SparkSession,
    conninfo: str,
    source: Source,
    bound: PeekBound,
    change_log: ChangeLog,
    batch: int,
    check_read: Callable[[], None] = lambda: None,
) -> PeekTimes:
    """Peek up to ``bound`` in one Spark task, which writes what came as a file, and commit it as
    ``batch``; durable when it returns.

    Returns how long the peek took. Messages never become Spark's rows: that cost more than to
    decode them. ``check_read`` is asked before the commit, and raises when what was read isn't to
    land. Raises what the task raised: SlotInUse, PeekTimeout, DecodeError with the message, or
    TargetNotWritable (nothing is landed then, the slot keeps everything); LateWriter when another
    run has landed the batch.
    """

    def read(_: int) -> pa.Table:
        times = PeekTimes()
        try:
            file = change_log.write(batch, peek(conninfo, source, bound, times), LANDING_SCHEMA)
        except OSError as err:
            # Raised, Spark would have it peeked again, to find as little room.
            return pa.Table.from_pylist([{"failed": task_error(err)}], schema=_WRITTEN)
        except DecodeError as err:
            if err.unread is None:
                raise
            return pa.Table.from_pylist(
                [{"failed": task_error(err)} | asdict(err.unread.shortened())], schema=_WRITTEN
            )
        return pa.Table.from_pylist(
            [(asdict(file) if file is not None else {}) | asdict(times)], schema=_WRITTEN
        )

    told = {
        "batch": batch,
        "slot": source.slot,
        "from_lsn": str(bound.from_lsn) if bound.from_lsn is not None else None,
        "upto_lsn": str(bound.upto_lsn),
        "attempt": uuid.uuid4().hex,
        **ReadRequest.of(source).as_commit_info(),
    }
    row = None
    try:
        (row,) = run_tasks(spark, 1, _WRITTEN, read)
        if row.failed is not None:
            raise OSError(row.failed)
    except Exception as err:
        # The task's own error, not Spark's account of it: a bite that took too long is taken again,
        # smaller.
        named = named_error(err)
        if isinstance(named, DecodeError) and row is not None and row.raw is not None:
            named.unread = UnreadMessage(
                row.id, row.lsn, row.xid, bytes(row.raw), streamed=row.streamed
            )
        raise named or change_log_write_error(change_log.uri, err) or err from err
    file = BatchFile(row.path, row.size, row.stats) if row.path is not None else None
    check_read()
    try:
        change_log.add(batch, file, json.dumps({"waldelta": told}))
    except (DeltaError, OSError) as err:
        raise change_log_write_error(change_log.uri, err) or err from err
    fault_point("land.committed")
    return PeekTimes(row.server_s, row.total_s, row.messages)
