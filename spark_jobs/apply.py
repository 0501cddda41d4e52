"""Apply: landed batches go into the targets, each target by its own watermark, each batch range as one commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import tenacity

from spark_jobs.collapse import ACTION_DELETE, ACTION_UPDATE
from spark_jobs.drift import check_drift, read_published_now
from spark_jobs.gate import TableGate, judge_of, read_gates
from spark_jobs.merge import (
    FOUND_DELETES,
    FOUND_UPDATES,
    CommitTag,
    insert_statement,
    merge_statement,
    tagged,
    with_variants,
)
from spark_jobs.merge_copies import CopiedColumn, count_statement, rewrite_statement
from spark_jobs.merge_files import merge_files
from spark_jobs.merge_here import changes_copies, merge_here
from spark_jobs.merge_states import complete_states, merge_states
from spark_jobs.net_rows import WRITTEN
from spark_jobs.plan import TargetPlan, plan_target
from spark_jobs.repair_end import end_killed_repairs
from spark_jobs.reread import reread
from spark_jobs.reshape import reshape
from spark_jobs.rewrites import check_mode, check_rewrite
from spark_jobs.split import splitting
from spark_jobs.stage import Staged, check_whole, stage
from spark_jobs.staging import staged_in
from spark_jobs.steps import plan_steps, told_steps
from spark_jobs.stretch import Stretches
from spark_jobs.target import VARIANT
from spark_jobs.target_commit import add_cuts, read_commit, read_unreported, read_untouched, take_over_target
from spark_jobs.task_error import is_passing, of_table, unexpected_error, writing_error
from spark_jobs.tasks import run_tasks
from waldelta.change_log import ChangeLog
from waldelta.column_names import clashes
from waldelta.emptied import with_emptied
from waldelta.errors import LateWriter, NeedsSync, SchemaChanged, StateError, WaldeltaError
from waldelta.evolution import Evolution
from waldelta.fault import fault_point
from waldelta.foreign import Watch
from waldelta.gate_verdicts import tell_passed
from waldelta.job import Job
from waldelta.leaves import of_partition, record_leaves
from waldelta.ledger_rows import BatchCut, TableState, TargetCut, now
from waldelta.leftovers import staging_folder
from waldelta.locks import LockSessions, target_lock
from waldelta.patience import Barred, read_around
from waldelta.present import PresentTable, read_present
from waldelta.quarantine import Quarantine
from waldelta.recopy import mark
from waldelta.refused_statements import refused_statements
from waldelta.repair import Repair
from waldelta.shared_connection import SharedConnection
from waldelta.standing import Due, Standing, due, read_published, record_removed
from waldelta.standing import states as due_states
from waldelta.stream import Stream
from waldelta.target_mode import CHANGELOG
from waldelta.targets import Feed, Target
from waldelta.type_catalog import KnownTypes
from waldelta.unpublished import unpublished
from waldelta.watermark import Watermarks, apply_app_id, check_same_copy, last_cut, uri_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# A full batch and the short one behind it are one step: every MERGE rewrites the files it touches.
BATCHES_PER_STEP = 2
# A MERGE that others' commits got ahead of is run again on what they left, so often in all.
_ATTEMPTS = 3
# An ALTER TABLE is waited for. What takes longer, as VACUUM FULL does, would keep the other tables, and the next run from emptying the slot.
LOCK_TIMEOUT_S = 10.0


@dataclass
class Applied:
    """What an apply did: step by step, the tables that failed, why others have to be copied again, what else to tell.

    ``drifted`` says what it takes to mend those that drift has put among them without a copy. ``published`` is what fed the
    targets meanwhile, ``removed`` those that left since, ``unpublished`` those that the pipeline file lists in vain, ``foreign`` those that others wrote to.
    """

    steps: list[BatchCut] = field(default_factory=list)
    failures: dict[str, WaldeltaError] = field(default_factory=dict)
    outdated: dict[str, str] = field(default_factory=dict)
    drifted: dict[str, Repair] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    published: dict[str, Feed] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unpublished: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every target got everything."""
        return not self.failures and not self.outdated


