"""Job reconcile: compares targets with their source, and corrects the rows that differ if
requested.

::

    reconcile  what the snapshot sees -> change log                    (stages.land)
               checksums of both sides -> rows that differ             (stages.repair.reconcile)
               rows that differ -> read again from the source          (stages.repair)
    report     what was found -> ledger, reports, summary

Nothing is written on the source. What its snapshot sees is landed first, as in any run; writers
continue.
"""

from __future__ import annotations

from collections.abc import Collection

from waldelta.errors import TargetDiffers
from waldelta.jobs._shared_stages import report_stage
from waldelta.jobs._stages import Stage, all_failures, continued, run_stages
from waldelta.lake.ledger import DIFFERENT, EQUAL, REPAIRED, now
from waldelta.lake.ledger.reconciliations import Reconciliations
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.pipeline.run_result import CheckFindings
from waldelta.pipeline.targets.unreadable_messages import close_compared
from waldelta.spark import Runner
from waldelta.stages.repair import ReconcileRequest, compare_all
from waldelta.stages.repair.reconcile_targets import (
    Reconciling,
    add_to_result,
    describe_different,
    write_report,
)


def run_reconcile(
    runner: Runner, job: Job, order: ReconcileRequest, only: Collection[str] | None = None
) -> RunResult:
    """Compare targets with the source; with ``repair`` rows that differ are read again and
    corrected.

    The results are in ``_waldelta/reconciliations``. Raises RunFailed when a target differs and
    isn't repaired.
    """

    def reconcile_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        began, work = now(), Reconciling(runner, job, order, result)
        try:
            compare_all(work)
        finally:
            found = [work.found[name] for name in sorted(work.found)]
            # Other runs may have compared or repaired some of many tables since this one began.
            Reconciliations(job.lake).add(found, began)
            are_equal = [
                row.table_name
                for row in found
                if row.status in (EQUAL, REPAIRED) and not row.left_out
            ]
            close_compared(job, are_equal, began)
            add_to_result(result, stage, found)
            repaired = sorted(row.table_name for row in found if row.status == REPAIRED)
            result.checked = CheckFindings(write_report(job, found), passed=repaired)
        if work.failures:
            raise all_failures(work.failures)
        if different := [row for row in found if row.status == DIFFERENT]:
            raise TargetDiffers(describe_different(different, repair=order.repair))

    stages: dict[str, Stage] = {"reconcile": reconcile_stage, "report": report_stage}
    result = continued(job, "reconcile", fresh=only is None or "reconcile" in only)
    return run_stages(runner, job, result, stages, only)
