"""Writes a copy's rows into its target: by tasks that write files, by Spark, or only rows that
differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from waldelta.arrow import UTC_TIME
from waldelta.changes.merge.commits import (
    check_alone,
    commit_equal,
    read_commit,
    take_over_for_copy,
)
from waldelta.changes.merge.divide import remove_partitions
from waldelta.changes.merge.mode_target import ModeTarget, stage_net
from waldelta.changes.merge.statements import (
    CommitTag,
)
from waldelta.changes.merge.target_table import (
    CopyCommit,
    TargetColumn,
    only_row,
    prepare_target,
    replace_target,
    stored_frame,
    target_schema,
    writing_target,
)
from waldelta.changes.stage.folders import staged_in
from waldelta.changes.stage.net_files import NetFiles
from waldelta.config.pipeline_file import Target
from waldelta.errors import EmptyPartitionValue, ModeRefused, NeedsSync, SnapshotLost, StateError
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget, Fence, Tag, TargetVersion, staging_folder
from waldelta.lake.delta_statements import (
    needs_mapping,
    set_change_data_feed,
    set_deletion_vectors,
)
from waldelta.lake.layout import CHANGE_DATA_FEED, TableOptions
from waldelta.lake.ledger import TableState
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.targets import check_target
from waldelta.postgres import TableId
from waldelta.snapshot.read_table import TableCopy
from waldelta.spark import Runner
from waldelta.spark.runner import once
from waldelta.spark_sql import simple_type
from waldelta.stages.repair.mend.mend import (
    ExpectedRows,
    bucket_count,
    differences,
    merge_differences,
)
from waldelta.stages.sync._staged_chunks import StagedCopy, stage_copy
from waldelta.stages.sync._write_files import (
    ChunkReader,
    RowDiff,
    WrittenCopy,
    columns_of,
    copy_files,
    open_target,
)
from waldelta.target_modes.target_mode import TargetMode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# Arrow's types of the modes' columns by Spark's; another one has the columns of the key.
_ARROW = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "timestamp": UTC_TIME,
    "array<string>": pa.list_(pa.string()),
}


@dataclass(frozen=True, slots=True)
class SnapshotMoment:
    """The position and time at which a snapshot was taken."""

    lsn: Lsn
    at: datetime

    @property
    def at_us(self) -> int:
        """The time in microseconds."""
        return round(self.at.timestamp() * 1_000_000)


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
    # The source's size, and what is verified before rows that differ are committed.
    bytes: int
    fence: Fence
    # The files of the attempt that this copy continues; None: it begins anew.
    staged: StagedCopy | None = None
    # True for a target that stores more than a mirror: its rows stay.
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Former:
    """The state of a target's last complete copy in any slot incarnation; None: it has none."""

    state: TableState | None


def write_copy(
    runner: Runner, job: Job, rows: CopyRows, state: TableState, former: Former | None
) -> WrittenCopy:
    """Write the rows into the target; with its ``former`` copy only those that differ, where that
    is exact.
    """
    name, target, full_rewrite_reason = state.table_name, job.pipeline.target, None
    place, mode = job.lake.target(name), target.mode_of(name)
    marks = target.deletion_vectors_of(name)
    options = _set_properties(runner, place, target, name)
    if rows.keeps:
        rows = _discard_staged(rows, "its target keeps rows")
        with writing_target(place):
            return WrittenCopy(_add(runner, job, state, rows))
    take_over_for_copy(runner, job, name, state.generation)
    if mode.keeps_rows:
        rows = _with_mode_columns(mode, _discard_staged(rows, "its target has columns of its mode"))
    elif former is not None:
        with writing_target(place):
            diff = mend_target(runner, job, state, former, rows)
        rows = _discard_staged(rows, diff if isinstance(diff, str) else None)
        if isinstance(diff, RowDiff):
            return WrittenCopy(CopyCommit(diff.cut.version, diff.compared, 0), diff=diff)
        full_rewrite_reason = diff
    table = None if marks else _open(runner, job, rows, options)
    if table is not None:
        copy = _copy_files(runner, table, rows)
        return replace(copy, full_rewrite_reason=full_rewrite_reason)
    rows = _discard_staged(rows, "Spark must write its target")
    runner.spark(_why_by_spark(rows, marks=marks))
    prepare_target(runner, place, rows.columns, options)
    marked = place.open().writes_deletion_vectors
    if marks and not marked:
        set_deletion_vectors(runner.spark(), place, wanted=True)
    commit = replace_target(runner, place, _stored_frame(runner, rows), rows.tag)
    # Deletion vectors can be switched off only now, when no file has one any more.
    if marked and not marks:
        set_deletion_vectors(runner.spark(), place, wanted=False)
    return WrittenCopy(commit, full_rewrite_reason=full_rewrite_reason)


