"""Repair: corrects a drifted target in one MERGE of the rows that enter and leave it, without a new
copy.

1. Land what waits, wait for old transactions of the publications, and take a snapshot, as for a
   copy.
2. Land until everything that the snapshot sees is in the change log. Each key that this changes
   after the target's position is read again, because such rows can't be judged by comparing
   filters. Each key in quarantine is read again too, because the target lacks it even if its
   filter admits it.
3. Read from the source, as the snapshot sees it, the rows that enter (an index finds them) and
   the rows of touched keys.
4. Find the rows in the target that its filter no longer admits.
5. Record a new generation with the snapshot in the ledger, commit, and record the end: the stream
   continues as after a copy. If the run is killed in between, the next run finds out whether it
   committed (waldelta.stages.repair.mend.unfinished_repairs).

waldelta.pipeline.drift.repair_plan explains why this is exact. Where it can't be exact, the table
is left to a copy before anything is changed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa

from waldelta.changes.merge.commits import (
    commit_untouched,
    read_commit,
    read_untouched,
    take_over_target,
)
from waldelta.changes.stage.folders import staged_in
from waldelta.errors import (
    ConfigError,
    LateWriter,
    LockHeld,
    NeedsSync,
    StateError,
    raised_as,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake import staging_folder
from waldelta.lake.ledger import (
    ACCEPTED,
    COPYING,
    DISCARDED,
    NEEDS_SYNC,
    RESOLVED,
    WAITING,
    Decision,
    Decisions,
    StorageState,
    TableState,
    TargetCut,
    now,
    watched_rows,
)
from waldelta.lake.ledger.decisions import discarded_rows, latest_rows
from waldelta.lake.ledger.ledger import next_generation
from waldelta.lsn import Lsn
from waldelta.pipeline import AdvisoryLock, Job, RunResult, target_lock, unexpected_error
from waldelta.pipeline.drift import (
    Repair,
    as_published,
    is_dear,
    obstacle,
    outdated_columns,
    unsent_changes,
)
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    TargetFence,
    Watermarks,
    check_columns,
    check_same_copy,
    check_target,
    column_states,
    merge_error,
    read_target_filter,
)
from waldelta.pipeline.targets.external_commits import checked_upto, drop_external_commits
from waldelta.pipeline.targets.lifecycle import check_not_removed
from waldelta.pipeline.targets.target_sources import to_text
from waldelta.postgres import TableId
from waldelta.postgres.publication_membership import was_interrupted
from waldelta.quantities import counted
from waldelta.snapshot.exported_snapshot import (
    SnapshotHolder,
    check_version,
    read_version_as_of,
    wait_for_version,
)
from waldelta.spark import Runner
from waldelta.stages.check.gate.gate import StillFails, judge_complete_rows
from waldelta.stages.check.gate.gate_files import read_gates
from waldelta.stages.land.drain import Drained, land_backlog, land_through
from waldelta.stages.repair._repair_rows import (
    ENTERS,
    LEAVES,
    TOUCHED,
    RepairRows,
    hold_back,
    plan_rows,
    quarantined_keys,
    stage_rows,
    stage_to_judge,
    untouched,
    untouched_keys,
)
from waldelta.stages.repair.mend.mend import (
    NetRows,
    differences,
    merge_differences,
)
from waldelta.stages.repair.mend.touched_keys import waiting_keys
from waldelta.stages.repair.mend.unfinished_repairs import (
    carry_over,
    end_repair,
    record_repaired,
    repair_tag,
)
from waldelta.stages.sync.copy_table import check_unaltered, source_as_of
from waldelta.stages.sync.sync import OLD_TRANSACTIONS_TIMEOUT_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repair's effect: rows that entered and left the target by its filter, and rows read again.

    ``failing_rows`` of the latter still fail their gate, and stay in quarantine.
    """

    cut: TargetCut
    lsn: Lsn
    entered: int
    exited: int
    read_again: int
    drained: Drained
    failing_rows: int = 0

    def add_to(self, result: RunResult) -> None:
        """Add what was landed and corrected to the result of the run."""
        result.add_drained(self.drained)
        result.add_repair(self.cut)


