"""Keeps Spark from retrying tasks that raised one of our errors; a task whose process died is
retried.

A retry would only meet the same error. So a task doesn't raise such an error where it can return it
as a row. Where rows are the task's result, the error is noted for later attempts, which raise it at
once.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from waldelta.errors import WaldeltaError
from waldelta.pipeline import named_error

_Reader = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def error_text(err: BaseException) -> str:
    """Return an error as the text that ``named_error`` reads, for a row to the driver."""
    return "".join(traceback.format_exception_only(err)).strip()


def once(read: _Reader) -> _Reader:
    """Wrap a task's function so that later attempts raise the named error that an earlier one met.

    This works on the machine where the error occurred: the note is in the folder that Spark clears
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
