"""Reconciles one table: compares a snapshot of the source with one version of its target, except
keys that changed between the two.

1. The target's version and its last applied batch are read; then the snapshot is taken.
2. Everything that the snapshot sees is landed. So each key in which both sides may rightly differ
   is in the change log: after the target's batch, or before it, in a transaction that was decoded
   before the snapshot sees it. The comparison skips such keys on both sides, and the rows that
   are in quarantine.
3. Both sides sum hashes by bucket: PostgreSQL its rows, this process those of a small target,
   Spark those of larger ones.
4. The rows of differing buckets are compared by their hashes, then differing rows by their
   columns.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import one_array
from waldelta.changes.decode.net_rows import named_keys
from waldelta.errors import LateWriter, NeedsSync
from waldelta.lake import staging_folder
from waldelta.lake.changelog import BatchNumbers, BatchRanges, Snapshot, last_truncates
from waldelta.lake.ledger import (
    DIFFERENT,
    EQUAL,
    Decisions,
    Reconciliation,
    RowDifference,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import ROWS_KEPT, ROWS_VALUED, TEXT_KEPT
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.pipeline import Job
from waldelta.pipeline.drift import Repair, is_dear, within_leaves
from waldelta.pipeline.targets import read_target_filter
from waldelta.postgres.publication_membership import EVERY_CHANGE
from waldelta.snapshot.chunks import plan_chunks
from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.snapshot.read_selected import whole_table
from waldelta.snapshot.read_table import TableCopy, plan_copy
from waldelta.snapshot.source_columns import key_columns
from waldelta.spark import Runner
from waldelta.stages.repair.mend.touched_keys import changed_keys
from waldelta.stages.repair.reconcile._checksum import Fingerprint, Hashes, Sums, drawn, hash_keys
from waldelta.stages.repair.reconcile._row_differences import (
    DIFFERENCE_KINDS,
    HashedRows,
    differing_rows,
    with_columns,
)
from waldelta.stages.repair.reconcile._row_differences import DIFFERENT_VALUES as DIFFERS
from waldelta.stages.repair.reconcile._source_side import BYTES_PER_CHUNK, SourceSide
from waldelta.stages.repair.reconcile._target_side import TargetSide, is_among, read_small
from waldelta.target_modes.target_mode import Feature

log = logging.getLogger(__name__)

# At most this many rows of differing buckets are compared one by one.
MOST_COMPARED_ROWS = 500_000


@dataclass(frozen=True, slots=True)
class ComparedTarget:
    """A target and its source as of the snapshot; it contained all changes up to ``batch`` at
    ``version``.

    That version is older than the snapshot.
    """

    as_copied: Repair
    batch: int
    version: int

    @property
    def state(self) -> TableState:
        """Returns the target's state in the ledger."""
        return self.as_copied.state


@dataclass(frozen=True, slots=True)
class Found:
    """A table's result, and the keys of all rows that differ."""

    row: Reconciliation
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Aside:
    """Keys that aren't compared: sorted hashes, texts by column, and counts by kind.

    The target may have a row of the keys in ``on_both``. It must lack the others: a row of these
    that it has is an extra row.
    """

    hashes: Hashes
    texts: tuple[ArrowArray, ...]
    on_both: Hashes
    in_flight: int
    lacking: int


# Batches after the first up to and including the second, and the state whose snapshot decides which
# of their transactions count.
_Range = tuple[TableState, BatchNumbers]
# The hashes of keys, and the keys' texts by column.
_Keys = tuple[Hashes, list[ArrowArray]]


def needs_spark(job: Job, table_name: str) -> bool:
    """Returns whether Spark must read the target in its current version."""
    return read_small(job.lake.target(table_name)) is None


def why_not_compared(job: Job, feeding: ComparedTarget) -> str | None:
    """Returns why a comparison would be meaningless, or None."""
    state, table = feeding.state, feeding.as_copied.table
    mode = job.pipeline.target.mode_of(state.table_name)
    if not mode.supports(Feature.MEND):
        return f"its mode is {mode}: only a mirror holds what its source holds"
    if not table.publishes >= EVERY_CHANGE:
        events = ", ".join(sorted(EVERY_CHANGE - table.publishes))
        return (
            f"its publications don't publish every {events}, so its target differs from the source"
            " by design"
        )
    if sorted(state.key_columns) != sorted(table.key_columns):
        return (
            "its key columns on the source differ from its target's: run consume (the _cdc DAG)"
            " first"
        )
    if gone := set(state.key_columns) & set(_uncompared_columns(state, _copy(job, feeding, None))):
        return (
            f"its key column {min(gone)} differs between source and target: run consume (the"
            " _cdc DAG) first"
        )
    return None


