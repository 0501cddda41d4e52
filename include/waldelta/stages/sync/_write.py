"""Writes a copy's rows into its target: by tasks that write files, by Spark, or only rows that
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from waldelta.changes.merge.commits import take_over_for_copy
from waldelta.changes.merge.target_table import (
    CommitResult,
    TargetColumn,
    replace_target,
    stored_frame,
    target_schema,
    writing_target,
)
from waldelta.lake import Tag
from waldelta.lake.delta_statements import set_deletion_vectors
from waldelta.lake.ledger import COPYING, TableState, now
from waldelta.pipeline import Job
from waldelta.postgres import TableId
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.spark.task_attempts import once
from waldelta.stages.sync._snapshot_diff import CopiedRows, Former, RowDiff, mend_target
from waldelta.stages.sync._write_files import (
    ChunkReader,
    WrittenCopy,
    copy_files,
    open_target,
)
from waldelta.stages.sync._write_states import (
    SnapshotMoment,
    copy_states,
    prepare_states,
)


@dataclass(frozen=True, slots=True)
class CopyRows:
    """The rows of a copy, its reader and number of tasks, and the names it is committed under.

    ``all_read`` is called as soon as nothing reads any more. Where Spark replaces the target, it
    isn't called before the commit, because Spark may read a task's rows again.
    """

    # The target's name: one source table may have several targets, and ``copy`` has the source's
    # name.
    target: TableId
    copy: TableCopy
    columns: Sequence[TargetColumn]
    tasks: int
    reader: ChunkReader
    tag: Tag
    moment: SnapshotMoment
    all_read: Callable[[], object]
    # True for a target that stores more than a mirror: its rows stay.
    keeps: bool = False


def write_copy(
    runner: Runner, job: Job, rows: CopyRows, generation: int, former: Former | None
) -> WrittenCopy:
    """Write the rows into the target; with its ``former`` copy only those that differ, where that
    is exact.
    """
    table_id, target = rows.target, job.pipeline.target
    place, mode = job.lake.target(str(table_id)), target.mode_of(str(table_id))
    marks = target.deletion_vectors_of(str(table_id))
    is_plain = not (mode.keeps_rows or marks) and former is None
    if not mode.keeps_rows:  # In other modes this follows once the copy is known not to be refused.
        take_over_for_copy(runner, job, str(table_id), generation)
    here = open_target(place, rows.columns) if is_plain else None
    if here is not None:
        return copy_files(runner, here, rows.tasks, rows.reader, rows.tag, rows.all_read)
    prepare_states(runner, job, str(table_id), rows.columns, rows.copy.key_columns)
    marked = place.open().writes_deletion_vectors
    if marks and not marked:
        set_deletion_vectors(runner.spark(), place, wanted=True)
    read = (
        runner.spark()
        .range(0, rows.tasks, 1, rows.tasks)
        .mapInArrow(once(_in_frames(rows.reader)), target_schema(rows.columns))
    )
    frame = stored_frame(read, rows.copy.columns)
    begun = TableState(now(), job.run_id, str(table_id), generation, COPYING)
    given = CopiedRows(rows.copy, read, frame, rows.all_read)
    if mode.keeps_rows:
        return WrittenCopy(copy_states(runner, job, begun, given, rows))
    whole: str | None = None
    if former is not None:
        with writing_target(place):
            diff = mend_target(runner, job, begun, former, given, rows.tag.number)
        if isinstance(diff, RowDiff):
            return WrittenCopy(CommitResult(diff.version, diff.compared, 0), diff=diff)
        whole = diff
    written = replace_target(runner, place, frame, rows.tag)
    if marked and not marks:  # This can follow only now, when no deletion vectors are left.
        set_deletion_vectors(runner.spark(), place, wanted=False)
    return WrittenCopy(written, whole=whole)


def keep_target(runner: Runner, job: Job, name: str, generation: int) -> WrittenCopy:
    """Keep the target's rows under a new generation, which late writers of earlier ones can't
    commit to.
    """
    take_over_for_copy(runner, job, name, generation)
    version = job.lake.target(name).version
    return WrittenCopy(CommitResult(version, 0, 0))


def _in_frames(
    reader: ChunkReader,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the function that reads the rows of Spark tasks by their numbers."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader(number)

    return read
