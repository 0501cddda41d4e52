"""Repair: mend a drifted target by the rows that enter it and leave it, in one MERGE, instead of copying it again.

1. Settle the publications and take a snapshot, as for a copy.
2. Land on until everything that the snapshot sees is in the change log. Each key of the table that is touched there,
   after what the target holds, is to be read again: such rows can't be judged by comparing filters. So is each key in
   quarantine, which the target lacks whatever its filter says.
3. Read from the source, as the snapshot sees it, the rows that enter (an index finds them) and those of touched keys.
4. Find the rows in the target that its filter doesn't admit any more.
5. Enter a new generation into the ledger, with the snapshot, commit, enter that it is done: the stream goes on from there as
   after a copy. Killed in between, the next run finds out which it was (spark_jobs.repair_end).

Why that is exact: waldelta.repair. Whatever it can't be exact for is left to a copy, before anything is changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import tenacity

from spark_jobs.drain import Drained, drain
from spark_jobs.merge_rows import merge_rows
from spark_jobs.plan import TargetPlan, plan_target
from spark_jobs.repair_end import end_repair, record_repaired, repair_tag
from spark_jobs.repair_rows import (
    ENTERS,
    LEAVES,
    RepairRows,
    check_cost,
    plan_rows,
    stage_net,
    stage_quarantined,
    stage_rows,
)
from spark_jobs.stretch import Stretches
from spark_jobs.sync import OLD_TRANSACTIONS_TIMEOUT_S, check_unaltered, fed_as_of
from spark_jobs.target_commit import commit_untouched, read_commit
from spark_jobs.task_error import first_line, named_error
from spark_jobs.touched import stage_touched
from waldelta.catalog import TableId
from waldelta.drift import unpublished_columns
from waldelta.errors import ApplyError, LateWriter, LockHeld, NeedsSync, SnapshotLost, StandbyAway, WaldeltaError
from waldelta.fault import fault_point
from waldelta.foreign import looked_upto
from waldelta.job import Job
from waldelta.lake import remove_folder
from waldelta.ledger_rows import FileState, StorageState, TableState, TargetCut, now
from waldelta.leftovers import staging_folder, take_over
from waldelta.locks import AdvisoryLock, slot_lock, target_lock
from waldelta.lsn import Lsn
from waldelta.membership import to_texts, was_interrupted
from waldelta.present import read_present
from waldelta.quarantine import Quarantine, watched_rows
from waldelta.repair import Repair, is_dear, obstacle
from waldelta.rewrite import unsent_changes
from waldelta.row_filter import RowFilter
from waldelta.settled import check_settled, read_version_as_of, settle
from waldelta.snapshot import SnapshotHolder
from waldelta.standing import COPYING, NEEDS_SYNC, SYNCED
from waldelta.target_filter import column_states, read_target_filter, to_text
from waldelta.targets import Target
from waldelta.watermark import Watermarks, check_same_copy, last_cut, uri_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did: rows that entered and left the target by its rule, and touched ones that were read again."""

    cut: TargetCut
    lsn: Lsn
    entered: int
    left: int
    reread: int
    drained: Drained


def repair(spark: SparkSession, job: Job, drifted: Repair) -> Repaired:
    """Mend a target that is marked ``needs_sync`` because of this drift, under its lock.

    Raises NeedsSync when only a whole copy is exact, or costs no more; other WaldeltaErrors when it didn't succeed. The table
    is in need of a copy then, and nothing was fed twice: a copy makes it whole.
    """
    if (why := obstacle(drifted)) is not None:
        raise NeedsSync(why)
    name, began = drifted.state.table_name, time.monotonic()
    with target_lock(job, name) as lock:
        _check_marked(job, drifted.state)
        done = _named_repair(spark, job, drifted, lock.check)
    log.info(
        "table=%s repaired lsn=%s: %d rows entered, %d left, %d were read again, %.1f s",
        name, done.lsn, done.entered, done.left, done.reread, time.monotonic() - began,
    )  # fmt: skip
    return done


def reread_quarantined(spark: SparkSession, job: Job, fed: Repair, by: str) -> Repaired:
    """Read the quarantined rows of a target again, which didn't drift otherwise, and put them right in one MERGE.

    Raises NeedsSync when only a whole copy is exact, before anything is changed; other WaldeltaErrors when it didn't succeed.
    Target and rows are as they were then, or, when the MERGE was committed after all, put right. ``by``: who asked for it.
    """
    if (why := obstacle(fed)) is not None:
        raise NeedsSync(why)
    with target_lock(job, fed.state.table_name) as lock:
        check_same_copy(job, fed.state)
        return _named_repair(spark, job, fed, lock.check, by)


