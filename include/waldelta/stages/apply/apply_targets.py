"""Applies landed batches to the targets, each from its own watermark, each batch range in one
commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from waldelta.changes.decode.net_rows import WRITTEN
from waldelta.changes.decode.target_plan import TargetPlan, find_unreadable, plan_target
from waldelta.changes.merge.commits import (
    read_commit,
    read_untouched,
    take_over_target,
)
from waldelta.changes.merge.merge import merge_staged
from waldelta.changes.merge.mode_target import stage_row_versions
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.merge.target_table import reshape
from waldelta.changes.stage.folders import staged_in
from waldelta.changes.stage.stage import splitting, stage
from waldelta.errors import DecodeError, LateWriter, NeedsSync, SchemaChanged, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.lake import Fence, staging_folder
from waldelta.lake.changelog import BatchNumbers, BatchRanges, ChangeLog, Stream
from waldelta.lake.ledger import BatchCut, Decisions, TargetCut, now
from waldelta.pgoutput.commit_time import shown_at
from waldelta.pipeline import Job, of_table, target_lock
from waldelta.pipeline.advisory_locks import LockSessions
from waldelta.pipeline.drift import may_resync, schema_rules
from waldelta.pipeline.source import SharedConnection
from waldelta.pipeline.targets import (
    TargetFence,
    apply_app_id,
    check_columns,
    check_same_copy,
    merge_error,
    record_unreadable,
)
from waldelta.pipeline.targets.lifecycle import mark_for_copy
from waldelta.pipeline.targets.quarantined_rows import record_passed
from waldelta.postgres import KnownTypes
from waldelta.quantities import counted
from waldelta.spark import Runner, RunnerPool
from waldelta.spark.runner import most_messages
from waldelta.stages.apply._apply_batches import reported_batches
from waldelta.stages.apply.complete_rows import complete_rows
from waldelta.stages.apply.inspect import InspectedTarget, Inspection
from waldelta.stages.apply.outcome import Applied
from waldelta.stages.check.gate.gate import judge
from waldelta.stages.check.gate.gate_files import TableGate
from waldelta.stages.sync.skipped_copy import is_empty
from waldelta.target_modes.column_names import clashes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    """One apply of the targets: its connections, locks, caches and results so far.

    ``batches`` is each target's last applied batch at this moment.
    """

    runner: Runner
    job: Job
    inspection: Inspection
    applied: Applied
    batches: dict[str, int]
    ranges: BatchRanges
    quarantine: Decisions
    locks: LockSessions
    types: KnownTypes
    caller: Fence


def apply_to_targets(
    runner: Runner, applied: Applied, inspection: Inspection, caller: Fence
) -> None:
    """Bring the targets up to the last of the inspected batches, one apply batch after another.

    Commits in ``unreported`` that a published cut reports are taken out of it.
    """
    targets, unreported = inspection.targets, inspection.unreported
    with _applying(runner, applied, inspection, caller) as run:
        for upto in reported_batches(inspection.sizes, inspection.ends):
            behind = inspection.is_all and all(batch <= upto for batch in run.batches.values())
            # Unreported commits are reported with a published cut where there is one.
            earlier = unreported if behind or upto == inspection.ends[-1] else {}
            fine = [target for target in targets if applied.is_fine(target.name)]
            cuts = _apply_batches(run, fine, upto, earlier)
            complete = behind and applied.is_complete
            change_log = inspection.watermarks.change_log
            applied.steps.append(
                finish_step(applied.job, change_log, upto, cuts, complete=complete)
            )


@contextmanager
def _applying(
    runner: Runner, applied: Applied, inspection: Inspection, caller: Fence
) -> Iterator[_Run]:
    """Yields the context in which the targets are applied, and closes it afterwards."""
    change_log, sizes = inspection.watermarks.change_log, inspection.sizes
    if (messages := sum(sizes.values())) > (most := most_messages()):
        waiting_messages = counted(messages, "message waits", "messages wait")
        runner.start(f"{waiting_messages}, this process applies up to {most:,}")
    batches = {target.name: target.batch for target in inspection.targets}
    job = applied.job
    planning, locks = SharedConnection(job.source, "apply"), LockSessions(job.source.conninfo)

    def waiting(stream: Stream) -> list[int]:
        return [
            oid
            for target in inspection.targets
            if applied.is_fine(target.name) and batches[target.name] <= stream.segments.after
            for oid in target.state.relation_ids
        ]

    with splitting(runner, job, change_log, waiting) as split, planning, locks:
        yield _Run(
            runner,
            job,
            inspection,
            applied,
            batches,
            BatchRanges(change_log, sizes, split),
            Decisions(job.lake),
            locks,
            KnownTypes(planning.use),
            caller,
        )


def _apply_batches(
    run: _Run,
    targets: Sequence[InspectedTarget],
    upto: int,
    unreported: dict[str, TargetCut],
) -> list[TargetCut]:
    """Bring targets up to a batch; returns the cuts of those that didn't fail, by name."""

    def batch_of(target: InspectedTarget) -> int:
        return run.batches[target.name]

    def apply_one(runner: Runner, target: InspectedTarget) -> TargetCut | None:
        return _apply_batch(replace(run, runner=runner), target, upto, unreported)

    cuts: list[TargetCut | None] = []
    # Targets with the same batches to apply follow each other, so that they read them together.
    for batch, of_batch in groupby(sorted(targets, key=batch_of), batch_of):
        together = list(of_batch)
        several = _is_in_memory(run, BatchNumbers(batch, upto))
        warned = len(run.applied.warnings)
        with RunnerPool.open(run.runner, len(together) if several else 1) as pool:
            cuts += pool.map(apply_one, together)
        # The warnings are in the order of the tables' names, not of the threads' ends.
        run.applied.warnings[warned:] = sorted(run.applied.warnings[warned:])
    return sorted((cut for cut in cuts if cut is not None), key=attrgetter("table_name"))


