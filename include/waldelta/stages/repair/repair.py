"""Repair: corrects a drifted target in one MERGE of the rows that enter and leave it, without a new
copy.

1. Land what waits, wait for old transactions of the publications, and take a snapshot, as for a
   copy.
2. Land until everything that the snapshot sees is in the change log. Each key that this changes
   after the target's position is read again, because such rows can't be judged by comparing
   filters. Each key in quarantine is read again too, because the target lacks it whatever its
   filter.
3. Read from the source, as the snapshot sees it, the rows that enter (an index finds them) and
   the rows of touched keys.
4. Find the rows in the target that its filter no longer admits.
5. Record a new generation with the snapshot in the ledger, commit, and record the end: the stream
   continues as after a copy. If the run is killed in between, the next run finds out whether it
   committed (waldelta.stages.sync.unfinished_repairs).

waldelta.pipeline.drift.repair_plan explains why this is exact. Where it can't be exact, the table
is left to a copy before anything is changed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from waldelta.changes.merge import read_commit, take_over_target
from waldelta.changes.merge.commits import commit_untouched
from waldelta.changes.merge.snapshot_rows import merge_rows
from waldelta.changes.stage import staged_in
from waldelta.errors import (
    ApplyError,
    ConfigError,
    LateWriter,
    LockHeld,
    NeedsSync,
    StateError,
    WaldeltaError,
)
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import IncompleteRow, Quarantine, TableState, TargetCut
from waldelta.lake.ledger.ledger import next_generation
from waldelta.lake.ledger.quarantine import (
    ACCEPTED,
    QUARANTINED,
    discarded_rows,
    message_rows,
    watched_rows,
)
from waldelta.lake.ledger.records import COPYING, NEEDS_SYNC, SYNCED, FileState, StorageState, now
from waldelta.lake.staging_leftovers import staging_folder
from waldelta.lsn import Lsn
from waldelta.pipeline import AdvisoryLock, Job, target_lock
from waldelta.pipeline.drift import Repair
from waldelta.pipeline.drift.drift import as_published
from waldelta.pipeline.drift.repair_plan import is_dear, obstacle
from waldelta.pipeline.drift.rewrites import unsent_changes
from waldelta.pipeline.targets import ReplicatedTarget, Watermarks
from waldelta.pipeline.targets.external_commits import check_target, checked_upto, mirrored_at
from waldelta.pipeline.targets.target_filter import column_states, read_target_filter, to_text
from waldelta.pipeline.targets.watermarks import TargetFence, check_same_copy
from waldelta.pipeline.task_errors import first_line, named_error
from waldelta.postgres import TableId
from waldelta.postgres.publication_membership import was_interrupted
from waldelta.quantities import counted
from waldelta.row_filter import RowFilter
from waldelta.snapshot import SnapshotHolder
from waldelta.snapshot.publication_version import (
    check_version,
    read_version_as_of,
    wait_for_version,
)
from waldelta.stages.check.gate import read_gates
from waldelta.stages.check.gate.gate import StillFails, judge_complete_rows
from waldelta.stages.check.gate.release import landed_upto
from waldelta.stages.land import land_backlog, land_through
from waldelta.stages.land.drain import Drained
from waldelta.stages.repair._by_driver import merge_rows_in_driver
from waldelta.stages.repair._repair_rows import (
    ENTERS,
    LEAVES,
    RepairRows,
    check_cost,
    hold_back,
    plan_rows,
    rows_to_judge,
    stage_named,
    stage_net,
    stage_rows,
    unheld_keys,
    untouched,
)
from waldelta.stages.repair.reconcile import stage_changed
from waldelta.stages.sync.copy_table import check_unaltered, source_as_of
from waldelta.stages.sync.sync import OLD_TRANSACTIONS_TIMEOUT_S
from waldelta.stages.sync.unfinished_repairs import (
    carry_over,
    end_repair,
    record_repaired,
    repair_tag,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repair's effect: rows that entered and left the target by its filter, and rows read again.

    ``kept`` of the latter still fail their gate and stay in quarantine.
    """

    cut: TargetCut
    lsn: Lsn
    entered: int
    exited: int
    read_again: int
    drained: Drained
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """Rows that an operator wants to read again: those of ``keys``, or (None) all in quarantine.

    ``keys`` have the quarantine's form. Quarantined rows are judged again, except accepted ones
    (the ids in ``accepted``, or all). ``reason`` goes into the ledger, ``by`` is the operator,
    ``why`` the operator's reason for accepting. ``compared`` is the target's version in which all
    other rows were found equal to the source's.
    """

    reason: str
    by: str | None = None
    keys: frozenset[str] | None = None
    compared: int | None = None
    accepted: frozenset[str] = frozenset()
    accepts_all: bool = False
    why: str | None = None

    def accepts(self, watched: Mapping[str, IncompleteRow]) -> frozenset[str]:
        """Returns the keys of the rows that are written without a gate.

        Raises ConfigError when one isn't in quarantine any more.
        """
        if lost := self.accepted - {row.id for row in watched.values()}:
            raise ConfigError(
                f"not open in quarantine: {', '.join(sorted(lost))}: the command quarantine lists"
                " the open rows"
            )
        return frozenset(
            key for key, row in watched.items() if self.accepts_all or row.id in self.accepted
        )


