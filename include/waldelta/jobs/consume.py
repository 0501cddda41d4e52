"""The flow: the stages of a run, in order. Each stage takes the job and adds what it did to the result.

::

    land    slot -> change log, and the slot consumed up to what has landed    (drain, land; waldelta.slot.acknowledge)
            of a large backlog, whole steps are applied meanwhile              (overlap)
    apply   change log -> targets, one commit each                             (plan, decode, collapse, merge)
            and, when asked for, logical messages -> their own table           (messages)
    check   targets -> expectations -> Data Docs                               (quality)
    report  what the run did -> ledger, summary

A backfill, or a run that is cleared after it ended well, replays instead: the same stages, but nothing lands, and apply derives
anew what the range touched (replay).

A stage imports its modules itself: in Airflow each is a process, and shouldn't wait for what the others need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, cast

from waldelta.errors import ApplyError, LockHeld, SlotGap, SlotUnreadable, StateError, SyncFailed, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.lake.changelog.transaction_counts import Landed
from waldelta.lake.ledger.quarantine import IncompleteRow
from waldelta.lake.ledger.records import BatchCut, now
from waldelta.lake.storage import BOOKKEEPING
from waldelta.lsn import Lsn
from waldelta.permissions import private_files
from waldelta.pipeline.advisory_locks import slot_lock
from waldelta.pipeline.job import Job
from waldelta.pipeline.run_result import RunFailed, RunResult, StageResult, TableResult
from waldelta.pipeline.targets.unreadable_messages import notices
from waldelta.pipeline.targets.watermarks import synced_states
from waldelta.pipeline.task_errors import describe_error, unexpected_error
from waldelta.postgres.partition_access import read_unreadable
from waldelta.postgres.server_position import read_oldest_xid
from waldelta.postgres.unpublished_tables import not_published
from waldelta.quantities import counted
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.slot.failover import check_system
from waldelta.slot.gaps import breaks_recorded, describe, gaps_recorded
from waldelta.slot.health import critical, reading, slot_warnings, tell
from waldelta.slot.read.peek import end_old_backends
from waldelta.slot.recovery import never_compared
from waldelta.slot.slot import read_slot
from waldelta.slot.standby import check_slot, committed_upto, left_on_primary, slot_position, standby_warnings
from waldelta.stages.check.gate.quarantined_rows import tell_anew
from waldelta.stages.repair.replay.interval import REPLAY, is_replay, read_span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waldelta.stages.apply.outcome import Applied
    from waldelta.stages.sync.copied_table import SyncResult

log = logging.getLogger(__name__)

_MESSAGES = "the table of messages"
_LEFT = (
    "isn't published any more: its target stays as it is; if it should be, run setup, then the initial sync, since what "
    "changes meanwhile is sent to nobody"
)


def land_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
    """Land and consume everything up to the server's present position; whole steps of a backlog are applied meanwhile."""
    from waldelta.stages.apply.concurrent import applying
    from waldelta.stages.apply.outcome import Applied

    meanwhile = Applied()
    with applying(spark, job, meanwhile, partial(_tell_looked, result, meanwhile)) as overlap:
        _land(spark, job, result, stage, overlap.landed)
    if result.unreadable is not None:
        stage.detail += "; PostgreSQL can't decode what comes next: the run fails once all before it is applied"
    if steps := sum(any(one.changed for one in cut.targets) for cut in meanwhile.steps):
        stage.detail += f"; {counted(steps, 'step')} applied meanwhile"


