"""Skipped copy: tables whose rows the initial sync doesn't copy (``copy: false``). Part of sync.

As with PostgreSQL's ``copy_data = false``, the target begins empty and gets the changes that the
slot sends. An UPDATE or DELETE of a row that the target lacks is skipped. Later syncs neither fill
nor empty nor replace such a target.
"""

from __future__ import annotations

from dataclasses import dataclass

from waldelta.errors import ConfigError
from waldelta.lake import row_count
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.targets import ReplicatedTarget
from waldelta.snapshot.exported_snapshot import SnapshotHolder

# Transaction ids begin at 3, so this snapshot sees none, and apply takes every landed change.
_SEES_NOTHING = "3:3:"


@dataclass(frozen=True, slots=True)
class SkippedCopy:
    """The position from which a target without a copy gets changes.

    ``former`` is the state whose target is continued; None: the target begins empty.
    """

    snapshot: str
    lsn: Lsn
    former: TableState | None = None

    def __str__(self) -> str:
        if self.former is None:
            return (
                f"replicated without a copy: it gets the changes since {self.lsn}, and lacks all"
                " other rows"
            )
        return (
            f"replicated without a copy: it continues at {self.lsn}, and lacks earlier changes"
            " that weren't applied"
        )


def skip_copy(job: Job, target: ReplicatedTarget, holder: SnapshotHolder) -> SkippedCopy | None:
    """Returns where a target with ``copy: false`` begins, or None for another.

    That is where the slot begins, or, if it was synced in the current slot incarnation, now.
    """
    name = str(target.id)
    if job.pipeline.target.copies(name):
        return None
    former = _former(job, name)
    if any(row.status == SYNCED for row in job.read_all_states(name)):
        return SkippedCopy(holder.snapshot, holder.lsn, former)
    identity = job.read_identity()
    reach = job.change_log(identity).reach(identity.floor)
    # What maintenance has dropped from the change log can't be applied any more.
    since = (reach.begins_at or holder.lsn.value) if reach.is_cut else identity.begins_at
    return SkippedCopy(_SEES_NOTHING, Lsn(since), former)


def check_skipped_copy(job: Job, target: ReplicatedTarget) -> None:
    """Raise ConfigError where a sync can't keep the target of a table with ``copy: false`` as it
    is.
    """
    name = str(target.id)
    if job.pipeline.target.copies(name):
        return
    former, present = _former(job, name), job.read_state(name)
    if former is None:
        if job.ledger.table_rows(name) or is_empty(job, name):
            return
        raise ConfigError(
            f"{name} has copy: false, but its target {job.lake.target(name).uri} has rows that"
            " no sync of this lake wrote: move the folder away, or write copy: true, which"
            " replaces them"
        )
    if not _is_same_table(former, target):
        raise ConfigError(
            f"{name} has copy: false, but its source table isn't the one that its target was"
            f" filled from: {_remedy(name)}"
        )
    if present is not None and present.status == SYNCED:
        raise ConfigError(
            f"{name} has copy: false and gets its changes, so there is nothing to sync:"
            f" {_remedy(name)}"
        )


def no_changes_reason(name: str, reason: str) -> str:
    """Returns why a table with ``copy: false`` gets no changes where only a copy would be exact.

    >>> changed = "public.t: its replica identity changed"
    >>> no_changes_reason("public.t", changed).partition(": remove")[0]
    'public.t: its replica identity changed; it has copy: false, so it waits for the operator'
    """
    return f"{reason}; it has copy: false, so it waits for the operator: {_remedy(name)}"


def is_empty(job: Job, name: str) -> bool:
    """Returns whether a target has no row, or doesn't exist."""
    table = job.lake.target(name).find()
    return table is None or row_count(table.files) == 0


def _remedy(name: str) -> str:
    return (
        f"remove its target's folder and sync --tables {name}, to begin with an empty one, or write"
        " copy: true"
    )


def _former(job: Job, name: str) -> TableState | None:
    """Returns the last state of any slot incarnation in which the target was complete, if it
    exists.
    """
    complete = job.ledger.complete_states(name)
    return complete[-1] if complete and job.lake.target(name).exists else None


def _is_same_table(former: TableState, target: ReplicatedTarget) -> bool:
    root = target.mapping.root_id
    if former.root_id is not None or root is not None:
        return former.root_id == root  # Leaf partitions may be added and removed.
    return not set(former.relation_ids).isdisjoint(target.table.relation_ids)
