"""What happened to a table: copies, changes of its columns, decisions, external commits, and
comparisons that found something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow.compute as pc

from waldelta.lake.ledger import COPYING, SYNCED, Ledger, Reconciliation, TableState
from waldelta.lake.ledger.check_records import ANSWERS
from waldelta.lake.ledger.records import rows_of
from waldelta.monitoring.decisions import Decided
from waldelta.quantities import counted

_COMPARED = (
    "at", "run_id", "table_name", "status", "position", "version", "source_rows", "target_rows",
    "missing", "extra", "different", "doubled", "repaired", "skipped_columns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableEvent:
    """What happened to a table at a time: ``text``, with the status or verdict that it led to.

    ``state`` is that status as the ledger has it, ``word`` as a page prints it.
    """

    at: datetime
    state: str
    word: str
    text: str
    run_id: str = ""


def read_comparisons(ledger: Ledger, table: str) -> list[Reconciliation]:
    """Returns a table's comparisons that had a result, oldest first, without differing rows."""
    rows = ledger.table(Reconciliation).scan(_COMPARED, None, pc.field("table_name") == table)
    return [row for row in rows_of(Reconciliation, rows) if row.status in ANSWERS]


def table_events(
    states: Sequence[TableState], decided: Iterable[Decided], compared: Iterable[Reconciliation]
) -> list[TableEvent]:
    """Returns a table's events, newest first; ``states`` are oldest first."""
    events = [*_of_states(states), *map(_of_decision, decided), *_of_comparisons(compared)]
    return sorted(events, key=lambda event: event.at, reverse=True)


def _of_states(states: Sequence[TableState]) -> Iterator[TableEvent]:
    copied, commits, why = 0, set(), None
    for state in states:
        copy = f"copy generation {state.generation}"
        for commit in state.external_commits:
            if (key := (state.generation, commit.version)) not in commits:
                commits.add(key)
                what = f"{commit.operation} by {commit.by}, Delta version {commit.version}"
                yield TableEvent(commit.at or state.at, "warning", "external commit", what)
        if state.status == SYNCED and state.generation > copied:
            copied = state.generation
            rows = f"{counted(state.rows, 'row')}, {copy}"
            text = f"{rows}: {state.reason}" if state.reason else rows
            yield TableEvent(state.at, SYNCED, "copied", text, state.run_id)
        elif state.status == SYNCED:
            if state.reason and state.reason != why:
                yield TableEvent(state.at, "unknown", "changed", state.reason, state.run_id)
        elif state.status != COPYING or state is states[-1]:
            text = f"{copy}: {state.reason}" if state.reason else copy
            yield TableEvent(
                state.at, state.status, state.status.replace("_", " "), text, state.run_id
            )
        why = state.reason


def _of_decision(decision: Decided) -> TableEvent:
    on = decision.scope or counted(decision.rows or 0, "row")
    why = f": {decision.reason}" if decision.reason else ""
    text = f"{on} by {decision.by or 'unknown'}{why}"
    return TableEvent(decision.at, "unknown", decision.what, text, decision.run_id)


def _of_comparisons(compared: Iterable[Reconciliation]) -> Iterator[TableEvent]:
    """Yields comparisons that found or repaired something, and the first that found nothing
    afterwards.
    """
    status = None
    for row in compared:
        if row.status != "equal" or status not in (None, "equal"):
            rows = counted(row.differing or row.repaired, "row") if row.status != "equal" else ""
            text = f"{rows} of {counted(row.source_rows or 0, 'row')}" if rows else "to the source"
            yield TableEvent(row.at, row.status, row.status, text, row.run_id)
        status = row.status
