"""Apply: landed batches go into the targets, each target by its own watermark, each batch range as one commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import tenacity

from spark_jobs.applied import Applied, isolated, to_be_fed
from spark_jobs.collapse import ACTION_DELETE, ACTION_UPDATE
from spark_jobs.fed import Fed, read_fed, read_settled
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
from spark_jobs.reread import reread
from spark_jobs.reshape import reshape
from spark_jobs.split import splitting
from spark_jobs.stage import Staged, check_whole, stage
from spark_jobs.staging import staged_in
from spark_jobs.steps import measures, plan_steps, told_steps
from spark_jobs.stretch import Stretches
from spark_jobs.target import VARIANT
from spark_jobs.target_commit import add_cuts, read_commit, read_unreported, read_untouched, take_over_target
from spark_jobs.task_error import is_passing, of_table, writing_error
from spark_jobs.tasks import run_tasks
from spark_jobs.told import Told
from waldelta.change_log import ChangeLog
from waldelta.column_names import clashes
from waldelta.errors import LateWriter, NeedsSync, SchemaChanged, WaldeltaError
from waldelta.evolution import Evolution
from waldelta.fault import fault_point
from waldelta.foreign import Watch
from waldelta.gate_verdicts import tell_passed
from waldelta.job import Job
from waldelta.ledger_rows import BatchCut, TableState, TargetCut, now
from waldelta.leftovers import staging_folder
from waldelta.locks import LockSessions, target_lock
from waldelta.present import PresentTable
from waldelta.quarantine import Quarantine
from waldelta.recopy import mark
from waldelta.shared_connection import SharedConnection
from waldelta.stream import Stream
from waldelta.target_mode import CHANGELOG
from waldelta.type_catalog import KnownTypes
from waldelta.watermark import Watermarks, apply_app_id, check_same_copy, last_cut, uri_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# A MERGE that others' commits got ahead of is run again on what they left, so often in all.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Run:
    """What every target of a run is applied with."""

    spark: SparkSession
    job: Job
    held: Watermarks
    stretches: Stretches
    present: Mapping[str, PresentTable]
    watch: Watch
    gates: dict[str, TableGate]
    quarantine: Quarantine
    locks: LockSessions
    types: KnownTypes
    goes_on: Callable[[], None]


def apply(spark: SparkSession, job: Job, landed_as_of: int | None = None) -> Applied:
    """Bring every synced target up to the last landed batch, publishing a cut whenever all of them got there.

    Small batches are applied together, up to twice batch.max_changes and twice batch.wal_window_mb at once. A failing table doesn't hold up the others;
    it is named in ``failures`` and resumes from its own watermark. One whose source changed so that only a new copy is exact
    is named in ``outdated``, and marked in the ledger: it gets no changes until it has been copied. ``landed_as_of``: all
    transactions below this one (xid8) have landed. A table that stays locked against readers fails as TableBusy where
    its catalogs can't be read without that lock: where it has a row filter.
    """
    applied = Applied()
    # Before the catalogs are read, which have to be those of behind it.
    last = job.change_log(job.slot_identity()).last_batch()
    fed = read_fed(spark, job, landed_as_of, applied)
    if last is not None:
        _feed(spark, job, fed, last, applied, Pace())
    return applied


def apply_meanwhile(
    spark: SparkSession, job: Job, upto: int, applied: Applied, goes_on: Callable[[], None] = lambda: None
) -> int:
    """Bring targets a step nearer to a landed batch while more is landing, but for those of which something has to be told or marked first.

    Returns the batch they have come to: before ``upto`` where some are farther behind. What that does is told by the apply behind the landing, as what a killed run has committed: if there is none, by the next run's.
    ``applied`` has what an earlier step gave up, and gets what this one does; ``goes_on`` raises when nobody waits for it any more.
    """
    goes_on()
    return _feed(spark, job, read_settled(job), upto, applied, Pace(1, goes_on))


@dataclass(frozen=True, slots=True)
class Pace:
    """How many steps are applied at the most, and what raises when nobody waits for them any more."""

    steps: int | None = None
    goes_on: Callable[[], None] = lambda: None

    @property
    def is_meanwhile(self) -> bool:
        """Whether more is landing, so that some steps are all there are."""
        return self.steps is not None


def _is_behind_copies(
    change_log: ChangeLog, ends: Sequence[int], states: Sequence[TableState], applied: Applied
) -> bool:
    """Whether no target of a step holds more than the step, and a cut can be made there: one that was copied later does, until its copy's
    position has landed.
    """
    if not ends or not applied.is_complete:
        return False
    end = change_log.landed_end(ends[-1])
    return all(state.snapshot_lsn <= end for state in states)


def _feed(spark: SparkSession, job: Job, fed: Fed, last: int, applied: Applied, pace: Pace) -> int:
    """Bring these targets up to a batch, step by step; returns the one that they have come to."""
    identity = job.slot_identity()
    change_log, states, cut = job.change_log(identity), fed.states, last_cut(job)
    held = Watermarks(job, identity)
    watermarks = _watermarks(job, held, states, applied)
    fed_from = [watermarks[state.table_name] for state in to_be_fed(states, applied)]
    sizes = change_log.sizes(min(fed_from, default=last), last)
    watch = Watch(job, cut)
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    planning, locks = SharedConnection(job, "apply"), LockSessions(job.conninfo)
    gates, types = read_gates(job, states), KnownTypes(planning.use)

    def waiting(stream: Stream) -> list[int]:
        late = [state for state in to_be_fed(states, applied) if watermarks[state.table_name] <= stream.segments.after]
        return [oid for state in late for oid in state.relation_ids]

    with splitting(spark, job, change_log, waiting) as split, planning, locks, _telling(watch, applied):
        stretches = Stretches(change_log, sizes, split)
        run = _Run(spark, job, held, stretches, fed.present, watch, gates, quarantine, locks, types, pace.goes_on)
        for state in to_be_fed(states, applied):
            _look(run, state, held.versions[state.table_name], applied)
        ends = plan_steps(*measures(job, sizes, change_log.bytes_of_batches))[: pace.steps]
        is_all = fed.is_all and (not pace.is_meanwhile or _is_behind_copies(change_log, ends, states, applied))
        untold = dict(fed.mended)
        if is_all or not pace.is_meanwhile:
            untold |= _unreported(run, [s for s in states if s.table_name in watermarks], cut, applied)
        for upto in told_steps(sizes, ends or [last] * bool(untold)):
            behind = is_all and all(watermark <= upto for watermark in watermarks.values())
            # Told by a cut that is published, where there is to be one.
            told = untold if behind or upto == (ends or [last])[-1] else {}
            # Those with the same batches before them one after the other: they read them together.
            in_turn = sorted(to_be_fed(states, applied), key=lambda state: watermarks[state.table_name])
            done = [_apply_step(run, state, upto, watermarks, told, applied) for state in in_turn]
            cuts = sorted((one for one in done if one is not None), key=lambda one: one.table_name)
            applied.steps.append(_finish_step(job, change_log, upto, cuts, complete=behind and applied.is_complete))
        # Of those that are given up, too.
        applied.retold += [*untold.values(), *_left_untold(run, fed.left)]
    return (ends or [last])[-1]


@contextmanager
def _telling(watch: Watch, applied: Applied) -> Iterator[None]:
    try:
        yield
    finally:
        applied.foreign = sorted({*applied.foreign, *watch.told})


def _apply_step(
    run: _Run, state: TableState, upto: int, watermarks: dict[str, int], untold: dict[str, TargetCut], applied: Applied
) -> TargetCut | None:
    """Bring one target up to a batch; None of one that fails."""
    name = state.table_name
    run.goes_on()
    with isolated(run.job, state, applied):
        cut = _apply_locked(run, state, (watermarks[name], upto))
        if (before := untold.pop(name, None)) is not None:
            cut = add_cuts(before, cut)
        applied.reached[name, state.generation] = watermarks[name] = max(watermarks[name], upto)
        # What was committed beside the run, before the cut says up to where all is told.
        _look(run, state, cut.version, applied)
        return cut
    return None


def _look(run: _Run, state: TableState, version: int, applied: Applied) -> None:
    with isolated(run.job, state, applied):
        applied.warnings += run.watch.look(state, version)


def _unreported(
    run: _Run, states: Sequence[TableState], cut: BatchCut | None, applied: Applied
) -> dict[str, TargetCut]:
    """What was committed and never told, by a run that was killed before it could or while more was landing: this run tells, checks and announces it.

    Of that the newest cut has its part already; the rest is returned, for the next one.
    """
    members = {(one.table_name, one.generation): one.version for one in (cut.targets if cut is not None else [])}
    untold, told = {}, Told(run.job.ledger, run.job.run_id)
    for state in states:
        with isolated(run.job, state, applied):
            in_cut = members.get((state.table_name, state.generation))
            retold, beyond = read_unreported(run.job, run.held.identity, state, told, in_cut)
            applied.retold += [retold] if retold is not None else []
            if beyond is not None:
                untold[state.table_name] = beyond
    return untold


def _left_untold(run: _Run, states: Sequence[TableState]) -> list[TargetCut]:
    """What nobody has told of targets that have left: nobody asks for it later. They get nothing any more, so that it is no failure of the run's."""
    found, told = [], Told(run.job.ledger, run.job.run_id)
    for state in states:
        try:
            _, untold = read_unreported(run.job, run.held.identity, state, told)
        except Exception as err:
            log.warning("table=%s what was applied to it before it left can't be told: %s", state.table_name, err)
        else:
            found += [untold] if untold is not None else []
    return found


def _watermarks(job: Job, held: Watermarks, states: Sequence[TableState], applied: Applied) -> dict[str, int]:
    """The last batch of each target; those that can't be fed go into the failures."""
    watermarks: dict[str, int] = {}
    for state in states:
        with isolated(job, state, applied):
            reached = applied.reached.get((state.table_name, state.generation), 0)
            watermarks[state.table_name] = max(held.of(state), reached)
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
            run.goes_on()
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
