"""Runs the stages of a job in order and records what each did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial

from waldelta.errors import ApplyError, StateError, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import now
from waldelta.permissions import private_files
from waldelta.pipeline import Job, RunResult, StageResult, describe_error, waiting_for_locks
from waldelta.pipeline.run_result import ReportedLag, RunFailed
from waldelta.pipeline.targets import synced_states
from waldelta.pipeline.targets.corrected_expectations import find_corrected
from waldelta.pipeline.targets.quarantined_rows import record_current
from waldelta.pipeline.targets.unreadable_messages import notices
from waldelta.postgres.publication_checks import read_unreadable
from waldelta.quantities import size
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.slot.health import reading
from waldelta.slot.slot import read_slot
from waldelta.slot.standby import slot_position
from waldelta.spark import Runner
from waldelta.spark.settings import NEEDS_SPARK

Stage = Callable[["Runner", Job, RunResult, StageResult], None]
log = logging.getLogger(__name__)

SPARK, THIS_PROCESS = "Spark", "this process"

# The stages that a stage depends on; if one failed, it is skipped. After a failed apply, other
# tables are worth checking.
_BUILDS_ON = {"apply": {"land"}, "check": {"land"}}


@private_files()
def run_stages(
    runner: Runner,
    job: Job,
    result: RunResult,
    stages: Mapping[str, Stage],
    only: Collection[str] | None,
) -> RunResult:
    """Run stages in order, or some of them, and record the result in the ledger.

    Of a run that another process has left unfinished, all stages are those that haven't succeeded.
    A failure raises RunFailed after stages that don't depend on the failed one have run, to check
    and report the run's changes. A run stays failed whatever succeeds later in another process.
    """
    names = _names(result, stages, only)
    attempt = result.attempt
    attempt.started_at = attempt.started_at or job.ledger.begin_run(result.run_id, result.verb)
    fault_point("run.begun")
    result.status = "running"
    with runner.prepared(), _record_for_application(job, result):
        failures = _run_each(runner, job, result, stages, names)
    result.error = next(
        (stage.error for stage in result.stages.values() if stage.status == "failed"), None
    )
    _report_unread(job, result)
    # A stage that left no result was killed.
    is_complete = result.error is None and stages.keys() <= result.stages.keys()
    result.status = "succeeded" if is_complete else "failed"
    if result.error is None and names[-1:] != list(stages)[-1:]:
        result.status = "running"
    _follow_commits(job, result)
    result.store_requests += job.lake.cache.new_requests()
    fault_point("run.ended")
    try:
        result.record(job)
        job.lake.leave_known()
    except WaldeltaError as err:
        if not failures:
            raise
        # The run's own error comes first; it probably has the same cause.
        log.error("the run's result isn't in the ledger: %s", err)
    if failures:
        raise RunFailed(result) from next(iter(failures.values()))
    return result


def _names(
    result: RunResult, stages: Mapping[str, Stage], only: Collection[str] | None
) -> list[str]:
    """Returns the stages that run; without ``only`` those that an unfinished run hasn't ended."""
    if unknown := sorted(set(only or ()) - set(stages)):
        raise StateError(
            f"{result.verb} has no stage {unknown[0]!r}: its stages are {', '.join(stages)}"
        )
    if only is None and result.status == "running":
        ended = {name for name, stage in result.stages.items() if stage.status == "succeeded"}
        return [name for name in stages if name not in ended]
    return [name for name in stages if only is None or name in only]


def _follow_commits(job: Job, result: RunResult) -> None:
    """Register in a catalog what the run committed; asset events and lineage are Airflow's side."""
    if result.status != "running" and job.pipeline.target.catalog is not None:
        from waldelta.catalogs.register import register_targets

        register_targets(job, result)


@contextmanager
def _record_for_application(job: Job, result: RunResult) -> Iterator[None]:
    """Record the result so far where this process leaves the rest of the run to an application."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == NEEDS_SPARK:
            with suppress(WaldeltaError):  # The application meets the error again.
                result.record(job)
        raise


def _run_each(
    runner: Runner,
    job: Job,
    result: RunResult,
    stages: Mapping[str, Stage],
    names: Sequence[str],
) -> dict[str, Exception]:
    """Run these stages and return their errors; a stage that builds on a failed one is left out.

    A stage that another run's lock stops begins again for as long as the job may wait.
    """
    failures: dict[str, Exception] = {}
    for name in names:
        # Running this stage again may change other tables for the later ones.
        for later in list(stages)[list(stages).index(name) + 1 :]:
            result.stages.pop(later, None)
        if failures.keys() & _BUILDS_ON.get(name, set()):
            continue
        try:
            with result.stage(name) as progress:
                log.info("stage %s of %s", name, job.run_id)
                run = partial(stages[name], runner, job, result, progress)
                with _runner_recorded(runner, progress):
                    waiting_for_locks(job.lock_wait_s, run, partial(_warn_of_wait, result, name))
        except Exception as err:
            log.error("stage %s failed%s", name, _reason(err, failures))
            failures[name] = err
    return failures


@contextmanager
def _runner_recorded(runner: Runner, stage: StageResult) -> Iterator[None]:
    uses = runner.uses
    try:
        yield
    finally:
        is_here = uses is not None and runner.uses == uses
        stage.runner = THIS_PROCESS if is_here else f"{SPARK}: {runner.why}"


def _warn_of_wait(result: RunResult, stage: str, why: str) -> None:
    result.warn([f"stage {stage} waited for another run: {why}"])


def _reason(err: Exception, earlier: Mapping[str, Exception]) -> str:
    """Returns a stage's error for the log, unless another line has it.

    The process ends with the first error's message, and later stages often fail by the same error.
    """
    described = describe_error(err)
    stage = next(
        (name for name, error in earlier.items() if describe_error(error) == described), None
    )
    if stage is not None:
        return f" as {stage} did"
    return ": {class}: {message}".format(**described) if earlier else ""


def _report_unread(job: Job, result: RunResult) -> None:
    """Add unreadable and skipped messages to each run's warnings until they are resolved."""
    try:
        result.warn(notices(job))
    except (WaldeltaError, OSError) as err:
        log.warning("unreadable messages can't be listed: %s", err)


