"""Quick targets: those that a run left mostly as they were, or that are too many, so that they are
checked without Great Expectations.

They get a page only when an expectation isn't met (``quick_check``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa
from deltalake.exceptions import DeltaError

from waldelta.lake import files_of
from waldelta.lake.storage import open_version, row_count
from waldelta.pipeline import Job, RunResult
from waldelta.pipeline.targets.watermarks import uri_of

log = logging.getLogger(__name__)

# So many changes are few, or as many as this share of the target's rows.
_FEW, _SHARE = 10_000, 0.1
# Of more tables copied at once: Great Expectations takes a second for each.
_MOST_PAGES = 20


def quick_targets(job: Job, result: RunResult, tables: Sequence[str]) -> list[str]:
    """Which of these tables' targets are checked quickly, where what they hold allows it."""
    if result.verb == "sync":
        return list(tables) if len(tables) > _MOST_PAGES else []
    if result.verb not in ("consume", "quarantine"):
        return []
    did = {name: result.tables[name] for name in tables}
    return [
        name
        for name, of in did.items()
        if is_little(
            of.inserted + of.updated + of.deleted,
            uri_of(job, name),
            of.version,
            job.storage_options,
        )
    ]


def is_little(
    changes: int, uri: str, version: int | None, storage_options: Mapping[str, str] | None = None
) -> bool:
    """Whether so many changes have left a target's version mostly as it was."""
    if changes <= _FEW:
        return True
    try:
        rows = row_count(files_of(open_version(uri, version, storage_options)))
    except (DeltaError, OSError, pa.ArrowException) as err:
        log.info("%s is checked as a whole, since its rows can't be counted: %s", uri, err)
        return False
    return rows is not None and changes <= rows * _SHARE
