"""Compacts and vacuums a target, removes leftovers of killed runs, and prunes change log, ledger
and reports.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tenacity

from waldelta.changes.merge.divide import Division, empty_texts, write_again
from waldelta.changes.merge.statements import MERGED_INSERTS, MERGED_UPDATES
from waldelta.config.layout_options import LayoutOptions
from waldelta.errors import LateWriter, LockHeld, class_and_text
from waldelta.failpoints import fault_point
from waldelta.lake import (
    MESSAGES,
    READ_FAILURES,
    WRITE_FAILURES,
    CommitConflict,
    Overtaken,
    Tag,
    TargetVersion,
    remove_folder,
)
from waldelta.lake.data_file import CODEC, discard, new_prefix
from waldelta.lake.delta_statements import (
    LARGEST_FILE,
    PARQUET_CODEC,
    SMALLEST_CUBE,
    SMALLEST_FILE,
    optimize,
    purge_deleted_rows,
    set_change_data_feed,
    set_clustering,
    set_deletion_vectors,
    set_properties,
    set_retention,
    vacuum,
)
from waldelta.lake.layout import (
    ROWS_PER_FILE,
    empty_value,
    folder_of,
    layout_properties,
    statistics_to_sort,
)
from waldelta.lake.ledger import Decisions, TableState, now
from waldelta.lake.ledger.prune_ledger import prune_ledger
from waldelta.lake.staging_leftovers import find_leftovers
from waldelta.lake.storage import is_within
from waldelta.pipeline import Job, RunResult, StageResult, is_conflict, target_lock
from waldelta.pipeline.targets import (
    Watermarks,
    check_target,
    messages_applied,
    synced_states,
    why_division_stays,
)
from waldelta.pipeline.targets.lifecycle import copies_under_way
from waldelta.quantities import counted
from waldelta.slot.recovery import durable_position
from waldelta.spark import Runner
from waldelta.spark.session import session_settings

log = logging.getLogger(__name__)

# In bytes. Only small files are compacted, into files that are still small, because a merge
# rewrites each file that it touches.
_SMALL_FILE, _LARGE_FILE = 1 << 20, 64 << 20
_ATTEMPTS = 3
# Delta's transaction id of a compaction, numbered by the version that it compacts.
_COMPACTION = "waldelta:compaction"
# The share of a table's rows that maintenance leaves unsorted, and the number of commits among
# which it looks for the last one that sorted them.
_UNSORTED, _MOST_COMMITS = 0.1, 2000
_WITHOUT_ROWS = ("SET TBLPROPERTIES", "VACUUM START", "VACUUM END")
# Longer than any run: an interrupted one may continue in a Spark Connect server.
_STAGED_FOR = timedelta(hours=24)


def maintain_target(runner: Runner, job: Job, name: str) -> list[str]:
    """Compact a target and delete its old versions, under its lock; returns warnings.

    Raises LockHeld when another run has the lock, and LateWriter when the target isn't compacted
    because another writer committed to it each time.
    """
    target, hours = job.lake.target(name), job.pipeline.maintenance.keep_versions_hours
    # Most files of another division are written before runs have to wait for the lock.
    plan = _Plan.of(job, name, target.open())
    if plan.division is not None:
        plan.division.write(runner)
    with target_lock(job, name):
        table = target.open()
        version = table.version
        if (state := job.read_state(name)) is not None:
            check_target(job, state, version)
        overtaken = _compact_as_chosen(runner, job, name, table)
        # Without this, only the next commit would make the log durable, and a cut could name a
        # version that a power failure removes.
        version = target.sync_behind(version)
    # The deleted files have been unused for a week at least, so no other run waits while the
    # table's folder is listed.
    _vacuum(runner, table, hours)
    target.sync_behind(version)
    if overtaken is not None:
        raise overtaken
    return [] if plan.why_not is None else [f"{name} keeps its layout: {plan.why_not}"]


def _compact_as_chosen(
    runner: Runner, job: Job, name: str, table: TargetVersion
) -> LateWriter | None:
    """Compact a target, with the pipeline file's deletion vectors and retention.

    Returns the error where another writer committed to it during each attempt. That can be a run
    that has lost the target's lock with its connection and still compacts.
    """
    target = job.pipeline.target

    def compact() -> None:
        _keep_as_chosen(runner, table, target.deletion_vectors_of(name))
        set_change_data_feed(runner.spark, table, target.change_data_feed_of(name))
        plan = _Plan.of(job, name, table)
        statistics = statistics_to_sort(plan.layout, table.properties)
        set_properties(runner.spark, table, statistics | layout_properties(plan.layout))
        if plan.division is not None:
            plan.division.commit(runner)
            table.update()
        set_clustering(runner.spark, table, plan.layout.cluster_by)
        set_retention(runner.spark, table, job.pipeline.maintenance.keep_versions_hours)
        _compact(runner, table, plan.layout)

    def see_that_commit(_: tenacity.RetryCallState) -> None:
        log.warning(
            "table=%s another writer committed during the compaction: compacting again", name
        )
        table.update()

    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_conflict),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=see_that_commit,
        reraise=True,
    )
    try:
        again(compact)
    except Exception as err:
        if not _is_conflict(err):
            raise
        return LateWriter(
            f"{name}: another writer committed to its target in each of {_ATTEMPTS} attempts to"
            " compact it: run maintain when that writer has ended"
        )
    return None


def _is_conflict(err: BaseException) -> bool:
    return isinstance(err, CommitConflict) or is_conflict(err)


def _vacuum(runner: Runner, table: TargetVersion, hours: int) -> None:
    """Delete files that no version newer than ``hours`` needs, including those of killed writers.

    delta-rs does it where it knows all writer features of the table: Spark's VACUUM of a small
    table takes seconds of CPU.
    """
    table.update()
    if table.is_writable and not table.is_clustered:
        try:
            table.vacuum(hours, full=True)
        except WRITE_FAILURES as err:  # The files may belong to another user, for example.
            log.info("%s is vacuumed by Spark: %s", table.place.uri, err)
        else:
            return
    vacuum(runner.spark(), table.place, hours)


def _keep_as_chosen(runner: Runner, table: TargetVersion, deletion_vectors: bool) -> None:
    """Follow the pipeline file's choice of deletion vectors.

    When they are switched off, existing ones are purged, so that every reader can read the table
    again.
    """
    if table.writes_deletion_vectors == deletion_vectors:
        return
    if not deletion_vectors:
        # Deletion vectors are purged before they are switched off: if the run is killed in between,
        # the next maintenance purges again.
        purge_deleted_rows(runner.spark(), table.place)
        fault_point("maintain.purged")
    set_deletion_vectors(runner.spark(), table.place, deletion_vectors)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The layout that maintenance gives a target; ``why_not`` is why it leaves a part of it as it
    is.
    """

    layout: LayoutOptions
    division: Division | None = None
    why_not: str | None = None

    @classmethod
    def of(cls, job: Job, name: str, table: TargetVersion) -> _Plan:
        """Returns the pipeline file's layout for a target; ``why_not`` says which part the target
        can't have.
        """
        layout = job.pipeline.target.layout_of(name)
        by = layout.divided_by
        if absent := layout.layout_columns - {*table.schema.names}:
            return cls(LayoutOptions(), why_not=(
                f"the pipeline file names {', '.join(sorted(absent))}, which the target doesn't"
                " have: correct the name, if the source renamed the column, or leave it out"
            ))  # fmt: skip
        if by is None or list(by) == list(table.layout.partition_by):
            return cls(layout)
        if (why_not := why_division_stays(table, by)) is not None:
            return cls(layout, why_not=why_not)
        if texts := empty_texts(table, by):
            return cls(layout, why_not=str(empty_value(texts)))
        return cls(layout, Division(table, name, by))


