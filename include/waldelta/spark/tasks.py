"""Tasks: Python functions that Spark runs wherever it has cores, each with a number; what they tell
comes back as rows.
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
# Has a number of tasks done, whose answers have this schema; gives the rows of these.
RunTask = Callable[[int, pa.Schema, Task], list[Any]]

_FAILED = pa.field("_wd_failed", pa.string())


class _HasSize(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


R = TypeVar("R", bound=_HasSize)


def shares(pieces: Iterable[R], rows: int, size: int) -> list[list[R]]:
    """Pieces in their order, as many together as make a task of at least so many rows, or so many
    bytes.
    """
    found: list[list[R]] = []
    taken, weighs = rows, 0
    for piece in pieces:
        if taken >= rows or weighs >= size:
            found.append([])
            taken = weighs = 0
        found[-1].append(piece)
        taken, weighs = taken + piece.rows, weighs + piece.bytes
    return found


def run_tasks(
    spark: SparkSession, count: int, row_schema: pa.Schema, task: Task, *, stops: bool = False
) -> list[Any]:
    """Run ``task`` with each of the numbers from 0 to ``count`` - 1; gives the rows of what they
    told, of schema ``row_schema``.

    A task may be run again, when its worker died or its stage is repeated; not when it raised an
    error of ours, which is raised here once all of them have ended. With ``stops`` that ends the
    others at once, whose work counts for nothing without it. A single task is run here where no
    session has been started yet: a JVM takes longer to start than most of them.
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
                # Spark keeps the process for whatever comes next, perhaps for hours.
                pa.default_memory_pool().release_unused()

    if not count:
        return []
    if count == 1 and not is_started(spark):
        told_here = numbered(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
        rows = [Row(**row) for part in told_here for row in part.to_pylist()]
    else:
        numbers = spark.range(0, count, 1, max(1, count))
        rows = _collected(numbers.mapInArrow(once(numbered) if stops else numbered, ddl(schema)))
    for row in rows:
        if (failed := row[_FAILED.name]) is not None:
            raise named_error(Exception(failed)) or ApplyError(failed)
    return rows


def _collected(answers: DataFrame) -> list[Any]:
    """The rows; raises what a task ended the others by under its name."""
    try:
        return answers.collect()
    except Exception as err:
        if (named := named_error(err)) is not None:
            raise named from None
        raise