@dataclass(frozen=True, slots=True)
class Again:
    """Rows that an operator wants to read again: those of ``keys``, or (None) all in quarantine.

    ``keys`` have the quarantine's form. Quarantined rows are judged again, except accepted ones
    (the ids in ``accepted``, or all). ``reason`` goes into the ledger, ``by`` is the operator,
    ``why`` the operator's reason for accepting. ``compared`` is the target's version in which all
    other rows were found equal to the source's. ``touched`` are keys that replayed changes touch
    (touched_schema()): their rows are judged by gates, and discarded ones stay as they are.
    """

    reason: str
    by: str | None = None
    keys: frozenset[str] | None = None
    compared: int | None = None
    accepted: frozenset[str] = frozenset()
    accepts_all: bool = False
    why: str | None = None
    touched: pa.Table | None = None

    def accepts(self, watched: Mapping[str, Decision]) -> frozenset[str]:
        """Returns the keys of the rows that are written without a gate.

        Raises ConfigError when one isn't in quarantine any more.
        """
        if absent := self.accepted - {row.id for row in watched.values()}:
            raise ConfigError(
                f"not in quarantine: {', '.join(sorted(absent))}: waldelta decide FILE list has the"
                " rows that are"
            )
        return frozenset(
            key for key, row in watched.items() if self.accepts_all or row.id in self.accepted
        )


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """A target's quarantine: by key, rows to read again and discarded rows; and unreadable
    messages.

    ``keys`` are those to read again, ``accepted`` those of rows that are written without a
    gate.
    """

    watched: dict[str, Decision]
    discarded: dict[str, Decision]
    messages: tuple[Decision, ...]
    keys: frozenset[str]
    accepted: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Work:
    """A repair under its target's lock: what is read again, and the folder of staged rows."""

    runner: Runner
    job: Job
    lock: AdvisoryLock
    again: Again | None
    quarantined: _Quarantined
    generation: int
    folder: str

    @property
    def touched(self) -> pa.Table | None:
        """The keys that replayed changes touch; None: nothing is replayed."""
        return self.again.touched if self.again is not None else None


def repair(runner: Runner, job: Job, drifted: Repair, again: Again | None = None) -> Repaired:
    """Correct a target by rows of a snapshot of its source, in one MERGE under the target's lock.

    These are the rows that a drift moves, of a target that it marked ``needs_sync``, or with
    ``again`` rows of a target without drift; quarantined rows that still fail their gate stay in
    quarantine. Raises before anything is changed: NeedsSync when only a whole copy is exact, or
    costs no more, and StateError or QualityFailed when it would also write rows that are kept out
    of the target on purpose. Other WaldeltaErrors mean that it failed: target and quarantine are
    unchanged, or, if the MERGE was committed after all, repaired. No change was applied twice.
    """
    if (why := obstacle(drifted)) is not None:
        raise NeedsSync(why)
    state, began = drifted.state, time.monotonic()
    name = state.table_name
    with (
        target_lock(job, name) as lock,
        raised_as(partial(merge_error, job, state)),
        # A full disk of the source's server isn't the target's.
        raised_as(partial(unexpected_error, name), psycopg.Error),
    ):
        check_same_copy(job, state if again is not None else replace(state, status=NEEDS_SYNC))
        check_target(job, state)
        check_columns(job, state)
        result = _repair(runner, job, drifted, lock, again)
    log.info(
        "table=%s repaired lsn=%s: entered=%d left=%d completed=%d seconds=%.1f",
        name, result.lsn, result.entered, result.exited, result.read_again,
        time.monotonic() - began,
    )  # fmt: skip
    return result