def _compact(runner: Runner, table: TargetVersion, layout: LayoutOptions) -> None:
    """Compact small files, and sort all rows where too many are new: that rewrites all files."""
    table.update()
    columns = layout.z_order or (layout.cluster_by if table.is_clustered else ()) or ()
    size = _file_size(table)
    # One file has nothing to sort.
    is_sorted = bool(columns) and _total(table.files) >= 2 * size
    sorts = is_sorted and _lacks_order(table, columns)
    if sorts or (_has_work(table, size) and not _compact_small(table, size)):
        # Spark's default codec would double what runs have written.
        files = {
            SMALLEST_FILE: str(_small(size)), LARGEST_FILE: str(size), PARQUET_CODEC: CODEC,
        }  # fmt: skip
        # Otherwise Delta sorts up to 100 GB of a clustered table again with each new file.
        cubes = {} if sorts else {SMALLEST_CUBE: "0"}
        with session_settings(runner.spark(), files | cubes):
            z_order = columns if sorts and not table.is_clustered else ()
            optimize(runner.spark(), table.place, z_order, full=sorts and table.is_clustered)
    fault_point("maintain.compacted")


def _file_size(table: TargetVersion) -> int:
    """Returns the bytes of the files that OPTIMIZE writes.

    Without a size of its own, they get as many rows as the files of runs.
    """
    files = table.table_files
    size, rows = sum(file.bytes for file in files), sum(file.rows for file in files)
    return table.layout.file_bytes or min(_LARGE_FILE, max(1, size * ROWS_PER_FILE // max(1, rows)))


def _small(size: int) -> int:
    """Returns the bytes below which a file is compacted, into files of this size."""
    return min(_SMALL_FILE, size // 4)


def _total(files: pa.Table) -> int:
    return pc.sum(files["size_bytes"]).as_py() or 0


def _lacks_order(table: TargetVersion, columns: Sequence[str]) -> bool:
    """Returns whether too many rows were written since all were sorted by these columns."""
    # Spark's commits name columns in this form.
    names = [f"`{name}`" if "." in name else name for name in columns]
    rows = 0.0
    for commit in table.commits(_MOST_COMMITS):
        if _order_of(commit) == names:
            total = sum(file.rows for file in table.table_files)
            if rows < _UNSORTED * total:
                return False
            try:
                new = table.files_since(commit["version"])
            except READ_FAILURES:  # Log retention removed the version's log entry.
                return True
            return _total(new) >= _UNSORTED * _total(table.files)
        rows += _rows_without_order(commit)
    return True


def _rows_without_order(commit: Mapping[str, Any]) -> float:
    """Returns how many rows a commit may have put out of order; infinity where it doesn't say.

    A merge with Arrow writes the other rows of a file again in their order, so random keys put few
    rows out of order, though they make most files new.
    """
    counts = commit["waldelta"].get("counts") or {}
    if MERGED_INSERTS in counts:
        return float(counts[MERGED_INSERTS] + counts[MERGED_UPDATES])
    is_compaction = "compaction" in commit["waldelta"] or _order_of(commit) == []
    return 0.0 if is_compaction or commit.get("operation") in _WITHOUT_ROWS else math.inf


def _order_of(commit: Mapping[str, Any]) -> Any:
    """Returns the columns by which a commit sorted all rows; other writers' entries have any
    form.
    """
    try:
        parameters = commit["operationParameters"]
        # OPTIMIZE with a WHERE sorts only some partitions, and without FULL only new files.
        if parameters["predicate"] != "[]":
            return None
        by = "clusterBy" if str(parameters.get("isFull")).lower() == "true" else "zOrderBy"
        return json.loads(parameters[by])
    except (LookupError, TypeError, ValueError):
        return None


def _compact_small(table: TargetVersion, size: int) -> bool:
    """Write the rows of small files into as few as they fill; returns False where Spark must.

    Spark compacts large targets, except clustered ones: of these, OPTIMIZE would sort all files
    that runs have written again.
    """
    files = [file for file in table.table_files if file.bytes < _small(size)]
    is_own = table.is_writable and all(is_within(file.path) for file in files)
    if not (is_own and (table.is_small or table.is_clustered)):
        return False
    place, prefix = table.place, new_prefix()
    try:
        added = write_again(place, table.layout, files, prefix)
    except READ_FAILURES as err:
        log.info("%s is compacted by Spark: %s", place.uri, class_and_text(err))
        return False
    tag = Tag.of(_COMPACTION, table.version, {"verb": "maintain", "compaction": uuid.uuid4().hex})
    try:
        table.replace_files(files, added, tag, changes_data=False)
    except Overtaken:
        discard(place, prefix)
        raise
    return True


def _has_work(table: TargetVersion, size: int) -> bool:
    """Returns whether OPTIMIZE may have work: Spark needs a second or more to find that out."""
    if table.has_deletion_vectors:
        return True
    files = (file for file in table.table_files if file.bytes < _small(size))
    return any(count > 1 for count in Counter(folder_of(f.partition) for f in files).values())


def remove_leftovers(_: Runner, job: Job, __: RunResult, stage: StageResult) -> None:
    """Remove what killed runs staged, if it is old enough and not in use.

    A Spark server may continue for a while after a run was killed.
    """
    names = {state.table_name for state in job.ledger.table_rows()}
    quarantine, removed = Decisions(job.lake), 0
    for uri, tables in find_leftovers(job.lake, names, now() - _STAGED_FOR).items():
        try:
            with ExitStack() as locks:
                for table in tables:
                    # The quarantine is fenced as in a takeover: without the folder, the next run
                    # has no sign of a late writer.
                    quarantine.fence(locks.enter_context(target_lock(job, table)))
                removed += remove_folder(uri)
        except LockHeld as err:
            log.info("%s is left for the next maintenance: %s", uri, err)
    stage.detail = f"{counted(removed, 'folder')} of staged changes removed"


def prune_change_log(_: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Delete batches that every target has applied and that are older than the retention."""
    identity = job.read_identity()
    change_log = job.change_log(identity)
    if change_log.last_batch() is None:
        stage.detail = "no change log yet"
        return
    # This check comes first: a copy that ends later counts among the synced ones, and one that
    # begins later sees what is old enough to delete.
    if waiting := copies_under_way(job):
        stage.detail = (
            f"nothing removed: copies in progress ({', '.join(waiting)}) need the changes since"
            " they began"
        )
        return
    states = synced_states(job)
    watermarks = Watermarks(job, identity)
    safe = min((_applied_upto(watermarks, state, result) for state in states), default=0)
    oldest = now() - timedelta(days=job.pipeline.maintenance.keep_changes_days)
    expired = max(
        (cut.batch for cut in job.ledger.batches() if cut.at < oldest and cut.batch <= safe),
        default=0,
    )
    if job.pipeline.source.options.messages:
        expired = min(expired, messages_applied(job, identity))
        if (messages := job.lake.bookkeeping(MESSAGES).find()) is not None:
            messages.drop_old_entries()
    # Another slot incarnation never learns how a transaction prepared in an earlier one was
    # decided.
    prepared = [p for p in change_log.prepared() if p.batch > identity.floor]
    # A prepared transaction's changes are still needed if it was decided in a later batch, or isn't
    # decided yet.
    needed = [p for p in prepared if p.decided_in is None or p.decided_in > expired]
    expired = min([expired, *(p.batch - 1 for p in needed)])
    # What the slot may return again after its server crashes is verified once more.
    saved = durable_position(job).value
    ends = change_log.reach(identity.floor).ends
    expired = min([expired, *(batch - 1 for batch, end in ends.items() if end > saved)])
    fault_point("maintain.forgetting")
    change_log.prune(expired, job.pipeline.maintenance.keep_versions_hours)
    stage.detail = f"batches up to {expired} removed"


def _applied_upto(watermarks: Watermarks, state: TableState, result: RunResult) -> int:
    """Returns the last batch that a target contains.

    For a target that can't be read, that is the last batch before the slot's incarnation: once
    restored, the target may need all batches of the incarnation.
    """
    try:
        return watermarks.of(state)
    except Exception as err:
        log.warning("table=%s keeps the change log from being pruned: %s", state.table_name, err)
        result.warnings.append(
            f"the change log keeps all batches, since the batches that {state.table_name} has"
            " can't be determined"
        )
        return watermarks.identity.floor


def prune_ledger_rows(_: Runner, job: Job, __: RunResult, stage: StageResult) -> None:
    """Prune the ledger after the change log: cuts must outlive the batches whose age they
    record.
    """
    maintenance = job.pipeline.maintenance
    oldest = now() - maintenance.ledger_retention
    change_log = job.change_log(job.read_identity())
    removed = prune_ledger(job.ledger, oldest, change_log.lowest_batch())
    expired = job.ledger.expire_cuts(now() - timedelta(hours=maintenance.keep_versions_hours))
    stage.detail = f"{counted(removed, 'row')} removed, {counted(expired, 'cut')} expired"


def prune_reports(_: Runner, job: Job, __: RunResult, stage: StageResult) -> None:
    """Delete the reports that are older than the newest ``quality.keep_reports`` of each table."""
    from waldelta.stages.check.reports.data_docs import prune_reports

    removed = prune_reports(job.pipeline, job.lake)
    stage.detail = f"{counted(removed, 'report')} removed"
