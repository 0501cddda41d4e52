"""Replay: derives the keys that a range of batches touched again from the change log, and corrects
the targets.

It runs alongside apply, under the same locks. Later batches stay in effect, because every key is
brought to its state at the target's watermark, not at the range's end. A replay doesn't touch the
slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import tenacity

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
    QUARANTINED_ROWS,
)
from waldelta.changes.decode.row_keys import own_keys, typed_keys
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.commits import read_commit, read_untouched, take_over_target
from waldelta.changes.merge.keyless import (
    KeylessTarget,
    different_rows,
    replace_statement,
    rewritten_rows,
)
from waldelta.changes.merge.statements import (
    FOUND_DELETES,
    FOUND_UPDATES,
    CommitTag,
    as_stored,
    commit_statement,
    merge_statement,
)
from waldelta.changes.stage.folders import staged_in
from waldelta.changes.stage.stage import stage
from waldelta.errors import (
    LockHeld,
    ModeRefused,
    SchemaChanged,
    WaldeltaError,
    raised_as,
)
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget, TableError, staging_folder, write_parquet
from waldelta.lake.changelog import BatchNumbers, BatchRange, BatchRanges, ChangeLog, Snapshot
from waldelta.lake.ledger import DISCARDED, IncompleteRow, Quarantine, TableState, TargetCut
from waldelta.pipeline import Job, of_table, target_lock
from waldelta.pipeline.drift import CatalogTable, read_catalog_state
from waldelta.pipeline.targets import (
    RequiredAction,
    TargetFence,
    Watermarks,
    apply_app_id,
    check_columns,
    check_same_copy,
    check_target,
    merge_error,
    read_lifecycles,
    read_published,
)
from waldelta.pipeline.targets.lifecycle import states
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.spark_sql import parquet
from waldelta.stages.apply.complete_rows import complete_rows
from waldelta.stages.check.gate.gate import TableGate, judge_of, read_gates
from waldelta.stages.repair.replay._derive_states import derive_states, write_differences
from waldelta.stages.repair.replay._plan import ReplayPlan, plan_replay
from waldelta.stages.repair.replay.interval import Span
from waldelta.target_modes import Feature

log = logging.getLogger(__name__)

# Runs and other replays lock a target for the duration of their merge.
TARGET_LOCK_TIMEOUT_S = 900.0
# Actions of the merge; rows that are only counted or completed need no commit.
_EFFECTS = (ACTION_UPDATE, ACTION_INSERT, ACTION_UPSERT, ACTION_DELETE, ACTION_PURGE)
# Suffixes of the folders next to a target's folder of staged changes.
_STAGED = (
    "-states",
    "-states-moved",
    "-discarded",
    "-completed",
    "-replaced",
    "-net",
    "-let",
    "-let-aside",
    "-let-gone",
)


@dataclass
class Replayed:
    """A replay's effect: corrected targets, number of keys, tables that failed, and warnings."""

    cuts: list[TargetCut] = field(default_factory=list)
    keys: int = 0
    failures: dict[str, WaldeltaError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """What the replay of every target needs."""

    runner: Runner
    job: Job
    span: Span
    held: Watermarks
    stretches: BatchRanges
    quarantine: Quarantine
    gates: Mapping[str, TableGate]


def replay(runner: Runner, job: Job, span: Span, tables: Collection[str] | None = None) -> Replayed:
    """Correct every replicated target, or these, by the batches of ``span``.

    A failing table doesn't stop the others. A table that can't be replayed, because its rows or
    columns changed in a way that the log doesn't contain, stays as it is and gets a warning. A
    table without a key is rebuilt from its copy.
    """
    for name in tables or ():
        if not (mode := job.pipeline.target.mode_of(name)).supports(Feature.REPLAY):
            raise ModeRefused(
                f"{name} has mode {mode}, so a replay would overwrite rows that it keeps: sync it"
                " again, which adds what differs as changes"
            )
    identity, done = job.read_identity(), Replayed()
    change_log = job.change_log(identity)
    sizes = change_log.sizes(identity.floor, change_log.last_batch() or span.upto)
    # These ranges start at the span; the others end at the targets' watermarks.
    ranges = BatchRanges(change_log, sizes)
    touched = BatchRanges(change_log, sizes).of(BatchNumbers(span.after, span.upto))
    with job.source.connect("replay") as connection:
        found = read_lifecycles(job, read_published(connection, job))
        replicated = states(found, RequiredAction.APPLY)
        catalog_tables = read_catalog_state(connection, replicated)
    marks, gates = Watermarks(job, identity), read_gates(job, replicated)
    run = _Run(runner, job, span, marks, ranges, Quarantine(job.lake), gates)
    chosen = [one for one in found if tables is None or one.table_name in tables]
    for other in chosen:
        state = other.state if other.action != RequiredAction.APPLY else None
        if state is not None and state.snapshot and _concerns(touched, state):
            done.warnings.append(f"{other.table_name} isn't replayed: {other.why}")
    for state in states(chosen, RequiredAction.APPLY):
        name = state.table_name
        done.warnings += _older_than_copy(touched, state)
        if not _concerns(touched, state) or _keeps(state, done):
            continue
        try:
            _replay_locked(run, state, catalog_tables[name], done)
        except SchemaChanged as err:
            done.warnings.append(f"{of_table(err, name)}: it isn't replayed, and stays as it is")
        except WaldeltaError as err:
            log.error("table=%s not replayed: %s", name, err)
            done.failures[name] = of_table(err, name)
    return done


def _keeps(state: TableState, done: Replayed) -> bool:
    """Returns whether the target differs from its source on purpose, which a replay would
    overwrite.

    If so, adds a warning.
    """
    if state.copy_skipped:
        why = (
            "its existing rows were not copied (copy: false), so the change log doesn't show which"
            " of the changed rows the target had"
        )
    elif not state.kept_as.supports(Feature.REPLAY):
        why = (
            f"its mode is {state.kept_as}, and a replay leaves such a target unchanged; to repair"
            " it, sync it again"
        )
    else:
        return False
    done.warnings.append(f"{state.table_name} isn't replayed: {why}")
    return True


def _concerns(touched: BatchRange, state: TableState) -> bool:
    """Returns whether the range has anything for a target that its copy doesn't contain."""
    return touched.count(state) > 0 or touched.stream.has_truncates()


def _older_than_copy(touched: BatchRange, state: TableState) -> list[str]:
    """Returns a warning about changes of the range that are older than the target's copy."""
    rows = touched.rows_of(state)
    if rows is not None:
        every = len(rows)
    else:
        every, _ = touched.change_log.unseen(touched.stream, state.relation_ids, Snapshot(0, 0))
    if not (older := every - touched.count(state)):
        return []
    remedy = f"initial sync with tables={state.table_name}, if its rows are damaged"
    return [
        (
            f"{state.table_name}: {counted(older, 'change')} of the range, older than its copy, not"
            f" replayed ({remedy})"
        )
    ]


def _replay_locked(run: _Run, state: TableState, catalog: CatalogTable, done: Replayed) -> None:
    began = time.monotonic()
    # A run or another replay may have the target's lock for a while.
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(LockHeld),
        stop=tenacity.stop_after_delay(TARGET_LOCK_TIMEOUT_S),
        wait=tenacity.wait_fixed(1),
        reraise=True,
    )
    for attempt in attempts:
        with attempt, target_lock(run.job, state.table_name) as lock:
            current = check_same_copy(run.job, state)
            watermark = run.held.of(current)
            if watermark <= run.span.after:
                done.warnings.append(
                    f"{state.table_name} hasn't applied the range yet: the next run does"
                )
                return
            cut, keys = _replay_target(
                run, current, catalog, TargetFence(lock, run.held, current, watermark), done
            )
    if cut is None:
        return
    done.cuts.append(cut)
    done.keys += keys
    log.info(
        "table=%s replayed keys=%d restored=%d corrected=%d removed=%d seconds=%.1f",
        state.table_name, keys, cut.inserted, cut.updated, cut.deleted, time.monotonic() - began,
    )  # fmt: skip


