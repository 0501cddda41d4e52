"""Reads a commit's effects from the target's own Delta log: rows by operation, and unreported
commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
    COMPLETED_ROWS,
    QUARANTINED_ROWS,
    RAW_ROWS,
)
from waldelta.changes.merge.statements import (
    FOUND_DELETES,
    FOUND_UPDATES,
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    CommitTag,
    commit_statement,
    void_statement,
)
from waldelta.changes.merge.target_table import writing_target
from waldelta.errors import LateWriter, SnapshotLost
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget, Overtaken, TargetVersion
from waldelta.lake.delta_statements import set_generation
from waldelta.lake.ledger import Decisions, TableState, TargetCut
from waldelta.lake.staging_leftovers import take_over
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.reported_commits import ReportedCommits
from waldelta.pipeline.targets import TargetFence, apply_app_id
from waldelta.spark import Runner

# How many commits are searched. Only maintenance and external commits come in between.
_NEWEST = 50


def read_untouched(job: Job, state: TableState) -> TargetCut:
    """Returns the target's current version as a cut without changes."""
    return TargetCut(state.table_name, state.generation, job.lake.target(state.table_name).version)


def commit_untouched(runner: Runner, job: Job, state: TableState) -> TargetCut:
    """Commit a generation that changes no row; the commit fences runs that still write an earlier
    one.
    """
    target = job.lake.target(state.table_name)
    set_generation(runner.spark, target.open(), state.generation)
    cut = read_untouched(job, state)
    target.sync_commit(cut.version)
    return cut


def commit_equal(
    runner: Runner, job: Job, state: TableState, tag: CommitTag, column: str
) -> TargetCut:
    """Commit, under the copy's transaction id, that a copy found the target correct.

    A copy that began earlier then comes too late.
    """
    commit_nothing(runner, job.lake.target(state.table_name), tag, column)
    return commit_untouched(runner, job, state)


def commit_nothing(runner: Runner, target: DeltaTarget, tag: CommitTag, column: str) -> None:
    """Commit no change under ``tag``, so that any other commit with its transaction id is late.

    Nothing is committed where that commit exists. Spark, for which ``column`` is one of the
    target's, works only on targets with features that delta-rs lacks.
    """
    table = target.open()
    if not table.is_writable:
        commit_statement(runner, tag, void_statement(target.relation, column))
        return
    while table.committed(tag.app_id) < tag.batch:
        try:
            table.replace_files([], [], tag.delta, changes_data=False)
        except Overtaken:
            table = target.open()


def take_over_target(
    runner: Runner,
    job: Job,
    state: TableState,
    quarantine: Decisions,
    fence: TargetFence,
) -> None:
    """Remove what other runs have staged for a target, and make sure that they can't commit any
    more.

    A killed client's statement continues in a Spark Connect server, and a run that lost its lock
    may be about to commit. A commit of the table's properties makes either fail, even an INSERT,
    which reads nothing that could conflict. Only after that is the target's last batch, which
    ``fence`` verifies, certain. Quarantine rows that other runs wrote for later batches are
    dropped, because those batches were never committed.
    """

    def shut_out() -> None:
        set_generation(runner.spark, job.lake.target(state.table_name).open(), state.generation)
        fault_point("takeover.fenced")
        quarantine.replace(state.table_name, state.generation, fence.verify(), (), fence)

    take_over(job.lake, state.table_name, shut_out)


def take_over_for_copy(runner: Runner, job: Job, name: str, generation: int) -> None:
    """Take over a target that is about to be copied, whatever was staged for it.

    A statement that still runs would duplicate the copy's rows.
    """
    target = job.lake.target(name)

    def shut_out() -> None:
        if (table := target.find()) is not None:
            target.log.check_entry(table.version + 1)
            set_generation(runner.spark, table, generation)

    with writing_target(target):
        if not take_over(job.lake, name, shut_out):
            shut_out()


def check_alone(job: Job, cut: TargetCut, compared: int) -> None:
    """Raise SnapshotLost when another commit changed rows after the version that was compared.

    ``compared`` is that version, and the cut's own commit is excluded. If a late copy has replaced
    the rows, for example, the compared differences don't repair the target.
    """
    log = job.lake.target(cut.table_name).log
    between = (commit for commit in log.behind(compared) if commit.version < cut.version)
    if any(commit.changes_data for commit in between):
        raise SnapshotLost(
            f"{cut.table_name}: another writer changed its target during the comparison: run again"
        )


def read_commit(job: Job, state: TableState, tag: CommitTag) -> TargetCut:
    """Returns what the commit of ``tag`` did, and make it durable.

    Raises LateWriter when the commit isn't there.
    """
    target = job.lake.target(state.table_name)
    # A commit of this process is known; one of Spark's may not be.
    for table in (opened() for opened in (target.open_known, target.open)):
        if (entry := _commit_of(table, tag, _NEWEST)) is not None:
            target.sync_commit(int(entry["version"]))
            # The cut is read from the commit's own metadata, because a late writer's commit may be
            # the newest.
            return _build_cut(state, entry)
    if any(tag.counts.values()):
        raise LateWriter(
            f"{state.table_name}: batch {tag.batch} isn't in the target's history: run again"
        )
    return TargetCut(state.table_name, state.generation, table.version)


def committed_verb(job: Job, state: TableState, tag: CommitTag) -> str | None:
    """Returns the command that committed under the identity of ``tag``.

    None when there is no such commit, "" when the history doesn't reach back that far.
    """
    table = job.lake.target(state.table_name).open()
    if table.committed(tag.app_id) < tag.batch:
        return None
    entry = _commit_of(table, tag)
    return "" if entry is None else str(entry["waldelta"].get("verb"))


