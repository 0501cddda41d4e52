"""Apply: brings the targets up to the last landed batch."""

from __future__ import annotations

import logging

from waldelta.errors import WaldeltaError
from waldelta.lake import UNFENCED, Fence
from waldelta.pipeline import Job
from waldelta.pipeline.targets import record_removed
from waldelta.spark import Runner
from waldelta.stages.apply.inspect import Inspection, inspect, inspect_unchanged
from waldelta.stages.apply.outcome import Applied

log = logging.getLogger(__name__)


def apply(
    runner: Runner, job: Job, landed_as_of: int | None = None, applied: Applied | None = None
) -> Applied:
    """Bring every synced target up to the last landed batch, and publish a cut whenever all are
    there.

    Small batches are applied together, up to twice batch.max_changes and twice batch.wal_window_mb.
    A failing table doesn't stop the others; it is in ``failures`` and resumes from its own
    watermark. A table whose source changed so that only a new copy is exact is in ``outdated`` and
    marked in the ledger; it gets no changes until it is copied. ``landed_as_of``: all transactions
    below this xid8 have landed. A table with a row filter fails as TableBusy while it is locked
    against readers, because its catalogs can't be read without that lock. ``applied`` gets the
    results.
    """
    applied = Applied(job) if applied is None else applied
    inspection = inspect(runner, applied, landed_as_of)
    _apply_inspected(runner, applied, inspection)
    try:
        applied.removed = record_removed(job, inspection.unpublished)
    except WaldeltaError as err:
        # What was applied is reported anyway, and the next run records the removal.
        log.warning(
            "the ledger doesn't record which tables left their publications, the next run records"
            " it: %s",
            err,
        )
    return applied


def apply_concurrently(
    runner: Runner, applied: Applied, upto: int, caller: Fence = UNFENCED
) -> int:
    """Apply one batch range of a backlog while more is landing, to targets with nothing to report
    first.

    Returns the batch the targets have reached, which is before ``upto`` where some lag farther
    behind. The apply after landing reports what this commits, like commits of a killed run; without
    one, the next run reports it. ``applied`` has the failures of earlier apply batches, and gets
    this one's results; ``caller`` raises when the caller no longer waits.
    """
    caller.verify()
    inspection = inspect_unchanged(applied, upto)
    _apply_inspected(runner, applied, inspection, caller)
    return (inspection.ends or [upto])[-1]


def _apply_inspected(
    runner: Runner, applied: Applied, inspection: Inspection, caller: Fence = UNFENCED
) -> None:
    try:
        if inspection.ends:
            # What decodes and merges is half of this stage's import.
            from waldelta.stages.apply.apply_targets import apply_to_targets

            apply_to_targets(runner, applied, inspection, caller)
    finally:
        applied.foreign = sorted({*applied.foreign, *inspection.watch.reported})
    # Commits of targets that failed are reported too.
    applied.reported_late += inspection.unreported.values()