@dataclass(frozen=True, slots=True)
class _Run:
    """What every target of a run is applied with."""

    spark: SparkSession
    job: Job
    held: Watermarks
    stretches: Stretches
    present: dict[str, PresentTable]
    watch: Watch
    gates: dict[str, TableGate]
    quarantine: Quarantine
    locks: LockSessions
    types: KnownTypes


def apply(spark: SparkSession, job: Job, landed_as_of: int | None = None) -> Applied:
    """Bring every synced target up to the last landed batch, publishing a cut whenever all of them got there.

    Small batches are applied together, up to twice batch.max_changes and twice batch.wal_window_mb at once. A failing table doesn't hold up the others;
    it is named in ``failures`` and resumes from its own watermark. One whose source changed so that only a new copy is exact
    is named in ``outdated``, and marked in the ledger: it gets no changes until it has been copied. ``landed_as_of``: all
    transactions below this one (xid8) have landed. A table that stays locked against readers fails as TableBusy where
    its catalogs can't be read without that lock: where it has a row filter.
    """
    identity = job.slot_identity()
    change_log = job.change_log(identity)
    applied = Applied()
    last = change_log.last_batch()
    with job.connect("apply") as connection:
        applied.published, barred = read_around(connection, LOCK_TIMEOUT_S, partial(read_published, connection, job))
        standings, mended = end_killed_repairs(spark, job, applied.published)
        states = _with_their_leaves(job, due_states(standings, Due.FEED), applied)
        applied.warnings += refused_statements(connection, job.pipeline.source.publication_names)
        applied.unpublished = unpublished(connection, job.pipeline.source)
        there, feeds = read_present(connection, states), applied.published
        found = [of_partition(state, there[state.table_name], feeds.get(state.table_name)) for state in states]
        states = [state for state, _ in found]
        present = with_emptied(connection, states, {s.table_name: table for s, table in found}, landed_as_of)
        published, barred = read_around(
            connection, LOCK_TIMEOUT_S, partial(read_published_now, connection, job, feeds, states), barred
        )
    applied.removed = record_removed(job, standings)
    applied.failures |= {found.table_name: _broken(found) for found in due(standings, Due.BROKEN)}
    for state in states:
        with _isolated(job, state, applied):
            now_there = present[state.table_name]
            check_mode(job, state)
            applied.warnings += check_drift(
                job, state, now_there, _read(published.get(state.table_name), barred), applied.drifted
            )
            # Afterwards: what it records is what drift is told by.
            applied.warnings += check_rewrite(job, state, now_there)
    if last is None:
        return applied
    held = Watermarks(job, identity)
    watermarks = _watermarks(job, held, states, applied)
    sizes = change_log.sizes(min(watermarks.values(), default=last), last)
    watch = Watch(job, last_cut(job))
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    planning, locks = SharedConnection(job, "apply"), LockSessions(job.conninfo)
    gates, types = read_gates(job, states), KnownTypes(planning.use)

    def waiting(stream: Stream) -> list[int]:
        late = [state for state in _to_be_fed(states, applied) if watermarks[state.table_name] <= stream.segments.after]
        return [oid for state in late for oid in state.relation_ids]

    with splitting(spark, job, change_log, waiting) as split, planning, locks:
        stretches = Stretches(change_log, sizes, split)
        run = _Run(spark, job, held, stretches, present, watch, gates, quarantine, locks, types)
        for state in _to_be_fed(states, applied):
            _look(run, state, held.versions[state.table_name], applied)
        untold = mended | _unreported(run, states, applied)
        ends = _planned(job, change_log, sizes)
        for upto in told_steps(sizes, ends or [last] * bool(untold)):
            behind = all(watermark <= upto for watermark in watermarks.values())
            # Those with the same batches before them one after the other: they read them together.
            in_turn = sorted(_to_be_fed(states, applied), key=lambda state: watermarks[state.table_name])
            fed = [_apply_step(run, state, upto, watermarks, untold, applied) for state in in_turn]
            cuts = sorted((cut for cut in fed if cut is not None), key=lambda cut: cut.table_name)
            applied.steps.append(_finish_step(job, change_log, upto, cuts, complete=behind and applied.is_complete))
    applied.foreign = sorted(set(run.watch.told))
    return applied