def repair(spark: SparkSession, job: Job, drifted: Repair) -> Repaired:
    """Repair a target that this drift marked ``needs_sync``, under the target's lock.

    Raises NeedsSync when only a whole copy is exact, or costs no more, and other WaldeltaErrors
    when the repair failed. The table then still needs a copy, which corrects it; no change was
    applied twice.
    """
    if (why := obstacle(drifted)) is not None:
        raise NeedsSync(why)
    name, began = drifted.state.table_name, time.monotonic()
    with target_lock(job, name) as lock:
        _check_marked(job, drifted.state)
        done = _named_repair(spark, job, drifted, lock)
    log.info(
        "table=%s repaired lsn=%s: entered=%d left=%d reread=%d seconds=%.1f",
        name, done.lsn, done.entered, done.exited, done.read_again, time.monotonic() - began,
    )  # fmt: skip
    return done


def repair_rows(spark: SparkSession, job: Job, as_copied: Repair, again: Again) -> Repaired:
    """Read rows of a target without drift again, quarantined ones too, and merge them in one MERGE.

    Quarantined rows that still fail their gate stay there. Raises before anything is changed:
    NeedsSync when only a whole copy is exact, StateError or QualityFailed when it would also write
    rows that are kept out of the target on purpose. Other WaldeltaErrors mean that it failed:
    target and quarantine are unchanged, or, if the MERGE was committed after all, repaired.
    """
    if (why := obstacle(as_copied)) is not None:
        raise NeedsSync(why)
    with target_lock(job, as_copied.state.table_name) as lock:
        check_same_copy(job, as_copied.state)
        return _named_repair(spark, job, as_copied, lock, again)


def _named_repair(
    spark: SparkSession,
    job: Job,
    drifted: Repair,
    lock: AdvisoryLock,
    again: Again | None = None,
) -> Repaired:
    try:
        check_target(job, drifted.state)
        return _repair(spark, job, drifted, lock, again)
    except WaldeltaError:
        raise
    except Exception as err:
        raise named_error(err) or ApplyError(
            f"{drifted.state.table_name}: {first_line(err)}"
        ) from err


