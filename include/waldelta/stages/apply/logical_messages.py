"""Messages: writes what pg_logical_emit_message emitted from the change log into its own Delta
table, each exactly once.

This runs alongside apply when the pipeline file has ``messages``. Transactional messages appear
when their transaction has committed, in commit order; others appear independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.target_plan import find_unreadable_logical
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.merge.target_table import plainly_typed
from waldelta.errors import ApplyError, DecodeError, LateWriter, without_values
from waldelta.failpoints import fault_point
from waldelta.lake import MESSAGES
from waldelta.lake.changelog import ChangeLog, place_columns
from waldelta.lake.changelog.row_messages import commits
from waldelta.pgoutput import Segments
from waldelta.pgoutput.messages import decode_logical_messages
from waldelta.pgoutput.transactions import LAST_SEQ, SEQ_BITS
from waldelta.pipeline import AdvisoryLock, Job, SlotIdentity, is_conflict, named_error
from waldelta.pipeline.advisory_locks import messages_lock
from waldelta.pipeline.targets import messages_applied, record_unreadable
from waldelta.pipeline.targets.watermarks import messages_app_id
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.runner import once

_COLUMNS = ("batch", "seq", "xid8", "streamed_xid", "commit_lsn", "commit_ts", "data")
SCHEMA = pa.schema(
    [
        # The batch that committed the message, and its place in it: together they are the commit
        # order.
        pa.field("batch", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("xid8", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", "UTC")),
        pa.field("transactional", pa.bool_()),
        pa.field("prefix", pa.string()),
        pa.field("content", pa.binary()),
    ]
)


def write_messages(runner: Runner, job: Job) -> int:
    """Append the messages of all batches landed since the last call in one commit; returns the last
    batch.

    Raises LockHeld or LateWriter when another run does the same concurrently, DecodeError for a
    malformed message.
    """
    identity = job.read_identity()
    change_log = job.change_log(identity)
    if (start := messages_applied(job, identity)) >= (change_log.last_batch() or 0):
        return start
    with messages_lock(job) as lock:
        # Read under the lock: of two runs, the last one to hold it has no lower number, and Delta
        # skips what the other one still begins.
        last = change_log.last_batch() or 0
        # Another run may have written some of the messages since. Delta alone would write them
        # again under a later batch's number.
        start = messages_applied(job, identity)
        if start >= last:
            return start
        job.read_landed_sizes(identity, start, last)  # raises SlotGap
        return _append(runner, job, identity, start, last, lock)


def _append(
    runner: Runner,
    job: Job,
    identity: SlotIdentity,
    start: int,
    last: int,
    lock: AdvisoryLock,
) -> int:
    """Append the messages of the batches after ``start`` up to ``last``."""
    change_log = job.change_log(identity)
    segments = change_log.stream(start, last).segments
    place, tag = job.lake.bookkeeping(MESSAGES), CommitTag(messages_app_id(identity), last)
    rows = plainly_typed(_messages(runner, change_log, segments))
    lock.verify()
    # The identity is read again: with a new slot, batches have other numbers.
    if messages_applied(job, job.read_identity()) != start:
        raise LateWriter("another run wrote logical messages at the same time: run again")
    fault_point("messages.writing")
    try:
        place.write(rows, "append", tag.delta)
    except Exception as err:
        if is_conflict(err):
            raise LateWriter("another run is writing logical messages: run again") from err
        error = named_error(err)
        if (
            isinstance(error, DecodeError)
            and (unread := find_unreadable_logical(change_log, segments)) is not None
        ):
            error = record_unreadable(job, unread, error)
        raise error or ApplyError(f"messages not written: {without_values(err)}") from err
    fault_point("messages.written")
    place.sync_commit(place.version)
    return last


def _messages(runner: Runner, change_log: ChangeLog, segments: Segments) -> DataFrame:
    def read(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield from read_messages(part, segments)

    rows = _read_changes(runner, change_log, segments).where(F.col("kind") == "M").select(*_COLUMNS)
    return rows.mapInArrow(once(read), ddl(SCHEMA))


def read_messages(changes: pa.RecordBatch, segments: Segments) -> Iterator[pa.RecordBatch]:
    """Yields rows of SCHEMA for the committed messages among ``changes``."""
    place = segments.places(*place_columns(changes))
    counts = place >= 0
    if not counts.any():
        return
    changes, place = changes.filter(pa.array(counts)), place[counts]
    messages = decode_logical_messages(changes["data"], place_columns(changes)[2] >= 0)
    _, commit_ts = commits(changes, segments)
    at: Any = pc.if_else(
        pa.array(messages.is_transactional), commit_ts, pa.scalar(None, commit_ts.type)
    )
    yield pa.RecordBatch.from_arrays(
        [
            pa.array(place >> SEQ_BITS),
            pa.array(place & LAST_SEQ),
            pa.array(messages.lsn),
            changes["xid8"],
            at.cast(SCHEMA.field("commit_ts").type),
            pa.array(messages.is_transactional),
            messages.prefix,
            messages.content,
        ],
        schema=SCHEMA,
    )


def _read_changes(runner: Runner, change_log: ChangeLog, segments: Segments) -> DataFrame:
    """Returns messages of the range and of the earlier parts that it commits.

    Those parts are transactions that were prepared earlier. Their positions show which of them
    count.
    """
    # Conditions can be made only once the session has started.
    messages = change_log.place.frame(runner.spark())
    condition = (F.col("batch") > segments.after) & (F.col("batch") <= segments.upto)
    for part in segments.older:
        condition = condition | (
            (F.col("batch") == part.batch) & F.col("seq").between(part.first, part.last)
        )
    return messages.where(condition)
