"""Up to which batch each target has been applied; the target's own Delta log is the authority."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from waldelta.errors import LateWriter, StateError
from waldelta.lake import bookkeeping_uri, target_uri
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import BatchCut, TableState
from waldelta.lake.ledger.records import SYNCED
from waldelta.lake.storage import MESSAGES
from waldelta.pipeline.job import Job
from waldelta.pipeline.slot_identity import SlotIdentity
from waldelta.postgres import TableId


def apply_app_id(identity: SlotIdentity, state: TableState) -> str:
    """Delta's txnAppId of the changes applied to one generation of a target."""
    return f"{identity.app_id}:apply:{state.table_name}:{state.generation}"


def uri_of(job: Job, table_name: str) -> str:
    """Where a target is."""
    table = TableId.parse(table_name)
    return target_uri(job.pipeline.target.root, table.schema, table.name)


def synced_states(job: Job) -> list[TableState]:
    """Targets whose copy is complete, in the order of their names; whether they still are published
    isn't asked.
    """
    states = job.table_states()
    return [states[name] for name in sorted(states) if states[name].status == SYNCED]


def check_same_copy(job: Job, state: TableState) -> TableState:
    """Under the target's lock: the copy is still the one whose changes were chosen; its columns may
    have changed since.
    """
    present = job.table_state(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, state.status):
        raise LateWriter(
            f"{state.table_name} was synced again meanwhile: its changes are applied by the"
            " next run"
        )
    return present


class Watermarks:
    """The last batch that each target holds.

    A target without changes in a batch gets no commit for it, so the last cut counts too; the
    ledger is read once. Of one that holds its copy alone, it is the last batch before any
    transaction that the copy's snapshot doesn't see.
    """

    def __init__(self, job: Job, identity: SlotIdentity) -> None:
        self._job, self.identity = job, identity
        self._cut = last_cut(job)
        self.floor = job.first_batch()
        self.versions: dict[str, int] = {}  # of each target's table, when it was asked for last

    def of(self, state: TableState) -> int:
        """One target's, from its own Delta log as it is now; raises StateError when the target is
        gone or can't be read.
        """
        uri = uri_of(self._job, state.table_name)
        try:
            table = DeltaTable(uri, storage_options=self._job.storage_options)
            committed = table.transaction_version(apply_app_id(self.identity, state)) or 0
        except TableNotFoundError as err:
            raise StateError(
                f"{state.table_name}: its target {uri} is gone: run the initial sync for it again"
            ) from err
        except DeltaError as err:
            raise StateError(
                f"{state.table_name}: its target {uri} can't be read ({str(err).splitlines()[0]}):"
                " bring back what its _delta_log lacks, or remove the folder and run the initial"
                " sync for it again"
            ) from err
        self.versions[state.table_name] = table.version()
        applied = max(committed, self._in_cut(state), self.floor)
        if applied > self.floor or not state.snapshot:
            return applied
        return self._job.change_log(self.identity).visible_upto(
            Snapshot.parse(state.snapshot), self.floor
        )

    def still(self, state: TableState, batch: int) -> int:
        """``batch``, up to which the target was found to be; raises LateWriter when another run has
        applied more meanwhile.
        """
        if self.of(state) > batch:
            raise LateWriter(
                f"{state.table_name}: another run applied changes to it meanwhile: run again"
            )
        return batch

    def _in_cut(self, state: TableState) -> int:
        cut = self._cut
        if cut is None or (state.table_name, state.generation) not in {
            (t.table_name, t.generation) for t in cut.targets
        }:
            return 0
        return cut.batch


def last_cut(job: Job) -> BatchCut | None:
    """The newest consistent cut."""
    return job.ledger.last_cut()


def messages_app_id(identity: SlotIdentity) -> str:
    """Delta's txnAppId of the table of logical messages."""
    return f"{identity.app_id}:messages"


def messages_uri(job: Job) -> str:
    """Where the table of logical messages is."""
    return bookkeeping_uri(job.pipeline.target.root, MESSAGES)


def messages_applied(job: Job, identity: SlotIdentity) -> int:
    """The last batch whose logical messages are in their table."""
    floor = job.first_batch()
    try:
        table = DeltaTable(messages_uri(job), storage_options=job.storage_options)
    except TableNotFoundError:
        return floor
    return max(floor, table.transaction_version(messages_app_id(identity)) or 0)
