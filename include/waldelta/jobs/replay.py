"""Job replay: brings the rows that a range of runs changed to the source's present state.

::

    land    the range of the runs that is replayed
    apply   keys changed in that range -> rows that differ are corrected   (stages.repair.replay)
    check, report: as job consume
"""

from __future__ import annotations

from collections.abc import Collection

from waldelta.jobs._stages import all_failures, check_stage, report_stage, resume_result, run_stages
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.repair.replay.interval import REPLAY, read_span


def replay(
    runner: Runner,
    job: Job,
    stages: Collection[str] | None = None,
    tables: Collection[str] | None = None,
) -> RunResult:
    """Run the stages of a replay, or some of them, for the job's interval or its own run's range.

    The stages have the names of a CDC run's, whose Airflow tasks run them. Afterwards targets, or
    ``tables``, agree with the source on the keys changed in that range, as of a snapshot. Raises
    RunFailed.
    """

    def plan_stage(_: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        span = read_span(job)
        result.landed.start_lsn, result.landed.end_lsn = str(span.start), str(span.end)
        stage.detail = str(span)

    def mend_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        from waldelta.stages.repair.replay_runs import replay as mend

        span = read_span(job)
        if span.is_empty:
            stage.detail = str(span)
            return
        outcome = mend(runner, job, result, span, tables)
        result.targets.leave_behind(outcome.failures)
        stage.detail = (
            f"{span}: {counted(outcome.keys, 'key')} of {counted(outcome.tables, 'table')},"
            f" {counted(outcome.rows, 'row')} corrected"
        )
        if outcome.failures:
            raise all_failures(outcome.failures)

    result = resume_result(job, REPLAY, fresh=stages is None or "land" in stages)
    job_stages = {
        "land": plan_stage,
        "apply": mend_stage,
        "check": check_stage,
        "report": report_stage,
    }
    if stages is not None and "apply" in stages and "land" not in result.stages:
        stages = ["land", *stages]  # The stage was cleared without land.
    return run_stages(runner, job, result, job_stages, stages)