def _repair(
    spark: SparkSession, job: Job, drifted: Repair, lock: AdvisoryLock, again: Again | None
) -> Repaired:
    name, publications = drifted.state.table_name, job.pipeline.source.publication_names
    generation = next_generation(job.ledger.table_rows(name))
    lock.verify()
    quarantine = Quarantine(job.lake)
    fence = TargetFence(lock, Watermarks(job, job.read_identity()), drifted.state)
    take_over_target(spark, job, drifted.state, quarantine, fence)
    held = _read_quarantined(quarantine, drifted.state, again)
    named = held.watched.keys() | ((again.keys if again is not None else None) or set())
    drained = land_backlog(spark, job)
    with job.source.connect("repair") as connection:
        own = read_target_filter(connection, name, drifted.where, drifted.table)
        settled = wait_for_version(connection, publications, OLD_TRANSACTIONS_TIMEOUT_S)
    staged = staging_folder(job.lake, name, generation, 0, job.run_id)
    with staged_in(spark, staged):
        with SnapshotHolder(
            job.source.conninfo, f"waldelta repair {job.pipeline.source.slot} {name}"
        ) as holder:
            check_version(holder, settled)
            replicated, storage = source_as_of(holder, job, TableId.parse(name))
            membership = read_version_as_of(holder, settled, replicated.table.relation_ids)
            drifted = _as_seen(job, drifted, replicated, storage)
            with job.source.connect("repair") as connection:
                rows = plan_rows(job, drifted, own, holder, connection)
                rows = replace(
                    rows, unheld=unheld_keys(connection, [column for column, _ in rows.key], named)
                )
                size = check_cost(connection, rows)
            drained = drained.before(land_through(spark, job, holder.lsn))
            counted = {
                f"{staged}/touched": _stage_touched(spark, job, drifted, f"{staged}/touched"),
                f"{staged}/named": stage_named(rows, named, f"{staged}/named"),
            }
            touched = sum(counted.values())
            if is_dear(touched, size):
                raise NeedsSync(
                    f"{touched:,} of its rows changed during the repair, so a full copy costs no"
                    " more"
                )
            folders = [folder for folder, count in counted.items() if count]
            stage_rows(spark, job, rows, holder, staged, folders)
            check_unaltered(job, replicated, membership)
        # Touched rows equal the source's from this commit on.
        left_out = untouched(
            spark, rows, held.discarded.keys(), staged, counted[f"{staged}/touched"]
        )
        net = f"{staged}/net", stage_net(spark, job, drifted, rows, staged, folders)
        carried = [held.discarded[key] for key in sorted(left_out)]
        if again is not None:
            waiting = f"{staged}/touched" if counted[f"{staged}/touched"] else None
            if waiting and left_out != held.discarded.keys():
                raise StateError(
                    f"{name}: changes of discarded rows wait in the change log, and this would"
                    " write them: let a CDC run apply them first"
                )
            still = _judge(spark, job, drifted.state, rows, staged, held=held, waiting=waiting)
            if still:
                net = hold_back(spark, rows, staged, still.keys())
            carried += _decided(job, again, held, still, holder.lsn)
        state = _synced_state(job, drifted, own, (holder, storage), generation)
        if again is not None and again.compared is not None:
            state = mirrored_at(state, again.compared)
        carried = [
            replace(row, at=now(), generation=generation) for row in (*carried, *held.messages)
        ]
        cut = _commit(spark, job, rows, state, net, (lock, again, carried))
    _, counts = net
    kept = sum(row.status == QUARANTINED for row in carried)
    return Repaired(
        cut, holder.lsn, counts.get(ENTERS, 0), counts.get(LEAVES, 0), touched, drained, kept
    )


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """A target's quarantine: by key, rows to read again and discarded rows; and unreadable
    messages.

    ``accepted`` are the keys of rows that are written without a gate.
    """

    watched: dict[str, IncompleteRow]
    discarded: dict[str, IncompleteRow]
    messages: tuple[IncompleteRow, ...]
    accepted: frozenset[str] = frozenset()


def _read_quarantined(
    quarantine: Quarantine, state: TableState, again: Again | None
) -> _Quarantined:
    """Read a target's quarantine.

    Raises StateError when reading these keys would also write rows that are kept out on purpose.
    """
    told = quarantine.rows(state.table_name, state.generation)
    watched, messages = watched_rows(told), tuple(message_rows(told))
    # A key with other columns is from before the key was changed.
    discarded = {
        key: row
        for key, row in discarded_rows(told).items()
        if json.loads(key).keys() == {*state.key_columns}
    }
    if again is None:
        return _Quarantined(watched, discarded, messages)
    if again.keys is not None:
        kept_out = [*watched.values(), *(discarded[key] for key in discarded.keys() & again.keys)]
        _check_none_kept_out(state.table_name, kept_out)
    return _Quarantined(watched, discarded, messages, again.accepts(watched))


