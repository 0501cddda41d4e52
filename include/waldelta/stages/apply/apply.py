"""Apply: applies landed batches to the targets, each from its own watermark, each batch range in
one commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from waldelta.changes.decode.message_search import find_unreadable
from waldelta.changes.decode.net_rows import WRITTEN
from waldelta.changes.decode.target_plan import TargetPlan, plan_target
from waldelta.changes.merge.alter_columns import reshape
from waldelta.changes.merge.commits import (
    read_commit,
    read_unreported,
    read_untouched,
    take_over_target,
)
from waldelta.changes.merge.merge import merge_staged
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.merge.states import complete_states
from waldelta.changes.stage.folders import staged_in
from waldelta.changes.stage.split import splitting
from waldelta.changes.stage.stage import stage
from waldelta.errors import DecodeError, LateWriter, NeedsSync, SchemaChanged, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.lake import UNFENCED, Fence, staging_folder
from waldelta.lake.changelog import BatchNumbers, BatchRanges, ChangeLog, Stream
from waldelta.lake.driver_limits import MOST_DRIVER_ROWS
from waldelta.lake.ledger import SYNCED, BatchCut, Quarantine, TableState, TargetCut, now
from waldelta.pgoutput.commit_time import shown_at
from waldelta.pipeline import Job, SlotIdentity, of_table, target_lock
from waldelta.pipeline.advisory_locks import LockSessions
from waldelta.pipeline.drift import CatalogTable
from waldelta.pipeline.reported_commits import ReportedCommits
from waldelta.pipeline.source_connections import SharedConnection
from waldelta.pipeline.targets import (
    TableLifecycle,
    TargetFence,
    Watermarks,
    apply_app_id,
    check_columns,
    check_same_copy,
    merge_error,
    record_removed,
    record_unreadable,
)
from waldelta.pipeline.targets.external_commits import Watch
from waldelta.pipeline.targets.lifecycle import mark_for_copy
from waldelta.postgres.type_catalog import KnownTypes
from waldelta.quantities import counted
from waldelta.spark import Runner, RunnerPool
from waldelta.stages.apply._apply_batches import measures, plan_apply_batches, reported_batches
from waldelta.stages.apply._select_targets import SelectedTargets, select_targets, select_unchanged
from waldelta.stages.apply.complete_rows import complete_rows
from waldelta.stages.apply.outcome import Applied, isolated, without_failure
from waldelta.stages.check.gate.gate import judge_of, read_gates
from waldelta.stages.check.gate.table_gate import TableGate
from waldelta.stages.check.gate.verdicts import record_passed
from waldelta.stages.sync.skipped_copy import is_empty
from waldelta.target_modes.column_names import clashes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    """What the apply of every target needs.

    ``watermarks`` is each target's last applied batch, ``sizes`` the messages of each landed batch.
    """

    runner: Runner
    job: Job
    held: Watermarks
    watermarks: dict[str, int]
    sizes: dict[int, int]
    stretches: BatchRanges
    catalog_tables: Mapping[str, CatalogTable]
    watch: Watch
    gates: dict[str, TableGate]
    quarantine: Quarantine
    locks: LockSessions
    types: KnownTypes
    caller: Fence


def apply(runner: Runner, job: Job, landed_as_of: int | None = None) -> Applied:
    """Bring every synced target up to the last landed batch, and publish a cut whenever all are
    there.

    Small batches are applied together, up to twice batch.max_changes and twice batch.wal_window_mb.
    A failing table doesn't stop the others; it is in ``failures`` and resumes from its own
    watermark. A table whose source changed so that only a new copy is exact is in ``outdated`` and
    marked in the ledger; it gets no changes until it is copied. ``landed_as_of``: all transactions
    below this xid8 have landed. A table with a row filter fails as TableBusy while it is locked
    against readers, because its catalogs can't be read without that lock.
    """
    applied = Applied()
    # Read before the catalogs, which must be newer than this batch.
    identity = job.read_identity()
    last = job.change_log(identity).last_batch()
    selected = select_targets(runner, job, landed_as_of, applied)
    if last is not None:
        _apply_upto(runner, job, selected, last, applied, Pace())
    applied.reported_late += unreported_commits(job, identity, selected.unpublished)
    try:
        applied.removed = record_removed(job, selected.unpublished)
    except WaldeltaError as err:
        # What was applied is reported anyway, and the next run records the removal.
        log.warning(
            "the ledger doesn't record which tables left their publications, the next run records"
            " it: %s",
            err,
        )
    return applied


def apply_concurrently(
    runner: Runner,
    job: Job,
    upto: int,
    applied: Applied,
    caller: Fence = UNFENCED,
) -> int:
    """Apply one batch range of a backlog while more is landing, to targets with nothing to report
    first.

    Returns the batch the targets have reached, which is before ``upto`` where some lag farther
    behind. The apply after landing reports what this commits, like commits of a killed run; without
    one, the next run reports it. ``applied`` has the failures of earlier apply batches, and gets
    this one's results; ``caller`` raises when the caller no longer waits.
    """
    caller.verify()
    return _apply_upto(runner, job, select_unchanged(job), upto, applied, Pace(1, caller))


@dataclass(frozen=True, slots=True)
class Pace:
    """The most apply batches of a call, and a fence that raises when the caller no longer waits."""

    steps: int | None = None
    caller: Fence = UNFENCED

    @property
    def is_concurrent(self) -> bool:
        """Returns whether more is landing, so that the number of apply batches is limited."""
        return self.steps is not None


def _is_behind_copies(
    change_log: ChangeLog, ends: Sequence[int], states: Sequence[TableState], applied: Applied
) -> bool:
    """Returns whether no target contains more than the apply batch, so that a cut can be made
    there.

    A target that was copied later contains more, until its copy's position has landed.
    """
    if not ends or not applied.is_complete:
        return False
    end = change_log.landed_end(ends[-1])
    return all(state.snapshot_lsn <= end for state in states)


def _apply_upto(
    runner: Runner,
    job: Job,
    selected: SelectedTargets,
    last: int,
    applied: Applied,
    pace: Pace,
) -> int:
    """Bring these targets up to a batch, one apply batch after another; returns the batch
    reached.
    """
    states, held = selected.states, Watermarks(job, job.read_identity())
    change_log = held.change_log
    with _begun(runner, job, selected, last, applied, held, pace) as run:
        watermarks, sizes = run.watermarks, run.sizes
        for state in without_failure(states, applied):
            _find_external_commits(run, state, run.held.versions[state.table_name], applied)
        ends = plan_apply_batches(*measures(job, sizes, change_log.bytes_of_batches))[: pace.steps]
        is_all = selected.is_all and (
            not pace.is_concurrent or _is_behind_copies(change_log, ends, states, applied)
        )
        unreported_cuts = dict(selected.mended)
        # Otherwise there is no cut, and the apply that follows reports.
        if is_all or not pace.is_concurrent:
            known = [state for state in states if state.table_name in watermarks]
            unreported_cuts |= unreported(job, held, known, applied)
        for upto in reported_batches(sizes, ends or [last] * bool(unreported_cuts)):
            behind = is_all and all(watermark <= upto for watermark in watermarks.values())
            # Unreported commits are reported with a published cut where there is one.
            told = unreported_cuts if behind or upto == (ends or [last])[-1] else {}
            cuts = _apply_batches(run, without_failure(states, applied), upto, told, applied)
            applied.steps.append(
                finish_step(job, change_log, upto, cuts, complete=behind and applied.is_complete)
            )
        # Commits of targets that failed are reported too.
        applied.reported_late += unreported_cuts.values()
    return (ends or [last])[-1]


@contextmanager
def _begun(  # noqa: PLR0913, PLR0917 - as _apply_upto() has them
    runner: Runner,
    job: Job,
    selected: SelectedTargets,
    last: int,
    applied: Applied,
    held: Watermarks,
    pace: Pace,
) -> Iterator[_Run]:
    """Yields what the targets are applied with up to a batch, from their current watermarks."""
    change_log, watch = held.change_log, Watch(job, held.cut)
    watermarks = _watermarks(job, held, selected.states, applied)
    fed_from = [watermarks[state.table_name] for state in without_failure(selected.states, applied)]
    sizes = job.read_landed_sizes(held.identity, min(fed_from, default=last), last)
    if (messages := sum(sizes.values())) > MOST_DRIVER_ROWS:
        most = f"this process applies up to {MOST_DRIVER_ROWS:,}"
        runner.start(f"{counted(messages, 'message waits', 'messages wait')}, {most}")
    quarantine = Quarantine(job.lake)
    planning, locks = SharedConnection(job.source, "apply"), LockSessions(job.source.conninfo)
    gates, types = read_gates(job, selected.states), KnownTypes(planning.use)

    def waiting(stream: Stream) -> list[int]:
        fed_now = without_failure(selected.states, applied)
        late = [state for state in fed_now if watermarks[state.table_name] <= stream.segments.after]
        return [oid for state in late for oid in state.relation_ids]

    with splitting(runner, job, change_log, waiting) as split, planning, locks:
        try:
            yield _Run(
                runner,
                job,
                held,
                watermarks,
                sizes,
                BatchRanges(change_log, sizes, split),
                selected.catalog_tables,
                watch,
                gates,
                quarantine,
                locks,
                types,
                pace.caller,
            )
        finally:
            applied.foreign = sorted({*applied.foreign, *watch.reported})


def _apply_batches(
    run: _Run,
    states: Sequence[TableState],
    upto: int,
    unreported_cuts: dict[str, TargetCut],
    applied: Applied,
) -> list[TargetCut]:
    """Bring targets up to a batch; returns the cuts of those that didn't fail, by name."""

    def batch_of(state: TableState) -> int:
        return run.watermarks[state.table_name]

    def apply_one(runner: Runner, state: TableState) -> TargetCut | None:
        return _apply_batch(replace(run, runner=runner), state, upto, unreported_cuts, applied)

    cuts: list[TargetCut | None] = []
    # Targets with the same batches to apply follow each other, so that they read them together.
    for batch, of_batch in groupby(sorted(states, key=batch_of), batch_of):
        targets = list(of_batch)
        batches = BatchNumbers(batch, upto)
        # A small target waits for the disk and the source most of the time. On Spark, one target
        # uses all cores.
        several = not (batches.is_empty or run.runner.is_started) and (
            run.stretches.of(batches).is_in_memory
        )
        with RunnerPool(run.runner, len(targets) if several else 1) as pool:
            cuts += pool.map(apply_one, targets)
    return sorted((cut for cut in cuts if cut is not None), key=attrgetter("table_name"))