def _copy_files(runner: Runner, target: TargetVersion, rows: CopyRows) -> WrittenCopy:
    """Have tasks write the rows; raises SnapshotLost where the target's partitions can't have a
    value, after it has removed them.
    """
    try:
        return copy_files(
            runner, target, columns_of(rows.columns), rows.tasks, rows.reader, rows.tag,
            rows.all_read, rows.staged,
        )  # fmt: skip
    except EmptyPartitionValue as err:
        _discard_staged(rows, None)
        remove_partitions(runner, target, str(rows.target), err)
        raise SnapshotLost(f"{rows.target}: {err}: its copy starts again, undivided") from None


def _open(runner: Runner, job: Job, rows: CopyRows, options: TableOptions) -> TargetVersion | None:
    """Returns the target as open_target() does; where it is to be clustered, Spark creates it.

    Spark's own overwrite would forget the columns by which it is clustered.
    """
    place = job.lake.target(str(rows.target))
    if options.cluster_by and not place.exists:
        runner.spark("clustering, which only Spark creates")
        prepare_target(runner, place, rows.columns, options)
    return open_target(place, rows.columns, options)


def _set_properties(runner: Runner, place: DeltaTarget, target: Target, name: str) -> TableOptions:
    """Set the properties of a target by the pipeline file; returns the options of a new one."""
    shows = target.change_data_feed_of(name)
    if (table := place.find()) is not None:
        set_change_data_feed(runner.spark, table, shows)
    return TableOptions.of(target.layout_of(name), {CHANGE_DATA_FEED: "true"} if shows else {})


def _discard_staged(rows: CopyRows, why: str | None) -> CopyRows:
    """Returns the rows without the records of what tasks have staged, which it removes.

    With a reason ``why`` all rows are needed: raises SnapshotLost where these are only those that
    earlier attempts lacked.
    """
    if rows.staged is None:
        return rows
    rows.staged.records.remove()
    if why is not None and rows.staged.earlier is not None:
        raise SnapshotLost(f"{rows.target}: {why}: its copy starts again")
    return replace(rows, staged=None)


def _stored_frame(runner: Runner, rows: CopyRows) -> DataFrame:
    """Returns the rows as Spark's tasks read them and as the target stores them."""
    numbers = runner.spark().range(0, rows.tasks, 1, rows.tasks)
    read = numbers.mapInArrow(once(_in_frames(rows.reader)), target_schema(rows.columns))
    return stored_frame(read, rows.copy.columns)


def obstacle(
    former: Former,
    key: Sequence[str],
    target_types: Mapping[str, str],
    copy_types: Mapping[str, str],
) -> str | None:
    """Returns why only a whole copy is exact, or None when merging what differs is.

    ``target_types`` and ``copy_types`` are Spark types by column: the target's, and those that a
    copy would write.
    """
    if former.state is None:
        return "it was never copied completely"
    if not key:
        return "it has no key"
    if sorted(former.state.key_columns) != sorted(key):
        return "its key has changed since it was copied"
    if dict(target_types) != dict(copy_types):
        return "its columns, or their types, differ from its target's"
    return None


def mend_target(
    runner: Runner, job: Job, state: TableState, former: Former, rows: CopyRows
) -> RowDiff | str:
    """Compare a copy's rows with the target by key, and merge the differences.

    Returns the reason instead when only a whole copy is exact. Raises LateWriter, SnapshotLost, or
    the error that a task named.
    """
    name = state.table_name
    target = job.lake.target(name)
    if (table := target.find()) is None:
        return "it has no target any more"
    target.log.check_entry(table.version + 1)

    def merge(expected: ExpectedRows, folder: str, tag: CommitTag) -> CommitTag:
        return merge_differences(
            runner, job, name, expected.net_columns, rows.copy, folder, tag=tag, fence=rows.fence
        )

    try:
        if former.state is not None:
            check_target(job, former.state, table.version)
        types = {column.name: simple_type(column.spark_type) for column in rows.columns}
        why = obstacle(former, rows.copy.key_columns, table.spark_types, types)
    except StateError as err:
        why = str(err)
    try:
        if why is None:
            return _merge_all(runner, job, state, rows, table, merge=merge)
    except NeedsSync as err:
        why = str(err)
    log.warning("table=%s is copied as a whole: %s", name, why)
    return why