def _land(
    spark: SparkSession, job: Job, result: RunResult, stage: StageResult, on_landed: Callable[[Landed], object]
) -> None:
    from waldelta.stages.land.drain import drain

    result.unreadable = None
    try:
        with gaps_recorded(job), slot_lock(job) as lock:
            with job.connect("health") as primary, job.connect_slot("health", primary) as connection:
                asked = now()
                # Where the slot's state tells nothing: a standby, another cluster.
                server = slot_position(connection, job, primary)
                check_system(job.slot_identity(), server)
                landed_as_of = read_oldest_xid(connection)
                lock.check()
                end_old_backends(connection, job.pipeline.source.slot)
                slot = check_slot(connection, job)
                elsewhere = standby_warnings(primary, connection, job, server)
                uncompared = never_compared(connection, job, job.slot_identity())
                result.as_of = committed_upto(connection, server, asked).isoformat()
            result.slot_before = reading(slot, server.lag_of(slot.confirmed_flush_lsn), asked)
            found = [*slot_warnings(slot, job.pipeline.slot_limits, job.ledger.last_move(), now()), *elsewhere]
            result.slot_critical = critical(found)
            result.warnings += [f"when the run began, {text}" for text in tell(found)] + uncompared
            lock.check()  # what comes first may end another run's reader, and move the slot
            drained = drain(spark, job, lock.check, on_landed)
            drained.check_read()
    except SlotUnreadable as err:
        # What landed in front of it is applied first: apply_stage() raises it then.
        log.error("%s", err)
        result.unreadable, result.as_of, landed_as_of = str(err), None, 0
    result.landed_as_of = landed_as_of
    result.changes += drained.changes
    result.source.add(drained.bill)
    result.start_lsn, result.end_lsn = str(drained.start), str(drained.end)
    stage.detail = (
        f"{counted(drained.changes, 'change')} in {counted(len(drained.batches), 'batch', 'batches')}, landed in {drained.seconds_landing:.1f} s, "
        f"consumed in {drained.seconds_consuming:.1f} s"
    )


def apply_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
    """Apply what has landed; raises ApplyError naming the tables that failed, after all others are done.

    So SlotUnreadable, which landing met: no table gets what was committed behind that.
    """
    from waldelta.stages.apply.apply import apply
    from waldelta.stages.repair.recopy import recopy

    result.told_applied = False  # an earlier attempt's word
    with breaks_recorded(job):
        of_messages = _write_messages(spark, job)
        applied = apply(spark, job, result.landed_as_of)
    _tell_looked(result, applied)
    for target in applied.retold:
        result.add_target(target)
    for cut in applied.steps:
        result.add_cut(cut)
    result.told_applied = True
    for name, table in sorted(result.tables.items()):
        if table.quarantined:
            result.warnings.append(
                f"{name}: {counted(table.quarantined, 'row')} came without values that the source no longer has, or fail an expectation with "
                f"gate: quarantine; the lake's table {BOOKKEEPING}/{IncompleteRow.table} has what the target lacks"
            )
        if table.verbatim and not job.pipeline.target.metadata_columns:
            result.warnings.append(
                f"{name}: {counted(table.verbatim, 'row has', 'rows have')} values that their types can't hold; metadata_columns is off, so these are null: "
                "name such columns under types.text"
            )
    result.warnings += [f"{name} {_LEFT}" for name in applied.removed if name not in applied.unpublished]
    result.unpublished = applied.unpublished
    if result.unpublished:
        result.warnings.append(not_published(result.unpublished))
    failures = applied.failures | recopy(spark, job, result, applied.published, applied.drifted)
    stopped = [state.table_name for state in synced_states(job)] if result.unreadable is not None else []
    result.not_applied = sorted({*failures, *result.not_applied, *stopped})
    changed = sum(table.changed for table in result.tables.values())
    stage.detail = f"{counted(len(applied.steps), 'step')}, {counted(changed, 'table')} changed"
    of_slot = {"the slot": SlotUnreadable(result.unreadable)} if result.unreadable is not None else {}
    if failures := failures | of_messages | of_slot:
        raise all_failures(failures)


def _tell_looked(result: RunResult, applied: Applied) -> None:
    result.warnings += [warning for warning in applied.warnings if warning not in result.warnings]
    result.foreign_commits = sorted({*applied.foreign, *result.foreign_commits})


def _write_messages(spark: SparkSession, job: Job) -> dict[str, WaldeltaError]:
    """Write logical messages, when asked for; an error, by what it concerns, is told once the tables have got their changes."""
    if not job.pipeline.source.options.messages:
        return {}
    from waldelta.stages.apply.logical_messages import write_messages

    try:
        write_messages(spark, job)
    except SlotGap:  # no table is brought past it either
        raise
    except WaldeltaError as err:
        log.error("logical messages not written: %s", err)
        return {_MESSAGES: err}
    except Exception as err:
        log.exception("logical messages not written")
        return {_MESSAGES: unexpected_error(_MESSAGES, err)}
    return {}


def check_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
    """Check the targets that the run changed; raises QualityFailed when a critical expectation failed.

    Where rows in quarantine were decided on, that alone may change what is found.
    """
    decided = result.verb == "quarantine"
    # Without a changed row, too, rows may have entered quarantine or left it: one that was deleted, or all of an earlier copy's.
    unchanged = {name: table for name, table in result.tables.items() if not (table.changed or decided)}
    quiet = [name for name, table in unchanged.items() if table.passed_by or result.verb != "consume"]
    if not job.pipeline.quality.enabled:  # no check tells it of the others
        quiet += result.tables.keys() - unchanged.keys()
    if quiet:
        tell_anew(job, quiet)
    _check(spark, job, result, stage, [name for name, table in result.tables.items() if table.changed or decided])


