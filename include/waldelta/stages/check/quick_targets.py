"""Quick targets: targets that are checked without Great Expectations, because they are small, the
run changed them little, or it synced too many of them.

They get a report page only when an expectation fails (``_quick_check``), or by maintenance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from waldelta.lake import READ_FAILURES, DeltaTarget
from waldelta.lake.storage import row_count
from waldelta.pipeline import Job, RunResult

log = logging.getLogger(__name__)

# Up to this many changes, or this share of the target's rows, count as few.
_FEW, _SHARE = 10_000, 0.1
# The verbs whose results say how many rows changed.
_MERGES = ("consume", "quarantine")
# A sync of more tables than this uses quick checks: Great Expectations takes a second per table.
_MOST_PAGES = 20


def quick_targets(job: Job, result: RunResult, tables: Sequence[str]) -> list[str]:
    """Returns the tables whose targets get a quick check, if it can evaluate them."""
    if result.verb == "validate":
        return []
    if result.verb == "sync" and len(tables) > _MOST_PAGES:
        return list(tables)
    changes = {
        name: result.tables[name].written if result.verb in _MERGES else None for name in tables
    }
    return [
        name
        for name, written in changes.items()
        if is_quick(written, job.lake.target(name), result.tables[name].version)
    ]


def is_quick(changes: int | None, target: DeltaTarget, version: int | None) -> bool:
    """Returns whether a target's version is small, or mostly as it was before these changes.

    ``changes`` is None where all rows may have changed.
    """
    if changes is not None and changes <= _FEW:
        return True
    try:
        table = target.open(version)
    except READ_FAILURES as err:
        log.info("%s gets a full check, since its rows can't be counted: %s", target.uri, err)
        return False
    rows = row_count(table.files)
    return table.is_small or (
        None not in (changes, rows) and changes <= rows * _SHARE  # type: ignore[operator]
    )