def _named_repair(
    spark: SparkSession, job: Job, drifted: Repair, check: Callable[[], None], by: str | None = None
) -> Repaired:
    try:
        return _repair(spark, job, drifted, check, by)
    except WaldeltaError:
        raise
    except Exception as err:
        raise named_error(err) or ApplyError(f"{drifted.state.table_name}: {first_line(err)}") from err


def _repair(spark: SparkSession, job: Job, drifted: Repair, check: Callable[[], None], by: str | None) -> Repaired:
    name, publications = drifted.state.table_name, job.pipeline.source.publication_names
    generation = drifted.state.generation + 1
    take_over(job.pipeline.target.root, name)
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    quarantined = watched_rows(quarantine.rows(name, drifted.state.generation)).keys()
    with job.connect("repair") as connection:
        own = read_target_filter(connection, name, drifted.where, drifted.table)
        settled = settle(connection, publications, OLD_TRANSACTIONS_TIMEOUT_S)
    staged = staging_folder(job.pipeline.target.root, name, generation, 0, job.run_id)
    try:
        with SnapshotHolder(job.conninfo, f"waldelta repair {name}"[:63]) as holder:
            check_settled(holder, settled)
            fed, storage = fed_as_of(holder, job, TableId.parse(name))
            membership = read_version_as_of(holder, settled, fed.table.relation_ids)
            drifted = _as_seen(job, drifted, fed, storage)
            with job.connect("repair") as connection:
                rows = plan_rows(job, drifted, own, holder, connection)
                size = check_cost(connection, rows)
            drained = _land_through(spark, job, holder.lsn)
            touched = _stage_touched(spark, job, drifted, f"{staged}/touched")
            touched += stage_quarantined(rows, quarantined, f"{staged}/touched")
            if is_dear(touched, size):
                raise NeedsSync(f"{touched:,} of its rows changed meanwhile, so that a whole copy costs no more")
            stage_rows(spark, job, rows, holder, staged, touched)
            check_unaltered(job, fed, membership)
        counts = stage_net(spark, job, drifted, rows, staged, touched)
        state = _synced_state(job, drifted, own, (holder, storage), generation)
        cut = _commit(spark, job, rows, state, (f"{staged}/net", counts), (check, by))
    finally:
        remove_folder(staged)
    return Repaired(cut, holder.lsn, counts.get(ENTERS, 0), counts.get(LEAVES, 0), touched, drained)


def _check_marked(job: Job, state: TableState) -> None:
    present = job.table_states().get(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, NEEDS_SYNC):
        raise LateWriter(f"{state.table_name} was synced again meanwhile")


def _as_seen(job: Job, drifted: Repair, fed: Target, storage: StorageState | None) -> Repair:
    """The drift as the snapshot sees it, which must be the one that was found."""
    table, state = fed.table, drifted.state
    seen = replace(drifted, table=table)
    if (why := obstacle(seen)) is not None:
        raise NeedsSync(why)
    then, leaves = drifted.table, {leaf.oid for leaf in table.leaves}
    altered = (table.row_filter, fed.feed.where) != (then.row_filter, drifted.where) or was_interrupted(
        then.entries, table.entries
    )
    if altered or leaves != {leaf.oid for leaf in then.leaves}:
        raise NeedsSync("what is published of it changed once more meanwhile")
    if told := unsent_changes(state, storage):
        raise NeedsSync("; ".join(told))
    if _leaves(drifted.storage) != _leaves(storage):
        raise NeedsSync("a partition was written anew, or emptied, once more meanwhile")
    present = column_states(table.columns, table.key_columns, job.pipeline.target.types_of(state.table_name))
    if {c.name: c.spark_type for c in present} != {c.name: c.spark_type for c in state.columns}:
        raise NeedsSync("its columns have other types in the lake now")
    return seen


def _leaves(storage: StorageState | None) -> list[FileState]:
    return storage.files if storage is not None else []


def _land_through(spark: SparkSession, job: Job, needed: Lsn) -> Drained:
    """Land until the change log holds everything up to ``needed``, where the last record ends that a snapshot sees."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    with _slot_lock(job) as lock:
        drained = drain(spark, job, lock.check)
        while drained.end < needed:
            # With synchronous_commit = off a commit is seen before it is flushed, and only what is flushed is decoded; of a
            # standby, what it has replayed.
            if time.monotonic() > deadline:
                if job.pipeline.source.read_from is not None:
                    raise StandbyAway(
                        f"the standby didn't replay WAL up to {needed} within {FLUSH_TIMEOUT_S:g} s: run again"
                    )
                raise SnapshotLost(f"WAL up to {needed} wasn't flushed within {FLUSH_TIMEOUT_S:g} s")
            time.sleep(0.2)
            further = drain(spark, job, lock.check)
            further.bill.add(drained.bill)
            drained = replace(further, start=drained.start, batches=[*drained.batches, *further.batches])
    return drained


@contextmanager
def _slot_lock(job: Job) -> Iterator[AdvisoryLock]:
    """The slot's lock, which a look or maintenance may have for a moment."""
    patient = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(LockHeld),
        stop=tenacity.stop_after_delay(LOCK_TIMEOUT_S),
        wait=tenacity.wait_fixed(0.5),
        reraise=True,
    )
    with ExitStack() as stack:
        yield patient(lambda: stack.enter_context(slot_lock(job)))