def _check_none_kept_out(name: str, watched: Iterable[IncompleteRow]) -> None:
    """Raise StateError if rows are kept out of the target: once written they can't be found
    again.
    """
    if kept_out := sum(row.is_kept_out for row in watched):
        raise StateError(
            f"{name}: {counted(kept_out, 'row is', 'rows are')} quarantined by a gate or"
            " discarded, and this would write them to the target: decide on them first"
            " (quarantine --retry checks them again, --accept writes them as the source has them,"
            " --discard leaves them out)"
        )


def _judge(  # noqa: PLR0913 - what is judged, and what of it waits or is accepted
    spark: SparkSession,
    job: Job,
    state: TableState,
    rows: RepairRows,
    staged: str,
    *,
    held: _Quarantined,
    waiting: str | None,
) -> dict[str, StillFails]:
    """Returns the quarantined rows that still fail their gate, by key.

    Waiting changes are judged with them, because rows that a run would keep out must not enter this
    way.
    """
    judged = {key: row for key, row in held.watched.items() if key not in held.accepted}
    gate = read_gates(job, [state]).get(state.table_name)
    if gate is None or not (judged or waiting):
        return {}
    texts = {tuple(json.loads(key)[column] for column, _ in rows.key): key for key in judged}
    opened = {of for of, key in texts.items() if judged[key].status == QUARANTINED}
    found = rows_to_judge(spark, rows, staged, waiting, (judged, held.accepted))
    still = judge_complete_rows(
        job, gate, rows.copy, found, landed_upto(job, job.read_identity()), opened
    )
    return {texts[row.key]: row for row in still}


def _decided(
    job: Job, again: Again, held: _Quarantined, still: Mapping[str, StillFails], as_of: Lsn
) -> Iterator[IncompleteRow]:
    """Yields the new quarantine records: rows that still fail, with current values, and accepted
    ones.

    A discarded row that still fails stays discarded.
    """
    for key, found in sorted(still.items()):
        row = held.watched[key]
        if row.status == QUARANTINED:
            row = replace(
                row,
                run_id=job.run_id,
                columns=[],
                sent=found.sent,
                lsn=as_of.value,
                commit_ts=None,
                reason=found.reason,
                by=again.by,
            )
        yield row
    for key in sorted(held.accepted):
        row = held.watched[key]
        yield IncompleteRow(
            row.at,
            job.run_id,
            ACCEPTED,
            row.table_name,
            row.generation,
            row.batch,
            key,
            reason=again.why,
            by=again.by,
        )


def _check_marked(job: Job, state: TableState) -> None:
    present = job.read_states().get(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, NEEDS_SYNC):
        raise LateWriter(f"{state.table_name} was synced again during its repair")


def _as_seen(
    job: Job, drifted: Repair, replicated: ReplicatedTarget, storage: StorageState | None
) -> Repair:
    """Returns the drift as the snapshot sees it; raises NeedsSync if it changed since it was
    found.
    """
    table, state = replicated.table, drifted.state
    seen = replace(drifted, table=table)
    if (why := obstacle(seen)) is not None:
        raise NeedsSync(why)
    then, leaves = drifted.table, {leaf.oid for leaf in table.leaves}
    altered = (table.row_filter, replicated.mapping.where) != (
        then.row_filter,
        drifted.where,
    ) or was_interrupted(then.entries, table.entries)
    if altered or leaves != {leaf.oid for leaf in then.leaves}:
        raise NeedsSync("what is published of it changed again during the repair")
    if told := unsent_changes(state, storage):
        raise NeedsSync("; ".join(told))
    if _leaves(drifted.storage) != _leaves(storage):
        raise NeedsSync("a partition was rewritten or truncated again during the repair")
    present = column_states(
        table.columns, table.key_columns, job.pipeline.target.types_of(state.table_name)
    )
    if {c.name: c.spark_type for c in present} != {c.name: c.spark_type for c in state.columns}:
        raise NeedsSync("its columns have other types in the lake now")
    return seen


