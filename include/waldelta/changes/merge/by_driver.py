"""Merge here: few net changes into a small target, as one commit, by Arrow and delta-rs.

Spark plans, compiles and runs seconds of CPU for what takes milliseconds: with many small tables
that is most of a run. The commit carries what a MERGE's would, the transaction id and the
userMetadata, and is a compare-and-swap on the version that was read, so that whoever else commits
meanwhile is never overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import (
    ColumnProperties,
    DeltaTable,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError

from waldelta.changes.decode import TargetPlan
from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPDATE, EventShape
from waldelta.changes.merge._arrow import MergedRows, WrittenColumns, are_new, match, matched_by
from waldelta.changes.merge.small_target import is_small
from waldelta.changes.merge.statements import MERGED_DELETES, MERGED_UPDATES, CommitTag
from waldelta.changes.stage.net_files import batches
from waldelta.lake import files_of
from waldelta.lake.storage import SPARKS_TIMESTAMPS, checkpoint, only_if_unchanged, row_group_bytes
from waldelta.pipeline import Job
from waldelta.pipeline.targets.watermarks import uri_of

log = logging.getLogger(__name__)

# In memory; what is packed into small files may unpack to much more, so that it is counted while it
# is read.
MOST_DRIVER_BYTES = 64 << 20
# New rows alone become one more file, until there are so many.
_MOST_FILES = 8
# As often as Spark writes one.
TARGET_CHECKPOINT_INTERVAL = 10
# What a table's writers have to know of it, by Delta's names; of others this one may not be a
# writer.
_LEGACY_WRITER = 2
_KNOWN = frozenset({"appendOnly", "invariants", "timestampNtz"})
_DEFAULT_STATISTICS = ColumnProperties(statistics_enabled="NONE")
_STATISTICS = ColumnProperties(statistics_enabled="CHUNK")


def merge_in_driver(
    job: Job, plan: TargetPlan, net: pa.Table, tag: CommitTag, check: Callable[[], object]
) -> CommitTag | None:
    """Commit net changes (columns as ``plan.decode.net_schema``) under ``tag``; returns the tag
    that tells what they did.

    ``check`` raises when this run may not write any more; asked once the target was read, so that
    whoever took over later has changed the version on which the commit depends. None where Spark
    has to: for a target that isn't small, for copies of equal rows, truncated leaves and features
    of Delta that only Spark writes, or when the target can't be written from here as it was read.
    """
    if not is_for_arrow(plan, tag):
        return None
    written = WrittenColumns(
        plan.decode.names, plan.decode.shape, job.pipeline.target.metadata_columns
    )
    return commit_in_driver(
        job, plan.state.table_name, NetChanges(net, written, plan.is_truncated), tag, check
    )


@dataclass(frozen=True, slots=True)
class NetChanges:
    """Net changes, the columns that they are written to, and whether all rows that the target had
    are gone.
    """

    rows: pa.Table
    written: WrittenColumns
    is_truncated: bool = False

    @classmethod
    def whole(
        cls, rows: pa.Table, names: Sequence[str], shape: EventShape, *, metadata: bool
    ) -> NetChanges:
        """Of rows that are known whole, into these columns and, with ``metadata``, ours."""
        return cls(rows, WrittenColumns(names, shape, metadata))


def commit_in_driver(
    job: Job, table_name: str, changes: NetChanges, tag: CommitTag, check: Callable[[], object]
) -> CommitTag | None:
    """As merge_in_driver(), of changes that Arrow can merge: of keyed rows, or of new ones
    alone.
    """
    table = DeltaTable(uri_of(job, table_name), storage_options=job.storage_options)
    if (table.transaction_version(tag.app_id) or 0) >= tag.batch:
        return tag  # as Delta skips a MERGE that is repeated
    try:
        return _merge(table, changes, tag, check)
    except (DeltaError, OSError, pa.ArrowException) as err:
        # Somebody else committed meanwhile, say. Spark does it, or says why not; what is committed
        # all the same it won't repeat.
        log.info("table=%s isn't merged here: %s", table_name, err)
        return None


def _merge(
    table: DeltaTable, changes: NetChanges, tag: CommitTag, check: Callable[[], object]
) -> CommitTag | None:
    net, written = changes.rows, changes.written
    if not has_columns(table, written):
        return None
    held = arrow_schema(table).empty_table() if changes.is_truncated else _read(table)
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
    appends = adds_only and len(table.file_uris()) < _MOST_FILES
    check()
    _commit(table, merge.new_rows() if appends else merge.rows(), tag, appends=appends)
    checkpoint(table, TARGET_CHECKPOINT_INTERVAL)
    return tag


def is_for_arrow(plan: TargetPlan, tag: CommitTag) -> bool:
    """Whether rows are found by a key, or only added, and all of them go when any are truncated:
    the rest is Spark's.
    """
    return not changes_copies(plan, tag) and not plan.truncated_leaves


def changes_copies(plan: TargetPlan, tag: CommitTag) -> bool:
    """Whether rows without a key are updated or deleted, so many copies of each as the source
    did.
    """
    return not plan.decode.shape.key and bool(tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE})


def written_columns(job: Job, plan: TargetPlan, table: DeltaTable) -> WrittenColumns | None:
    """What is written to the table; None when it lacks one of the columns, or asks more of its
    writers than is done here.
    """
    written = WrittenColumns(
        plan.decode.names, plan.decode.shape, job.pipeline.target.metadata_columns
    )
    return written if has_columns(table, written) else None


def has_columns(table: DeltaTable, written: WrittenColumns) -> bool:
    """Whether the table has the columns that are written, and asks no more of its writers than is
    done here.
    """
    return is_known(table) and set(arrow_schema(table).names).issuperset(written.sources)


def is_known(table: DeltaTable) -> bool:
    """Whether everything that the table asks of its writers is done here."""
    protocol, metadata = table.protocol(), table.metadata()
    asked = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    version_is_known = (
        protocol.min_writer_version <= _LEGACY_WRITER or protocol.writer_features is not None
    )
    is_append_only = metadata.configuration.get("delta.appendOnly", "false").lower() == "true"
    return (
        version_is_known
        and asked <= _KNOWN
        and not is_append_only
        and not metadata.partition_columns
    )


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The table's columns."""
    return pa.schema(table.schema().to_arrow())


