"""Merge here: few net changes into a small target, as one commit, by Arrow and delta-rs.

Spark plans, compiles and runs seconds of CPU for what takes milliseconds: with many small tables that is most of a run. The
commit carries what a MERGE's would, the transaction id and the userMetadata, and is a compare-and-swap on the version that
was read, so that whoever else commits meanwhile is never overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    ColumnProperties,
    DeltaTable,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError

from spark_jobs.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    Bools,
    EventShape,
    Ints,
    codes_of,
)
from spark_jobs.merge import MERGED_DELETES, MERGED_INSERTS, MERGED_UPDATES, CommitTag
from spark_jobs.plan import TargetPlan
from waldelta.column_names import COMMIT_TS, LSN, RAW
from waldelta.job import Job
from waldelta.lake import SPARKS_TIMESTAMPS, checkpoint, only_if_unchanged
from waldelta.watermark import uri_of

log = logging.getLogger(__name__)

# A target is small up to here; beyond, a MERGE that writes only the files it touches is the cheaper one.
MOST_ROWS = 100_000
MOST_FILE_BYTES = 16 << 20
# In memory; what is packed into small files may unpack to much more, so that it is counted while it is read.
MOST_BYTES = 64 << 20
_ROWS_PER_READ = 8_192
# New rows alone become one more file, until there are so many.
_MOST_FILES = 8
# As often as Spark writes one.
_CHECKPOINT_INTERVAL = 10
# What a table's writers have to know of it, by Delta's names; of others this one may not be a writer.
_LEGACY_WRITER = 2
_KNOWN = frozenset({"appendOnly", "invariants", "timestampNtz"})
_DEFAULT_STATISTICS = ColumnProperties(statistics_enabled="NONE")
_STATISTICS = ColumnProperties(statistics_enabled="CHUNK")


def merge_here(
    job: Job, plan: TargetPlan, net: pa.Table, tag: CommitTag, check: Callable[[], None]
) -> CommitTag | None:
    """Commit net changes (columns as ``plan.decode.net_schema``) under ``tag``; returns the tag that tells what they did.

    ``check`` raises when this run may not write any more; asked once the target was read, so that whoever took over
    later has changed the version on which the commit depends. None where Spark has to: for a target that isn't small, for
    copies of equal rows, truncated leaves and features of Delta that only Spark writes, or when the target can't be
    written from here as it was read.
    """
    of_copies = not plan.decode.shape.key and tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE}
    if of_copies or plan.truncated_leaves:
        return None
    table = DeltaTable(uri_of(job, plan.state.table_name), storage_options=job.storage_options)
    if (table.transaction_version(tag.app_id) or 0) >= tag.batch:
        return tag  # as Delta skips a MERGE that is repeated
    if not _is_known(table):
        return None
    try:
        return _merge(job, plan, table, net, tag, check)
    except (DeltaError, OSError, pa.ArrowException) as err:
        # Somebody else committed meanwhile, say. Spark does it, or says why not; what is committed all the same it won't repeat.
        log.info("table=%s isn't merged here: %s", plan.state.table_name, err)
        return None


def _merge(
    job: Job, plan: TargetPlan, table: DeltaTable, net: pa.Table, tag: CommitTag, check: Callable[[], None]
) -> CommitTag | None:
    emptied = plan.truncated and not plan.decode.gathers
    held = _schema(table).empty_table() if emptied else _read(table)
    if held is None:
        return None
    merge = _Merge(held, net, plan.decode.names, plan.decode.shape, job.pipeline.target.metadata_columns)
    if not merge.is_possible:
        return None
    tag = replace(tag, counts=tag.counts | merge.counts)
    adds_only = not (emptied or merge.counts[MERGED_UPDATES] or merge.counts[MERGED_DELETES])
    appends = adds_only and len(table.file_uris()) < _MOST_FILES
    check()
    _commit(table, merge.inserted() if appends else merge.rows(), tag, appends=appends)
    checkpoint(table, _CHECKPOINT_INTERVAL)
    return tag


def _is_known(table: DeltaTable) -> bool:
    """Whether everything that the table asks of its writers is done here."""
    protocol, metadata = table.protocol(), table.metadata()
    asked = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    version_is_known = protocol.min_writer_version <= _LEGACY_WRITER or protocol.writer_features is not None
    is_append_only = metadata.configuration.get("delta.appendOnly", "false").lower() == "true"
    return version_is_known and asked <= _KNOWN and not is_append_only and not metadata.partition_columns


def _schema(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _read(table: DeltaTable) -> pa.Table | None:
    """All rows of a small table; None for another."""
    files = pa.table(table.get_add_actions(flatten=True)).select(["num_records", "size_bytes"])
    if len(files) and (
        files["num_records"].null_count
        or pc.sum(files["num_records"]).as_py() > MOST_ROWS
        or pc.sum(files["size_bytes"]).as_py() > MOST_FILE_BYTES
    ):
        return None
    dataset = table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS)
    parts: list[pa.RecordBatch] = []
    taken = 0
    for part in dataset.scanner(batch_size=_ROWS_PER_READ, batch_readahead=1, fragment_readahead=1).to_batches():
        taken += part.nbytes
        if taken > MOST_BYTES:
            return None
        parts.append(part)
    return pa.Table.from_batches(parts, _schema(table))


@dataclass(frozen=True)
class _Merge:
    """The rows of a target and the net changes of some: what MERGE (merge.merge_statement) makes of them."""

    held: pa.Table
    net: pa.Table
    names: Sequence[str]
    shape: EventShape
    metadata_columns: bool

    @property
    def is_possible(self) -> bool:
        """Whether the target has the columns that are written, and no row keeps some verbatim values among others."""
        known = set(self.held.schema.names)
        if not known.issuperset(self._sources):
            return False
        if not self.metadata_columns or not self.shape.toastable or not self._updated.any():
            return True
        rows = self.net.take(pa.array(self._of_row[self._updated]))
        keeps = np.zeros(len(rows), np.bool_)
        for flag in self.shape.flags:
            keeps |= np.asarray(rows[flag])
        return not (keeps & np.asarray(self.held[RAW].is_valid())[self._updated]).any()

    @property
    def counts(self) -> dict[str, int]:
        """Rows of the target that were changed, by what became of them."""
        return {
            MERGED_INSERTS: len(self._fresh),
            MERGED_UPDATES: int(self._updated.sum()),
            MERGED_DELETES: int(self._deleted.sum()),
        }

    def rows(self) -> pa.Table:
        """The target's rows afterwards."""
        stay = ~self._deleted
        columns = [self._column(field, stay) for field in self.held.schema]
        return pa.table(columns, schema=self.held.schema)

    def inserted(self) -> pa.Table:
        """The new rows alone."""
        columns = [self._column(field, np.zeros(len(self.held), np.bool_)) for field in self.held.schema]
        return pa.table(columns, schema=self.held.schema)

    def _column(self, field: pa.Field, stay: Bools) -> pa.ChunkedArray:
        before = self.held[field.name]
        source = self._sources.get(field.name)
        if source is None:  # a column that the source doesn't have any more
            after = pa.nulls(len(self.net), field.type)
            return self._chosen(before, pa.chunked_array([after]), np.zeros(len(self.held), np.bool_), stay)
        changed = self._updated
        if (flag := source.replace("c", "u", 1)) in self.shape.flags:
            untold = np.asarray(self.net[flag])
            changed = changed & ~np.where(self._of_row >= 0, untold[self._of_row], False) if len(untold) else changed
        return self._chosen(before, self.net[source].cast(field.type), changed, stay)

    def _chosen(self, before: pa.ChunkedArray, after: pa.ChunkedArray, changed: Bools, stay: Bools) -> pa.ChunkedArray:
        """Values of the rows that stay, new ones where ``changed``, and those of new rows behind them."""
        place = np.where(changed, len(before) + self._of_row, np.arange(len(before)))[stay]
        both = pa.chunked_array([*before.chunks, *after.chunks], before.type)
        return both.take(pa.array(np.concatenate([place, len(before) + self._fresh])))

    @cached_property
    def _sources(self) -> dict[str, str]:
        """Which column of the net changes each column of the target is written from."""
        found = {name: f"c{i}" for i, name in enumerate(self.names)}
        return found | {LSN: "lsn", COMMIT_TS: "commit_ts", RAW: "raw"} if self.metadata_columns else found

    @cached_property
    def _of_row(self) -> Ints:
        """For each row of the target the net change of its key, -1 for none."""
        if not self.shape.key:  # only new rows
            return np.full(len(self.held), -1, np.int64)
        pairs = [(self.held[self.names[i]], self.net[f"b{k}"]) for k, i in enumerate(self.shape.key)]
        codes = codes_of([pa.chunked_array([*t.cast(s.type).chunks, *s.chunks], s.type) for t, s in pairs])
        # Nulls are equal to nothing: a new row whose key went elsewhere in the batch has no base.
        in_target, in_net = (np.ones(n, np.bool_) for n in (len(self.held), len(self.net)))
        for t, s in pairs:
            in_target &= np.asarray(t.is_valid())
            in_net &= np.asarray(s.is_valid())
        change_of = np.full(int(codes.max(initial=-1)) + 1, -1, np.int64)
        change_of[codes[len(self.held) :][in_net]] = np.flatnonzero(in_net)
        return np.where(in_target, change_of[codes[: len(self.held)]], -1)

    @cached_property
    def _deleted(self) -> Bools:
        return self._matched_by(ACTION_DELETE, ACTION_PURGE)

    @cached_property
    def _updated(self) -> Bools:
        return (self._of_row >= 0) & ~self._deleted

    def _matched_by(self, *actions: str) -> Bools:
        chosen = np.append(self._has_action(*actions), False)
        return np.asarray(chosen[self._of_row])

    def _has_action(self, *actions: str) -> Bools:
        return np.asarray(pc.is_in(self.net["action"], value_set=pa.array(actions)))

    @cached_property
    def _fresh(self) -> Ints:
        """The net changes that are new rows, without one of the target at their key."""
        is_new = self._has_action(ACTION_INSERT, ACTION_UPSERT)
        is_new[self._of_row[self._of_row >= 0]] = False
        return np.flatnonzero(is_new)


def _commit(table: DeltaTable, rows: pa.Table, tag: CommitTag, *, appends: bool) -> None:
    """Write rows in the place of the table's, or behind them; raises DeltaError when it isn't what was read any more."""
    write_deltalake(
        table,
        rows,
        mode="append" if appends else "overwrite",
        writer_properties=_writer_properties(rows.schema),
        **only_if_unchanged(tag.app_id, tag.batch, tag.metadata),
    )


def _writer_properties(schema: pa.Schema) -> WriterProperties:
    """Statistics of integers alone: delta-rs rounds decimals' to doubles and leaves NaN out, so that readers would skip too much."""
    told = [field.name for field in schema if pa.types.is_integer(field.type) and field.name.isidentifier()]
    return WriterProperties(
        compression="SNAPPY",
        default_column_properties=_DEFAULT_STATISTICS,
        column_properties=dict.fromkeys(told, _STATISTICS),
    )
