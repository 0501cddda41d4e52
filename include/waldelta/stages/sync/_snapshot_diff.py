"""Snapshot diff: brings a target to a snapshot of its source by merging only the rows that differ.

It replaces a copy for a target that already has most rows: equal rows are not written again and
keep their metadata columns. It is as exact as a copy whatever the target contained, because every
row of both sides is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import ACTION_UPSERT
from waldelta.changes.merge.commits import check_alone, commit_equal, read_commit
from waldelta.changes.merge.statements import CommitTag, merge_rows, staged_names, staged_shape
from waldelta.changes.merge.states import count_actions
from waldelta.changes.stage.folders import staged_in
from waldelta.errors import StateError
from waldelta.failpoints import fault_point
from waldelta.lake import staging_folder
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.pipeline.targets import check_target
from waldelta.pipeline.targets.watermarks import sync_app_id
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.stages.repair.mend.mend import TWICE, ExpectedRows, differences

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowDiff:
    """What the diff found and its commit did, in rows; ``version`` is the target's new version."""

    version: int
    inserted: int
    updated: int
    deleted: int
    unchanged: int

    @property
    def compared(self) -> int:
        """Returns the number of rows in the snapshot, which the target has now."""
        return self.inserted + self.updated + self.unchanged

    @property
    def written(self) -> int:
        """Returns the number of rows that differed."""
        return self.inserted + self.updated + self.deleted


@dataclass(frozen=True, slots=True)
class Former:
    """The state of a target's last complete copy in any slot incarnation; None: it has none."""

    state: TableState | None


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """A copy and its rows, as they are read, once, and as the target would store them.

    Call ``all_read`` when nothing will read them from the source again, whatever Spark recomputes:
    it ends the snapshot.
    """

    copy: TableCopy
    rows: DataFrame
    stored: DataFrame
    all_read: Callable[[], object]

    @property
    def expected(self) -> ExpectedRows:
        """Returns the rows as those that the target should have."""
        copy, shape = self.copy, staged_shape(self.copy, self.copy.key_columns)
        bases = [F.col(f"c{i}").alias(base) for base, i in zip(shape.bases, shape.key, strict=True)]
        action = F.lit(ACTION_UPSERT).alias("action")
        rows = self.rows.toDF(*staged_names(copy)).select(action, *bases, "*")
        return ExpectedRows(rows, copy.columns, shape, copy.lsn is not None)


def obstacle(
    former: Former, key: Sequence[str], held: Mapping[str, str], wanted: Mapping[str, str]
) -> str | None:
    """Returns why only a whole copy is exact, or None when a diff is.

    ``held`` and ``wanted`` are Spark types by column: the target's, and those that a copy would
    write.
    """
    if former.state is None:
        return "it was never copied completely"
    if not key:
        return "it has no key"
    if sorted(former.state.key_columns) != sorted(key):
        return "its key has changed since it was copied"
    if dict(held) != dict(wanted):
        return "its columns, or their types, differ from its target's"
    return None


def mend_target(
    runner: Runner,
    job: Job,
    state: TableState,
    former: Former,
    copied: CopiedRows,
    attempt: int,
) -> RowDiff | str:
    """Compare a copy's rows with the target by key, and merge the differences.

    Returns the reason instead when only a whole copy is exact. ``state`` is the generation that it
    begins. Raises LateWriter, SnapshotLost, or the error that a task named.
    """
    target = job.lake.target(state.table_name)
    compared = target.version
    target.log.check_entry(compared + 1)
    diff: RowDiff | None = None
    try:
        if former.state is not None:
            check_target(job, former.state, compared)
        held = target.frame(runner.spark()).dtypes
        why = obstacle(former, copied.copy.key_columns, dict(held), dict(copied.stored.dtypes))
    except StateError as err:
        why = str(err)
    if why is None:
        merge = partial(merge_rows, runner, target, copied.copy, copied.copy.key_columns)
        diff = merge_differences(
            runner, job, state, copied, compared=compared, attempt=attempt, merge=merge
        )
        why = "its target has rows with the same key"
    if diff is None:
        log.warning("table=%s is copied as a whole: %s", state.table_name, why)
    return diff or why


def merge_differences(  # noqa: PLR0913 - a copy, its target, and how it is merged
    runner: Runner,
    job: Job,
    state: TableState,
    copied: CopiedRows,
    *,
    compared: int,
    attempt: int,
    merge: Callable[[str, CommitTag], CommitTag],
) -> RowDiff | None:
    """Stage the differences between a copy and the target's live rows, and commit them.

    ``merge`` merges the staged rows of a folder; it gets a tag with their number by action, and
    returns the one it committed under. ``attempt`` is the transaction's version. Returns None, with
    nothing committed, when the target has a key twice. Raises SnapshotLost when another writer
    changed it since its version ``compared``.
    """
    table, key = state.table_name, copied.copy.key_columns
    target, mode = job.lake.target(table), job.pipeline.target.mode_of(table)

    def live_rows() -> DataFrame:
        return mode.live_rows(target.frame(runner.spark()), key)

    folder = staging_folder(job.lake, table, state.generation, attempt, job.run_id)
    # The same transaction id as a copy's, which this replaces.
    app_id = sync_app_id(job.read_identity(), table)
    with staged_in(runner, folder):
        differences(copied.expected, live_rows()).write.mode("overwrite").parquet(folder)
        counts = count_actions(runner, folder)
        if TWICE in counts:
            return None  # A whole copy reads the rows again.
        copied.all_read()
        fault_point("resync.compared")
        tag = CommitTag(app_id, attempt, job.run_id, counts=counts, verb="resync")
        done = (
            read_commit(job, state, merge(folder, tag))
            if counts
            else commit_equal(runner, job, state, tag, key[0])
        )
        check_alone(job, done, compared)
    equal = live_rows().count() - done.inserted - done.updated
    return RowDiff(done.version, done.inserted, done.updated, done.deleted, equal)
