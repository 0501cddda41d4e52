"""Attempts: Spark does a task again whose process died, and should; an error of ours it would only
meet again.

So what a task fails by isn't raised where it can be told as a row; and where rows are the task's
result, it is noted for the attempts that come, which raise it at once.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from waldelta.errors import WaldeltaError
from waldelta.pipeline.task_errors import named_error

_Reader = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def error_text(err: BaseException) -> str:
    """An error as the text that ``named_error`` reads, on its way to the driver in a row."""
    return "".join(traceback.format_exception_only(err)).strip()


def once(read: _Reader) -> _Reader:
    """The same function of a task, whose later attempts raise the named error that an earlier one
    met instead of doing all again.

    They know of it on the machine that it was met on: the note is in the folder that Spark clears
    when the application ends.
    """
    key = uuid.uuid4().hex

    def attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import SparkFiles, TaskContext

        context = TaskContext.get()
        if context is None:
            yield from read(batches)
            return
        name = f"waldelta-{key}-{context.stageId()}-{context.partitionId()}"
        note = Path(SparkFiles.getRootDirectory()) / name
        if context.attemptNumber() and (known := _noted(note)) is not None:
            raise known
        try:
            yield from read(batches)
        except WaldeltaError as err:
            with suppress(OSError):
                note.write_text(error_text(err))
            raise

    return attempt


def _noted(note: Path) -> WaldeltaError | None:
    try:
        return named_error(Exception(note.read_text()))
    except OSError:
        return None
