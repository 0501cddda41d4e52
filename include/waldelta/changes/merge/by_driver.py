"""Merges few net changes into a small target in the driver, as one commit, with Arrow and delta-rs.

Spark spends seconds of CPU on planning and compiling for milliseconds of work. With many small
tables, that would be most of a run. The commit has the transaction id and the userMetadata of a
MERGE's commit. It is a compare-and-swap on the version that was read, so it never overwrites a
concurrent commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from waldelta.arrow import table_of
from waldelta.changes.decode import TargetPlan
from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPDATE, EventShape
from waldelta.changes.merge._arrow import MergedRows, WrittenColumns, are_new, match, matched_by
from waldelta.changes.merge.statements import MERGED_DELETES, MERGED_UPDATES, CommitTag
from waldelta.changes.stage.net_files import batches
from waldelta.lake import READ_FAILURES, TargetVersion
from waldelta.lake.data_file import replace_by_rows
from waldelta.lake.driver_limits import MOST_DRIVER_BYTES, is_small
from waldelta.lake.fence import Fence
from waldelta.lake.storage import row_group_bytes
from waldelta.pipeline import Job

log = logging.getLogger(__name__)

# New rows alone are appended as one more file, up to this many files.
_MOST_FILES = 8


def merge_in_driver(
    job: Job, plan: TargetPlan, net: pa.Table, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    """Commit net changes under ``tag``; returns the tag with counts of what they did.

    The net changes have the columns of ``plan.decode.net_schema``. ``fence`` is verified after the
    target was read. Returns None where Spark must merge: for a target that isn't small, duplicate
    rows, truncated leaves, features of Delta that only Spark writes, or when the target can't be
    written as it was read.
    """
    if not is_for_arrow(plan, tag):
        return None
    written = WrittenColumns(
        plan.decode.names, plan.decode.shape, job.pipeline.target.metadata_columns
    )
    return commit_in_driver(
        job, plan.state.table_name, NetChanges(net, written, plan.is_truncated), tag, fence
    )


@dataclass(frozen=True, slots=True)
class NetChanges:
    """Net changes, their target columns, and whether all rows that the target had are gone."""

    rows: pa.Table
    written: WrittenColumns
    is_truncated: bool = False

    @classmethod
    def whole(
        cls, rows: pa.Table, names: Sequence[str], shape: EventShape, *, metadata: bool
    ) -> NetChanges:
        """Create net changes from complete rows; ``metadata``: waldelta's own columns are written,
        too.
        """
        return cls(rows, WrittenColumns(names, shape, metadata))


def commit_in_driver(
    job: Job, table_name: str, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    """Commit as merge_in_driver() does, for changes that Arrow can merge.

    These change rows with a key, or only add rows.
    """
    table = job.lake.target(table_name).open()
    if table.committed(tag.app_id) >= tag.batch:
        return tag  # Delta skips a repeated MERGE in the same way.
    try:
        return _merge(table, changes, tag, fence)
    except READ_FAILURES as err:
        # For example, another writer has committed since. Spark will merge, or report why it can't.
        # If this commit succeeded after all, Spark won't repeat it.
        log.info("table=%s can't be merged by the driver, so Spark merges it: %s", table_name, err)
        return None


def _merge(
    table: TargetVersion, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    net, written = changes.rows, changes.written
    if not has_columns(table, written):
        return None
    held = table.schema.empty_table() if changes.is_truncated else _read(table)
    if held is None:
        return None
    of_row = match(held, net, written)
    new = np.flatnonzero(are_new(net, matched_by(of_row, len(net))))
    merge = MergedRows(held, net, of_row, new, written)
    if not merge.is_possible:
        return None
    tag = replace(tag, counts=tag.counts | merge.counts)
    adds_only = not (
        changes.is_truncated or merge.counts[MERGED_UPDATES] or merge.counts[MERGED_DELETES]
    )
    appends = adds_only and len(table.files) < _MOST_FILES
    fence.verify()
    rows = merge.new_rows() if appends else merge.rows()
    replace_by_rows(table, [] if appends else table.sized_files, rows, tag.delta)
    return tag


def is_for_arrow(plan: TargetPlan, tag: CommitTag) -> bool:
    """Return whether Arrow can merge: rows have a key or are only added, and no single leaf is
    truncated.
    """
    return not changes_copies(plan, tag) and not plan.truncated_leaves


def changes_copies(plan: TargetPlan, tag: CommitTag) -> bool:
    """Return whether the changes update or delete duplicate rows of a table without a key."""
    return not plan.decode.shape.key and bool(tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE})


def written_columns(job: Job, plan: TargetPlan, table: TargetVersion) -> WrittenColumns | None:
    """Return what is written to the table.

    None when it lacks one of the columns, or requires a writer feature that isn't implemented here.
    """
    written = WrittenColumns(
        plan.decode.names, plan.decode.shape, job.pipeline.target.metadata_columns
    )
    return written if has_columns(table, written) else None


def has_columns(table: TargetVersion, written: WrittenColumns) -> bool:
    """Return whether the table has the written columns and requires only implemented features."""
    return table.is_writable and set(table.schema.names).issuperset(written.sources)


def _read(table: TargetVersion) -> pa.Table | None:
    """Return all rows of a small table; None for a larger one."""
    return read_within(table.dataset(), table.schema) if is_small(table.files) else None


def read_within(dataset: ds.Dataset, schema: pa.Schema) -> pa.Table | None:
    """Return all rows; None when they take more than MOST_DRIVER_BYTES of memory."""
    # A first batch of large rows would be in memory before it could be counted, so the footers are
    # checked first.
    if sum(row_group_bytes(dataset)) > MOST_DRIVER_BYTES:
        return None
    return table_of(batches(dataset), schema, MOST_DRIVER_BYTES)