def _replay_target(
    run: _Run,
    state: TableState,
    catalog: CatalogTable,
    fence: TargetFence,
    done: Replayed,
) -> tuple[TargetCut | None, int]:
    job, change_log, watermark = run.job, run.stretches.change_log, fence.batch or 0
    batches = BatchNumbers(run.span.after, watermark)
    if not state.key_columns:
        batches = batches_since_copy(job, change_log, state, watermark)
    batch_range = run.stretches.of(batches)
    with job.source.connect("replay") as connection:
        plan = plan_replay(
            connection, job, batch_range, state, catalog, min(run.span.upto, watermark)
        )
    if not plan.target.volume.rows and not plan.target.truncated:
        return None, 0
    app_id = f"{apply_app_id(run.held.identity, state)}:replay:{job.run_id}"
    name = state.table_name
    folder = staging_folder(job.lake, name, state.generation, watermark, job.run_id)
    mend = _mend_by_key if state.key_columns else _mend_whole
    with (
        raised_as(partial(merge_error, job, state)),
        staged_in(run.runner, *(f"{folder}{staged}" for staged in ("", *_STAGED))),
    ):
        fence.verify()
        check_target(job, state)
        check_columns(job, state)
        take_over_target(run.runner, job, state, run.quarantine, fence)
        # The version grows with every commit, so a late writer of this run is skipped after a
        # newer commit.
        version = job.lake.target(name).version
        tag = CommitTag(app_id, version, job.run_id, verb="replay")
        return mend(run, plan, folder, tag, fence, done)


