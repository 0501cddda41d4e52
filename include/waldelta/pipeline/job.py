"""One run of a command on a pipeline: what every stage needs to know, free of Spark and Airflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.lake import Lake
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import Ledger, TableState
from waldelta.lake.ledger.records import SlotMove, now
from waldelta.pipeline.slot_identity import SlotIdentity, identity_of, incarnation_of
from waldelta.postgres import connect
from waldelta.postgres.connection import (
    conninfo_from_environment,
    ended_by_replay,
    named_loss,
    privilege_missing,
)
from waldelta.postgres.unreadable_names import name_unreadable


def ledger_of(pipeline: PipelineFile) -> Ledger:
    """Return a pipeline's ledger, with its object store's credentials from the environment."""
    return Ledger(Lake.of(pipeline.target.root))


@dataclass(frozen=True, slots=True)
class Job:
    """A command's run: its pipeline, the connections to its source, and why it runs.

    ``hand_over`` is True when a sync follows this run: large copies are left to that sync.
    ``again`` is True when this part of the run ran before, and was retried or cleared.
    ``read_conninfo`` connects to the standby of source.read_from, and is None without one.
    """

    pipeline: PipelineFile
    conninfo: str = field(repr=False)
    run_id: str
    run_type: str = "manual"
    interval_start: datetime | None = None
    interval_end: datetime | None = None
    hand_over: bool = False
    again: bool = False
    read_conninfo: str | None = field(default=None, repr=False)

    @property
    def slot_conninfo(self) -> str:
        """The connection string of the server that has the slot: the primary, or the standby of
        source.read_from.
        """
        if self.pipeline.source.read_from is None:
            return self.conninfo
        if not self.read_conninfo:
            raise ConfigError(
                f"connection {self.pipeline.source.read_from!r} (source.read_from) wasn't passed"
                " to this run"
            )
        return self.read_conninfo

    @property
    def lake(self) -> Lake:
        """The pipeline's Delta tables, with the object store's credentials from the environment."""
        return Lake.of(self.pipeline.target.root)

    @property
    def ledger(self) -> Ledger:
        """The pipeline's ledger tables."""
        return Ledger(self.lake)

    @contextmanager
    def connect(self, purpose: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Open a connection to the source's primary; its application_name contains the purpose.

        Raises PrivilegeMissing where the server refuses a statement without a more specific error,
        NameUnreadable where it can't send a name as UTF-8, and SourceUnreachable where the
        connection is lost.
        """
        with self._connect(self.conninfo, purpose) as connection:
            yield connection

    @contextmanager
    def connect_slot(
        self, purpose: str, primary: psycopg.Connection[tuple[Any, ...]] | None = None
    ) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Open a connection to the server that has the slot; raises as connect() does.

        Unless source.read_from names a standby, it yields the caller's ``primary`` connection when
        given.
        """
        if self.pipeline.source.read_from is None and primary is not None:
            yield primary
            return
        with self._connect(self.slot_conninfo, purpose) as connection:
            yield connection

    @contextmanager
    def _connect(
        self, conninfo: str, purpose: str
    ) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with (
            named_loss(conninfo),
            connect(conninfo, f"waldelta {purpose} {self.pipeline.source.slot}") as connection,
        ):
            try:
                yield connection
            except psycopg.errors.InsufficientPrivilege as err:
                raise privilege_missing(
                    connection.info.user, err.diag.message_primary or "refused"
                ) from err
            except psycopg.errors.UntranslatableCharacter as err:
                # The text is in a row that the slot decodes, not in a name.
                if "output plugin" in (err.diag.context or ""):
                    raise
                raise name_unreadable(conninfo, err) from err
            except psycopg.OperationalError as err:
                if "conflict with recovery" in str(err):
                    raise ended_by_replay(
                        f"{purpose} of slot {self.pipeline.source.slot!r}", str(err)
                    ) from err
                raise

    def change_log(self, identity: SlotIdentity) -> ChangeLog:
        """The change log of this incarnation of the slot."""
        return ChangeLog(self.lake, identity.app_id)

    def landed_sizes(
        self, identity: SlotIdentity, after_batch: int, upto_batch: int
    ) -> dict[int, int]:
        """Return the number of messages of each batch in a range.

        Raises SlotGap when the change log lacks batches that the slot was advanced past.
        """
        consumed = self.ledger.consumed_batches(identity.slot, identity.incarnation)
        return self.change_log(identity).whole_sizes(consumed, after_batch, upto_batch)

    def slot_identity(self) -> SlotIdentity:
        """Return the slot's identity from the ledger; raises SlotMissing before setup."""
        return identity_of(self.pipeline.source.slot, self.ledger.slot_lives())

    def first_batch(self) -> int:
        """Return the last batch of the slot's earlier incarnations.

        Changes from another server or timeline are never applied again.
        """
        return incarnation_of(self.pipeline.source.slot, self.ledger.slot_lives()).batch or 0

    def table_states(self) -> dict[str, TableState]:
        """Return the latest state of each target in the current slot incarnation.

        Copies of an earlier incarnation are stale.
        """
        return {state.table_name: state for state in self.table_rows()}

    def table_state(self, table_name: str) -> TableState | None:
        """Return the latest state of one target, as table_states() does.

        With many targets, this reads far less.
        """
        return next(reversed(self.table_rows(table_name)), None)

    def table_rows(self, table_name: str | None = None) -> list[TableState]:
        """Return all states of all targets, or of one, in the current slot incarnation, oldest
        first.
        """
        return self.of_life(self.ledger.table_rows(table_name))

    def of_life(self, rows: Sequence[TableState]) -> list[TableState]:
        """Return those of the ledger's states that belong to the current slot incarnation."""
        life = incarnation_of(self.pipeline.source.slot, self.ledger.slot_lives())
        return [state for state in rows if _is_of(state, life)]


def _is_of(state: TableState, life: SlotMove) -> bool:
    # Earlier versions wrote rows without the incarnation; only the clock can place them.
    if state.incarnation is None:
        return state.at >= life.at
    return state.incarnation == life.incarnation


def load_job(pipeline: PipelineFile, run_id: str | None = None, **details: Any) -> Job:
    """Create a job whose connections come from the environment, where an Airflow task puts them."""
    run_id = run_id or f"manual__{now().isoformat(timespec='microseconds')}"
    primary, *others = [conninfo_from_environment(conn_id) for conn_id in pipeline.source.conn_ids]
    return Job(pipeline, primary, run_id, **details, read_conninfo=others[0] if others else None)