def _merge_all(  # noqa: PLR0913 - a copy, its target, and how it is merged
    runner: Runner,
    job: Job,
    state: TableState,
    rows: CopyRows,
    table: TargetVersion,
    *,
    merge: Callable[[ExpectedRows, str, CommitTag], CommitTag],
    live: str | None = None,
) -> RowDiff:
    """Stage a copy's rows, compare them with all rows of the target, and commit what differs.

    Raises NeedsSync, with nothing committed, when the target has a key twice, and SnapshotLost when
    another writer changed it since this version.
    """
    name, number = state.table_name, rows.tag.number
    staged = rows.staged
    buckets = staged.records.buckets if staged is not None else bucket_count(table, rows.bytes)
    folder = staging_folder(job.lake, name, state.generation, number, job.run_id)
    key = rows.copy.key_columns
    expected = ExpectedRows(job.lake, folder, rows.copy, key, buckets, is_whole=True)
    with staged_in(runner, folder):
        expected, count = stage_copy(runner, expected, rows.tasks, rows.reader, staged)
        net = differences(runner, expected, count, table.place, live)
        rows.all_read()
        fault_point("resync.compared")
        # The same transaction id as a copy's, which this replaces.
        tag = CommitTag(rows.tag.app_id, number, job.run_id, counts=net.counts, verb="resync")
        cut = (
            read_commit(job, state, merge(expected, net.files.folder, tag))
            if net.counts
            else commit_equal(runner, job, state, tag, key[0])
        )
        check_alone(job, cut, table.version)
    return RowDiff(cut, count - cut.inserted - cut.updated)


def _why_by_spark(rows: CopyRows, *, marks: bool) -> str:
    """Returns the feature of a copy for which Spark must write it, because delta-rs doesn't."""
    if needs_mapping(column.name for column in rows.columns):
        return "column mapping, which a column's name requires"
    if marks:
        return "deletion vectors"
    return "features of a target that delta-rs doesn't write"


def keep_target(runner: Runner, job: Job, state: TableState) -> WrittenCopy:
    """Keep the target's rows under a new generation, which late writers of earlier ones can't
    commit to.
    """
    take_over_for_copy(runner, job, state.table_name, state.generation)
    return WrittenCopy(CopyCommit(job.lake.target(state.table_name).version, 0, 0))