def _mend_by_key(
    run: _Run, plan: ReplayPlan, folder: str, tag: CommitTag, fence: TargetFence, done: Replayed
) -> tuple[TargetCut, int]:
    """Merge the rows that differ; returns how many keys were compared, too."""
    job, state, decode = run.job, plan.target.state, plan.target.decode
    target, kept = job.lake.target(state.table_name), job.pipeline.target.metadata_columns
    change_log = run.stretches.change_log
    keys = derive_states(run.runner, change_log, plan, f"{folder}-states")
    discarded = _stage_discarded(run, plan.target, f"{folder}-discarded")
    changes = write_differences(run.runner, job, f"{folder}-states", plan, folder, discarded)
    if skipped := changes.counts.get(ACTION_SKIP):
        why = "missing in the target, as expected if what is published changed"
        done.warnings.append(
            f"{state.table_name}: {counted(skipped, 'row')} that the range changed {why}: left out"
        )
    judged = judge_of(run.runner, job, plan.target, run.gates)
    filled: list[IncompleteRow] = []
    changes = complete_rows(
        job,
        change_log,
        plan.target,
        changes,
        run.quarantine,
        judged,
        fence=fence,
        filled=filled,
    )
    source = as_stored(changes.source, decode.types)
    statement = merge_statement(
        target.relation, source, decode.names, decode.shape, metadata_columns=kept
    )
    cut = _commit(run, plan, statement, replace(tag, counts=changes.counts), fence)
    if filled:
        run.quarantine.add(filled, fence)
    return cut, keys


def _stage_discarded(run: _Run, plan: TargetPlan, folder: str) -> str | None:
    """Write the keys of discarded rows, if there are any, in the columns of the states' bases.

    That the target lacks such a row, or has an earlier version of it, is no damage. A change of
    such a row is handled as one of a discarded row.
    """
    lacking = run.quarantine.lacking(
        plan.state.table_name, plan.state.generation, plan.batches.upto
    )
    keys = own_keys([key for key, row in lacking.items() if row.status == DISCARDED], plan.decode)
    if not keys:
        return None
    write_parquet(folder, typed_keys(keys, plan.decode))
    return folder