def _repair(
    runner: Runner, job: Job, drifted: Repair, lock: AdvisoryLock, again: Again | None
) -> Repaired:
    state, quarantine = drifted.state, Decisions(job.lake)
    generation = next_generation(job.ledger.table_rows(state.table_name))
    lock.verify()
    fence = TargetFence(lock, Watermarks(job, job.read_identity()), state)
    take_over_target(runner, job, state, quarantine, fence)
    quarantined = _read_quarantined(quarantine, state, again)
    folder = staging_folder(job.lake, state.table_name, generation, 0, job.run_id)
    work = _Work(runner, job, lock, again, quarantined, generation, folder)
    drained = land_backlog(runner, job)
    with staged_in(runner, folder):
        rows, net, waiting, drained = _stage_rows(work, drifted, drained)
        if work.touched is not None and not net.counts:
            cut = read_untouched(job, state)
            return Repaired(cut, rows.holder.lsn, 0, 0, 0, drained)
        # Touched rows equal the source's from this commit on.
        net, carried = _decide(work, rows, net, waiting)
        carried = [replace(row, at=now(), generation=generation, row_id=row.id) for row in carried]
        cut = _commit(work, rows, net, carried)
    waiting_count = sum(row.status == WAITING for row in carried)
    entered, exited, read_again = (net.counts.get(why, 0) for why in (ENTERS, LEAVES, TOUCHED))
    return Repaired(cut, rows.holder.lsn, entered, exited, read_again, drained, waiting_count)


def _read_quarantined(
    quarantine: Decisions, state: TableState, again: Again | None
) -> _Quarantined:
    """Read a target's quarantine.

    Raises StateError when reading these keys would also write rows that are kept out on purpose:
    once written they can't be found again.
    """
    rows = quarantine.rows(state.table_name, state.generation)
    watched = watched_rows(rows)
    # A key with other columns is from before the key was changed.
    discarded = {
        key: row
        for key, row in discarded_rows(rows).items()
        if json.loads(key).keys() == {*state.key_columns}
    }
    if again is not None and again.touched is not None:
        outdated = {key: row for key, row in watched.items() if row.status == DISCARDED}
        discarded |= outdated
        watched = {key: row for key, row in watched.items() if key not in outdated}
    keys = again.keys if again is not None else None
    if keys is not None:
        these = [*watched.values(), *(discarded[key] for key in discarded.keys() & keys)]
        if kept_out := sum(row.is_kept_out for row in these):
            raise StateError(
                f"{state.table_name}: {counted(kept_out, 'row is', 'rows are')} quarantined by a"
                " gate or discarded, and this would write them to the target: decide on them first"
                " (waldelta decide FILE: retry checks them again, accept writes them as the source"
                " has them, discard leaves them out)"
            )
    last = latest_rows(quarantine.messages(state.table_name, state.generation))
    messages = [row for row in last.values() if row.status != RESOLVED]
    accepted = again.accepts(watched) if again is not None else frozenset()
    keys_to_read = frozenset({*watched, *(keys or ())})
    return _Quarantined(watched, discarded, tuple(messages), keys_to_read, accepted)


