"""Job consume: lands the slot's changes, applies them to the targets, checks them and reports.

::

    land    slot -> change log, then the slot moves over what has landed   (stages.land)
            a large backlog is applied while more of it lands              (stages.apply.concurrent)
    apply   change log -> targets, one commit each                         (stages.apply)
            logical messages -> a table of their own, if configured
    check   targets -> expectations -> Data Docs                           (stages.check)
    report  replication lag and what the run did -> ledger, summary

A backfill, or a run that is cleared after it succeeded, is a replay instead (waldelta.jobs.replay).

Each stage imports its own modules: in Airflow each stage is a process, and loads only what it
needs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from waldelta.errors import SlotGap, SlotUnreadable, WaldeltaError
from waldelta.jobs._stages import (
    Stage,
    all_failures,
    check_stage,
    report_stage,
    resume_result,
    run_stages,
)
from waldelta.jobs.replay import replay
from waldelta.pipeline import Job, RunResult, StageResult, unexpected_error
from waldelta.pipeline.targets import synced_states
from waldelta.quantities import counted
from waldelta.slot.gaps import breaks_recorded
from waldelta.spark import Runner
from waldelta.stages.land.land_stage import land_to_now
from waldelta.stages.repair.replay.interval import is_replay

log = logging.getLogger(__name__)

_MESSAGES = "the table of logical messages"


def land_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Land and consume up to the server's current position; apply batches of a backlog
    concurrently.
    """
    from waldelta.stages.apply.concurrent import applying
    from waldelta.stages.apply.outcome import Applied

    meanwhile = Applied(job)
    with applying(runner, meanwhile, partial(meanwhile.add_external_commits, result)) as overlap:
        land_to_now(runner, job, result, stage, overlap.add)
    if result.landed.unreadable is not None:
        stage.detail += (
            "; PostgreSQL can't decode what comes next: the run fails once all before it is applied"
        )
    if steps := sum(any(one.changed for one in cut.targets) for cut in meanwhile.steps):
        stage.detail += f"; {counted(steps, 'apply batch', 'apply batches')} applied during landing"


def apply_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Apply what has landed; raises ApplyError with the tables that failed after all others are
    done.

    It also raises SlotUnreadable if landing met one: no table gets what was committed after it.
    """
    from waldelta.stages.apply.apply import apply
    from waldelta.stages.apply.outcome import Applied
    from waldelta.stages.repair.resync_targets import resync_targets

    result.targets.is_apply_reported = False  # This resets the result of an earlier attempt.
    with breaks_recorded(job):
        of_messages, applied = _write_messages(runner, job), Applied(job)
        try:
            apply(runner, job, result.landed.landed_as_of, applied)
        except SystemExit:
            # What was committed is found by the process that continues, but it isn't warned again.
            applied.add_external_commits(result)
            raise
    applied.add_to(result)
    failures = applied.failures | resync_targets(runner, applied, result)
    unreadable = result.landed.unreadable
    stopped = [state.table_name for state in synced_states(job)] if unreadable is not None else []
    result.targets.leave_behind(failures, [*result.targets.not_applied, *stopped])
    changed = sum(table.changed for table in result.tables.values())
    stage.detail = (
        f"{counted(len(applied.steps), 'apply batch', 'apply batches')},"
        f" {counted(changed, 'table')} changed"
    )
    of_slot = {"the slot": SlotUnreadable(unreadable)} if unreadable is not None else {}
    if failures := failures | of_messages | of_slot:
        raise all_failures(failures)


def _write_messages(runner: Runner, job: Job) -> dict[str, WaldeltaError]:
    """Write logical messages, if configured; returns errors, which are raised after the tables'
    apply.
    """
    if not job.pipeline.source.options.messages:
        return {}
    from waldelta.stages.apply.logical_messages import write_messages

    try:
        write_messages(runner, job)
    except SlotGap:  # No table can be brought past the gap either.
        raise
    except Exception as err:
        error = unexpected_error(_MESSAGES, err)
        log.error("logical messages not written: %s", error, exc_info=error is not err)
        return {_MESSAGES: error}
    return {}


CONSUME_STAGES: dict[str, Stage] = {
    "land": land_stage,
    "apply": apply_stage,
    "check": check_stage,
    "report": report_stage,
}


def consume(runner: Runner, job: Job, stages: Collection[str] | None = None) -> RunResult:
    """Run the stages of a CDC run, or some of them; a failed check doesn't prevent the report.

    A run's stages may run in several processes one after another: each continues the result in the
    ledger. So does a process that runs what another one, or a killed attempt, has left of a run.
    """
    started_at = job.ledger.begin_run(job.run_id, "consume")
    if is_replay(job, stages):
        return replay(runner, job, stages)
    begins = stages is None or "land" in stages
    result = resume_result(job, "consume", fresh=begins, started_at=started_at)
    return run_stages(runner, job, result, CONSUME_STAGES, stages)
