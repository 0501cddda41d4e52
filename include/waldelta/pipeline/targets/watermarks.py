"""The last batch that was applied to each target; the target's own Delta log is the authority."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from waldelta.errors import LateWriter, StateError
from waldelta.lake import MESSAGES, UNFENCED, Fence, TableError
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import SYNCED, TableState, now
from waldelta.pipeline.advisory_locks import AdvisoryLock, target_lock
from waldelta.pipeline.job import Job, SlotIdentity
from waldelta.pipeline.targets.target_definition import upgrade


def apply_app_id(identity: SlotIdentity, state: TableState) -> str:
    """Delta's txnAppId of the changes applied to one generation of a target."""
    return f"{identity.app_id}:apply:{state.table_name}:{state.generation}"


def sync_app_id(identity: SlotIdentity, table_name: str) -> str:
    """Delta's txnAppId of all copies of a target; their numbers grow with the generation."""
    return f"{identity.app_id}:sync:{table_name}"


def synced_states(job: Job) -> list[TableState]:
    """Returns the targets with a complete copy, by name; they may be no longer published."""
    states = job.read_states()
    return [states[name] for name in sorted(states) if states[name].status == SYNCED]


def check_same_copy(job: Job, state: TableState) -> TableState:
    """Check, under the target's lock, that its copy is still the one whose changes were selected.

    Its columns may have changed since; returns its current state.
    """
    present = job.read_state(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, state.status):
        raise LateWriter(
            f"{state.table_name}: another run synced it during this run: the next run applies its"
            " changes"
        )
    return present


def record_state(
    job: Job, state: TableState, change: Callable[[TableState], TableState]
) -> TableState:
    """Change a target's ledger row under the target's lock; return its latest row.

    ``change`` gets the row as it is by then. When it returns that same object, nothing is written.
    An equal row is written all the same, because StorageState.as_of isn't compared. Raises LockHeld
    while another run works on the target, and LateWriter as check_same_copy() does.
    """
    with target_lock(job, state.table_name):
        latest = check_same_copy(job, state)
        changed = change(latest)
        if changed is latest:
            return latest
        return job.ledger.append_state(replace(changed, at=now(), run_id=job.run_id), latest)


class Watermarks:
    """The last batch that each target contains.

    A target without changes in a batch gets no commit for it, so the last cut counts, too; the
    ledger is read once. For a target that has nothing but its copy, it is the last batch before any
    transaction that is invisible to the copy's snapshot.
    """

    def __init__(self, job: Job, identity: SlotIdentity) -> None:
        self._job, self.identity = job, identity
        self.change_log, self.cut = job.change_log(identity), job.ledger.last_cut()
        self.versions: dict[str, int] = {}  # Each target table's version when it was read last.

    def of(self, state: TableState) -> int:
        """Returns one target's last batch, from its own Delta log as it is now.

        Raises StateError when the target is gone or can't be read, and TargetAltered when an
        external writer made it unreadable.
        """
        place = self._job.lake.target(state.table_name)
        in_cut = self.cut.of(state) if self.cut is not None else None
        try:
            if (newest := place.committed(apply_app_id(self.identity, state))) is None:
                raise StateError(
                    f"{state.table_name}: its target {place.uri} is gone: run the initial sync for"
                    " it again"
                )
        except TableError as err:
            last_version = in_cut.version if in_cut is not None else state.version or 0
            altered = upgrade(place, state.table_name, last_version, err)
            if altered is not None:
                raise altered from err
            raise StateError(
                f"{state.table_name}: its target {place.uri} can't be read"
                f" ({str(err).splitlines()[0]}): restore the missing files of its _delta_log, or"
                " remove the folder and run the initial sync for it again"
            ) from err
        self.versions[state.table_name], committed = newest
        floor = self.identity.floor
        cut_batch = self.cut.batch if self.cut is not None and in_cut is not None else 0
        applied = max(committed, cut_batch, floor)
        if applied > floor or not state.snapshot:
            return applied
        return self.change_log.visible_upto(Snapshot.parse(state.snapshot), floor)


@dataclass(frozen=True, slots=True)
class TargetFence:
    """A target's lock and watermark: ``batch`` was its last batch when it was read.

    Without a batch, the target may have any. ``caller`` raises when the caller itself must stop.
    """

    lock: AdvisoryLock
    watermarks: Watermarks
    state: TableState
    batch: int | None = None
    caller: Fence = UNFENCED

    def verify(self) -> int:
        """Returns the target's last batch.

        Raises LockHeld without the lock, and LateWriter when another run has applied more.
        """
        self.caller.verify()
        self.lock.verify()
        applied = self.watermarks.of(self.state)
        if self.batch is None:
            return applied
        if applied > self.batch:
            raise LateWriter(
                f"{self.state.table_name}: another run applied changes to it at the same time: run"
                " again"
            )
        return self.batch


def messages_app_id(identity: SlotIdentity) -> str:
    """Delta's txnAppId of the table of logical messages."""
    return f"{identity.app_id}:messages"


def messages_applied(job: Job, identity: SlotIdentity) -> int:
    """Returns the last batch whose logical messages are in their table."""
    newest = job.lake.bookkeeping(MESSAGES).committed(messages_app_id(identity))
    return max(identity.floor, newest[1] if newest is not None else 0)
