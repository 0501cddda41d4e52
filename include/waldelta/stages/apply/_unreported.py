"""Commits that no run result contains yet, because their run crashed or is still landing. The run
that finds them reports them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from waldelta.changes.merge.commits import read_unreported
from waldelta.lake.ledger import SYNCED, TableState, TargetCut, now
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.reported_commits import ReportedCommits
from waldelta.pipeline.targets import TableLifecycle, Watermarks
from waldelta.stages.apply.outcome import Applied, isolated

log = logging.getLogger(__name__)


def unreported(
    job: Job, held: Watermarks, states: Sequence[TableState], applied: Applied
) -> dict[str, TargetCut]:
    """Returns the commits that were never reported: this run reports, checks and announces them.

    The part that the newest cut already contains goes into ``applied``; the rest is returned,
    for the next cut.
    """
    unreported_cuts, told = {}, _as_reported(job)
    for state in states:
        with isolated(job, state, applied):
            in_cut = held.cut.of(state) if held.cut is not None else None
            version = in_cut.version if in_cut is not None else None
            reported_late, beyond = read_unreported(job, held.identity, state, told, version)
            applied.reported_late += [reported_late] if reported_late is not None else []
            if beyond is not None:
                unreported_cuts[state.table_name] = beyond
    return unreported_cuts


def unreported_commits(
    job: Job, identity: SlotIdentity, unpublished: Sequence[TableLifecycle]
) -> list[TargetCut]:
    """Returns the unreported commits of targets that aren't published any more.

    Such a target gets no changes any more, so an error of one doesn't fail the run.
    """
    found, told = [], _as_reported(job)
    for state in (standing.state for standing in unpublished):
        if state is None or state.status != SYNCED:
            continue
        try:
            _, untold = read_unreported(job, identity, state, told)
        except Exception as err:
            log.warning(
                "table=%s what was applied to it before it left its publications can't be"
                " reported: %s",
                state.table_name,
                err,
            )
        else:
            found += [untold] if untold is not None else []
    return found


def _as_reported(job: Job) -> ReportedCommits:
    return ReportedCommits(job.ledger, now() - job.pipeline.maintenance.ledger_retention)