def _apply_batch(
    run: _Run, state: TableState, upto: int, unreported_cuts: dict[str, TargetCut], applied: Applied
) -> TargetCut | None:
    """Bring one target up to a batch; returns None for a target that fails."""
    name, watermarks = state.table_name, run.watermarks
    run.caller.verify()
    with isolated(run.job, state, applied):
        cut = _apply_locked(run, state, BatchNumbers(watermarks[name], upto))
        if (before := unreported_cuts.pop(name, None)) is not None:
            cut = before + cut
        applied.reached[name, state.generation] = watermarks[name] = max(watermarks[name], upto)
        # External commits are searched before the cut states up to which version all are reported.
        _find_external_commits(run, state, cut.version, applied)
        return cut
    return None


def _find_external_commits(run: _Run, state: TableState, version: int, applied: Applied) -> None:
    with isolated(run.job, state, applied):
        applied.warnings += run.watch.find(state, version)


def _watermarks(
    job: Job, held: Watermarks, states: Sequence[TableState], applied: Applied
) -> dict[str, int]:
    """Returns each target's last applied batch; targets that can't be applied become failures."""
    watermarks: dict[str, int] = {}
    for state in states:
        with isolated(job, state, applied):
            reached = applied.reached.get((state.table_name, state.generation), 0)
            watermarks[state.table_name] = max(held.of(state), reached)
    return watermarks