def _leaves(storage: StorageState | None) -> list[FileState]:
    return storage.files if storage is not None else []


def _stage_touched(spark: SparkSession, job: Job, drifted: Repair, folder: str) -> int:
    """Write the keys of all changes after the target's position.

    Raises NeedsSync for changes that aren't only of rows.
    """
    state, held = drifted.state, Watermarks(job, job.read_identity())
    after, last = held.of(state), held.change_log.last_batch()
    return 0 if last is None else stage_changed(spark, job, state, (after, last), folder)


def _synced_state(
    job: Job,
    drifted: Repair,
    own: RowFilter | None,
    seen: tuple[SnapshotHolder, StorageState | None],
    generation: int,
) -> TableState:
    """Returns the new generation's ledger row: as after a copy from that snapshot, without its
    cost.
    """
    state, (holder, storage) = drifted.state, seen
    types = job.pipeline.target.types_of(state.table_name)
    return replace(
        as_published(state, drifted.table, storage, to_text(own), types),
        generation=generation,
        status=SYNCED,
        snapshot=holder.snapshot,
        snapshot_lsn=holder.lsn.value,
        version=checked_upto(job.ledger.last_cut(), state),
    )


def _commit(
    spark: SparkSession,
    job: Job,
    rows: RepairRows,
    state: TableState,
    net: tuple[str, dict[str, int]],
    given: tuple[AdvisoryLock, Again | None, Sequence[IncompleteRow]],
) -> TargetCut:
    """Commit the net changes between two ledger rows.

    A run that finds only the first row reads the target to find out whether they were committed
    (repair_end). ``given`` ends with the quarantine's rows of the new generation, unreadable
    messages included.
    """
    (_, counts), (lock, again, carried), name = net, given, state.table_name
    marked = job.read_states()[name]
    reason = marked.reason if again is None else again.reason
    lock.verify()
    first = replace(
        state,
        at=now(),
        run_id=job.run_id,
        status=COPYING,
        reason=reason,
        rows=0,
        bytes=0,
        seconds=0.0,
    )
    begun = job.ledger.append_state(first, marked)
    carry_over(job, begun, carried)
    fault_point("repair.begun")
    try:
        cut = (
            _merge(spark, job, rows, begun, net, lock)
            if counts
            else commit_untouched(spark, job, begun)
        )
        fault_point("repair.merged")
        lock.verify()
        present = job.read_states()[name]
        if (present.generation, present.status) != (begun.generation, COPYING):
            raise LateWriter(
                f"{name} left the publications while it was repaired: sync it again once it is"
                " published"
            )
        record_repaired(spark, job, begun, cut, again.by if again is not None else None)
    except (LateWriter, LockHeld):
        raise
    except Exception:
        _end(spark, job, begun, lock)
        raise
    return cut


def _end(spark: SparkSession, job: Job, begun: TableState, lock: AdvisoryLock) -> None:
    """Record how an aborted repair ended; if that fails now, the next run finds out."""
    try:
        lock.verify()
        end_repair(spark, job, begun)
    except Exception as err:
        log.warning(
            "table=%s its repair may or may not be committed, the next run finds out: %s",
            begun.table_name,
            first_line(err),
        )


def _merge(
    spark: SparkSession,
    job: Job,
    rows: RepairRows,
    begun: TableState,
    net: tuple[str, dict[str, int]],
    lock: AdvisoryLock,
) -> TargetCut:
    folder, counts = net
    tag = repair_tag(begun, job.run_id, counts)
    # For a drift, Spark's MERGE leaves files alone that no row enters or leaves.
    reread_only = not counts.keys() & {ENTERS, LEAVES}
    if not (reread_only and merge_rows_in_driver(job, begun.table_name, rows, folder, tag, lock)):
        # A run that committed concurrently may have copied the target again.
        lock.verify()
        merge_rows(
            spark,
            job.lake.target(begun.table_name).uri,
            rows.copy,
            [column for column, _ in rows.key],
            folder,
            tag,
        )
    # A touched key that the target never had isn't a skipped change.
    return replace(read_commit(job, begun, tag), skipped=0)