def _apply_step(
    run: _Run, state: TableState, upto: int, watermarks: dict[str, int], untold: dict[str, TargetCut], applied: Applied
) -> TargetCut | None:
    """Bring one target up to a batch; None of one that fails."""
    name = state.table_name
    with _isolated(run.job, state, applied):
        cut = _apply_locked(run, state, (watermarks[name], upto))
        if (before := untold.pop(name, None)) is not None:
            cut = add_cuts(before, cut)
        watermarks[name] = max(watermarks[name], upto)
        # What was committed beside the run, before the cut says up to where all is told.
        _look(run, state, cut.version, applied)
        return cut
    return None


def _planned(job: Job, change_log: ChangeLog, sizes: Mapping[int, int]) -> list[int]:
    """The ends of the steps, which hold about as much as so many full batches: a step's changes are collapsed in memory."""
    batch = job.pipeline.batch
    # One batch is one step, whatever its bytes are.
    weights = change_log.bytes_of_batches(min(sizes) - 1, max(sizes)) if len(sizes) > 1 else {}
    messages, megabytes = BATCHES_PER_STEP * batch.max_changes, BATCHES_PER_STEP * batch.wal_window_mb
    return plan_steps((sizes, messages), (weights, megabytes << 20))


def _read(target: Target | None, barred: Barred) -> Target | None:
    """The target as it is fed now; raises TableBusy when that couldn't be read."""
    if target is not None and target.is_unread:
        raise barred.busy(str(target.id))
    return target


def _to_be_fed(states: Sequence[TableState], applied: Applied) -> list[TableState]:
    """Those that nothing was given up of, so far."""
    return [state for state in states if state.table_name not in applied.failures.keys() | applied.outdated.keys()]


def _look(run: _Run, state: TableState, version: int, applied: Applied) -> None:
    with _isolated(run.job, state, applied):
        applied.warnings += run.watch.look(state, version)


def _with_their_leaves(job: Job, states: Sequence[TableState], applied: Applied) -> list[TableState]:
    found = []
    for state in states:
        with _isolated(job, state, applied):
            found.append(record_leaves(job, state, applied.published))
    return found


@contextmanager
def _isolated(job: Job, state: TableState, applied: Applied) -> Iterator[None]:
    """What fails here fails for one table: the others go on."""
    try:
        yield
    except WaldeltaError as err:
        _give_up(job, state, err, applied)
    except Exception as err:  # a defect of ours, or of a library: it must not end the others' either
        log.exception("table=%s", state.table_name)
        _give_up(job, state, unexpected_error(state.table_name, err), applied)


def _give_up(job: Job, state: TableState, err: WaldeltaError, applied: Applied) -> None:
    if isinstance(err, NeedsSync) and job.pipeline.target.policy_of(state.table_name) == "evolve":
        log.warning("table=%s has to be copied again: %s", state.table_name, err)
        applied.outdated[state.table_name] = str(err)
    else:
        log.error("table=%s not applied: %s", state.table_name, err)
        applied.failures[state.table_name] = of_table(err, state.table_name)


def _unreported(run: _Run, states: Sequence[TableState], applied: Applied) -> dict[str, TargetCut]:
    """What an earlier run committed and was killed before it could tell: this run tells, checks and announces it."""
    found = {}
    for state in states:
        if state.table_name not in applied.failures:
            with _isolated(run.job, state, applied):
                cut = read_unreported(run.job, run.held.identity, state)
                if cut is not None:
                    found[state.table_name] = cut
    return found


def _broken(found: Standing) -> StateError:
    return StateError(f"{found.table_name} gets no changes since {found.why}: run the initial sync for it again")


def _watermarks(job: Job, held: Watermarks, states: Sequence[TableState], applied: Applied) -> dict[str, int]:
    """The last batch of each target; those that can't be fed go into the failures."""
    watermarks: dict[str, int] = {}
    for state in states:
        with _isolated(job, state, applied):
            watermarks[state.table_name] = held.of(state)
    return watermarks


