"""Finds consistent cuts that can be read, and the versions of the targets at which to read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from waldelta.errors import LateWriter, StateError
from waldelta.lake.ledger import BatchCut, TargetCut, now
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.external_commits import check_durably, expire_vacuumed

log = logging.getLogger(__name__)

# An object store takes its own time for each answer, so several targets are queried at once.
_AT_ONCE = 16


def _at_versions(cut: BatchCut, readable: Callable[[str, int], int | None]) -> BatchCut | None:
    """Returns the cut at readable versions with the same rows; None when a target has none any
    more.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(cut.targets)))) as pool:
        versions = list(pool.map(lambda of: readable(of.table_name, of.version), cut.targets))
    targets = [
        replace(target, version=version)
        for target, version in zip(cut.targets, versions, strict=True)
        if version is not None
    ]
    return replace(cut, targets=targets) if len(targets) == len(cut.targets) else None


def readable_cut(job: Job) -> BatchCut | None:
    """Returns the newest cut that can be read; None before the first cut.

    A target may have been compacted since, so that a VACUUM could delete the files of its version.
    Such a target is returned at a later version with the same rows. Raises StateError when no cut
    can be read any more.
    """
    if (newest := job.ledger.last_cut()) is None:
        return None
    readable = cache(partial(_readable_version, job))  # Several cuts share the answers.
    if (candidate := _at_versions(newest, readable)) is not None:
        return candidate
    for cut in reversed(job.ledger.batches()):
        if not cut.expired and (candidate := _at_versions(cut, readable)) is not None:
            return candidate
    raise StateError(
        "no consistent cut can be read any more: files or log entries that the cut of batch"
        f" {newest.batch} needs were deleted from a target, and its rows have changed since; the"
        " next run that applies changes publishes a new cut"
    )


def renew_cut(job: Job) -> list[str]:
    """Publish the newest cut again at its targets' current versions, if no commit since changed
    data.

    A source without changes brings no new cut, and VACUUM deletes the old one's files in time.
    Returns warnings about VACUUMs by external writers up to then: runs search from the newest cut
    on, and wouldn't find them any more.
    """
    if (cut := job.ledger.last_cut()) is None:
        return []
    targets = [TargetCut(t.table_name, t.generation, _current_version(job, t)) for t in cut.targets]
    if [target.version for target in targets] == [target.version for target in cut.targets]:
        return []
    warnings = []
    for then, present in zip(cut.targets, targets, strict=True):
        warnings += expire_vacuumed(
            job,
            then.table_name,
            check_durably(job.lake.target(then.table_name), then.version, present.version),
        )
    with suppress(LateWriter):  # Another run has published a newer cut.
        job.ledger.append_cut(replace(cut, at=now(), run_id=job.run_id, targets=targets), cut)
    return warnings


def _current_version(job: Job, target: TargetCut) -> int:
    try:
        return job.lake.target(target.table_name).log.newest_with_rows_of(target.version)
    # The log is damaged; the cut is renewed with the other targets' newer versions.
    except (ValueError, OSError, StateError) as err:
        log.warning(
            "table=%s: the consistent cut keeps version %d, because later commits in the target's"
            " Delta log can't be read: %s",
            target.table_name,
            target.version,
            err,
        )
        return target.version


def _readable_version(job: Job, table_name: str, version: int) -> int | None:
    log = job.lake.target(table_name).log
    if log.can_be_read_at(version):
        return version
    later = log.newest_with_rows_of(version)
    return later if later > version and log.can_be_read_at(later) else None