def _check(
    spark: SparkSession,
    job: Job,
    result: RunResult,
    stage: StageResult,
    tables: Sequence[str],
) -> None:
    from waldelta.stages.check.check import Left, check
    from waldelta.stages.check.quick_targets import quick_targets
    from waldelta.stages.check.suite.source_constraints import read_rules

    fault_point("check.begun")
    result.passed = []
    fine = set(result.tables) - set(result.not_applied)
    if result.verb != "validate" and not job.pipeline.quality.enabled:
        result.passed = sorted(fine)
        stage.detail = "switched off"
        return
    versions = {name: table.version for name, table in result.tables.items() if table.version is not None}
    quick = quick_targets(job, result, tables)
    # What was copied is all new: none of it is known from an earlier run.
    touched = () if result.verb == "sync" else quick
    rules = read_rules(job, result, tables, touched)
    left = Left(versions, frozenset(quick), rules, is_beside=result.verb == "quarantine")
    report = check(spark, job.pipeline, job.ledger, job.run_id, tables, left)
    result.add_check(report)
    result.passed = sorted(fine - set(report.failed_tables))
    stage.detail = report.summary
    fault_point("check.ended")
    report.raise_if_critical()


def report_stage(_: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
    """Say how far behind the lake is now, and print the summary."""
    with job.connect_slot("report") as connection:
        position = slot_position(connection, job)
        confirmed = confirmed_lsn(connection, job.pipeline.source.slot)
        slot = read_slot(connection, job.pipeline.source.slot)
        unreadable = read_unreadable(connection, job.pipeline.source)
    result.warnings += [text for text in unreadable if text not in result.warnings]
    # What was read and holds nothing for us is no lag, though a slot isn't moved for less than a WAL file.
    read = max(confirmed, Lsn.parse(result.end_lsn)) if result.end_lsn else confirmed
    result.lag_bytes = position.lag_of(read)
    result.slot_after = None if slot is None else reading(slot, result.lag_bytes, now())
    stage.detail = f"lag {result.lag_bytes:,} bytes"


Stage = Callable[["SparkSession", Job, RunResult, StageResult], None]
CONSUME: dict[str, Stage] = {
    "land": land_stage,
    "apply": apply_stage,
    "check": check_stage,
    "report": report_stage,
}
# What a stage builds on; without it the stage is left out. What apply did to the other tables is worth checking.
_BUILDS_ON = {"apply": {"land"}, "check": {"land"}}


def consume(spark: SparkSession, job: Job, only: Collection[str] | None = None) -> RunResult:
    """Run the stages of a CDC run, or some of them; a failed check doesn't keep the report from being made.

    A run's stages may be run by several processes one after the other: each continues the result in the ledger.
    """
    begun = job.ledger.begin_run(job.run_id, "consume")
    if is_replay(job, only):
        return replay(spark, job, only)
    result = continued(job, "consume", fresh=only is None or "land" in only, begun=begun)
    return run_stages(spark, job, result, CONSUME, only)


def replay(
    spark: SparkSession, job: Job, only: Collection[str] | None = None, tables: Collection[str] | None = None
) -> RunResult:
    """Run the stages of a replay, or some of them: of the job's interval, or of what its own run consumed.

    The stages are named as a CDC run's, whose tasks they are run by. Targets, or ``tables``, hold afterwards what the
    change log says of the keys changed in that range, as of each target's watermark. Raises RunFailed.
    """

    def plan_stage(_: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        span = read_span(job)
        result.start_lsn, result.end_lsn = str(span.start), str(span.end)
        stage.detail = f"{span}; a replay lands nothing and leaves the slot alone"

    def mend_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        from waldelta.stages.repair.replay.replay import replay as mend

        span = read_span(job)
        if span.is_empty:
            stage.detail = str(span)
            return
        done = mend(spark, job, span, tables)
        result.warnings += done.warnings
        result.add_cut(BatchCut(now(), job.run_id, span.upto, span.end.value, None, done.cuts))
        result.not_applied = sorted(done.failures)
        rows = sum(cut.inserted + cut.updated + cut.deleted for cut in done.cuts)
        stage.detail = (
            f"{span}: {counted(done.keys, 'key')} of {counted(len(done.cuts), 'table')}, {counted(rows, 'row')} mended"
        )
        if done.failures:
            raise all_failures(done.failures)

    result = continued(job, REPLAY, fresh=only is None or "land" in only)
    stages = {"land": plan_stage, "apply": mend_stage, "check": check_stage, "report": report_stage}
    if only is not None and "apply" in only and "land" not in result.stages:
        only = ["land", *only]  # cleared without it
    return run_stages(spark, job, result, stages, only)


def run_sync(
    spark: SparkSession,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    only: Collection[str] | None = None,
    *,
    only_due: bool = False,
) -> RunResult:
    """Copy tables that were never copied, or the given ones (``only_due``: as far as they wait for it), then check them."""
    from waldelta.stages.sync.sync import sync
    from waldelta.stages.sync.verbatim_count import count_verbatim

    def sync_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        copied, failed = _synced(lambda: sync(spark, job, tables, reason, only_due=only_due))
        for done in copied:
            name = str(done.table)
            verbatim = count_verbatim(spark, job, name, done.version) if done.verbatim is None else done.verbatim
            result.tables[name] = TableResult(rows=done.rows, version=done.version, verbatim=verbatim)
            result.source.add(done.bill)
            result.warnings += [f"{name} was {done.skipped}"] if done.skipped else []
        result.not_applied = sorted(failed.failures) if failed is not None else []
        stage.detail = f"{counted(len(copied), 'table')}, {counted(sum(done.rows for done in copied), 'row')}"
        if failed is not None:
            raise failed

    # A retry copies what the failed attempt left; what that one copied is checked and told as well.
    result = continued(job, "sync", fresh=False)
    stages: dict[str, Stage] = {"sync": sync_stage, "check": check_stage, "report": report_stage}
    return run_stages(spark, job, result, stages, only)


def run_resync(
    spark: SparkSession,
    job: Job,
    tables: Sequence[str] | None = None,
    reason: str | None = None,
    only: Collection[str] | None = None,
    *,
    accept_server: str | None = None,
) -> RunResult:
    """Give a pipeline whose slot is lost a new one and mend its targets by the rows that differ, then check them.

    Of all tables that the slot's present life has no copy of, or of these. With a slot that is fine, only the tables.
    A slot is fine when what waits in it could be read, and has landed.
    ``accept_server`` names a server that isn't the one of before, as ``renew_slot`` asks for it.
    """
    from waldelta.changes.decode.route import translate
    from waldelta.stages.land.land_until import land_backlog
    from waldelta.stages.setup.renew_slot import renew_slot
    from waldelta.stages.sync.sync import sync

    def resync_stage(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        gap = renew_slot(job, translate, accept_server=accept_server)
        if gap is None:
            try:  # nothing but reading it shows that the slot can be read
                land_backlog(spark, job)
            except SlotUnreadable as err:
                gap = renew_slot(job, translate, accept_server=accept_server, broken=err)
        if gap is not None:
            result.warnings.append(
                f"the slot was made anew, changes in {describe(gap)} were lost to it: {gap.cause}: {gap.detail}"
            )
        if gap is not None and accept_server is not None:
            result.warnings.append(
                f"slot {gap.slot!r} of the server of before (system {gap.system_identifier}, timeline {gap.timeline}) holds its "
                "WAL until somebody drops it there"
            )
        if gap is not None:
            with job.connect("resync") as primary, job.connect_slot("resync", primary) as connection:
                result.warnings += left_on_primary(primary, connection, gap.slot)
        done, failed = _synced(lambda: sync(spark, job, tables, reason or (gap.cause if gap else None), by_diff=True))
        for table in done:
            name = str(table.table)
            result.source.add(table.bill)
            result.add_copy(table)
            result.warnings += [f"{name} was copied as a whole: {table.whole}"] if table.whole else []
            result.warnings += [f"{name} was {table.skipped}"] if table.skipped else []
        result.not_applied = sorted(failed.failures) if failed is not None else []
        written = sum(table.rows if table.diff is None else table.diff.written for table in done)
        stage.detail = f"{counted(len(done), 'table')}, {counted(written, 'row')} written or removed; slot {'made anew' if gap else 'as it was'}"
        if failed is not None:
            raise failed
        with suppress(LockHeld):  # by a run, which reads it
            land_backlog(spark, job)

    result = continued(job, "resync", fresh=False)
    stages: dict[str, Stage] = {"resync": resync_stage, "check": check_stage, "report": report_stage}
    return run_stages(spark, job, result, stages, only)


def _synced(copy: Callable[[], list[SyncResult]]) -> tuple[list[SyncResult], SyncFailed | None]:
    """What was copied, and the error that names the rest."""
    try:
        return copy(), None
    except SyncFailed as err:
        return cast("list[SyncResult]", list(err.results)), err


def run_validate(spark: SparkSession, job: Job) -> RunResult:
    """Check every synced target's expectations, also where the checks after runs are switched off."""
    tables = [state.table_name for state in synced_states(job)]

    def check_all(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
        _check(spark, job, result, stage, tables)

    result = RunResult("validate", job.run_id, tables={name: TableResult() for name in tables})
    return run_stages(spark, job, result, {"check": check_all}, None)


@private_files()
def run_stages(
    spark: SparkSession, job: Job, result: RunResult, stages: Mapping[str, Stage], only: Collection[str] | None
) -> RunResult:
    """Run stages in order, or some of them, and record the result in the ledger; a failure raises RunFailed then.

    After a failure the stages that don't build on what failed still run: what the run did is checked and reported. A
    run stays failed whatever succeeds after a failed stage, also in another process.
    """
    if unknown := sorted(set(only or ()) - set(stages)):
        raise StateError(f"{result.verb} has no stage {unknown[0]!r}: its stages are {', '.join(stages)}")
    result.begun = result.begun or job.ledger.begin_run(result.run_id, result.verb)
    fault_point("run.begun")
    failures: dict[str, Exception] = {}
    chosen = [name for name in stages if only is None or name in only]
    for name in chosen:
        _forget_later(result, list(stages), name)
        if failures.keys() & _BUILDS_ON.get(name, set()):
            continue
        try:
            with result.stage(name) as progress:
                log.info("stage %s of %s", name, job.run_id)
                stages[name](spark, job, result, progress)
        except Exception as err:
            # The process ends by the first one's message; it isn't logged twice.
            log.error(
                "stage %s failed%s", name, ": {class}: {message}".format(**describe_error(err)) if failures else ""
            )
            failures[name] = err
    result.error = next((stage.error for stage in result.stages.values() if stage.status == "failed"), None)
    _report_unread(job, result)
    if chosen[-1:] != list(stages)[-1:]:
        result.status = "running"
    else:  # a stage that left no result was killed
        result.status = "succeeded" if stages.keys() <= result.stages.keys() else "failed"
    if result.error is not None:
        result.status = "failed"
    fault_point("run.ended")
    try:
        result.record(job)
    except WaldeltaError as err:
        if not failures:
            raise
        # What the run failed by comes first: likely the same.
        log.error("the run's result isn't in the ledger: %s", err)
    if failures:
        raise RunFailed(result) from next(iter(failures.values()))
    return result


def _report_unread(job: Job, result: RunResult) -> None:
    """Each run says which messages can't be read, and which were skipped, until what their tables lack is settled."""
    try:
        result.warnings += [notice for notice in notices(job) if notice not in result.warnings]
    except (WaldeltaError, OSError) as err:
        log.warning("messages that can't be read aren't known: %s", err)


def _forget_later(result: RunResult, stages: Sequence[str], name: str) -> None:
    """What later stages found is no longer so once this one is run again: its retry may have changed other tables."""
    for later in stages[stages.index(name) + 1 :]:
        result.stages.pop(later, None)


def continued(job: Job, verb: str, *, fresh: bool, begun: datetime | None = None) -> RunResult:
    """A run's result as its earlier stages recorded it, or a new one; the attempt begins now, unless it has ``begun``."""
    # First: what another attempt tells from here on is a later one's.
    begun = begun or job.ledger.begin_run(job.run_id, verb)
    run = None if fresh else job.ledger.run_result(job.run_id, verb)
    result = RunResult.from_json(run.result) if run is not None else RunResult(verb, job.run_id)
    result.begun = begun
    return result


def all_failures(failures: Mapping[str, WaldeltaError]) -> WaldeltaError:
    """One error for the failures of several tables, by name."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    error = ApplyError("several tables failed:\n" + "\n".join(f"  - {err}" for err in failures.values()))
    error.causes = tuple(failures.values())
    error.retryable = all(err.retryable for err in failures.values())
    return error