def _finish_step(job: Job, change_log: ChangeLog, batch: int, cuts: list[TargetCut], *, complete: bool) -> BatchCut:
    landed = change_log.landed(batch)
    cut = BatchCut(now(), job.run_id, batch, landed.end_lsn, landed.commit_ts, cuts)
    newest = last_cut(job)
    if complete and cuts and (newest is None or not _is_told(cut, newest)):
        fault_point("apply.cutting")
        try:
            job.ledger.append_cut(cut, newest)
        except LateWriter as err:  # readers take the newest row: it must never be of an older batch
            log.warning("no cut of batch %d: %s", batch, err)
        fault_point("apply.cut")
    return cut


def _is_told(cut: BatchCut, newest: BatchCut) -> bool:
    """Whether the newest cut is this one, or of a later batch of the same copies.

    In another life of the slot, whose copies are of later generations, batches may be numbered anew.
    """
    if newest.batch <= cut.batch:
        return (newest.batch, _members(newest)) == (cut.batch, _members(cut))
    generations = dict(_members(newest))
    return any(generations.get(name, 0) >= generation for name, generation in _members(cut))


def _members(cut: BatchCut) -> set[tuple[str, int]]:
    return {(target.table_name, target.generation) for target in cut.targets}


def _apply_locked(run: _Run, state: TableState, batches: tuple[int, int]) -> TargetCut:
    began = time.monotonic()
    with target_lock(run.job, state.table_name, run.locks) as lock:
        present = check_same_copy(run.job, state)
        # Another run may have applied some of it since the watermarks were read.
        after = max(batches[0], run.held.of(present))

        def check() -> int:
            lock.check()
            return run.held.still(present, after)

        try:
            cut = _apply_target(run, present, (after, batches[1]), check)
        except NeedsSync as err:
            named = of_table(err, state.table_name)
            if run.job.pipeline.target.policy_of(state.table_name) == "evolve":
                # Read once more: its columns may have been recorded meanwhile.
                mark(run.job, check_same_copy(run.job, present), str(named))
            raise named from err
    fault_point("apply.applied")
    log.info(
        "table=%s applied up to batch %d: %d inserted, %d updated, %d deleted, %d skipped, %.1f s",
        state.table_name, batches[1], cut.inserted, cut.updated, cut.deleted, cut.skipped, time.monotonic() - began,
    )  # fmt: skip
    return cut


def _apply_target(run: _Run, state: TableState, batches: tuple[int, int], check: Callable[[], int]) -> TargetCut:
    """``check`` gives the target's watermark, and raises when this run may not write any more: a second writer of inserts would double them."""
    job = run.job
    if batches[0] >= batches[1]:
        return read_untouched(job, state)
    target, stretch = job.pipeline.target, run.stretches.between(*batches)
    policy, options = target.policy_of(state.table_name), target.types_of(state.table_name)
    plan = plan_target(run.types, stretch, state, run.present[state.table_name], policy, options)
    if not plan.volume.rows and not plan.truncated:
        return read_untouched(job, state)
    looked = run.watch.looked_upto(state)
    tag = CommitTag(apply_app_id(run.held.identity, state), batches[1], job.run_id, plan.truncated, looked=looked)
    staged = staging_folder(target.root, state.table_name, state.generation, tag.batch, job.run_id)
    try:
        with staged_in(run.spark, staged):
            tag = _bring(run, plan, tag, staged, check)
    except WaldeltaError:
        raise
    except Exception as err:
        check()  # what another run does to whoever lost the target to it says less than that it did
        raise writing_error(state.table_name, err) from err
    return read_commit(job, state, tag)