def _stage_rows(
    work: _Work, drifted: Repair, drained: Drained
) -> tuple[RepairRows, NetRows, pa.Table | None, Drained]:
    """Take a snapshot, land what it sees, and stage its rows that differ from the target's.

    Returns the keys, too, that changes after the target's position touch.
    """
    runner, job, key_names, state = work.runner, work.job, work.quarantined.keys, drifted.state
    name, publications = state.table_name, job.pipeline.source.publication_names
    with job.source.connect("repair") as connection:
        target_filter = read_target_filter(connection, name, drifted.where, drifted.table)
        version = wait_for_version(connection, publications, OLD_TRANSACTIONS_TIMEOUT_S)
    with SnapshotHolder(
        job.source.conninfo, f"waldelta repair {job.pipeline.source.slot} {name}"
    ) as holder:
        check_version(holder, version)
        replicated, storage = source_as_of(holder, job, TableId.parse(name))
        membership = read_version_as_of(holder, version, replicated.table.relation_ids)
        drifted = _as_seen(job, drifted, replicated, storage)
        with job.source.connect("repair") as connection:
            rows = plan_rows(job, drifted, target_filter, holder, connection, key_names)
        drained = drained.before(land_through(runner, job, holder.lsn))
        waiting = waiting_keys(runner, job, state, f"{work.folder}/touched")
        keys = quarantined_keys(rows, key_names)
        if waiting is not None:
            keys = pa.concat_tables([keys, waiting.cast(keys.schema)])
        if is_dear(len(keys), rows.size):
            raise NeedsSync(
                f"{len(keys):,} of its rows changed during the repair, so a full copy costs no more"
            )
        if work.touched is not None:
            let = untouched_keys(rows, work.touched, work.quarantined.discarded.keys())
            keys = pa.concat_tables([keys, let.cast(keys.schema)])
        staged = stage_rows(runner, job, rows, keys, work.folder)
        check_unaltered(job, replicated, membership)
    return rows, differences(runner, *staged, job.lake.target(name)), waiting, drained


def _decide(
    work: _Work, rows: RepairRows, net: NetRows, waiting: pa.Table | None
) -> tuple[NetRows, list[Decision]]:
    """Returns the net changes to merge, and the quarantine's rows of the new generation."""
    job, quarantined, again = work.job, work.quarantined, work.again
    left_out = untouched(rows, quarantined.discarded.keys(), waiting)
    carried = [quarantined.discarded[key] for key in sorted(left_out)]
    if again is not None:
        if left_out != quarantined.discarded.keys():
            raise StateError(
                f"{rows.drifted.state.table_name}: changes of discarded rows wait in the change"
                " log, and this would write them: run consume (the _cdc DAG) first"
            )
        if still := _judge(work, rows, net, waiting):
            net = hold_back(rows, net, work.folder, still.keys())
        carried += _decided_records(job, again, quarantined, still, rows.holder.lsn)
    return net, [*carried, *quarantined.messages]


def _judge(
    work: _Work, rows: RepairRows, net: NetRows, waiting: pa.Table | None
) -> dict[str, StillFails]:
    """Returns the quarantined rows that still fail their gate, by key.

    Waiting changes are judged with them, because rows that a run would keep out must not enter this
    way.
    """
    job, quarantined, state = work.job, work.quarantined, rows.drifted.state
    judged = {
        key: row for key, row in quarantined.watched.items() if key not in quarantined.accepted
    }
    brought = [keys for keys in (waiting, work.touched) if keys is not None]
    gate, folder = read_gates(job, [state]).get(state.table_name), f"{work.folder}/judged"
    if gate is None or not (judged or brought):
        return {}
    if not stage_to_judge(rows, net, folder, brought, judged, quarantined.accepted):
        return {}
    names = rows.named(judged)
    opened = {texts for texts, key in names.items() if judged[key].status == WAITING}
    still = judge_complete_rows(work.runner, job, gate, rows.copy, folder, opened)
    return {names[row.key]: row for row in still}


def _decided_records(
    job: Job, again: Again, quarantined: _Quarantined, still: Mapping[str, StillFails], as_of: Lsn
) -> Iterator[Decision]:
    """Yields the new quarantine records: rows that still fail, with current values, and accepted
    ones.

    A discarded row that still fails stays discarded. A row keeps its id while its values do: an
    operator who has seen other values must look again before deciding by the id.
    """
    for key, failure in sorted(still.items()):
        row = quarantined.watched[key]
        if row.status == WAITING:
            row = replace(
                row,
                row_id=row.id if _values(failure.values) == _values(row.values) else None,
                run_id=job.run_id,
                columns=[],
                values=failure.values,
                lsn=as_of.value,
                commit_ts=None,
                reason=failure.reason,
                by=again.by,
                why=again.why,
            )
        yield row
    for key in sorted(quarantined.accepted):
        row = quarantined.watched[key]
        yield Decision(
            row.at,
            job.run_id,
            ACCEPTED,
            row.table_name,
            row.generation,
            row.batch,
            key,
            lsn=as_of.value,
            why=again.why,
            decided_at=now(),
            by=again.by,
            row_id=row.id,
        )


