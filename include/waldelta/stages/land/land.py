"""Land: appends one read window of the slot to the change log as a batch of raw messages with their
envelopes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict

import pyarrow as pa

from waldelta.config import Source
from waldelta.errors import DecodeError
from waldelta.failpoints import fault_point
from waldelta.lake import WRITE_FAILURES
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.changelog.batch_file import BatchFile
from waldelta.pgoutput import UnreadMessage
from waldelta.pipeline import named_error
from waldelta.slot.read import ReadRequest
from waldelta.slot.read.peek import LANDING_SCHEMA, PeekBound, PeekTimes, peek
from waldelta.spark import Runner
from waldelta.spark.runner import Answer, Task
from waldelta.spark.task_attempts import error_text as task_error
from waldelta.spark.write_errors import change_log_write_error

# The task's result: its file (all null when no message came), the peek's duration, and its error.
_WRITTEN = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("server_s", pa.float64()),
        ("total_s", pa.float64()),
        ("messages", pa.int64()),
        ("failed", pa.string()),
        # The unreadable message, when the task failed by one.
        ("id", pa.string()),
        ("lsn", pa.int64()),
        ("xid", pa.int64()),
        ("raw", pa.binary()),
        ("streamed", pa.bool_()),
    ]
)


def land(  # noqa: PLR0913, PLR0917 - one call, with nothing that its parts would be together
    runner: Runner,
    conninfo: str,
    source: Source,
    bound: PeekBound,
    change_log: ChangeLog,
    batch: int,
    check_read: Callable[[], None] = lambda: None,
) -> PeekTimes:
    """Peek up to ``bound`` in one Spark task that writes a file, and commit the file as ``batch``.

    The batch is durable on return. Returns the peek's duration. Messages never become Spark's rows,
    which would cost more than decoding them. ``check_read`` is called before the commit, and raises
    when what was read must not land. Raises the task's error: SlotInUse, PeekTimeout, DecodeError
    with the message, or TargetNotWritable (nothing is landed then, and the slot keeps everything);
    LateWriter when another run has landed the batch.
    """

    def read(_: int) -> pa.Table:
        times = PeekTimes()
        try:
            file = change_log.write(batch, peek(conninfo, source, bound, times), LANDING_SCHEMA)
            told = (asdict(file) if file is not None else {}) | asdict(times)
        except OSError as err:
            # If this were raised, Spark would peek again and find no more disk space.
            told = {"failed": task_error(err)}
        except DecodeError as err:
            if err.unread is None:
                raise
            told = {"failed": task_error(err)} | asdict(err.unread.shortened())
        return pa.Table.from_pylist([told], schema=_WRITTEN)

    row = _written(runner, change_log.uri, read)
    file = BatchFile(row["path"], row["size"], row["stats"]) if row["path"] is not None else None
    check_read()
    try:
        change_log.add(batch, file, _commit_metadata(batch, source, bound))
    except WRITE_FAILURES as err:
        raise change_log_write_error(change_log.uri, err) or err from err
    fault_point("land.committed")
    return PeekTimes(row["server_s"], row["total_s"], row["messages"])


def _commit_metadata(batch: int, source: Source, bound: PeekBound) -> str:
    told = {
        "batch": batch,
        "slot": source.slot,
        "from_lsn": str(bound.from_lsn) if bound.from_lsn is not None else None,
        "upto_lsn": str(bound.upto_lsn),
        "attempt": uuid.uuid4().hex,
        **asdict(ReadRequest.of(source)),
    }
    return json.dumps({"waldelta": told})


def _written(runner: Runner, uri: str, read: Task) -> Answer:
    """Have a task write a batch's file; returns its result (_WRITTEN) or raises its error."""
    row = None
    try:
        (row,) = runner.run(1, _WRITTEN, read)
        if row["failed"] is not None:
            raise OSError(row["failed"])
    except Exception as err:
        # The task's own error is raised, not Spark's, because a read window that timed out is
        # retried with a smaller one.
        named = named_error(err)
        if isinstance(named, DecodeError) and row is not None and row["raw"] is not None:
            named.unread = UnreadMessage(
                row["id"], row["lsn"], row["xid"], bytes(row["raw"]), streamed=row["streamed"]
            )
        raise named or change_log_write_error(uri, err) or err from err
    return row