def _bring(run: _Run, plan: TargetPlan, tag: CommitTag, staged: str, check: Callable[[], int]) -> CommitTag:
    """Stage the net changes in a folder, and commit them; returns the tag they were committed under."""
    job, state = run.job, plan.state
    check()  # what is staged may be the staging of whoever has the target now
    take_over_target(run.spark, job, state, run.quarantine, check)
    if plan.evolution is not None:
        _check_names(job, state, plan.evolution)
        reshape(run.spark, job, state, plan.evolution, plan.decode.types, (tag.app_id, tag.batch, f"{staged}-fills"))
        evolved = [column.state for column in plan.evolution.columns]
        plan = replace(plan, state=replace(state, columns=evolved, key_columns=list(plan.evolution.key_columns)))
    changes = stage(run.spark, run.stretches.change_log, plan, f"{staged}/net")
    judged = judge_of(run.spark, job, plan, run.gates)
    if state.kept_as != CHANGELOG:  # which says what was sent
        changes = reread(job, run.stretches.change_log, plan, changes, run.quarantine, judged, check=check)
    elif judged is not None:
        changes = judged(changes).staged
    if plan.decode.unfolding is not None:
        changes = complete_states(run.spark, uri_of(job, state.table_name), plan, changes, f"{staged}/filled")
    fault_point("apply.staged")
    check()
    if judged is not None and not any(changes.counts.get(action) for action in WRITTEN):
        tell_passed(job, state.table_name)
    fault_point("apply.merging")
    tag = _merge_staged(run, changes, plan, replace(tag, counts=changes.counts), check)
    fault_point("apply.merged")
    return tag


def _check_names(job: Job, state: TableState, evolution: Evolution) -> None:
    names = [column.state.name for column in evolution.columns]
    for clash in clashes(names, metadata_columns=job.pipeline.target.metadata_columns):
        raise SchemaChanged(f"{state.table_name}: {clash}; its changes wait in the change log")


def _merge_staged(
    run: _Run, changes: Staged, plan: TargetPlan, tag: CommitTag, check: Callable[[], object]
) -> CommitTag:
    """Commit the net changes here, else file by file in tasks, else by Spark, as states always; returns the tag of the commit."""
    done = None
    if plan.decode.unfolding is None:
        done = None if changes.net is None else merge_here(run.job, plan, changes.net, tag, check)
        if done is None and changes.files is not None:
            done = merge_files(partial(run_tasks, run.spark), run.job, plan, changes.files, tag, check)
    if done is not None:
        return done
    # Whoever committed meanwhile may have copied the target again: Spark would take what it finds now for ours.
    check()
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=lambda _: log.warning(
            "table=%s somebody else committed beside the merge: again", plan.state.table_name
        ),
        reraise=True,
    )
    if plan.decode.unfolding is not None:
        return again(merge_states, run.spark, uri_of(run.job, plan.state.table_name), plan, changes, tag)
    if changes.net is None and changes.files is not None:
        check_whole(run.spark, changes)
    return again(_merge, run, changes.source, plan, tag, check)


def _merge(run: _Run, source: str, plan: TargetPlan, tag: CommitTag, check: Callable[[], object]) -> CommitTag:
    """Commit the net changes; returns the tag they were committed under.

    Spark's commit is no compare-and-swap, but ``source`` is gone once another run has taken the target over (take_over_target).
    """
    uri, keep_metadata = uri_of(run.job, plan.state.table_name), run.job.pipeline.target.metadata_columns
    names = plan.decode.names
    source = with_variants(source, [f"c{i}" for i, kind in enumerate(plan.decode.types) if kind.spark == VARIANT])
    by_name = {c.name: CopiedColumn(c.name, c.spark_type, c.type_name) for c in plan.state.columns}
    columns = [by_name[name] for name in names]
    found = {}
    if changes_copies(plan, tag):
        counted = run.spark.sql(
            count_statement(uri, source, columns, metadata_columns=keep_metadata, truncated=plan.truncated_leaves)
        ).collect()
        by_action = {row["action"]: row["rows"] for row in counted}
        found = {FOUND_UPDATES: by_action.get(ACTION_UPDATE, 0), FOUND_DELETES: by_action.get(ACTION_DELETE, 0)}
        tag = replace(tag, counts=tag.counts | found)
        check()  # counting takes as long as it takes
    cut = plan.truncated_leaves
    if any(found.values()) or (cut and not plan.decode.shape.key):
        statement = rewrite_statement(uri, source, columns, metadata_columns=keep_metadata, truncated=cut)
    elif plan.is_emptied or not plan.decode.shape.key:
        statement = insert_statement(uri, source, names, metadata_columns=keep_metadata, overwrite=plan.is_emptied)
    else:
        statement = merge_statement(
            uri, source, names, plan.decode.shape, metadata_columns=keep_metadata, truncated=cut
        )
    with tagged(run.spark, tag):
        run.spark.sql(statement).collect()
    return tag