def _commit_of(
    table: TargetVersion, tag: CommitTag, newest: int | None = None
) -> dict[str, Any] | None:
    """Returns the commit of ``tag`` among the newest commits (None: among all)."""
    for entry in table.commits(newest):
        written = entry["waldelta"]
        if (written.get("app_id"), written.get("batch")) == (tag.app_id, tag.batch):
            return entry
    return None


def read_unreported(
    job: Job,
    identity: SlotIdentity,
    state: TableState,
    reported: ReportedCommits,
    in_cut: int | None = None,
) -> tuple[TargetCut | None, TargetCut | None]:
    """Returns what was committed to the target but isn't in any run's result.

    The first value covers commits up to ``in_cut``, the newest cut's version, the second later
    ones; None where there are none.
    """
    within = beyond = None
    target = job.lake.target(state.table_name)

    @cache
    def copied_at() -> datetime:
        return min(
            row.at
            for row in job.read_all_states(state.table_name)
            if row.generation == state.generation
        )

    for entry in _own_commits(target.open_known(), apply_app_id(identity, state)):
        version, run_id = int(entry["version"]), entry["waldelta"].get("run_id")
        committed_at = datetime.fromtimestamp(entry["timestamp"] / 1000, UTC)
        if run_id is None or reported.has(
            run_id, state.table_name, version, committed_at, copied_at
        ):
            break
        # A commit isn't necessarily on disk, and its files may be compacted and gone by now.
        target.sync_commits([version])
        this = _build_cut(state, entry)
        if in_cut is not None and version <= in_cut:
            within = this if within is None else within + this
        else:
            beyond = this if beyond is None else beyond + this
    return within, beyond


def _build_cut(state: TableState, entry: Mapping[str, Any]) -> TargetCut:
    counts = entry["waldelta"].get("counts") or {}
    return TargetCut(
        state.table_name,
        state.generation,
        int(entry["version"]),
        truncated=bool(entry["waldelta"].get("truncated")),
        completed=counts.get(COMPLETED_ROWS, 0),
        quarantined=counts.get(QUARANTINED_ROWS, 0),
        raw_rows=counts.get(RAW_ROWS, 0),
        **_effects(entry.get("operationMetrics", {}), counts),
    )


def _own_commits(table: TargetVersion, app_id: str) -> Iterator[dict[str, Any]]:
    """Yields the commits that this copy's writer (``app_id``) made, newest first, read on demand.

    External commits may be in between, but the search ends at a commit of another copy of the
    table. It goes back further than the newest commits only after finding one there: for a large
    backlog, each apply batch is a commit.
    """
    is_found = False
    for limit, skip in ((1, 0), (_NEWEST, 1), (None, _NEWEST)):
        if limit is None and not is_found:
            return
        for entry in islice(table.commits(limit), skip, None):
            written = entry["waldelta"]
            if written.get("app_id") == app_id:
                is_found = True
                yield entry
            elif written and written.get("verb") not in ("reshape", "void"):
                return


def _effects(metrics: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns rows inserted, updated, deleted and skipped, from Delta's metrics and the staged
    ``counts``.

    Changes of one row count once: as inserted when it is new, as deleted when it is gone, else as
    updated. A new row that replaced one at its key counts as updated in Delta's metrics. Updates
    and deletes that found no row are skipped, as in a PostgreSQL subscriber. For a rewritten target
    (no key), the counts were taken before it was written.
    """
    if FOUND_UPDATES in counts:
        updated, deleted = counts[FOUND_UPDATES], counts[FOUND_DELETES]
        skipped = (
            counts.get(ACTION_SKIP, 0) + counts.get(ACTION_UPDATE, 0) + counts.get(ACTION_DELETE, 0)
        )
        inserted, skipped = counts.get(ACTION_INSERT, 0), skipped - updated - deleted
        return {"inserted": inserted, "updated": updated, "deleted": deleted, "skipped": skipped}
    if MERGED_INSERTS in counts:
        metrics = {
            "numTargetRowsInserted": counts[MERGED_INSERTS],
            "numTargetRowsUpdated": counts[MERGED_UPDATES],
            "numTargetRowsMatchedDeleted": counts[MERGED_DELETES],
        }
    if "numTargetRowsInserted" not in metrics:  # The commit is an INSERT, not a MERGE.
        return {
            "inserted": int(metrics.get("numOutputRows", 0)),
            "skipped": counts.get(ACTION_SKIP, 0),
        }
    inserted = int(metrics.get("numTargetRowsInserted", 0))
    updated = int(metrics.get("numTargetRowsUpdated", 0))
    # Rows of truncated leaves are deleted, too, without being matched: they are reported as
    # truncated.
    deleted = int(
        metrics.get("numTargetRowsMatchedDeleted", metrics.get("numTargetRowsDeleted", 0))
    )
    new_rows = counts.get(ACTION_INSERT, 0) + counts.get(ACTION_UPSERT, 0)
    replaced = max(0, new_rows - inserted)
    skipped = counts.get(ACTION_SKIP, 0) + max(
        0, counts.get(ACTION_UPDATE, 0) - (updated - replaced)
    )
    skipped += max(0, counts.get(ACTION_DELETE, 0) - deleted)
    return {"inserted": inserted, "updated": updated, "deleted": deleted, "skipped": skipped}
