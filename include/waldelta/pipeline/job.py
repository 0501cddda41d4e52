"""One run of a command on a pipeline: what every stage needs to know, free of Spark and Airflow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args

from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import RUNNER_VARIABLE, RunnerName
from waldelta.errors import ConfigError, SlotMissing, StateError
from waldelta.lake import REQUEST_LIMITS, Lake, is_store_variable, read_store_options
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import Ledger, SlotMove, TableState, now
from waldelta.pipeline.source import SourceConnections
from waldelta.postgres import conninfo_from_environment


def lake_of(pipeline: PipelineFile, environment: Mapping[str, str] = os.environ) -> Lake:
    """Returns a pipeline's lake; the environment has what opens its object store.

    Raises ConfigError as read_store_options() does, and for another value of WALDELTA_RUNNER than
    those of ``runner``.
    """
    runner = environment.get(RUNNER_VARIABLE, pipeline.runner)
    if runner not in get_args(RunnerName):
        raise ConfigError(f"{RUNNER_VARIABLE} is {runner!r}: set it to auto or spark, or unset it")
    target = pipeline.target
    return Lake.of(
        target.root,
        target.conn_id,
        environment,
        on_spark=runner == "spark",
        names=target.target_names,
    )


def ledger_of(pipeline: PipelineFile) -> Ledger:
    """Returns a pipeline's ledger, as lake_of() does the lake."""
    return Ledger(lake_of(pipeline))


# Stands for the lake of the job's pipeline, opened by the environment's connections.
_OF_PIPELINE = Lake("")


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a command: its pipeline, the connections to its source, and why it runs.

    ``hand_over`` is True when a sync follows this run: large copies are left to that sync.
    ``again`` is True when this part of the run ran before: it was retried or cleared, or continues
    what a process left to an application.
    ``lock_wait_s`` is how long each stage may wait for locks of other runs. ``lake`` has
    the pipeline's Delta tables, with the object store's credentials from the environment.
    """

    pipeline: PipelineFile
    source: SourceConnections
    run_id: str
    run_type: str = "manual"
    interval_start: datetime | None = None
    interval_end: datetime | None = None
    hand_over: bool = False
    again: bool = False
    lock_wait_s: float = 0.0
    lake: Lake = field(default=_OF_PIPELINE, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the lake unless it is given: all stages share the tables that one of them opened."""
        if self.lake is _OF_PIPELINE:
            object.__setattr__(self, "lake", lake_of(self.pipeline))

    @property
    def ledger(self) -> Ledger:
        """The pipeline's ledger tables."""
        return Ledger(self.lake)

    def change_log(self, identity: SlotIdentity) -> ChangeLog:
        """The change log of this incarnation of the slot."""
        return ChangeLog(self.lake, identity.app_id)

    def read_landed_sizes(
        self, identity: SlotIdentity, after_batch: int, upto_batch: int
    ) -> dict[int, int]:
        """Returns the number of messages of each batch in a range.

        Raises SlotGap when the change log lacks batches that the slot was advanced past.
        """
        consumed = self.ledger.consumed_batches(identity.slot, identity.incarnation)
        return self.change_log(identity).whole_sizes(consumed, after_batch, upto_batch)

    def read_identity(self) -> SlotIdentity:
        """Returns the slot's identity from the ledger; raises SlotMissing before setup."""
        return identity_of(self.pipeline.source.slot, self.ledger.slot_events())

    def read_states(self) -> dict[str, TableState]:
        """Returns the latest state of each target in the current slot incarnation.

        Copies of an earlier incarnation are stale.
        """
        return {state.table_name: state for state in self.read_all_states()}

    def read_state(self, table_name: str) -> TableState | None:
        """Returns the latest state of one target, as read_states() does.

        With many targets, this reads far less.
        """
        return next(reversed(self.read_all_states(table_name)), None)

    def read_all_states(self, table_name: str | None = None) -> list[TableState]:
        """Returns all states of all targets, or of one, in the current slot incarnation, oldest
        first.
        """
        rows = self.ledger.table_rows(table_name)
        return self.read_identity().states_of(rows)


