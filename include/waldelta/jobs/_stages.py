"""Runs the stages of a job in order and records what each did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial

from waldelta.errors import ApplyError, StateError, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.permissions import private_files
from waldelta.pipeline import Job, RunResult, StageResult, describe_error, waiting_for_locks
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets.unreadable_messages import notices
from waldelta.spark import Runner

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

    A failure raises RunFailed afterwards. After a failure, stages that don't depend on the failed
    one still run, so that the run's changes are checked and reported. A run stays failed whatever
    succeeds after a failed stage, also in another process.
    """
    if unknown := sorted(set(only or ()) - set(stages)):
        raise StateError(
            f"{result.verb} has no stage {unknown[0]!r}: its stages are {', '.join(stages)}"
        )
    result.attempt.begun = result.attempt.begun or job.ledger.begin_run(result.run_id, result.verb)
    fault_point("run.begun")
    chosen = [name for name in stages if only is None or name in only]
    with runner.prepared():
        failures = _run_each(runner, job, result, stages, chosen)
    result.error = next(
        (stage.error for stage in result.stages.values() if stage.status == "failed"), None
    )
    _report_unread(job, result)
    if chosen[-1:] != list(stages)[-1:]:
        result.status = "running"
    else:  # A stage that left no result was killed.
        result.status = "succeeded" if stages.keys() <= result.stages.keys() else "failed"
    if result.error is not None:
        result.status = "failed"
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


def _run_each(
    runner: Runner,
    job: Job,
    result: RunResult,
    stages: Mapping[str, Stage],
    chosen: Sequence[str],
) -> dict[str, Exception]:
    """Run these stages and return their errors; a stage that builds on a failed one is left out.

    A stage that another run's lock stops begins again for as long as the job may wait.
    """
    failures: dict[str, Exception] = {}
    for name in chosen:
        _forget_later(result, list(stages), name)
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
    before = runner.uses
    try:
        yield
    finally:
        is_here = before is not None and runner.uses == before
        stage.runner = THIS_PROCESS if is_here else f"{SPARK}: {runner.why}"


def _warn_of_wait(result: RunResult, stage: str, why: str) -> None:
    result.warn([f"stage {stage} waited for another run: {why}"])


def _reason(err: Exception, earlier: Mapping[str, Exception]) -> str:
    """Returns a stage's error for the log, unless another line has it.

    The process ends with the first error's message, and later stages often fail by the same error.
    """
    described = describe_error(err)
    same = next(
        (name for name, other in earlier.items() if describe_error(other) == described), None
    )
    if same is not None:
        return f" as {same} did"
    return ": {class}: {message}".format(**described) if earlier else ""


def _report_unread(job: Job, result: RunResult) -> None:
    """Add unreadable and skipped messages to each run's warnings until they are resolved."""
    try:
        result.warn(notices(job))
    except (WaldeltaError, OSError) as err:
        log.warning("unreadable messages can't be listed: %s", err)


def _forget_later(result: RunResult, stages: Sequence[str], name: str) -> None:
    """Remove the results of later stages, because running this one again may change other
    tables.
    """
    for later in stages[stages.index(name) + 1 :]:
        result.stages.pop(later, None)


def continued(job: Job, verb: str, *, fresh: bool, begun: datetime | None = None) -> RunResult:
    """Returns a run's result as its earlier stages recorded it, or a new one.

    The attempt begins now, unless ``begun`` is given.
    """
    # Recorded first: what another attempt records after this is newer.
    begun = begun or job.ledger.begin_run(job.run_id, verb)
    run = None if fresh else job.ledger.run_result(job.run_id, verb)
    result = RunResult.from_json(run.result) if run is not None else RunResult(verb, job.run_id)
    result.attempt.begun = begun
    return result


def all_failures(failures: Mapping[str, WaldeltaError]) -> WaldeltaError:
    """Returns one error for the failures of several tables, by name."""
    first = next(iter(failures.values()))
    if len({(type(err), str(err)) for err in failures.values()}) == 1:
        return first
    error = ApplyError(
        "several tables failed:\n" + "\n".join(f"  - {err}" for err in failures.values())
    )
    error.causes = tuple(failures.values())
    error.retryable = all(err.retryable for err in failures.values())
    return error