def _apply_locked(run: _Run, state: TableState, batches: BatchNumbers) -> TargetCut:
    began = time.monotonic()
    with target_lock(run.job, state.table_name, run.locks) as lock:
        present = check_same_copy(run.job, state)
        # Another run may have applied some of it since the watermarks were read.
        after = max(batches.after, run.held.of(present))
        fence = TargetFence(lock, run.held, present, after, run.caller)
        try:
            cut = _apply_target(run, present, batches._replace(after=after), fence)
        except NeedsSync as err:
            named = of_table(err, state.table_name)
            if run.job.pipeline.target.recopies(state.table_name):
                # The state is read again, because its columns may have been recorded since.
                mark_for_copy(run.job, check_same_copy(run.job, present), str(named))
            raise named from err
    fault_point("apply.applied")
    log.info(
        "table=%s applied up to batch %d: %d inserted, %d updated, %d deleted, %d skipped, %.1f s",
        state.table_name,
        batches.upto,
        cut.inserted,
        cut.updated,
        cut.deleted,
        cut.skipped,
        time.monotonic() - began,
    )
    return cut


def _apply_target(
    run: _Run, state: TableState, batches: BatchNumbers, fence: TargetFence
) -> TargetCut:
    """Apply a range of batches to one target.

    ``fence`` raises when this run may no longer write, because a second writer of inserts would
    duplicate them.
    """
    job = run.job
    if batches.is_empty:
        return read_untouched(job, state)
    target, batch_range = job.pipeline.target, run.stretches.of(batches)
    rules = target.schema_rules_of(state.table_name)
    plan = None
    try:
        # The columns of a table with copy: false before its sync don't matter while its target has
        # no rows.
        begins = bool(state.copy_skipped) and is_empty(job, state.table_name)
        catalog = run.catalog_tables[state.table_name]
        plan = plan_target(run.types, batch_range, state, catalog, rules, is_empty=begins)
        if not plan.volume.rows and not plan.truncated:
            return read_untouched(job, state)
        return _apply_plan(run, plan, fence)
    except DecodeError as err:
        unread = find_unreadable(run.stretches.change_log, state, batches, plan)
        raise record_unreadable(job, unread, err) if unread is not None else err from err


