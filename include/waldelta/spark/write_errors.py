"""Explains a failed write by Spark, and checks whether its tasks can write into the lake."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from waldelta.errors import TargetNotWritable, without_values
from waldelta.lake import not_writable_by_spark, why_not_writable
from waldelta.lake.write_errors import storage_refusal
from waldelta.spark import Runner


def why_not_writable_in_task(runner: Runner, root: str) -> str | None:
    """Run why_not_writable() in a task, whose process may be another user's, on another machine."""

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict(
                {"problem": pa.array([why_not_writable(root)], pa.string())}
            )

    found: str | None = (
        runner.spark().range(0, 1, 1, 1).mapInArrow(ask, "problem string").collect()[0][0]
    )
    return found if found is None else f"in Spark's tasks {found}"


def change_log_write_error(uri: str, err: Exception) -> TargetNotWritable | None:
    """Return TargetNotWritable when Spark's error means that; else None."""
    refused = storage_refusal(str(err))
    if refused is None:
        return None
    kept = "; nothing was consumed from the slot"
    return not_writable_by_spark(uri, err, without_values(err), refused, kept)