def compare(runner: Runner, job: Job, holder: SnapshotHolder, feeding: ComparedTarget) -> Found:
    """Compare one table; everything that the snapshot sees has landed.

    Raises NeedsSync for a table that can't be compared now.
    """
    began, state = time.monotonic(), feeding.state
    rows = _estimated_rows(job, state)
    source, target, skipped_columns = _sides(runner, job, holder, feeding, rows)
    plan = source.plan
    aside = _set_aside(runner, job, feeding, plan, _between(job, holder, feeding))
    if is_dear(aside.in_flight, rows):
        raise NeedsSync(
            f"{aside.in_flight:,} of the source's rows changed after version {feeding.version} of"
            " the target: run again after a CDC run has applied these changes"
        )
    ours, theirs, source_seconds = _sum_up(source, target, aside)
    differing = ours.differing(theirs)
    differences, is_complete = _drill(source, target, ours, theirs, differing, aside)
    counts: dict[str, Any] = {
        kind: sum(one.rows for one in differences if one.kind == kind) for kind in DIFFERENCE_KINDS
    }
    _check_same(job, state)
    status = DIFFERENT if len(differing) else EQUAL
    row = Reconciliation(
        now(), job.run_id, state.table_name, status, generation=state.generation,
        position=holder.lsn.value, batch=feeding.batch, version=feeding.version,
        snapshot=holder.snapshot, source_rows=ours.count, target_rows=theirs.count, **counts,
        in_flight=aside.in_flight, lacking=aside.lacking, buckets=plan.buckets,
        differing_buckets=len(differing), is_complete=is_complete, skipped_columns=skipped_columns,
        differences=differences[:ROWS_KEPT], seconds=round(time.monotonic() - began, 3),
        source_seconds=round(source_seconds, 3),
    )  # fmt: skip
    log.info(
        "table=%s reconciled source_rows=%d target_rows=%d differing=%d in_flight=%d lacking=%d"
        " buckets=%d of %d seconds=%.1f",
        row.table_name, row.source_rows, row.target_rows, row.differing, row.in_flight,
        row.lacking, len(differing), plan.buckets, row.seconds,
    )  # fmt: skip
    return Found(row, frozenset(one.key for one in differences))


def _sides(
    runner: Runner, job: Job, holder: SnapshotHolder, feeding: ComparedTarget, rows: int
) -> tuple[SourceSide, TargetSide, list[str]]:
    """Returns both sides of a comparison, and the columns that are left out; ``rows`` is an
    estimate of the table's rows.
    """
    state, copy = feeding.state, _copy(job, feeding, holder)
    skipped_columns = _uncompared_columns(state, copy)
    columns = tuple(column for column in copy.columns if column[0] not in skipped_columns)
    encoding = holder.connection.info.parameter_status("server_encoding") or ""
    raw = job.pipeline.target.metadata_columns
    plan = drawn(
        state.table_name, columns, tuple(state.key_columns), rows, raw=raw, encoding=encoding
    )
    table, place = feeding.as_copied.table, job.lake.target(state.table_name)
    source = SourceSide(
        job.source.conninfo,
        plan,
        copy,
        tuple(plan_chunks(table.stored_leaves, BYTES_PER_CHUNK)),
        whole_table(table, within_leaves(feeding.as_copied, "true"), copy.relfilenodes),
        key_columns(table, state.key_columns),
        holder.pid,
    )
    small = read_small(place, feeding.version)
    target = TargetSide(runner, place, feeding.version, plan, tuple(source.shown), small)
    return source, target, skipped_columns


def _estimated_rows(job: Job, state: TableState) -> int:
    """Returns about how many rows the target has, by its files' statistics.

    Rows marked as deleted by deletion vectors are counted.
    """
    actions = job.lake.target(state.table_name).open().files
    return (
        int(pc.sum(actions["num_records"]).as_py() or 0)
        if "num_records" in actions.column_names
        else state.rows
    )