def resume_result(
    job: Job, verb: str, *, fresh: bool, started_at: datetime | None = None
) -> RunResult:
    """Returns a run's result as its earlier stages recorded it, or a new one if it is ``fresh``.

    A run that a process began and left to an application, or that was killed later, is never fresh.
    The attempt begins now, unless ``started_at`` is given.
    """
    # Recorded first: what another attempt records after this is newer.
    started_at = started_at or job.ledger.begin_run(job.run_id, verb)
    run = job.ledger.run_result(job.run_id, verb) if job.again or not fresh else None
    if run is not None and fresh and run.status != "running":
        run = None
    result = RunResult.from_json(run.result) if run is not None else RunResult(verb, job.run_id)
    result.attempt.started_at = started_at
    return result


def all_failures(failures: Mapping[str, WaldeltaError]) -> WaldeltaError:
    """Returns one error for the failures of several tables, by name."""
    by_name = [failures[name] for name in sorted(failures)]
    if len({(type(err), str(err)) for err in by_name}) == 1:
        return by_name[0]
    error = ApplyError("several tables failed:\n" + "\n".join(f"  - {err}" for err in by_name))
    error.causes = tuple(by_name)
    error.retryable = all(err.retryable for err in by_name)
    return error


def check_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Check the targets that the run changed, and those whose failed expectations were edited;
    raises QualityFailed when a critical expectation failed.

    After decisions on quarantined rows all their targets are checked, because a decision alone may
    change a result.
    """
    decided = result.verb == "decide"
    # Without a changed row, rows may still have entered or left quarantine: one that was deleted,
    # or all of an earlier copy's.
    unchanged = {
        name: table for name, table in result.tables.items() if not (table.changed or decided)
    }
    quiet = [
        name for name, table in unchanged.items() if table.passed_by or result.verb != "consume"
    ]
    # Without checks, nothing else records the other tables' results.
    if not job.pipeline.quality.enabled:
        quiet += result.tables.keys() - unchanged.keys()
    if quiet:
        record_current(job, quiet)
    changed = [name for name, table in result.tables.items() if table.changed or decided]
    edited = []
    if result.verb == "consume" and job.pipeline.quality.suites is not None:
        edited = find_corrected(
            job, {state.table_name for state in synced_states(job)} - {*changed}
        )
    check_tables(runner, job, result, stage, [*changed, *edited])


def check_tables(
    runner: Runner,
    job: Job,
    result: RunResult,
    stage: StageResult,
    tables: Sequence[str],
) -> None:
    """Check these targets and add the results; raises QualityFailed for failed critical
    expectations.
    """
    fault_point("check.begun")
    result.checked = replace(result.checked, passed=[], corrected=[])
    fine = {*result.tables, *tables} - set(result.targets.not_applied)
    if result.verb != "validate" and not job.pipeline.quality.enabled:
        result.checked = replace(result.checked, passed=sorted(fine))
        stage.detail = "switched off"
        return
    from waldelta.stages.check.check import check
    from waldelta.stages.check.check_run import MERGES, RunOutcome, paged_targets
    from waldelta.stages.check.suite.source_constraints import read_rules

    versions = {
        name: table.version for name, table in result.tables.items() if table.version is not None
    }
    wrote = [name for name in tables if name in result.tables and result.verb != "validate"]
    paged = paged_targets(job, result, wrote)
    # Only rows of new changes have a newer position than those that were judged before.
    outcome = RunOutcome(
        versions,
        frozenset(wrote),
        frozenset(paged),
        read_rules(job, result, tables, wrote if result.verb in MERGES else []),
        is_concurrent=result.verb == "decide",
    )
    report = check(runner, job.pipeline, job.ledger, job.run_id, tables, outcome)
    passed = sorted(fine - set(report.failed_tables))
    result.add_check(report, passed, [name for name in passed if name not in result.tables])
    stage.detail = report.summary
    fault_point("check.ended")
    report.raise_if_critical()


def report_stage(_: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Record how far the lake lags behind now, and print the summary.

    Raises SlotMissing as the other stages do, for a pipeline that was torn down too.
    """
    job.read_identity()
    with job.source.connect_slot("report") as connection:
        position = slot_position(connection, job)
        confirmed = confirmed_lsn(connection, job.pipeline.source.slot)
        slot = read_slot(connection, job.pipeline.source.slot)
        unreadable = read_unreadable(connection, job.pipeline.source)
    result.warn(unreadable)
    # WAL that was read and has nothing to land is no lag, although a slot isn't moved for less than
    # a WAL file.
    lag_bytes = position.lag_of(result.landed.read_upto(confirmed))
    result.reported = ReportedLag(
        lag_bytes, None if slot is None else reading(slot, lag_bytes, now())
    )
    stage.detail = f"lag {size(lag_bytes)}"
