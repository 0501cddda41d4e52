"""Runs numbered Python functions as Spark tasks wherever Spark has cores; their results are
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import Row

from waldelta.errors import ApplyError, WaldeltaError
from waldelta.permissions import lake_umask, private_files
from waldelta.pipeline.task_errors import named_error
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.session import is_started
from waldelta.spark.task_attempts import error_text as task_error
from waldelta.spark.task_attempts import once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Task = Callable[[int], pa.Table]
# Runs a number of tasks that return rows of this schema, and returns these rows.
RunTask = Callable[[int, pa.Schema, Task], list[Any]]

# Fewer rows or bytes aren't worth a task: each one reads what all need, and writes files of its
# own.
ROWS_PER_TASK = 250_000
BYTES_PER_TASK = 64 << 20
# So many tasks run in this process while no session has been started, since a JVM takes longer to
# start.
LOCAL_TASKS = 4
_FAILED = pa.field("_wd_failed", pa.string())


class _HasSize(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


R = TypeVar("R", bound=_HasSize)


def shares(pieces: Iterable[R], least_rows: int = 0) -> list[list[R]]:
    """Group pieces, in their order, into tasks of at least ROWS_PER_TASK rows or BYTES_PER_TASK.

    ``least_rows`` is how many rows make a task when that is more.
    """
    found: list[list[R]] = []
    rows = max(ROWS_PER_TASK, least_rows)
    taken, weighs = rows, 0
    for piece in pieces:
        if taken >= rows or weighs >= BYTES_PER_TASK:
            found.append([])
            taken = weighs = 0
        found[-1].append(piece)
        taken, weighs = taken + piece.rows, weighs + piece.bytes
    return found


def run_tasks(
    spark: SparkSession, count: int, row_schema: pa.Schema, task: Task, *, stops: bool = False
) -> list[Any]:
    """Run ``task`` with each number from 0 to ``count`` - 1; returns rows of schema ``row_schema``.

    A task may run again when its worker died or its stage is repeated. It doesn't after raising one
    of our errors, which this raises once all tasks have ended. With ``stops`` such an error ends
    the other tasks at once, because their work is useless without it. No more than LOCAL_TASKS run
    in this process while no session has been started.
    """

    umask, schema = lake_umask(), row_schema.append(_FAILED)

    def numbered(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for number in part["id"].to_pylist():
                try:
                    with private_files(umask):
                        done = task(number)
                except WaldeltaError as err:
                    if stops:
                        raise
                    yield pa.RecordBatch.from_pylist(
                        [{_FAILED.name: task_error(err)}], schema=schema
                    )
                    return
                yield from done.append_column(
                    _FAILED, pa.nulls(len(done), _FAILED.type)
                ).to_batches()
                # Spark keeps the process for later tasks, perhaps for hours.
                pa.default_memory_pool().release_unused()

    if not count:
        return []
    if count <= LOCAL_TASKS and not is_started(spark):
        told_here = numbered(iter([pa.RecordBatch.from_pydict({"id": list(range(count))})]))
        rows = [Row(**row) for part in told_here for row in part.to_pylist()]
    else:
        numbers = spark.range(0, count, 1, max(1, count))
        rows = _collected(numbers.mapInArrow(once(numbered) if stops else numbered, ddl(schema)))
    for row in rows:
        if (failed := row[_FAILED.name]) is not None:
            raise named_error(Exception(failed)) or ApplyError(failed)
    return rows


def _collected(answers: DataFrame) -> list[Any]:
    """Return the rows; raises a task's error, which ended the others, under its name."""
    try:
        return answers.collect()
    except Exception as err:
        if (named := named_error(err)) is not None:
            raise named from None
        raise
