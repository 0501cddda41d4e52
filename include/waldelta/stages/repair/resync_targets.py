"""Resync: copies tables again whose source changed in a way that the stream doesn't contain, or
leaves them to a sync.
"""

from __future__ import annotations

import logging

from waldelta.config import dag_id_of
from waldelta.errors import StateError, WaldeltaError
from waldelta.pipeline import Job, RunResult
from waldelta.pipeline.drift import Repair
from waldelta.pipeline.targets import (
    RequiredAction,
    TableLifecycle,
    read_lifecycles,
    requiring,
)
from waldelta.pipeline.targets.lifecycle import (
    copied_by_runs,
    never_copied,
    read_table_bytes,
    record_killed,
)
from waldelta.pipeline.targets.quarantined_rows import record_current
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.apply.outcome import Applied

log = logging.getLogger(__name__)


def resync_targets(runner: Runner, applied: Applied, result: RunResult) -> dict[str, WaldeltaError]:
    """Repair or copy every target that needs a new copy; returns the failures by table.

    Targets whose drift the apply found (``drifted``) are repaired, however large, if a repair is
    exact and cheaper. Where a sync follows, large tables are left to it and listed in
    ``needs_sync``. They are also a failure when their last copy failed, so that the run fails until
    one succeeds. Each run tries each copy once. A new table that the run copies by itself is left
    to that sync, whatever its size; other tables without a copy are listed in ``never_copied`` for
    the initial sync.
    """
    job, published = applied.job, applied.published
    all_lifecycles = read_lifecycles(job, published)
    if record_killed(job, all_lifecycles):
        all_lifecycles = read_lifecycles(job, published)
    adopted = copied_by_runs(job, published, all_lifecycles)
    pending = [*requiring(all_lifecycles, RequiredAction.COPY), *adopted]
    sizes, busy = read_table_bytes(job) if pending else ({}, {})
    targets = result.targets
    targets.needs_sync, targets.not_applied = [], []  # This may be the stage's second attempt.
    for name in (copy.table_name for copy in requiring(all_lifecycles, RequiredAction.WAIT)):
        result.warnings.append(f"{name} is being copied, and its changes wait until that is done")
        targets.not_applied.append(name)
    failures: dict[str, WaldeltaError] = {}
    largest = job.pipeline.target.copy_within_run_mb << 20
    for copy in pending:
        name = copy.table_name
        try:
            if name in busy:
                raise busy[name]
            is_large = sizes.get(name, 0) > largest or copy in adopted
            drift = applied.drifted.get(name)
            if drift is not None and _repair(runner, job, result, copy, drift):
                continue
            if job.hand_over and is_large:
                _hand_over(job, result, copy)
            else:
                _copy(runner, job, result, copy)
        except WaldeltaError as err:
            failures[name] = err
    tables = [table for table in all_lifecycles if table not in adopted]
    targets.never_copied = [table.table_name for table in requiring(tables, RequiredAction.FIRST)]
    if notice := never_copied(job, tables):
        result.warnings.append(notice)
    return failures


def _repair(
    runner: Runner, job: Job, result: RunResult, copy: TableLifecycle, drift: Repair
) -> bool:
    """Returns whether the drift was repaired; if not, a warning has the reason, and a copy
    follows.
    """
    from waldelta.stages.repair.repair import repair

    try:
        effect = repair(runner, job, drift)
    except WaldeltaError as err:
        log.warning("table=%s needs a whole copy: %s", copy.table_name, err)
        result.warnings.append(f"{copy.table_name} needs a whole copy: {err}")
        return False
    effect.add_to(result)
    result.landed.end_lsn = str(result.landed.read_upto(effect.drained.end))
    result.warnings.append(
        f"{_warning(copy)}: it was repaired as of {effect.lsn}: {counted(effect.entered, 'row')}"
        f" added, {effect.exited:,} removed, {effect.read_again:,} that changed during the repair"
        " were read again"
    )
    record_current(job, [copy.table_name])
    return True


def _hand_over(job: Job, result: RunResult, copy: TableLifecycle) -> None:
    dag, name = dag_id_of(job.pipeline.pipeline, "initial_sync"), copy.table_name
    result.targets.needs_sync.append(name)
    if copy.action == RequiredAction.FIRST:
        result.warnings.append(
            f"{_warning(copy)}: {dag} must copy it, and its changes wait until then"
        )
        return
    result.targets.not_applied.append(name)
    if copy.failed:
        raise StateError(
            f"{name} gets no changes because its last copy {copy.failed}: {dag} must copy it again"
        )
    result.warnings.append(
        f"{_warning(copy)}: {dag} must copy it again, and its changes wait until then"
    )


def _copy(runner: Runner, job: Job, result: RunResult, copy: TableLifecycle) -> None:
    from waldelta.stages.sync.sync import sync

    results = sync(runner, job, [copy.table_name], only_waiting=True)
    if not results:
        result.targets.not_applied.append(copy.table_name)
        result.warnings.append(
            f"{_warning(copy)}: another run has already copied it, and the next run applies the"
            " changes since then"
        )
        return
    (copied,) = results
    result.add_copy(copied)
    again = "" if copy.action == RequiredAction.FIRST else " again"
    how = f"copied{again}, {counted(copied.rows, 'row')}"
    if copied.skipped is not None:
        how = str(copied.skipped)
    if copied.copy.diff is not None:
        how = (
            f"compared with its source, {copied.written:,} of {counted(copied.rows, 'row')}"
            " differed"
        )
    result.warnings.append(f"{_warning(copy)}: it was {how}")
    record_current(job, [copy.table_name])


def _warning(copy: TableLifecycle) -> str:
    # Some reasons in the ledger begin with the table's name.
    return (
        copy.why if copy.why.startswith(f"{copy.table_name}") else f"{copy.table_name}: {copy.why}"
    )