def _mend_whole(
    run: _Run, plan: ReplayPlan, folder: str, tag: CommitTag, fence: TargetFence, _: Replayed
) -> tuple[TargetCut, int]:
    """Replace all rows of a table without a key, if they differ; there are no keys to count."""
    job, state = run.job, plan.target.state
    counts = write_rows(run.runner, job, run.stretches.change_log, plan, folder)
    relation, table = job.lake.target(state.table_name).relation, KeylessTarget.of(job, plan.target)
    statement = replace_statement(relation, parquet(folder), table)
    return _commit(run, plan, statement, replace(tag, counts=counts), fence), 0


def _commit(
    run: _Run, plan: ReplayPlan, statement: str, tag: CommitTag, fence: TargetFence
) -> TargetCut:
    job, state = run.job, plan.target.state
    if not any(tag.counts.get(action) for action in _EFFECTS):
        return replace(read_untouched(job, state), quarantined=tag.counts.get(QUARANTINED_ROWS, 0))
    fence.verify()
    fault_point("replay.merging")
    commit_statement(run.runner, tag, statement)
    fault_point("replay.merged")
    return read_commit(job, state, tag)


def batches_since_copy(
    job: Job, change_log: ChangeLog, state: TableState, watermark: int
) -> BatchNumbers:
    """Returns the range of all batches since the copy.

    Raises SchemaChanged when the change log no longer goes back to the copy.
    """
    identity = job.read_identity()
    after = min(change_log.visible_upto(Snapshot.parse(state.snapshot), identity.floor), watermark)
    lowest = change_log.lowest_batch()
    if lowest is None or lowest > after + 1:
        raise SchemaChanged(
            f"{state.table_name} has no key, and the change log no longer reaches back to its copy"
        )
    job.read_landed_sizes(identity, after, watermark)  # raises SlotGap
    return BatchNumbers(after, watermark)


def write_rows(
    runner: Runner,
    job: Job,
    change_log: ChangeLog,
    replay: ReplayPlan,
    folder: str,
) -> dict[str, int]:
    """Write the target's expected rows as Parquet into ``folder``; returns counts of differences.

    Raises SchemaChanged when the copy's version is gone, or had other columns.
    """
    plan, table = replay.target, KeylessTarget.of(job, replay.target)
    target = job.lake.target(plan.state.table_name)
    staged = stage(runner, change_log, plan, f"{folder}-net/net")
    base = (
        f"{target.relation} limit 0"
        if plan.is_truncated
        else target.relation_at(_version_of_copy(plan.state, target))
    )
    rows = runner.spark().sql(rewritten_rows(base, staged.source, table))
    rows.write.mode("overwrite").parquet(folder)
    statement = different_rows(target.relation, parquet(folder), table)
    ((lacking, many),) = runner.spark().sql(statement).collect()
    found = {ACTION_INSERT: int(lacking), ACTION_DELETE: int(many)}
    return {FOUND_UPDATES: 0, FOUND_DELETES: int(many), **found} if lacking or many else {}


def _version_of_copy(state: TableState, target: DeltaTarget) -> int:
    """Returns the target's version that its sync committed, if it is readable with today's
    columns.
    """
    table = target.open()
    present = table.schema.names
    for entry in table.commits():
        written = entry["waldelta"]
        if (written.get("verb"), written.get("generation")) == ("sync", state.generation):
            try:
                copied = target.open(int(entry["version"]))
            except TableError:
                break
            if copied.schema.names == present:
                return copied.version
            raise SchemaChanged(
                f"{state.table_name} has no key, and its columns changed since its copy"
            )
    raise SchemaChanged(
        f"{state.table_name} has no key, and the version of its copy isn't there any more"
    )