def _is_in_memory(run: _Run, batches: BatchNumbers) -> bool:
    # A small target waits for the disk and the source most of the time. On Spark, one target uses
    # all cores.
    if not (batches.is_empty or run.runner.is_started):
        with suppress(Exception):  # Each target that reads the range fails by this error.
            return run.ranges.of(batches).is_in_memory
    return False


def _apply_batch(
    run: _Run, target: InspectedTarget, upto: int, unreported: dict[str, TargetCut]
) -> TargetCut | None:
    """Bring one target up to a batch; returns None for a target that fails."""
    name, state, applied = target.name, target.state, run.applied
    run.caller.verify()
    with applied.isolated(state):
        cut = _apply_locked(run, target, BatchNumbers(run.batches[name], upto))
        if (earlier_cut := unreported.pop(name, None)) is not None:
            cut = earlier_cut + cut
        applied.reached[name, state.generation] = run.batches[name] = max(run.batches[name], upto)
        # External commits are searched before the cut states up to which version all are reported.
        with applied.isolated(state):
            applied.warnings += run.inspection.watch.find(state, cut.version)
        return cut
    return None


def _apply_locked(run: _Run, target: InspectedTarget, batches: BatchNumbers) -> TargetCut:
    began, watermarks = time.monotonic(), run.inspection.watermarks
    with target_lock(run.job, target.name, run.locks) as lock:
        state = check_same_copy(run.job, target.state)
        # Another run may have applied some of these batches since the inspection.
        after = max(batches.after, watermarks.of(state))
        fence = TargetFence(lock, watermarks, state, after, run.caller)
        current = replace(target, state=state)
        try:
            cut = _apply_target(run, current, batches._replace(after=after), fence)
        except NeedsSync as err:
            error = of_table(err, target.name)
            if may_resync(run.job, state):
                # The state is read again, because its columns may have been recorded since.
                mark_for_copy(run.job, check_same_copy(run.job, state), str(error))
            raise error from err
    fault_point("apply.applied")
    log.info(
        "table=%s applied up to batch %d: %d inserted, %d updated, %d deleted, %d skipped, %.1f s",
        target.name,
        batches.upto,
        cut.inserted,
        cut.updated,
        cut.deleted,
        cut.skipped,
        time.monotonic() - began,
    )
    return cut


def _apply_target(
    run: _Run, target: InspectedTarget, batches: BatchNumbers, fence: TargetFence
) -> TargetCut:
    """Apply a range of batches to one target.

    ``fence`` raises when this run may no longer write, because a second writer of inserts would
    duplicate them.
    """
    job, state = run.job, target.state
    if batches.is_empty:
        return read_untouched(job, state)
    batch_range, plan = run.ranges.of(batches), None
    rules = schema_rules(job, state)
    try:
        # The columns of a table with copy: false before its sync don't matter while its target has
        # no rows.
        begins = bool(state.copy_skipped) and is_empty(job, target.name)
        plan = plan_target(run.types, batch_range, state, target.catalog, rules, is_empty=begins)
        if not plan.volume.rows and not plan.truncated:
            return read_untouched(job, state)
        return _apply_plan(run, plan, target.gate, fence)
    except DecodeError as err:
        unread = find_unreadable(run.ranges.change_log, state, batches, plan)
        raise record_unreadable(job, unread, err) if unread is not None else err from err


