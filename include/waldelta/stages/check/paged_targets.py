"""Paged targets: targets whose check gets a report page although they meet all expectations.

A page costs seconds, because Great Expectations describes the results. So a small target, or one
that a run changed little, gets its page from maintenance, or when it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from waldelta.lake import READ_FAILURES, DeltaTarget, row_count
from waldelta.pipeline import Job, RunResult

log = logging.getLogger(__name__)

# Up to this many changes, or this share of the target's rows, count as few.
_FEW, _SHARE = 10_000, 0.1
# The verbs whose results say how many rows changed.
MERGES = ("consume", "quarantine")
# A sync of more tables than this writes no pages.
_MOST_PAGES = 20


def paged_targets(job: Job, result: RunResult, tables: Sequence[str]) -> list[str]:
    """Returns the tables whose targets get a page, of those that the run wrote."""
    if result.verb == "sync" and len(tables) > _MOST_PAGES:
        return []
    changes = {
        name: result.tables[name].written if result.verb in MERGES else None for name in tables
    }
    return [
        name
        for name, written in changes.items()
        if has_page(written, job.lake.target(name), result.tables[name].version)
    ]


def has_page(changes: int | None, target: DeltaTarget, version: int | None) -> bool:
    """Returns whether a target's version is large, and mostly other than before these changes.

    ``changes`` is None where all rows may have changed.
    """
    if changes is not None and changes <= _FEW:
        return False
    try:
        table = target.open(version)
    except READ_FAILURES as err:
        log.info("%s gets a page, since its rows can't be counted: %s", target.uri, err)
        return True
    if table.is_small:
        return False
    rows = row_count(table.files)
    return changes is None or rows is None or changes > rows * _SHARE