def _sum_up(source: SourceSide, target: TargetSide, aside: _Aside) -> tuple[Sums, Sums, float]:
    """Returns the sums of the source and of the target without the keys set aside, and how long
    the source took.
    """
    nothing = np.zeros(0, np.int64)
    hashes = source.hashes(aside.texts) if len(aside.hashes) else (nothing, nothing)
    with ThreadPoolExecutor(1, thread_name_prefix="reconcile source") as pool:
        began = time.monotonic()
        future = pool.submit(lambda: (source.sums(), time.monotonic() - began))
        theirs = target.sums(aside.on_both)
        whole, source_seconds = future.result()
    return whole.without(*hashes), theirs, source_seconds


def _copy(job: Job, feeding: ComparedTarget, holder: SnapshotHolder | None) -> TableCopy:
    """Returns the plan of a copy of the table as of the snapshot; the comparison reads the same
    rows.
    """
    state, table = feeding.state, feeding.as_copied.table
    options = job.pipeline.target.types_of(state.table_name)
    if holder is None:
        return plan_copy(table, "", {}, None, options)
    with job.source.connect("reconcile") as connection:
        target_filter = read_target_filter(
            connection, state.table_name, feeding.as_copied.where, table
        )
    files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
    return plan_copy(table, holder.snapshot_id, files, None, options, target_filter)


def _uncompared_columns(state: TableState, copy: TableCopy) -> list[str]:
    """Returns columns that only one side has, whose types differ, or that have no canonical
    text.
    """
    stored_types = {
        column.name: column.stored_type for column in state.columns if not column.stopped
    }
    compared = {
        name
        for name, kind in copy.columns
        if stored_types.get(name) == kind.ledger_name and kind.has_checksum
    }
    return sorted((stored_types.keys() | dict(copy.columns).keys()) - compared)


def _set_aside(
    runner: Runner,
    job: Job,
    feeding: ComparedTarget,
    plan: Fingerprint,
    ranges: Sequence[_Range],
) -> _Aside:
    """Returns the keys that changed between the two positions, and those the target is known to
    lack.
    """
    if not plan.key:
        if waiting := sum(_waiting(job, seen, batches) for seen, batches in ranges):
            raise NeedsSync(
                f"{waiting:,} of its changes are not applied yet, and rows without a key can't be"
                " told apart: run again after a CDC run has applied them"
            )
        nothing = np.zeros(0, np.int64)
        return _Aside(nothing, (), nothing, 0, 0)
    touched = list(_read_touched_keys(runner, job, feeding.state, plan, ranges))
    in_flight = np.unique(
        np.concatenate([np.zeros(0, np.int64), *(hashes for hashes, _ in touched)])
    )
    outdated, absent = _lacking(job, feeding, plan)
    groups = [*touched, outdated, absent]
    hashes, first = np.unique(np.concatenate([hashes for hashes, _ in groups]), return_index=True)
    texts = [
        pa.concat_arrays([texts[k] for _, texts in groups]).take(pa.array(first))
        for k in range(len(plan.key))
    ]
    on_both = np.union1d(in_flight, outdated[0])
    return _Aside(hashes, tuple(texts), on_both, len(in_flight), len(hashes) - len(in_flight))


def _read_touched_keys(
    runner: Runner, job: Job, state: TableState, plan: Fingerprint, ranges: Sequence[_Range]
) -> Iterator[_Keys]:
    """Yields the keys that these ranges of batches change."""
    folder = staging_folder(job.lake, "reconcile", 0, 0, f"{job.run_id} {state.table_name}")
    for seen, batches in ranges:
        if (keys := changed_keys(runner, job, seen, batches, folder)) is not None:
            yield _hash_keys(keys, plan)


def _lacking(job: Job, feeding: ComparedTarget, plan: Fingerprint) -> tuple[_Keys, _Keys]:
    """Returns the keys of rows known to be outdated, and known to be missing, when the batch was
    applied.

    A key with other columns is from before the key was changed, and is skipped.
    """
    records = Decisions(job.lake).lacking(
        feeding.state.table_name, feeding.state.generation, feeding.batch
    )
    keys = {key for key in records if json.loads(key).keys() == set(plan.key)}
    outdated = {key for key in keys if records[key].outdated}
    return (
        _hash_keys(named_keys(outdated, plan.key_columns), plan),
        _hash_keys(named_keys(keys - outdated, plan.key_columns), plan),
    )


