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
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waldelta.arrow import Ints, table_of
from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPDATE
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge._arrow import (
    MergedRows,
    are_new,
    match,
    match_duplicates,
    matched_by,
)
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_UPDATES,
    CommitTag,
    WrittenColumns,
)
from waldelta.changes.stage.net_files import batches
from waldelta.lake import MOST_DRIVER_BYTES, READ_FAILURES, Fence, TargetVersion, replace_by_rows
from waldelta.lake.storage import row_group_bytes
from waldelta.metadata_columns import RELID
from waldelta.pipeline import Job
from waldelta.types import TargetType

log = logging.getLogger(__name__)

# New rows alone are appended as one more file, up to this many files.
_MOST_FILES = 8


def merge_in_driver(
    job: Job, plan: TargetPlan, net: pa.Table, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    """Commit net changes under ``tag``; returns the tag with counts of what they did.

    The net changes have the columns of ``plan.decode.net_schema``. ``fence`` is verified after the
    target was read. Returns None where Spark must merge: for a target that isn't small, truncated
    leaves of a table with a key, features of Delta that only Spark writes, or when the target can't
    be written as it was read.
    """
    decode = plan.decode
    if plan.truncated_leaves and decode.shape.key:
        return None
    written = WrittenColumns(decode.names, decode.shape, job.pipeline.target.metadata_columns)
    changes = NetChanges(
        net,
        written,
        plan.is_truncated,
        plan.truncated_leaves,
        decode.columns if changes_copies(plan, tag) else None,
    )
    table = job.lake.target(plan.state.table_name).open()
    if table.committed(tag.app_id) >= tag.batch:
        return tag  # Delta skips a repeated MERGE in the same way.
    try:
        return _merge(table, changes, tag, fence)
    except READ_FAILURES as err:
        # For example, another writer has committed since. Spark will merge, or report why it can't.
        # If this commit succeeded after all, Spark won't repeat it.
        log.info(
            "table=%s can't be merged by the driver, so Spark merges it: %s",
            plan.state.table_name,
            err,
        )
        return None


@dataclass(frozen=True, slots=True)
class NetChanges:
    """Net changes, their target columns, and whether all rows that the target had are gone.

    ``truncated_leaves`` are the oids of leaves whose rows are gone. ``duplicates`` are the columns
    of a table without a key whose rows the changes update or delete.
    """

    rows: pa.Table
    written: WrittenColumns
    is_truncated: bool = False
    truncated_leaves: Sequence[int] = ()
    duplicates: Sequence[tuple[str, TargetType]] | None = None

    @property
    def truncates(self) -> bool:
        """Whether rows are gone that no change names."""
        return self.is_truncated or bool(self.truncated_leaves)

    def remaining(self, rows: pa.Table) -> pa.Table:
        """Return the target's rows that aren't of truncated leaves."""
        if not self.truncated_leaves:
            return rows
        leaves = pa.array(self.truncated_leaves, rows[RELID].type)
        return rows.filter(pc.invert(pc.is_in(rows[RELID], value_set=leaves)))

    def match(self, rows: pa.Table) -> Ints:
        """Return, for each row of the target, the net change that takes it; -1 for none."""
        if self.duplicates is None:
            return match(rows, self.rows, self.written)
        return match_duplicates(rows, self.rows, self.duplicates, metadata=self.written.metadata)


def _merge(
    table: TargetVersion, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    net, written = changes.rows, changes.written
    if not has_columns(table, written) or not (changes.is_truncated or table.is_small):
        return None
    schema = table.schema
    held = schema.empty_table() if changes.is_truncated else read_within(table.dataset(), schema)
    if held is None:
        return None
    held = changes.remaining(held)
    of_row = changes.match(held)
    new = np.flatnonzero(are_new(net, matched_by(of_row, len(net))))
    merge = MergedRows(held, net, of_row, new, written)
    if not merge.is_possible:
        return None
    tag = replace(tag, counts=tag.counts | merge.counts)
    adds_only = not (
        changes.truncates or merge.counts[MERGED_UPDATES] or merge.counts[MERGED_DELETES]
    )
    appends = adds_only and len(table.files) < _MOST_FILES
    fence.verify()
    rows = merge.new_rows() if appends else merge.rows()
    replace_by_rows(table, [] if appends else table.sized_files, rows, tag.delta)
    return tag


def changes_copies(plan: TargetPlan, tag: CommitTag) -> bool:
    """Return whether the changes update or delete duplicate rows of a table without a key."""
    return not plan.decode.shape.key and bool(tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE})


def has_columns(table: TargetVersion, written: WrittenColumns) -> bool:
    """Return whether the table has the written columns and requires only implemented features."""
    return table.is_writable and set(table.schema.names).issuperset(written.sources)


def read_within(dataset: ds.Dataset, schema: pa.Schema) -> pa.Table | None:
    """Return all rows; None when they take more than MOST_DRIVER_BYTES of memory."""
    # A first batch of large rows would be in memory before it could be counted, so the footers are
    # checked first.
    if sum(row_group_bytes(dataset)) > MOST_DRIVER_BYTES:
        return None
    return table_of(batches(dataset), schema, MOST_DRIVER_BYTES)