def _values(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _as_seen(
    job: Job, drifted: Repair, replicated: ReplicatedTarget, storage: StorageState
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
    if changes := unsent_changes(state, storage, outdated_columns(job, state, storage)):
        raise NeedsSync("; ".join(changes))
    if drifted.storage.files != storage.files:
        raise NeedsSync("a partition was rewritten or truncated again during the repair")
    present = column_states(
        table.columns, table.key_columns, job.pipeline.target.types_of(state.table_name)
    )
    if {c.name: c.stored_type for c in present} != {c.name: c.stored_type for c in state.columns}:
        raise NeedsSync("its columns have other types in the lake now")
    return replace(seen, storage=storage)


def _first_row(work: _Work, rows: RepairRows, marked: TableState) -> TableState:
    """Returns the new generation's first ledger row: as after a copy from that snapshot, without
    its cost.
    """
    job, again, holder, table = work.job, work.again, rows.holder, rows.drifted.table
    state, storage = rows.drifted.state, rows.drifted.storage
    types = job.pipeline.target.types_of(state.table_name)
    row = replace(
        as_published(state, table, storage, to_text(rows.target_filter), types),
        at=now(),
        run_id=job.run_id,
        generation=work.generation,
        status=COPYING,
        reason=marked.reason if again is None else again.reason,
        rows=0,
        bytes=0,
        seconds=0.0,
        snapshot=holder.snapshot,
        snapshot_lsn=holder.lsn.value,
        version=checked_upto(job.ledger.last_cut(), state),
    )
    compared = again.compared if again is not None else None
    return row if compared is None else drop_external_commits(row, compared)


def _commit(work: _Work, rows: RepairRows, net: NetRows, carried: Sequence[Decision]) -> TargetCut:
    """Commit the net changes between two ledger rows.

    A run that finds only the first row reads the target to find out whether they were committed
    (end_repair). ``carried`` are the quarantine's rows of the new generation.
    """
    runner, job, lock, name = work.runner, work.job, work.lock, rows.drifted.state.table_name
    marked = job.read_states()[name]
    first = _first_row(work, rows, marked)
    lock.verify()
    state = job.ledger.append_state(first, marked)
    carry_over(job, state, carried)
    fault_point("repair.begun")
    try:
        cut = _merge(work, rows, state, net) if net.counts else commit_untouched(runner, job, state)
        fault_point("repair.merged")
        lock.verify()
        check_not_removed(job, state, "repaired")
        record_repaired(runner, job, state, cut, work.again.by if work.again is not None else None)
    except (LateWriter, LockHeld):
        raise
    except Exception:
        _end(runner, job, state, lock)
        raise
    return cut


def _end(runner: Runner, job: Job, state: TableState, lock: AdvisoryLock) -> None:
    """Record how an aborted repair ended; if that fails now, the next run finds out."""
    try:
        lock.verify()
        end_repair(runner, job, state)
    except Exception as err:
        log.warning(
            "table=%s its repair may or may not be committed, the next run finds out: %s",
            state.table_name,
            without_values(err),
        )


def _merge(work: _Work, rows: RepairRows, state: TableState, net: NetRows) -> TargetCut:
    job, name, folder = work.job, state.table_name, net.files.folder
    tag, expected = repair_tag(state, job.run_id, net.counts), rows.expected(job.lake, folder)
    merge_differences(
        work.runner,
        job,
        name,
        expected.net_columns,
        expected.copy,
        folder,
        tag=tag,
        fence=work.lock,
    )
    # A touched key that the target never had isn't a skipped change.
    return replace(read_commit(job, state, tag), skipped=0)
