"""Job maintain: keeps targets, change log, ledger and reports small.

::

    maintain  compacts and vacuums targets, under the lock of each        (stages.maintain)
              forgets batches, ledger rows and reports past their retention
    check     targets -> all expectations -> Data Docs                    (stages.check)
    report    what the run did -> ledger, summary
"""

from __future__ import annotations

import logging
from itertools import chain

from waldelta.errors import LockHeld, WaldeltaError
from waldelta.failpoints import fault_point
from waldelta.jobs._stages import Stage, all_failures, resume_result, run_stages
from waldelta.pipeline import Job, RunResult, StageResult, TableResult, of_table, unexpected_error
from waldelta.pipeline.targets import synced_states
from waldelta.pipeline.targets.consistent_cuts import renew_cut
from waldelta.quantities import counted
from waldelta.spark import Runner, RunnerPool
from waldelta.stages.maintain.maintain import (
    maintain_target,
    prune_change_log,
    prune_ledger_rows,
    prune_reports,
    remove_leftovers,
)

log = logging.getLogger(__name__)


def run_maintain(runner: Runner, job: Job) -> RunResult:
    """Compact and clean every target, the change log, the ledger and the reports.

    A target locked by another run is left for the next time. If all of them are locked, the run
    fails with LockHeld. A target that can't be maintained fails the run after all others are done.
    The targets are checked, in full as ``quality.full_check`` says; a failed critical expectation
    fails the run at the end.
    """
    stages: dict[str, Stage] = {
        "targets": _targets,
        "leftovers": remove_leftovers,
        "change_log": prune_change_log,
        "ledger": prune_ledger_rows,
        "check": _check,
        "reports": prune_reports,
    }
    return run_stages(runner, job, resume_result(job, "maintain", fresh=True), stages, None)


def _targets(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    hours = job.pipeline.maintenance.keep_versions_hours
    names = [state.table_name for state in synced_states(job)]
    warnings: dict[str, list[str]] = {}

    def one(session: Runner, name: str) -> WaldeltaError | None:
        try:
            warnings[name] = maintain_target(session, job, name)
        except LockHeld as err:
            log.warning("table=%s left for the next maintenance: %s", name, err)
            return err
        except Exception as err:
            # A target that was removed or damaged must not stop the others.
            log.exception("table=%s not maintained", name)
            return of_table(unexpected_error(name, err), name)
        return None

    # Compacting needs the session's settings for itself.
    with RunnerPool.open(runner, len(names)) as pool:
        ended = dict(zip(names, pool.map(one, names), strict=True))
    busy = {name: err for name, err in ended.items() if isinstance(err, LockHeld)}
    failures = {name: err for name, err in ended.items() if err is not None and name not in busy}
    result.tables |= {name: TableResult() for name, err in ended.items() if err is None}
    result.targets.keep_errors({name: err for name, err in ended.items() if err is not None})
    fault_point("maintain.cleaned")
    result.warnings += [*chain.from_iterable(warnings.get(name, []) for name in names)]
    result.warnings += renew_cut(job)
    stage.detail = (
        f"{counted(len(result.tables), 'target')} compacted, versions older than {hours} h vacuumed"
    )
    if busy:
        stage.detail += f"; in use by other runs and left: {', '.join(busy)}"
        result.warnings.append(f"maintenance left out {', '.join(busy)}: in use by another run")
    if failures:
        raise all_failures(failures)
    if busy and not result.tables:
        raise next(iter(busy.values()))


def _check(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
    """Check all rows of targets that changed since their last full check, if ``quality.full_check``
    had a time since; otherwise only rows that no check has read.

    Targets that are unchanged since get only the expectations that depend on other data. Raises
    QualityFailed when a critical expectation failed.
    """
    if not job.pipeline.quality.enabled:
        stage.detail = "switched off"
        return
    from waldelta.stages.check.check import check
    from waldelta.stages.check.check_run import RunOutcome
    from waldelta.stages.check.suite.source_constraints import read_rules

    tables = [state.table_name for state in synced_states(job)]
    outcome = RunOutcome(rules=read_rules(job, result, tables), is_upkeep=True)
    report = check(runner, job.pipeline, job.ledger, job.run_id, tables, outcome)
    result.add_check(report)
    result.warnings += report.warnings
    full = sum(verdict.whole for verdict in report.tables)
    stage.detail = f"{report.summary}, {full} of them in full"
    report.raise_if_critical()