def load_job(pipeline: PipelineFile, run_id: str | None = None, **details: Any) -> Job:
    """Create a job whose connections come from the environment, where an Airflow task puts them.

    What ``target.conn_id`` opens the object store with is put there by delta-rs's names, in place
    of all variables of object stores: the JVM that this process may start reads it there, too.
    """
    options = read_store_options(pipeline.target.root, pipeline.target.conn_id)
    if pipeline.target.conn_id is not None:
        for name in filter(is_store_variable, list(os.environ)):
            del os.environ[name]
    os.environ.update(
        {name: value for name, value in options.items() if name not in REQUEST_LIMITS}
    )
    run_id = run_id or f"manual__{now().isoformat(timespec='microseconds')}"
    conninfos = map(conninfo_from_environment, pipeline.source.conn_ids)
    return Job(pipeline, SourceConnections(pipeline.source, *conninfos), run_id, **details)


# --- the slot that a change log's messages came from: its name, and its incarnation


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """A slot, its server and its incarnation; stored with every move of the slot.

    The incarnation began at the position ``begins_at``, at the time ``since``. Its batches come
    after batch ``floor``: changes from another server or timeline are never applied again.
    """

    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    begins_at: int = field(default=0, compare=False)
    floor: int = field(default=0, compare=False)
    since: datetime = field(default=datetime.min.replace(tzinfo=UTC), compare=False)

    @property
    def app_id(self) -> str:
        """Delta's txnAppId of everything that this slot lands; a recreated slot is another
        writer.
        """
        return f"waldelta:{self.system_identifier}:{self.slot}:{self.incarnation}"

    def states_of(self, rows: Sequence[TableState]) -> list[TableState]:
        """Returns the states that belong to this slot incarnation.

        Earlier versions wrote rows without the incarnation; only the clock can place them.
        """
        return [
            state
            for state in rows
            if state.incarnation == self.incarnation
            or (state.incarnation is None and state.at >= self.since)
        ]


def identity_of(slot: str, moves: list[SlotMove]) -> SlotIdentity:
    """Returns the slot's current incarnation, on the timeline to which it was followed last."""
    begin = incarnation_of(slot, moves)
    followed = [
        m.timeline
        for m in moves
        if (m.slot, m.incarnation, m.event) == (slot, begin.incarnation, "promoted")
    ]
    return SlotIdentity(
        slot,
        begin.system_identifier,
        max([begin.timeline, *followed]),
        begin.incarnation,
        begin.lsn,
        begin.batch or 0,
        begin.at,
    )


def incarnation_of(slot: str, moves: list[SlotMove]) -> SlotMove:
    """Returns the slot's latest creation or adoption that no drop follows.

    Raises SlotMissing when there is none.
    """
    bounds = [move for move in moves if move.is_begin or move.event == "dropped"]
    last = {move.slot: move.event for move in bounds}
    if strangers := sorted(
        name for name, event in last.items() if name != slot and event != "dropped"
    ):
        raise StateError(
            f"slot {strangers[0]!r} already replicates into this lake, and two slots in one lake"
            " would apply changes twice: give each pipeline its own target.root, or run teardown"
            " for the other one first"
        )
    events = [move for move in bounds if move.slot == slot]
    if not events:
        raise SlotMissing(f"slot {slot!r} was never set up for this lake: run setup, then sync")
    if (last_event := events[-1]).event == "dropped":
        raise SlotMissing(
            f"slot {slot!r} was torn down at {last_event.at:%Y-%m-%d %H:%M:%S} UTC by run"
            f" {last_event.run_id}, and the lake stays as it was then: to go on, run setup, then"
            " resync, which writes only the rows that differ; if that run was a resync that was"
            " killed, run resync again"
        )
    return events[-1]
