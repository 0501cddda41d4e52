"""Writable: whether the lake can be written where Spark's tasks run, and how a failed write says
that it can't.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from waldelta.errors import TargetNotWritable
from waldelta.lake.storage import find_unwritable
from waldelta.lake.write_errors import not_written
from waldelta.pipeline.task_errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What Hadoop's file systems, their stores and Delta say of a place that can't be written; all else
# may go away by itself.
_REFUSED = re.compile(
    r"Permission denied|AccessDenied|AccessControlException|Access Denied|Forbidden|Read-only file"
    r" system"
    r"|Mkdirs failed|ParentNotDirectory|Not a directory|not a"
    r" directory|FileAlreadyExistsException|No space left on device"
    r"|DELTA_CANNOT_CREATE_LOG_PATH|DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|NoSuchBucket|UnknownHostException"
)


def find_unwritable_in_task(spark: SparkSession, root: str) -> str | None:
    """As find_unwritable(), asked in a task: its process may be another user's, on another
    machine.
    """

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict(
                {"problem": pa.array([find_unwritable(root)], pa.string())}
            )

    found: str | None = spark.range(0, 1, 1, 1).mapInArrow(ask, "problem string").collect()[0][0]
    return found if found is None else f"in Spark's tasks {found}"


def write_error(uri: str, err: Exception) -> TargetNotWritable | None:
    """TargetNotWritable when that is what Spark's error means."""
    refused = _REFUSED.search(str(err))
    if refused is None:
        return None
    return not_written(
        f"{uri} can't be written ({refused[0]}: {first_line(err)}): check target.root and the"
        " rights of whoever runs Spark; nothing was consumed from the slot",
        err,
    )