def _stage_touched(spark: SparkSession, job: Job, drifted: Repair, folder: str) -> int:
    """Write the keys of all changes behind what the target holds; raises NeedsSync for changes that aren't of rows alone."""
    state, identity = drifted.state, job.slot_identity()
    change_log = job.change_log(identity)
    after, last = Watermarks(job, identity).of(state), change_log.last_batch()
    if last is None or last <= after:
        return 0
    stretch = Stretches(change_log, change_log.sizes(after, last)).between(after, last)
    target = job.pipeline.target
    with job.connect("repair") as connection:
        present = read_present(connection, [state])[state.table_name]
        policy, options = target.policy_of(state.table_name), target.types_of(state.table_name)
        plan: TargetPlan = plan_target(connection, stretch, state, present, policy, options)
    if plan.truncated or plan.evolution is not None:
        raise NeedsSync("it was truncated or altered meanwhile")
    return stage_touched(spark, change_log, plan, folder) if plan.volume.rows else 0


def _synced_state(
    job: Job,
    drifted: Repair,
    own: RowFilter | None,
    seen: tuple[SnapshotHolder, StorageState | None],
    generation: int,
) -> TableState:
    """The new generation's row in the ledger: as after a copy from that snapshot, but for what it took."""
    state, table, (holder, storage) = drifted.state, drifted.table, seen
    return replace(
        state,
        generation=generation,
        status=SYNCED,
        snapshot=holder.snapshot,
        snapshot_lsn=holder.lsn.value,
        relation_ids=list(table.relation_ids),
        columns=column_states(table.columns, table.key_columns, job.pipeline.target.types_of(state.table_name)),
        row_filter=table.row_filter,
        storage=storage,
        target_filter=to_text(own),
        later_filters=[],
        publishes=sorted(table.publishes),
        entries=to_texts(table.entries),
        unpublished=unpublished_columns(table, storage),
        unmended_leaves=[],
        version=looked_upto(last_cut(job), state),
    )


def _commit(
    spark: SparkSession,
    job: Job,
    rows: RepairRows,
    state: TableState,
    net: tuple[str, dict[str, int]],
    told: tuple[Callable[[], None], str | None],
) -> TargetCut:
    """Commit the net changes between two rows of the ledger: whoever finds only the first asks the target (repair_end)."""
    (folder, counts), (check, by), name = net, told, state.table_name
    marked = job.table_states()[name]
    reason = marked.reason if by is None else f"quarantine --retry by {by}"
    check()
    first = replace(state, at=now(), run_id=job.run_id, status=COPYING, reason=reason, rows=0, bytes=0, seconds=0.0)
    begun = job.ledger.append_state(first, marked)
    fault_point("repair.begun")
    try:
        cut = _merge(spark, job, rows, begun, folder, counts) if counts else commit_untouched(spark, job, begun)
        fault_point("repair.merged")
        check()
        present = job.table_states()[name]
        if (present.generation, present.status) != (begun.generation, COPYING):
            raise LateWriter(f"{name} left the publications while it was repaired: sync it again once it is published")
        record_repaired(spark, job, begun, cut, by)
    except (LateWriter, LockHeld):
        raise
    except Exception:
        _end(spark, job, begun, check)
        raise
    return cut


def _end(spark: SparkSession, job: Job, begun: TableState, check: Callable[[], None]) -> None:
    """Of a repair that broke off; what can't be told now, the next run finds out."""
    try:
        check()
        end_repair(spark, job, begun)
    except Exception as err:
        log.warning("table=%s the next run finds out what became of its repair: %s", begun.table_name, first_line(err))


def _merge(
    spark: SparkSession, job: Job, rows: RepairRows, begun: TableState, folder: str, counts: dict[str, int]
) -> TargetCut:
    tag = repair_tag(begun, job.run_id, counts)
    merge_rows(spark, uri_of(job, begun.table_name), rows.copy, [column for column, _ in rows.key], folder, tag)
    # A touched key that the target never had isn't a change that was skipped.
    return replace(read_commit(job, begun, tag), skipped=0)