def _apply_plan(run: _Run, plan: TargetPlan, fence: TargetFence) -> TargetCut:
    job, state = run.job, plan.state
    looked = run.watch.checked_upto(state)
    tag = CommitTag(
        apply_app_id(run.held.identity, state),
        plan.batches.upto,
        job.run_id,
        plan.truncated,
        looked=looked,
    )
    staged = staging_folder(job.lake, state.table_name, state.generation, tag.batch, job.run_id)
    try:
        with staged_in(run.runner, staged):
            tag = _bring(run, plan, tag, staged, fence)
    except WaldeltaError:
        raise
    except Exception as err:
        # If another run took the target over, LateWriter explains more than this error.
        fence.verify()
        raise merge_error(job, state, err) from err
    return read_commit(job, state, tag)


def _bring(
    run: _Run, plan: TargetPlan, tag: CommitTag, staged: str, fence: TargetFence
) -> CommitTag:
    """Stage the net changes in a folder and commit them; returns the tag of the commit."""
    job, state = run.job, plan.state
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
    changes = stage(run.runner, run.stretches.change_log, plan, f"{staged}/net")
    judged = judge_of(run.runner, job, plan, run.gates)
    if state.kept_as.completes_rows:
        changes = complete_rows(
            job, run.stretches.change_log, plan, changes, run.quarantine, judged, fence=fence
        )
    elif judged is not None:
        changes = judged(changes).staged
    if plan.decode.unfolding is not None:
        changes = complete_states(
            run.runner, job.lake.target(state.table_name), plan, changes, f"{staged}/filled"
        )
    fault_point("apply.staged")
    fence.verify()
    if judged is not None and not any(changes.counts.get(action) for action in WRITTEN):
        record_passed(job, state.table_name)
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


def unreported(
    job: Job, held: Watermarks, states: Sequence[TableState], applied: Applied
) -> dict[str, TargetCut]:
    """Returns the commits that were never reported: this run reports, checks and announces them.

    The part that the newest cut already contains goes into ``applied``; the rest is returned,
    for the next cut.
    """
    unreported_cuts, told = {}, _as_reported(job)
    for state in states:
        with isolated(job, state, applied):
            in_cut = held.cut.of(state) if held.cut is not None else None
            version = in_cut.version if in_cut is not None else None
            reported_late, beyond = read_unreported(job, held.identity, state, told, version)
            applied.reported_late += [reported_late] if reported_late is not None else []
            if beyond is not None:
                unreported_cuts[state.table_name] = beyond
    return unreported_cuts


def unreported_commits(
    job: Job, identity: SlotIdentity, unpublished: Sequence[TableLifecycle]
) -> list[TargetCut]:
    """Returns the unreported commits of targets that aren't published any more.

    Such a target gets no changes any more, so an error of one doesn't fail the run.
    """
    found, told = [], _as_reported(job)
    for state in (standing.state for standing in unpublished):
        if state is None or state.status != SYNCED:
            continue
        try:
            _, cut = read_unreported(job, identity, state, told)
        except Exception as err:
            log.warning(
                "table=%s what was applied to it before it left its publications can't be"
                " reported: %s",
                state.table_name,
                err,
            )
        else:
            found += [cut] if cut is not None else []
    return found


def _as_reported(job: Job) -> ReportedCommits:
    return ReportedCommits(job.ledger, now() - job.pipeline.maintenance.ledger_retention)
