"""Finds external commits: what other writers did to a target, reported by the next run from the
Delta log.

A target mirrors its source as long as only the pipeline changes its rows. An external write (an
append, UPDATE, DELETE, overwrite, RESTORE, CREATE OR REPLACE) isn't undone, and changes are still
applied: a PostgreSQL subscriber treats a table with local writes the same way. But the run reports
it. The commit stays on record until the target is a mirror again: after a copy, a resync, or a
repair that follows a comparison of all rows. OPTIMIZE and VACUUM change no row and aren't reported,
except a VACUUM that keeps less than the cuts need.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from waldelta.config import dag_id_of
from waldelta.errors import StateError
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaLog, DeltaTarget, local_path
from waldelta.lake.delta_log import Commit
from waldelta.lake.ledger import BatchCut, ExternalCommit, TableState, now
from waldelta.lake.storage import is_within
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.target_definition import (
    describe,
    describe_commit,
    external_commit,
)
from waldelta.pipeline.targets.watermarks import record_state
from waldelta.quantities import first_of

log = logging.getLogger(__name__)

# The ledger keeps the first external commit, before which the target was a mirror, and the latest
# ones.
MOST_RECORDED = 10
_MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """What a range of a target's log shows: external commits, and how far a VACUUM deleted old
    files.

    ``vacuumed``: files unused at this moment may have been deleted. ``external_versions``: all
    versions that waldelta didn't commit. ``lacks``: the first version without a log entry, whose
    writer can't be known.
    """

    commits: Sequence[ExternalCommit] = ()
    vacuumed: datetime | None = None
    lacks: int | None = None
    external_versions: Sequence[int] = ()


@dataclass
class Watch:
    """Searches the targets' logs during one run, each commit once.

    ``cut`` is the newest cut when the run began. ``reported`` are the targets with findings.
    """

    job: Job
    cut: BatchCut | None
    reported: list[str] = field(default_factory=list)
    _checked: dict[str, int] = field(default_factory=dict)

    def checked_upto(self, state: TableState) -> int | None:
        """Returns the target's version up to which everything was reported; None when nothing was
        checked yet.
        """
        return self._checked.get(state.table_name, checked_upto(self.cut, state))

    def find(self, state: TableState, version: int) -> list[str]:
        """Search a target's log up to ``version``, and record external commits; returns the
        warnings.

        Raises StateError when the target is another table than the one that was copied; also
        LockHeld and LateWriter.
        """
        after = self.checked_upto(state)
        target = self.job.lake.target(state.table_name)
        target.log.check_entry(version + 1)
        if after is not None and version < after:
            raise StateError(
                f"{state.table_name}: its target {target.uri} is another table"
                f" than the one that was copied (it is at version {version}, and a run has"
                f" already seen version {after}): run the initial sync for it again"
            )
        if after is None or version == after:
            self._checked[state.table_name] = version
            return []
        seen = check_durably(target, after, version)
        versions = {commit.version for commit in state.external_commits}
        fresh = [commit for commit in seen.commits if commit.version not in versions]
        if fresh:
            self.reported.append(state.table_name)
            _record(self.job, state, fresh)
        self._checked[state.table_name] = version
        vacuumed = expire_vacuumed(self.job, state.table_name, seen, only_new=False)
        warnings = [*self._describe(state, fresh), *vacuumed]
        if seen.lacks is not None:
            warnings.append(
                f"{state.table_name}: its target's log has no version {seen.lacks} any more, so"
                " external commits up to that version can't be detected"
            )
        return warnings

    def _describe(self, state: TableState, fresh: Sequence[ExternalCommit]) -> list[str]:
        if not fresh:
            return []
        name, pipeline = state.table_name, self.job.pipeline.pipeline
        listed = _list_commits(fresh)
        log.warning("table=%s an external writer wrote to its target: %s", name, listed)
        warning = (
            f"{name}: an external writer wrote to its target: {listed}; runs continue to apply"
            " changes, but the target may differ from its source until you compare it"
            f" ({dag_id_of(pipeline, 'reconcile')} with tables, and repair if it differs) or copy"
            f" it again ({dag_id_of(pipeline, 'initial_sync')} with tables and a reason)"
        )
        return [warning]


def expire_vacuumed(job: Job, table_name: str, seen: Seen, *, only_new: bool = True) -> list[str]:
    """Mark the cuts that an external VACUUM may have made unreadable; returns the warnings.

    The newest cut is never marked. So a caller that sees each VACUUM only once reports it in any
    case; with ``only_new``, it is reported only when a cut was marked.
    """
    promised = timedelta(hours=job.pipeline.maintenance.keep_versions_hours)
    if seen.vacuumed is None or seen.vacuumed <= now() - promised:
        return []
    expired = job.ledger.expire_cuts(seen.vacuumed)
    warning = (
        f"{table_name}: a VACUUM kept fewer versions of its target than"
        " maintenance.keep_versions_hours requires: cuts from before"
        f" {seen.vacuumed:%Y-%m-%d %H:%M:%S%z} ({expired} of them) are marked as expired"
    )
    return [warning] if expired or not only_new else []


def checked_upto(cut: BatchCut | None, state: TableState) -> int | None:
    """Returns the target's version up to which runs have reported commits.

    That is the version of its copy, or of a later cut.
    """
    in_cut = cut.of(state) if cut is not None else None
    versions = (in_cut.version if in_cut is not None else None, state.version)
    return max((version for version in versions if version is not None), default=None)


def drop_external_commits(state: TableState, version: int) -> TableState:
    """Returns the state without external commits up to a version in which the target equals its
    source.
    """
    later = [commit for commit in state.external_commits if commit.version > version]
    return replace(state, external_commits=later, version=max(version, state.version or 0))


def repaired_commits(job: Job, state: TableState, version: int) -> list[str]:
    """Returns messages about external commits up to this version, which a repair is about to
    correct.
    """
    after = checked_upto(job.ledger.last_cut(), state)
    if after is None or after >= version:
        return []
    seen = check_durably(job.lake.target(state.table_name), after, version)
    vacuumed = expire_vacuumed(job, state.table_name, seen, only_new=False)
    if not seen.commits:
        return vacuumed
    return [
        (
            f"{state.table_name}: external commits to its target were repaired:"
            f" {_list_commits(seen.commits)}"
        ),
        *vacuumed,
    ]


def check_readable(table: DeltaLog, state: TableState, cut: BatchCut | None, version: int) -> None:
    """Check, before a target's files are opened, that its newest ``version`` is safe to read.

    Raises StateError for an external commit since the newest cut that adds an unsafe file: one
    outside of the table's folder, or one that isn't a regular file. Raises it, too, for a log entry
    that isn't a regular file. Reads only
    entries that no run has checked.
    """
    table.check_entry(version + 1)
    if (after := checked_upto(cut, state)) is not None:
        check_log(table, after, version)


def check_target(job: Job, state: TableState, version: int | None = None) -> None:
    """Run check_readable() on a target as it is now; callers that know its newest version pass
    it.
    """
    target = job.lake.target(state.table_name)
    newest = target.version if version is None else version
    check_readable(target.log, state, job.ledger.last_cut(), newest)


def check_durably(target: DeltaTarget, after: int, upto: int) -> Seen:
    """Run check_log(), and force the external commits to disk, because a cut will be built on
    them.
    """
    seen = check_log(target.log, after, upto)
    target.sync_commits(seen.external_versions)
    return seen


def check_log(table: DeltaLog, after: int, upto: int) -> Seen:
    """Returns the external commits and VACUUMs in a table's log after version ``after``, up to
    ``upto``.

    The search begins at the end, because our own commits record how far it went before. Raises
    StateError for an external commit whose files aren't safe to read.
    """
    commits: list[ExternalCommit] = []
    vacuums: list[datetime] = []
    versions: list[int] = []
    lacks: int | None = None
    for version in range(upto, after, -1):
        if version <= after:
            break
        commit = table.read(version)
        if commit is None:
            lacks = version
            break
        if commit.metadata:
            after = max(after, commit.metadata.get("checked_version") or after)
            continue
        _check_files(table, commit)
        versions.append(version)
        if commit.info.get("operation") == "VACUUM START":
            vacuums.append(_vacuumed_upto(commit))
        elif commit.changes_data or commit.info.get("operation") == "RESTORE":
            commits.append(external_commit(commit))
    return Seen(commits[::-1], max(vacuums, default=None), lacks, versions[::-1])


def _check_files(table: DeltaLog, commit: Commit) -> None:
    """Refuse files that a reader would follow out of the table's folder, or wait for without end.

    The first are links and a shallow clone's files; the second is a FIFO.
    """
    folder = local_path(table.uri)
    for path in commit.named:
        if (wrong := _wrong_file(folder, path)) is not None:
            raise StateError(
                f"{table.uri}: {describe_commit(commit)} adds a file {wrong}: find out which"
                " program wrote it, and run the initial sync for this table again (in a mode that"
                " keeps rows, move the table's folder away first)"
            )


def _wrong_file(folder: Path | None, path: str) -> str | None:
    outside = "that isn't in its folder"
    if not is_within(path):
        return outside
    if folder is None:
        return None
    # The root of the lake may be a symbolic link itself.
    file = Path(os.path.realpath(folder / path))
    if not file.is_relative_to(os.path.realpath(folder)):
        return outside
    return None if file.is_file() or not os.path.lexists(file) else "that is not a regular file"


def _list_commits(commits: Sequence[ExternalCommit]) -> str:
    return first_of([describe(commit) for commit in commits], _MOST_LISTED, "; ")


def _vacuumed_upto(commit: Commit) -> datetime:
    """Returns the moment before which unused files may have been deleted.

    A VACUUM that doesn't say what it kept counts as having kept nothing.
    """
    params, at = commit.info.get("operationParameters") or {}, external_commit(commit).at or now()
    retentions = [
        params[name]
        for name in ("specifiedRetentionMillis", "defaultRetentionMillis")
        if params.get(name) is not None
    ]
    return at - timedelta(milliseconds=int(next(iter(retentions), 0)))


def _record(job: Job, state: TableState, fresh: Sequence[ExternalCommit]) -> None:
    def with_commits(latest: TableState) -> TableState:
        commits = sorted({*latest.external_commits, *fresh}, key=lambda commit: commit.version)
        if len(commits) > MOST_RECORDED:
            commits = [commits[0], *commits[1 - MOST_RECORDED :]]
        return replace(latest, external_commits=commits)

    record_state(job, state, with_commits)
    fault_point("external.recorded")
