"""Quick targets: targets that are checked without Great Expectations, because the run changed them
little or synced too many of them.

They get a report page only when an expectation fails (``_quick_check``).
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
# A sync of more tables than this uses quick checks: Great Expectations takes a second per table.
_MOST_PAGES = 20


def quick_targets(job: Job, result: RunResult, tables: Sequence[str]) -> list[str]:
    """Returns the tables whose targets get a quick check, if it can evaluate them."""
    if result.verb == "sync":
        return list(tables) if len(tables) > _MOST_PAGES else []
    if result.verb not in ("consume", "quarantine"):
        return []
    did = {name: result.tables[name] for name in tables}
    return [
        name for name, of in did.items() if is_little(of.written, job.lake.target(name), of.version)
    ]


def is_little(changes: int, target: DeltaTarget, version: int | None) -> bool:
    """Returns whether this number of changes leaves a target's version mostly as it was."""
    if changes <= _FEW:
        return True
    try:
        rows = row_count(target.open(version).files)
    except READ_FAILURES as err:
        log.info("%s gets a full check, since its rows can't be counted: %s", target.uri, err)
        return False
    return rows is not None and changes <= rows * _SHARE