def _hash_keys(keys: pa.Table, plan: Fingerprint) -> _Keys:
    """Returns the hashes and texts of keys in the columns of named_keys()."""
    typed = [
        one_array(keys[f"k{k}"]).cast(kind.arrow) for k, (_, kind) in enumerate(plan.key_columns)
    ]
    texts = [one_array(keys[f"t{k}"]).cast(pa.string()) for k in range(len(plan.key))]
    return hash_keys(typed, plan), texts


def _between(job: Job, holder: SnapshotHolder, feeding: ComparedTarget) -> list[_Range]:
    """Returns the ranges of batches that only one side may contain.

    Each has the state whose snapshot decides which of its transactions count.
    """
    state, identity = feeding.state, job.read_identity()
    change_log = job.change_log(identity)
    ranges: list[_Range] = [(state, BatchNumbers(feeding.batch, change_log.last_batch() or 0))]
    # A decoded transaction may not be visible yet: a commit that waits for a synchronous standby.
    of_snapshot = replace(state, snapshot=holder.snapshot)
    visible = change_log.visible_upto(Snapshot.parse(holder.snapshot), identity.floor)
    if visible < feeding.batch:
        ranges.append((of_snapshot, BatchNumbers(visible, feeding.batch)))
    return ranges


def _waiting(job: Job, state: TableState, batches: BatchNumbers) -> int:
    """Returns the number of row changes and truncates in a range that a state's snapshot doesn't
    see.
    """
    if batches.is_empty:
        return 0
    identity = job.read_identity()
    sizes = job.read_landed_sizes(identity, *batches)
    batch_range = BatchRanges(job.change_log(identity), sizes).of(batches)
    truncated = last_truncates(batch_range.stream, state, Snapshot.parse(state.snapshot))
    return batch_range.count(state) + len(truncated)


def _drill(
    source: SourceSide,
    target: TargetSide,
    ours: Sums,
    theirs: Sums,
    differing: Hashes,
    aside: _Aside,
) -> tuple[list[RowDifference], bool]:
    """Returns the rows that differ in differing buckets, and whether these are all.

    Of very many buckets, only the first are compared.
    """
    if not len(differing):
        return [], True
    plan = source.plan
    sizes = np.cumsum(np.maximum(ours.rows[differing], theirs.rows[differing]))
    buckets = differing[
        : max(1, int(np.searchsorted(sizes, MOST_COMPARED_ROWS, side="right")))
    ].tolist()
    source_rows, target_rows = source.rows(buckets), target.rows(buckets, aside.on_both)
    source_rows = HashedRows(
        source_rows.table.filter(
            pa.array(~is_among(source_rows.table["k"].to_numpy(), aside.hashes))
        )
    )
    rows = differing_rows(source_rows, target_rows, source.shown, keyed=bool(plan.key))
    if plan.key:
        rows = _with_values(source, target, rows, source_rows)
    return rows, len(buckets) == len(differing)


def _with_values(
    source: SourceSide, target: TargetSide, rows: list[RowDifference], source_rows: HashedRows
) -> list[RowDifference]:
    """Returns the rows, the first ones with the columns that differ."""
    valued = [one.hash for one in rows if one.kind == DIFFERS][:ROWS_VALUED]
    if not valued:
        return rows
    key_rows = source_rows.table.filter(
        pc.is_in(source_rows.table["k"], value_set=pa.array(valued))
    )
    ours = source.values([one_array(key_rows[f"t{n}"]) for n in range(len(source.shown))])
    theirs = target.values(valued)
    names, hashes = [name for name, _ in source.plan.columns], set(valued)
    return [
        (
            with_columns(one, names, ours.get(one.hash), theirs.get(one.hash), TEXT_KEPT)
            if one.hash in hashes
            else one
        )
        for one in rows
    ]


def _check_same(job: Job, state: TableState) -> None:
    """Raise LateWriter if the table was synced again since, which replaced the compared target."""
    present = job.read_state(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, state.status):
        raise LateWriter(f"{state.table_name} was synced again while it was compared: run again")
