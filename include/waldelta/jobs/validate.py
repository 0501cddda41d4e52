"""Job validate: checks every target's expectations now."""

from __future__ import annotations

from functools import partial

from waldelta.jobs._stages import check_tables, run_stages
from waldelta.pipeline import Job, RunResult, TableResult
from waldelta.pipeline.targets import synced_states
from waldelta.spark import Runner


def run_validate(runner: Runner, job: Job) -> RunResult:
    """Check every synced target's expectations, even if checks after runs are switched off."""
    tables = [state.table_name for state in synced_states(job)]

    result = RunResult("validate", job.run_id, tables={name: TableResult() for name in tables})
    return run_stages(runner, job, result, {"check": partial(check_tables, tables=tables)}, None)