def _apply_plan(
    run: _Run, plan: TargetPlan, gate: TableGate | None, fence: TargetFence
) -> TargetCut:
    job, state = run.job, plan.state
    tag = CommitTag(
        apply_app_id(run.inspection.watermarks.identity, state),
        plan.batches.upto,
        job.run_id,
        plan.truncated,
        checked_version=run.inspection.watch.checked_upto(state),
    )
    staged = staging_folder(job.lake, state.table_name, state.generation, tag.batch, job.run_id)
    try:
        with staged_in(run.runner, staged):
            tag = _stage_and_commit(run, plan, gate, tag, staged, fence)
    except WaldeltaError:
        raise
    except Exception as err:
        # If another run took the target over, LateWriter explains more than this error.
        fence.verify()
        raise merge_error(job, state, err) from err
    return read_commit(job, state, tag)


def _stage_and_commit(
    run: _Run,
    plan: TargetPlan,
    gate: TableGate | None,
    tag: CommitTag,
    staged: str,
    fence: TargetFence,
) -> CommitTag:
    """Stage a target's net changes in a folder, have the gate judge them, and commit them; returns
    the tag of the commit.
    """
    job, state, change_log = run.job, plan.state, run.ranges.change_log
    fence.verify()  # The folder may be the staging folder of the run that owns the target now.
    take_over_target(run.runner, job, state, run.quarantine, fence)
    if plan.evolution is not None:
        evolved = [column.state for column in plan.evolution.columns]
        metadata = job.pipeline.target.metadata_columns
        for clash in clashes([column.name for column in evolved], metadata_columns=metadata):
            raise SchemaChanged(f"{state.table_name}: {clash}; its changes wait in the change log")
        reshape(run.runner, job, state, plan.evolution, plan.decode.types, tag)
        plan = replace(
            plan,
            state=replace(state, columns=evolved, key_columns=list(plan.evolution.key_columns)),
        )
    check_columns(job, plan.state)
    changes = stage(run.runner, change_log, plan, f"{staged}/net")
    judged = partial(judge, run.runner, job, plan, gate) if gate is not None else None
    if state.target_mode.completes_rows:
        changes = complete_rows(
            run.runner, job, change_log, plan, changes, run.quarantine, judge=judged, fence=fence
        )
    elif judged is not None:
        changes = judged(changes).staged
    if plan.decode.unfolding is not None:
        plan, changes = stage_row_versions(run.runner, job, plan, changes, f"{staged}/kept")
    fault_point("apply.staged")
    fence.verify()
    if judged is not None and not any(changes.counts.get(action) for action in WRITTEN):
        record_passed(job, [state.table_name], are_empty=True)
    fault_point("apply.merging")
    tag = merge_staged(run.runner, job, changes, plan, replace(tag, counts=changes.counts), fence)
    fault_point("apply.merged")
    return tag


def finish_step(
    job: Job, change_log: ChangeLog, batch: int, cuts: list[TargetCut], *, complete: bool
) -> BatchCut:
    """Returns the cut of an apply batch, and publishes it when it is ``complete`` and has news."""
    landed = change_log.landed(batch)
    committed = shown_at(landed.commit_us) if landed.commit_us is not None else None
    cut = BatchCut(now(), job.run_id, batch, landed.end_lsn, committed, cuts)
    newest = job.ledger.last_cut()
    if complete and cuts and (newest is None or not is_published(cut, newest)):
        fault_point("apply.cutting")
        try:
            job.ledger.append_cut(cut, newest)
        except LateWriter as err:
            # Readers use the newest row, which must never be of an older batch.
            log.warning("no consistent cut recorded for batch %d: %s", batch, err)
        fault_point("apply.cut")
    return cut


def is_published(cut: BatchCut, newest: BatchCut) -> bool:
    """Returns whether the newest cut is this one, or of a later batch of the same copies.

    In another slot incarnation, whose copies have later generations, batch numbers may start again.
    """
    if newest.batch <= cut.batch:
        return (newest.batch, _members(newest)) == (cut.batch, _members(cut))
    generations = dict(_members(newest))
    return any(generations.get(name, 0) >= generation for name, generation in _members(cut))


def _members(cut: BatchCut) -> set[tuple[str, int]]:
    return {(target.table_name, target.generation) for target in cut.targets}