def _read(table: DeltaTable) -> pa.Table | None:
    """All rows of a small table; None for another."""
    if not is_small(files_of(table)):
        return None
    return read_within(
        table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS), arrow_schema(table)
    )


def read_within(dataset: ds.Dataset, schema: pa.Schema) -> pa.Table | None:
    """All rows; None when they take more than MOST_DRIVER_BYTES of memory."""
    # A first batch of large rows would be in memory before it could be counted.
    if sum(row_group_bytes(dataset)) > MOST_DRIVER_BYTES:
        return None
    parts: list[pa.RecordBatch] = []
    taken = 0
    for part in batches(dataset):
        taken += part.nbytes
        if taken > MOST_DRIVER_BYTES:
            return None
        parts.append(part)
    return pa.Table.from_batches(parts, schema)


def _commit(table: DeltaTable, rows: pa.Table, tag: CommitTag, *, appends: bool) -> None:
    """Write rows in the place of the table's, or behind them; raises DeltaError when it isn't what
    was read any more.
    """
    write_deltalake(
        table,
        rows,
        mode="append" if appends else "overwrite",
        writer_properties=_writer_properties(rows.schema),
        **only_if_unchanged(tag.app_id, tag.batch, tag.metadata),
    )


def _writer_properties(schema: pa.Schema) -> WriterProperties:
    """Statistics of integers alone: delta-rs rounds decimals' to doubles and leaves NaN out, so
    that readers would skip too much.
    """
    told = [
        field.name
        for field in schema
        if pa.types.is_integer(field.type) and field.name.isidentifier()
    ]
    return WriterProperties(
        compression="SNAPPY",
        default_column_properties=_DEFAULT_STATISTICS,
        column_properties=dict.fromkeys(told, _STATISTICS),
    )
