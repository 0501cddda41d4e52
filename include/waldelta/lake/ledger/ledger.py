"""The ledger: small append-only Delta tables under ``<root>/_waldelta``, written without a JVM.

- ``slot_moves``: what was done to the slot.
- ``tables``: the state of each target's sync.
- ``batches``: the consistent cuts.
- ``runs``: what each run did.
- ``gaps``: which changes the slot lost.
- ``read_windows``: the read windows that the server manages.
- ``decisions``: what waits for an operator's decision, and what was decided.

Rows are never changed, and the latest one counts. Maintenance drops old rows that nothing depends
on (``prune_ledger``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

import pyarrow.compute as pc

from waldelta.config.parse_text import parse_json
from waldelta.errors import LateWriter, StateError
from waldelta.lake.delta_target import TargetVersion
from waldelta.lake.lake import Lake
from waldelta.lake.ledger.records import (
    FORMAT,
    SYNCED,
    BatchCut,
    ConsumedBatch,
    Gap,
    LedgerRow,
    R,
    Run,
    RunLanding,
    SlotMove,
    TableState,
    now,
    rows_of,
)
from waldelta.lake.ledger.table import LedgerTable, Newest, of_run
from waldelta.lake.storage import entry_identity, entry_path

# Events of single moves; all other events are about a slot as a whole.
OF_BATCHES = ("intent", "compared")
_OF_EVENTS = ~pc.field("event").isin(OF_BATCHES)
_TICK = timedelta(microseconds=1)
# The status of a failed run.
_FAILED = "failed"


# Of some tables of a ledger: their kind, version (-1: there is none), and its entry on a disk.
LedgerVersions = tuple[tuple[type[LedgerRow], int, tuple[int, int] | None], ...]


class Ledger:
    """Reads and appends the ledger tables of one lake; every append is durable when it returns.

    Rows of one table are in the order in which they were appended, not in that of any clock.
    """

    def __init__(self, lake: Lake) -> None:
        self.lake = lake

    def table(self, kind: type[R]) -> LedgerTable[R]:
        """Returns the table of one kind of rows."""
        return LedgerTable(kind, self.lake)

    def versions(self, kinds: Iterable[type[LedgerRow]]) -> LedgerVersions:
        """Returns the versions of the tables of some kinds of rows."""
        tables = {kind: self.table(kind) for kind in kinds}
        versions = {kind: table.version() for kind, table in tables.items()}
        return tuple(
            (kind, version, entry_identity(tables[kind].uri, version))
            for kind, version in versions.items()
        )

    def is_at(self, versions: LedgerVersions) -> bool:
        """Returns whether the tables are still at these versions, without opening one."""
        for kind, version, identity in versions:
            uri = self.table(kind).uri
            if identity != entry_identity(uri, version):
                return False
            if self.lake.has(f"{uri}/{entry_path(version + 1)}"):
                return False
        return True

    def append(self, row: LedgerRow) -> None:
        """Add one row to its table, creating the table with the first."""
        self.table(type(row)).append(row)

    def append_all(self, rows: Sequence[LedgerRow], after: Newest | None = None) -> None:
        """Add rows of one kind in one commit: all of them, or none.

        Raises LateWriter, and adds nothing, when ``after`` isn't the newest row any more.
        """
        if rows:
            self.table(type(rows[0])).extend(rows, after)

    def append_state(self, row: TableState, after: TableState | None) -> TableState:
        """Add a target's row after the row that it replaces (None: the target has none yet).

        Returns the row as it was written. Raises LateWriter, and adds nothing, when another run has
        written a row of this target since. Without a name of its own in the lake, the row has that
        of the row before it, and a target's first one that of the pipeline file.
        """
        name = self.lake.names.of(row.table_name) if after is None else after.stored_name
        if row.stored_name is None and name != row.table_name:
            row = replace(row, stored_name=name)
        written = self._append_behind(row, after, pc.field("table_name") == row.table_name)
        self.note_names([written])
        return written

    def append_slot_event(self, row: SlotMove, after: SlotMove | None) -> SlotMove:
        """Add an event of a slot itself, such as its creation or its end, after its last such event
        (None: it is the first).

        Returns the row as it was written. Raises LateWriter, and adds nothing, when another run has
        recorded an event of that slot since.
        """
        return self._append_behind(row, after, (pc.field("slot") == row.slot) & _OF_EVENTS)

    def append_cut(self, row: BatchCut, after: BatchCut | None) -> None:
        """Add a cut after the newest one (None: it is the first).

        Raises LateWriter when ``after`` isn't the newest any more.
        """
        self._append_behind(row, after)

    def append_gap(self, row: Gap, after: Gap | None) -> None:
        """Add a gap's row after the newest one of that slot incarnation (None: it is the first).

        Raises LateWriter, and adds nothing, when another run has written one since.
        """
        self._append_behind(row, after, _of_incarnation(row.slot, row.incarnation))

    def begin_run(self, run_id: str, verb: str) -> datetime:
        """Returns the beginning of an attempt at a run: now, but later than all rows of that run.

        This doesn't depend on the clocks of the machines.
        """
        newest = self._newest_attempt(run_id, verb)
        return now() if newest is None else max(now(), newest["at"] + _TICK)

    def append_run(self, row: Run) -> None:
        """Add the result of an attempt at a run.

        The run's newest row is the one that readers use. So this raises LateWriter, and adds
        nothing, when an attempt that began later has recorded its result. The exception is a later
        attempt that failed while this one didn't: it may have failed because of this one's locks.
        """
        while True:
            newest = self._newest_attempt(row.run_id, row.verb)
            is_late = (
                newest is not None
                and row.started_at is not None
                and row.started_at < (newest["started_at"] or newest["at"])
            )
            if (
                newest is not None
                and is_late
                and (row.status == _FAILED or newest["status"] != _FAILED)
            ):
                raise LateWriter(
                    f"run {row.run_id!r}: a later attempt at {row.verb} already recorded status"
                    f" {newest['status']!r}; this attempt's result is discarded, no action needed:"
                    " see the later attempt's log"
                )
            at = newest["at"] if newest is not None else None
            # The loop reads again when another attempt has recorded a result in between.
            with suppress(LateWriter):
                self.table(Run).append(row, Newest(at, of_run(row.run_id, row.verb), cache=False))
                return

    def gaps(self, slot: str) -> list[Gap]:
        """Returns all rows about gaps of a slot, oldest first."""
        return self.table(Gap).read(pc.field("slot") == slot)

    def slot_moves(self) -> list[SlotMove]:
        """Returns all moves, oldest first."""
        return self.table(SlotMove).read()

    def last_move(self) -> SlotMove | None:
        """Returns the newest row of any move."""
        return self.table(SlotMove).newest()

    def slot_events(self, slot: str | None = None) -> list[SlotMove]:
        """Returns the recorded events of slots, or of one slot, oldest first: created, adopted,
        dropped, promoted and others.

        Batches' moves (``intent``, ``compared``) aren't included. Raises StateError for a lake that
        an earlier or later waldelta wrote in another format.
        """
        result = self.table(SlotMove).place.read_once("events", self._read_events)
        events = [] if result is None else result[1]
        return [event for event in events if slot in (None, event.slot)]

    def _read_events(self, version: TargetVersion) -> list[SlotMove]:
        moves = self.table(SlotMove)
        rows = moves.scan(moves.schema.names, where=_OF_EVENTS, version=version)
        if formats := set(rows["format"].to_pylist()) - {FORMAT}:
            raise StateError(
                f"the lake {self.lake.root} has format {formats.pop() or 1}, and this waldelta"
                f" reads and writes format {FORMAT}: go on with the waldelta that wrote it, or run"
                " its teardown, set another target.root, and run setup and sync with this one"
            )
        return rows_of(SlotMove, rows)

    def furthest_lsn(self, slot: str, incarnation: str, last_batch: int | None = None) -> int:
        """Returns the furthest position that this slot incarnation was ever meant to move to; 0
        without any.

        Moves on a timeline that the server has left count only up to where the current timeline
        left it. With ``last_batch``, the end of a change log, only moves before the first one past
        a later batch count.
        """
        moves = self.table(SlotMove).read(_of_incarnation(slot, incarnation))
        promotions = [move for move in moves if move.event == "promoted"]
        counted = moves
        if last_batch is not None:
            counted = list(
                takewhile(lambda m: m.event != "intent" or (m.batch or 0) <= last_batch, moves)
            )
        return max(
            (
                min([move.lsn, *(m.lsn for m in promotions if m.timeline > move.timeline)])
                for move in counted
                if move.event != "promoted"
            ),
            default=0,
        )

    def consumed_batches(self, slot: str, incarnation: str) -> dict[int, ConsumedBatch]:
        """Returns the batches past which this slot incarnation was ever meant to move, by number.

        They were durable by then. A slot that its server's restart set back is moved past the same
        batch again. So the first row with a number of messages says how many had landed.
        """
        rows = self.table(SlotMove).scan(
            ["batch", "lsn", "messages"], where=_of_incarnation(slot, incarnation) & ~_OF_EVENTS
        )
        batches: dict[int, ConsumedBatch] = {}
        for row in rows.filter(pc.is_valid(rows["batch"])).to_pylist():
            batch = batches.get(row["batch"])
            if batch is None or batch.messages is None:
                batches[row["batch"]] = ConsumedBatch(row["lsn"], row["messages"])
        return batches

    def landed_by(self, slot: str, incarnation: str, run_id: str) -> RunLanding | None:
        """Returns the WAL range, batches and changes that a run's attempts landed from this slot
        incarnation; None if they landed nothing.

        The first run that moved the slot past a batch has landed it, or continued an attempt of its
        own that was killed before.
        """
        names = ["event", "run_id", "lsn", "batch", "changes"]
        start, end, position, seen = None, 0, 0, set[int]()
        changes: dict[int, int | None] = {}
        for row in (
            self.table(SlotMove).scan(names, where=_of_incarnation(slot, incarnation)).to_pylist()
        ):
            batch = row["batch"] if row["event"] == "intent" else None
            if batch is not None and batch not in seen:
                seen.add(batch)
                if row["run_id"] == run_id:
                    start = position if start is None else start
                    end, changes[batch] = row["lsn"], row["changes"]
            position = max(position, row["lsn"])
        return None if start is None else RunLanding(start, end, changes)

    def uncompared(self, slot: str, incarnation: str) -> SlotMove | None:
        """Returns the last move past a batch of this slot incarnation, unless that batch was
        compared.

        The comparison is with what had landed.
        """
        single = self.table(SlotMove).read(_of_incarnation(slot, incarnation) & ~_OF_EVENTS)
        moves = [move for move in single if move.batch is not None]
        of_last = [move for move in moves if move.batch == moves[-1].batch]
        # Without compared_after, the row itself proves it: recovery compares first.
        return of_last[-1] if of_last and all(move.compared_after for move in of_last) else None

    def table_states(self) -> dict[str, TableState]:
        """Returns the latest state of each target, by table name."""
        return {state.table_name: state for state in self.table_rows()}

    def table_rows(self, table_name: str | None = None) -> list[TableState]:
        """Returns all states of all targets, or of one, oldest first."""
        table = self.table(TableState)
        if table_name is None:
            rows = table.read_all()
        elif (states := table.rows_in_memory()) is not None:
            rows = [row for row in states if row.table_name == table_name]
        else:
            # A copy adds a state and reads again: other targets' rows needn't become objects.
            where = pc.field("table_name") == table_name
            result = table.place.read_once(f"of {table_name}", lambda _: table.read(where))
            rows = [] if result is None else list(result[1])
        self.note_names(rows)
        return rows

    def note_names(self, rows: Iterable[TableState]) -> None:
        """Have the lake open targets where these states, oldest first, say that they are stored."""
        names = {row.table_name: row.stored_name or row.table_name for row in rows}
        # One update, because another thread may be opening one of these tables.
        self.lake.cache.stored_names.update(names)

    def complete_states(self, table_name: str) -> list[TableState]:
        """Returns the states in which a target was complete, in any slot incarnation, oldest
        first.
        """
        return [state for state in self.table_rows(table_name) if state.status == SYNCED]

    def generations(self) -> list[tuple[str, int, str]]:
        """Returns table, generation and status of all states of all targets, oldest first.

        The other columns, which are most of the data, aren't read.
        """
        rows = self.table(TableState).scan(["table_name", "generation", "status"])
        return [(row["table_name"], row["generation"], row["status"]) for row in rows.to_pylist()]

    def batches(self) -> list[BatchCut]:
        """Returns all cuts, oldest first."""
        return self.table(BatchCut).read()

    def last_cut(self) -> BatchCut | None:
        """Returns the newest cut."""
        return self.table(BatchCut).newest()

    def cut_ends(self, after_batch: int) -> list[tuple[str, int]]:
        """Returns run and end position of each cut after a batch, newest first.

        The cuts' targets, which are most of the data, aren't read.
        """
        rows = self.table(BatchCut).scan(
            ["run_id", "end_lsn"], where=pc.field("batch") > after_batch
        )
        return [(row["run_id"], row["end_lsn"]) for row in reversed(rows.to_pylist())]

    def is_reported(self, cut: BatchCut) -> bool:
        """Returns whether a run result contains what was applied since the first cut of that batch.

        It may be the result of a later run, or of the run that made the cut.
        """
        where = (pc.field("batch") == cut.batch) & (pc.field("end_lsn") == cut.end_lsn)
        # Maintenance publishes a cut again, so there may be several rows.
        cuts = self.table(BatchCut).read(where)
        runs = self.table(Run).scan(["at", "applied"], cuts[0].at, pc.field("verb") == "consume")
        if runs["applied"].null_count < len(runs):
            return True
        # The clock of the run may be behind. An earlier attempt of the same run has reported less.
        runs_of_cuts = [run for row in cuts if (run := self.run_result(row.run_id)) is not None]
        return any(run.applied is not None and _reports(run, cuts[0]) for run in runs_of_cuts)

    def expire_cuts(self, before: datetime) -> int:
        """Mark the cuts from before a moment as expired; returns how many were newly marked.

        The newest cut is never marked, because it may be the only one.
        """
        return self.table(BatchCut).mark(
            "expired", lambda at: pc.and_(pc.less(at, before), pc.less(at, pc.max(at)))
        )

    def runs(self, since: datetime | None = None) -> list[Run]:
        """Returns the rows of the table runs that were written at ``since`` or later (None: all),
        oldest first.
        """
        return self.table(Run).read(since=since)

    def last_run(self) -> Run | None:
        """Returns the newest row of any run."""
        return self.table(Run).newest()

    def run_result(self, run_id: str, verb: str = "consume") -> Run | None:
        """Returns the latest row of a run."""
        rows = self.table(Run).read(of_run(run_id, verb))
        return rows[-1] if rows else None

    def _append_behind(self, row: R, after: R | None, where: pc.Expression | None = None) -> R:
        """Returns the row as it was added; raises LateWriter unless ``after`` still is the newest
        of the rows that ``where`` selects (None: there is none).
        """
        return self.table(type(row)).append(
            row, Newest(after.at if after is not None else None, where)
        )

    def _newest_attempt(self, run_id: str, verb: str) -> dict[str, Any] | None:
        rows = (
            self.table(Run)
            .scan(["at", "started_at", "status"], where=of_run(run_id, verb), cache=False)
            .to_pylist()
        )
        return rows[-1] if rows else None


def _reports(run: Run, cut: BatchCut) -> bool:
    tables = parse_json(run.result).get("tables", {})
    changed = [target for target in cut.targets if target.changed]
    return all(
        (tables.get(one.table_name, {}).get("version") or -1) >= one.version for one in changed
    )


def _of_incarnation(slot: str, incarnation: str) -> pc.Expression:
    return (pc.field("slot") == slot) & (pc.field("incarnation") == incarnation)


def next_generation(rows: Iterable[TableState]) -> int:
    """Returns the number of a target's next copy or repair, higher than in all of its states.

    This includes the states of copies that were undone.
    """
    return max((state.generation for state in rows), default=0) + 1
