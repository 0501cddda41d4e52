"""The pipeline's memory: small append-only Delta tables under ``<root>/_waldelta``, written without
a JVM.

``slot_moves`` says what was done to the slot, ``tables`` the state of each target's sync,
``batches`` the consistent cuts, ``runs`` what each run did, ``gaps`` which changes the slot lost,
``bites`` what the server manages, ``releases`` what somebody let pass a gate. Rows are never
changed; the latest one counts, and maintenance drops old ones that nothing depends on
(``ledger_upkeep``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any, TypeVar

import pyarrow.compute as pc

from waldelta.errors import LateWriter
from waldelta.lake.ledger.records import (
    SYNCED,
    AttributeState,
    BatchCut,
    ColumnState,
    ConsumedBatch,
    ExternalCommit,
    FileState,
    Gap,
    KeptWindow,
    LabelState,
    Release,
    Row,
    Run,
    SlotMove,
    StorageState,
    TableState,
    TargetCut,
    now,
)
from waldelta.lake.ledger.table import LedgerTable, Newest
from waldelta.lake.storage import bookkeeping_uri

# Events of single moves; the others are of a slot as a whole.
OF_BATCHES = ("intent", "compared")
_OF_LIVES = ~pc.field("event").isin(OF_BATCHES)
_TICK = timedelta(microseconds=1)
# A run's status.
_FAILED = "failed"

R = TypeVar("R", SlotMove, TableState, BatchCut, Run, Gap, KeptWindow, Release)


class Ledger:
    """Reads and appends the bookkeeping tables of one lake; every append is durable when it
    returns.

    Rows of one table come in the order in which they were appended, not in that of anybody's clock.
    """

    def __init__(self, root: str, storage_options: dict[str, str] | None = None) -> None:
        self.root = root
        self._options = storage_options

    @property
    def storage_options(self) -> dict[str, str] | None:
        """Credentials of the object store, for other tables of the same lake."""
        return self._options

    def append(self, row: Row) -> None:
        """Add one row to its table, creating the table with the first."""
        self._table(type(row)).append(asdict(row))

    def append_all(self, rows: Sequence[R]) -> None:
        """Add rows of one kind in one commit: all of them, or none."""
        self._table(type(rows[0])).extend([asdict(row) for row in rows])

    def append_state(self, row: TableState, after: TableState | None) -> TableState:
        """Add a target's row behind the one that it replaces (None: it is the target's first);
        returns it as it was written.

        Raises LateWriter, and adds nothing, when another run has written a row of this target
        meanwhile.
        """
        return self._append_behind(row, after, pc.field("table_name") == row.table_name)

    def append_life(self, row: SlotMove, after: SlotMove | None) -> SlotMove:
        """Add what is done to a slot as a whole behind what was done last (None: it is the first);
        returns it as it was written.

        Raises LateWriter, and adds nothing, when another run has done something to that slot
        meanwhile.
        """
        return self._append_behind(row, after, (pc.field("slot") == row.slot) & _OF_LIVES)

    def append_cut(self, row: BatchCut, after: BatchCut | None) -> None:
        """Add a cut behind the one that was the newest (None: it is the first); raises LateWriter
        when that isn't so any more.
        """
        self._append_behind(row, after)

    def append_gap(self, row: Gap, after: Gap | None) -> None:
        """Add a gap's row behind the newest one of that life of the slot (None: it is the first).

        Raises LateWriter, and adds nothing, when another run has written one meanwhile.
        """
        self._append_behind(row, after, _of_life(row.slot, row.incarnation))

    def begin_run(self, run_id: str, verb: str) -> datetime:
        """When an attempt at a run begins: now, and behind all that was told of the run so far,
        whatever the clocks say.
        """
        newest = self._newest_attempt(run_id, verb)
        return now() if newest is None else max(now(), newest["at"] + _TICK)

    def append_run(self, row: Run) -> None:
        """Add what an attempt at a run came to.

        Raises LateWriter, and adds nothing, when one that began later has told what it came to: the
        run's newest row is what readers go by. Unless that one failed and this one didn't, whose
        locks it may have met.
        """
        while True:
            newest = self._newest_attempt(row.run_id, row.verb)
            is_late = (
                newest is not None
                and row.begun is not None
                and row.begun < (newest["begun"] or newest["at"])
            )
            if (
                newest is not None
                and is_late
                and (row.status == _FAILED or newest["status"] != _FAILED)
            ):
                raise LateWriter(
                    f"run {row.run_id!r}: an attempt at {row.verb} that began later has told what"
                    f" became of it, {newest['status']}, which stands; nothing is to be done: see"
                    " that attempt's log"
                )
            at = newest["at"] if newest is not None else None
            # Read again when another attempt has told something meanwhile.
            with suppress(LateWriter):
                self._table(Run).append(
                    asdict(row), Newest(at, _of_run(row.run_id, row.verb), kept=False)
                )
                return

    def gaps(self, slot: str) -> list[Gap]:
        """All rows on gaps of a slot, oldest first."""
        return self._read(Gap, pc.field("slot") == slot)

    def releases(self) -> list[Release]:
        """All that was let pass stop gates, oldest first."""
        return self._read(Release)

    def slot_moves(self) -> list[SlotMove]:
        """All moves, oldest first."""
        return self._read(SlotMove)

    def last_move(self) -> SlotMove | None:
        """The newest row of any move."""
        return self._newest(SlotMove)

    def slot_lives(self, slot: str | None = None) -> list[SlotMove]:
        """What was done to slots, or to one, as a whole, oldest first: all events but ``intent``
        and ``compared``.
        """
        return self._read(
            SlotMove, _OF_LIVES if slot is None else (pc.field("slot") == slot) & _OF_LIVES
        )

    def furthest_lsn(self, slot: str, incarnation: str, last_batch: int | None = None) -> int:
        """The furthest position that this life of the slot was ever meant to move to; 0 when it has
        no row.

        Of moves on a timeline that the server has left since, only what the present one has in
        common with it counts. With ``last_batch``, which a change log ends at, only moves from
        before the first one over a later batch do.
        """
        moves = self._read(SlotMove, _of_life(slot, incarnation))
        left = [move for move in moves if move.event == "promoted"]
        counted = moves
        if last_batch is not None:
            counted = list(
                takewhile(lambda m: m.event != "intent" or (m.batch or 0) <= last_batch, moves)
            )
        return max(
            (
                min([move.lsn, *(m.lsn for m in left if m.timeline > move.timeline)])
                for move in counted
                if move.event != "promoted"
            ),
            default=0,
        )

    def consumed_batches(self, slot: str, incarnation: str) -> dict[int, ConsumedBatch]:
        """The batches past which this life of the slot was ever meant to move, which were durable
        by then, by number.

        A slot that a stop of its server took back is moved over the same batch again: the first row
        that counts its messages is the one that says how many had landed.
        """
        rows = self._table(SlotMove).scan(
            ["batch", "lsn", "messages"], chosen=_of_life(slot, incarnation) & ~_OF_LIVES
        )
        found: dict[int, ConsumedBatch] = {}
        for row in rows.filter(pc.is_valid(rows["batch"])).to_pylist():
            known = found.get(row["batch"])
            if known is None or known.messages is None:
                found[row["batch"]] = ConsumedBatch(row["lsn"], row["messages"])
        return found

    def uncompared(self, slot: str, incarnation: str) -> SlotMove | None:
        """The move over the last batch of this life of the slot, unless a row says that it was
        compared with what had landed.
        """
        moves = [move for move in self._moves(slot, incarnation) if move.batch is not None]
        of_last = [move for move in moves if move.batch == moves[-1].batch]
        # Without compared_after it is the row itself that says so: recovery compares first.
        return of_last[-1] if of_last and all(move.compared_after for move in of_last) else None

    def _moves(self, slot: str, incarnation: str) -> list[SlotMove]:
        """The single moves of this life of the slot, oldest first."""
        return self._read(SlotMove, _of_life(slot, incarnation) & ~_OF_LIVES)

    def last_window(self) -> KeptWindow | None:
        """The newest row on bites; None when the server always managed those of the pipeline
        file.
        """
        return self._newest(KeptWindow)

    def table_states(self) -> dict[str, TableState]:
        """The latest state of each target, by table name."""
        return {state.table_name: state for state in self.table_rows()}

    def table_rows(self, table_name: str | None = None) -> list[TableState]:
        """All states of all targets, or of one, oldest first."""
        return self._read(
            TableState, None if table_name is None else pc.field("table_name") == table_name
        )

    def complete_states(self, table_name: str) -> list[TableState]:
        """The states in which a target was complete, in whatever life of the slot, oldest first."""
        return [state for state in self.table_rows(table_name) if state.status == SYNCED]

    def generations(self) -> list[tuple[str, int, str]]:
        """Table, generation and status of all states of all targets, oldest first; without what
        else they hold, which is most of them.
        """
        rows = self._table(TableState).scan(["table_name", "generation", "status"])
        return [(row["table_name"], row["generation"], row["status"]) for row in rows.to_pylist()]

    def batches(self) -> list[BatchCut]:
        """All cuts, oldest first."""
        return self._read(BatchCut)

    def last_cut(self) -> BatchCut | None:
        """The newest cut."""
        return self._newest(BatchCut)

    def cut_ends(self, after_batch: int) -> list[tuple[str, int]]:
        """Which run made each cut behind a batch, and where it ends, newest first; without what
        cuts hold, which is most of them.
        """
        rows = self._table(BatchCut).scan(
            ["run_id", "end_lsn"], chosen=pc.field("batch") > after_batch
        )
        return [(row["run_id"], row["end_lsn"]) for row in reversed(rows.to_pylist())]

    def is_reported(self, cut: BatchCut) -> bool:
        """Whether a run has told what it applied since the first cut of that batch was made: a
        later one, or the one that made it.
        """
        same = (pc.field("batch") == cut.batch) & (pc.field("end_lsn") == cut.end_lsn)
        made = self._read(BatchCut, same)  # maintenance publishes one again
        runs = self._table(Run).scan(["at", "applied"], made[0].at, pc.field("verb") == "consume")
        if runs["applied"].null_count < len(runs):
            return True
        # By a clock that is behind; an earlier attempt of the same run has told less.
        own = [run for row in made if (run := self.run_result(row.run_id)) is not None]
        return any(run.applied is not None and _reports(run, made[0]) for run in own)

    def expire_cuts(self, before: datetime) -> int:
        """Mark the cuts from before a moment as expired, but for the newest one, which may be all
        there is; returns how many weren't yet.
        """
        return self._table(BatchCut).mark(
            "expired", lambda at: pc.and_(pc.less(at, before), pc.less(at, pc.max(at)))
        )

    def runs(self, since: datetime | None = None) -> list[Run]:
        """All events of runs from a moment on, oldest first."""
        return self._read(Run, None if since is None else pc.field("at") >= since)

    def first_run_at(self) -> datetime | None:
        """When the oldest event of a run was told that is left; None when there is none."""
        return min(self._table(Run).scan(["at"])["at"].to_pylist(), default=None)

    def last_run(self) -> Run | None:
        """The newest event of any run."""
        return self._newest(Run)

    def run_result(self, run_id: str, verb: str = "consume") -> Run | None:
        """The latest event of a run."""
        found = self._read(Run, _of_run(run_id, verb))
        return found[-1] if found else None

    def prune(self, kind: type[R], keep: Callable[[Sequence[R]], Sequence[bool]]) -> int:
        """Drop the rows of one table that ``keep`` says no to; returns how many."""
        return self._table(kind).prune(lambda rows: keep([_build(kind, row) for row in rows]))

    def _append_behind(self, row: R, after: R | None, chosen: pc.Expression | None = None) -> R:
        """Add a row while the newest of its kind, or of those that are chosen, still is ``after``
        (None: there is none).
        """
        written = self._table(type(row)).append(
            asdict(row), Newest(after.at if after is not None else None, chosen)
        )
        return replace(row, at=written["at"])

    def _read(self, kind: type[R], chosen: pc.Expression | None = None) -> list[R]:
        return [_build(kind, row) for row in self._table(kind).read(chosen)]

    def _newest(self, kind: type[R]) -> R | None:
        row = self._table(kind).newest()
        return _build(kind, row) if row is not None else None

    def _newest_attempt(self, run_id: str, verb: str) -> dict[str, Any] | None:
        found = (
            self._table(Run)
            .scan(["at", "begun", "status"], chosen=_of_run(run_id, verb), kept=False)
            .to_pylist()
        )
        return found[-1] if found else None

    def _table(self, kind: type[Row]) -> LedgerTable:
        return LedgerTable(bookkeeping_uri(self.root, kind.table), kind.schema, self._options)


def _reports(run: Run, cut: BatchCut) -> bool:
    tables = json.loads(run.result).get("tables", {})
    changed = [target for target in cut.targets if target.changed]
    return all(
        (tables.get(one.table_name, {}).get("version") or -1) >= one.version for one in changed
    )


def _of_life(slot: str, incarnation: str) -> pc.Expression:
    return (pc.field("slot") == slot) & (pc.field("incarnation") == incarnation)


def _of_run(run_id: str, verb: str) -> pc.Expression:
    return (pc.field("run_id") == run_id) & (pc.field("verb") == verb)


def _build(kind: type[R], row: dict[str, Any]) -> R:
    nested: dict[str, type[Any]] = {
        "columns": ColumnState,
        "targets": TargetCut,
        "foreign_commits": ExternalCommit,
    }
    # A table written by an earlier version may lack a column that has a default.
    values = {f.name: row[f.name] for f in fields(kind) if f.name in row}
    for name, of in nested.items():
        if name in values and not (kind is Run and values[name] is None):
            # So may a struct inside of one, whose field is null then.
            items = [
                {k: v for k, v in item.items() if v is not None} for item in values[name] or []
            ]
            values[name] = [of(**item) for item in items]
    for name in ("later_filters", "publishes", "unpublished", "unmended_leaves", "entries"):
        if name in values:
            values[name] = values[name] or []
    for name in ("expired", "compared_after"):
        if name in values:
            values[name] = bool(values[name])
    if (storage := values.get("storage")) is not None:
        values["storage"] = StorageState(
            [FileState(**item) for item in storage["files"]],
            [AttributeState(**item) for item in storage["attributes"]],
            [LabelState(**item) for item in storage.get("labels") or ()],
            storage.get("as_of") or 0,
        )
    return kind(**values)


def next_generation(rows: Iterable[TableState]) -> int:
    """The number of a target's next copy or repair, which none of its states had before, be it one
    that was undone.
    """
    return max((state.generation for state in rows), default=0) + 1