def _in_frames(
    reader: ChunkReader,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the function that reads the rows of Spark tasks by their numbers."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader(number)

    return read


def keeps_earlier_rows(job: Job, table: str, key: Sequence[str]) -> bool:
    """Returns whether the target keeps the rows of an earlier copy in its mode and later changes.

    Raises ModeRefused when its mode needs a key and the table has none, or when its mode differs
    from the target's.
    """
    mode = job.pipeline.target.mode_of(table)
    mode.check_key(table, key)
    states = job.ledger.complete_states(table)
    if not states or not job.lake.target(table).exists:
        return False
    states[-1].target_mode.check_change(table, mode)
    return states[-1].target_mode.keeps_rows


def _mode_columns(mode: TargetMode, rows: CopyRows) -> list[TargetColumn]:
    """Returns the columns of a copy's target, with those of its mode.

    Where a TRUNCATE is a row, key columns are nullable, because it has no key.
    """
    is_log, columns = mode.fold.has_changes, {column.name: column for column in rows.columns}
    key = [columns[name] for name in rows.copy.key_columns]
    keys = pa.struct([(column.name, column.arrow) for column in key])
    added = mode.columns({column.name: column.spark_type for column in key})
    return [
        *(replace(column, nullable=column.nullable or is_log) for column in rows.columns),
        *(TargetColumn(name, kind, _ARROW.get(kind, keys), True) for name, kind in added.items()),
    ]


def _with_mode_columns(mode: TargetMode, rows: CopyRows) -> CopyRows:
    """Returns the rows of a first copy with the columns of the mode, as of the copy's snapshot."""
    columns, read = _mode_columns(mode, rows), rows.reader
    first = mode.first_values(rows.moment.lsn.value, rows.moment.at)
    added = [(c.name, pa.scalar(first.get(c.name), c.arrow)) for c in columns[len(rows.columns) :]]

    def reader(number: int) -> Iterator[pa.RecordBatch]:
        for batch in read(number):
            constants = (pa.repeat(value, len(batch)) for _, value in added)
            names = [*batch.schema.names, *(name for name, _ in added)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)

    return replace(rows, columns=columns, reader=reader)


def _add(runner: Runner, job: Job, state: TableState, rows: CopyRows) -> CopyCommit:
    mode = job.pipeline.target.mode_of(state.table_name)
    copy, name, target = rows.copy, state.table_name, job.lake.target(state.table_name)
    table = target.open()
    if complete := job.ledger.complete_states(name):
        check_target(job, complete[-1], table.version)
    columns = _check_same_columns(rows, table, mode)
    _check_position(runner, name, table, mode, rows.moment.lsn)
    mode_columns = _mode_columns(mode, rows)
    # A column may be null that may not be in the target.
    if not table.can_store(columns_of(mode_columns)):
        prepare_target(runner, target, mode_columns)
        table = target.open()
    take_over_for_copy(runner, job, name, state.generation)

    merge = _merge_as_changes(runner, job, rows, mode, table)
    live = mode.live_query(columns, copy.key_columns)
    try:
        diff = _merge_all(runner, job, state, rows, table, merge=merge, live=live)
    except NeedsSync as err:
        raise ModeRefused(
            f"the target of {name} can't be compared ({err}), and its mode keeps rows: move"
            " its folder away and sync it again"
        ) from None
    return CopyCommit(diff.cut.version, diff.compared, 0)


def _merge_as_changes(
    runner: Runner, job: Job, rows: CopyRows, mode: TargetMode, table: TargetVersion
) -> Callable[[ExpectedRows, str, CommitTag], CommitTag]:
    """Returns the function that commits differences as changes at the snapshot's position."""
    copy, name, moment = rows.copy, str(rows.target), rows.moment

    def merge(expected: ExpectedRows, folder: str, tag: CommitTag) -> CommitTag:
        log.info("table=%s compared with what it keeps: %s", name, tag.counts)
        mode_target = ModeTarget(
            mode, dict(copy.columns), expected.numbering.key, (), table.schema, has_equal_keys=True
        )
        net = NetFiles.of(folder, job.lake)

        def read(files: NetFiles, number: int) -> pa.Table:
            return mode_target.versions_of(
                files.all_of(number), moment.lsn.value, moment.at_us, sum(files.rows[:number])
            )

        counts = stage_net(runner, table.place, mode_target, net, read, f"{folder}-kept")
        tag = replace(tag, counts=dict(counts))
        return merge_differences(
            runner,
            job,
            name,
            mode_target.net_columns,
            copy,
            f"{folder}-kept/net",
            tag=tag,
            fence=rows.fence,
        )

    return merge


def _check_position(
    runner: Runner, name: str, table: TargetVersion, mode: TargetMode, lsn: Lsn
) -> None:
    """Raise ModeRefused when the target has positions after the snapshot's.

    Positions identify states. A state that begins after its own end would be taken for one that
    never existed, and be removed.
    """
    text = f"select {', '.join(f'max({column})' for column in mode.positions)} from {{rows}}"
    positions = only_row(runner, table, text).values()
    newest = max((position for position in positions if position is not None), default=0)
    if newest > lsn.value:
        raise ModeRefused(
            f"the source's WAL positions restarted: the target of {name} (mode {mode}) has"
            f" changes up to {Lsn(newest)}, but the source is only at {lsn} (another server, or"
            " restored); nothing was changed: move its folder away and sync it"
        )


def _check_same_columns(rows: CopyRows, table: TargetVersion, mode: TargetMode) -> list[str]:
    """Returns the target's columns that the source has; raises ModeRefused when old and new rows
    can't be in one table as they are.
    """
    copy, name = rows.copy, str(rows.target)
    columns = mode.source_columns(table.spark_types, copy.key_columns)
    target_types = {column: table.spark_types[column] for column in columns}
    copy_types = {column.name: simple_type(column.spark_type) for column in rows.columns}
    if not copy.key_columns:
        raise ModeRefused(
            f"{name} has no key, so a new copy can't be compared with its changelog: move its"
            " folder away and sync it again"
        )
    if target_types != copy_types:
        differing = sorted(
            name
            for name in target_types.keys() | copy_types.keys()
            if target_types.get(name) != copy_types.get(name)
        )
        raise ModeRefused(
            f"{name} keeps rows with other columns, or types, than the source has now"
            f" ({', '.join(differing)}): alter the target's columns to match, or move its folder"
            " away, then sync it again"
        )
    mode.check_stored_key(name, table.schema, copy.key_columns)
    return columns
