"""Messages: writes what pg_logical_emit_message emitted from the change log into its own Delta
table, each exactly once.

This runs alongside apply when the pipeline file has ``messages``. Transactional messages appear
when their transaction has committed, in commit order; others appear independently.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.target_plan import find_unreadable_logical
from waldelta.changes.merge.statements import CommitTag
from waldelta.errors import DecodeError, LateWriter, TargetNotWritable
from waldelta.failpoints import fault_point
from waldelta.lake import MESSAGES, DeltaTarget, Overtaken, TargetVersion
from waldelta.lake.changelog import place_columns
from waldelta.lake.changelog.row_messages import commits, logical_messages
from waldelta.lake.data_file import NEW_FILES, DataFiles, discard, new_prefix
from waldelta.lake.layout import NewFile
from waldelta.pgoutput.messages import decode_logical_messages
from waldelta.pgoutput.transactions import LAST_SEQ, SEQ_BITS, Segments
from waldelta.pipeline import AdvisoryLock, Job, SlotIdentity
from waldelta.pipeline.advisory_locks import messages_lock
from waldelta.pipeline.targets import messages_applied, record_unreadable
from waldelta.pipeline.targets.watermarks import messages_app_id
from waldelta.spark import Runner
from waldelta.spark.runner import shares

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
    malformed message, TargetNotWritable for a table with features that only Spark writes.
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
    table, prefix = _open(place), new_prefix()
    condition, layout = logical_messages(segments), table.layout
    dealt = shares(change_log.pieces(condition))

    def write(number: int) -> pa.Table:
        with DataFiles(place.files, layout, prefix) as files:
            for part in change_log.read(dealt[number], condition, _COLUMNS):
                files.write(_add_columns(read_messages(part, segments), layout.schema))
            return pa.Table.from_pylist(files.close(), NEW_FILES)

    try:
        added = runner.run(len(dealt), NEW_FILES, write)
        lock.verify()
        # The identity is read again: with a new slot, batches have other numbers.
        if messages_applied(job, job.read_identity()) != start:
            raise LateWriter("another run wrote logical messages at the same time: run again")
        fault_point("messages.writing")
    except DecodeError as err:
        discard(place, prefix)
        unread = find_unreadable_logical(change_log, segments)
        raise record_unreadable(job, unread, err) if unread is not None else err from err
    except Exception:
        discard(place, prefix)
        raise
    try:
        table.replace_files([], map(NewFile.of, added), tag.delta)
    except Overtaken as err:  # After any other error, the commit may exist.
        discard(place, prefix)
        raise LateWriter("another program wrote to the logical messages: run again") from err
    fault_point("messages.written")
    return last


def _open(place: DeltaTarget) -> TargetVersion:
    """Returns the table of logical messages, which is created where there is none."""
    table = place.find() or place.create(SCHEMA)
    if not table.is_writable:
        raise TargetNotWritable(
            f"{place.uri} requires features of Delta that waldelta doesn't write: drop them"
            " (alter table ... drop feature), and run again"
        )
    return table


def _add_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns the rows with the columns that others have added to the table, as nulls."""
    absent = [field for field in schema if field.name not in SCHEMA.names]
    for field in absent:
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    return rows.select(schema.names)


def read_messages(changes: pa.RecordBatch, segments: Segments) -> pa.Table:
    """Returns rows of SCHEMA for the committed messages among ``changes``."""
    place = segments.places(*place_columns(changes))
    counts = place >= 0
    changes, place = changes.filter(pa.array(counts)), place[counts]
    messages = decode_logical_messages(changes["data"], place_columns(changes)[2] >= 0)
    _, commit_ts = commits(changes, segments)
    is_transactional = pa.array(messages.is_transactional)
    at: Any = pc.if_else(is_transactional, commit_ts, pa.scalar(None, commit_ts.type))
    columns = [
        pa.array(place >> SEQ_BITS),
        pa.array(place & LAST_SEQ),
        pa.array(messages.lsn),
        changes["xid8"],
        at.cast(SCHEMA.field("commit_ts").type),
        is_transactional,
        messages.prefix,
        messages.content,
    ]
    return pa.table(columns, schema=SCHEMA)
