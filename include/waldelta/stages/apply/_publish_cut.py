"""Publishes what an apply batch did to all targets, if that is a new consistent cut."""

from __future__ import annotations

import logging

from waldelta.errors import LateWriter
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import BatchCut, TargetCut
from waldelta.lake.ledger.records import now
from waldelta.pgoutput.commit_time import shown_at
from waldelta.pipeline import Job

log = logging.getLogger(__name__)


def finish_step(
    job: Job, change_log: ChangeLog, batch: int, cuts: list[TargetCut], *, complete: bool
) -> BatchCut:
    """Returns the cut of an apply batch, and publishes it when it is ``complete`` and has news."""
    landed = change_log.landed(batch)
    committed = shown_at(landed.commit_us) if landed.commit_us is not None else None
    cut = BatchCut(now(), job.run_id, batch, landed.end_lsn, committed, cuts)
    newest = job.ledger.last_cut()
    if complete and cuts and (newest is None or not is_published(cut, newest)):
        fault_point("apply.cutting")
        try:
            job.ledger.append_cut(cut, newest)
        except LateWriter as err:
            # Readers use the newest row, which must never be of an older batch.
            log.warning("no consistent cut recorded for batch %d: %s", batch, err)
        fault_point("apply.cut")
    return cut


def is_published(cut: BatchCut, newest: BatchCut) -> bool:
    """Returns whether the newest cut is this one, or of a later batch of the same copies.

    In another slot incarnation, whose copies have later generations, batch numbers may start again.
    """
    if newest.batch <= cut.batch:
        return (newest.batch, _members(newest)) == (cut.batch, _members(cut))
    generations = dict(_members(newest))
    return any(generations.get(name, 0) >= generation for name, generation in _members(cut))


def _members(cut: BatchCut) -> set[tuple[str, int]]:
    return {(target.table_name, target.generation) for target in cut.targets}
