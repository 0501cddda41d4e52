"""Cuts that can be read: which consistent cut of the targets is handed out, and at which of their
versions.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from waldelta.errors import LateWriter, StateError
from waldelta.lake import DeltaLog
from waldelta.lake.ledger import BatchCut, TargetCut
from waldelta.lake.ledger.records import now
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.external_commits import check_durably, expire_vacuumed
from waldelta.pipeline.targets.watermarks import last_cut, uri_of

log = logging.getLogger(__name__)

# An object store answers each in its own time.
_AT_ONCE = 16


@dataclass
class _Versions:
    """At which version each target of a cut can be read; asked once for several cuts."""

    job: Job
    known: dict[tuple[str, int], int | None] = field(default_factory=dict)

    def of(self, cut: BatchCut) -> BatchCut | None:
        """The cut at versions that can be read, of the same rows; None when one of its targets
        can't be read any more.
        """
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(cut.targets)))) as pool:
            versions = list(pool.map(self._readable, cut.targets))
        found = [
            replace(target, version=version)
            for target, version in zip(cut.targets, versions, strict=True)
            if version is not None
        ]
        return replace(cut, targets=found) if len(found) == len(cut.targets) else None

    def _readable(self, target: TargetCut) -> int | None:
        key = (target.table_name, target.version)
        if key not in self.known:
            self.known[key] = _readable_version(self.job, target)
        return self.known[key]


def readable_cut(job: Job) -> BatchCut | None:
    """The newest cut that can be read; None before the first. Raises StateError when there is none
    any more.

    A target that was compacted since, so that a VACUUM could delete what its version consisted of,
    is given by a later version of the same rows.
    """
    if (newest := last_cut(job)) is None:
        return None
    versions = _Versions(job)
    if (found := versions.of(newest)) is not None:
        return found
    for cut in reversed(job.ledger.batches()):
        if not cut.expired and (found := versions.of(cut)) is not None:
            return found
    raise StateError(
        f"no cut can be read any more: files or logs that the one of batch {newest.batch} needs"
        " were deleted from a target, and its rows have changed since; the next run that applies"
        " changes publishes another one"
    )


def renew_cut(job: Job) -> list[str]:
    """Publish the newest cut again, at its targets' present versions, as far as no commit since has
    changed any data.

    A source that nothing happens on brings no new cut, and the old one's files are vacuumed in
    time. Returns what is to be told of VACUUMs by others until then: a run looks from the newest
    cut on, and wouldn't see them any more.
    """
    if (cut := last_cut(job)) is None:
        return []
    targets = [TargetCut(t.table_name, t.generation, _current_version(job, t)) for t in cut.targets]
    if [target.version for target in targets] == [target.version for target in cut.targets]:
        return []
    told = []
    for then, present in zip(cut.targets, targets, strict=True):
        told += expire_vacuumed(
            job, then.table_name, check_durably(_log(job, then), then.version, present.version)
        )
    with suppress(LateWriter):  # a run has published another one
        job.ledger.append_cut(replace(cut, at=now(), run_id=job.run_id, targets=targets), cut)
    return told


def _current_version(job: Job, target: TargetCut) -> int:
    try:
        return _log(job, target).same_rows_as(target.version)
    # Damaged: the others have a newer version all the same.
    except (ValueError, OSError, StateError) as err:
        log.warning(
            "table=%s: its log can't be read behind version %d: %s",
            target.table_name,
            target.version,
            err,
        )
        return target.version


def _readable_version(job: Job, target: TargetCut) -> int | None:
    log = _log(job, target)
    if log.can_be_read_at(target.version):
        return target.version
    later = log.same_rows_as(target.version)
    return later if later > target.version and log.can_be_read_at(later) else None


def _log(job: Job, target: TargetCut) -> DeltaLog:
    return DeltaLog(uri_of(job, target.table_name), job.storage_options)
