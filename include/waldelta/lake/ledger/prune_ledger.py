"""Decides which ledger rows may be dropped: those past retention that no recovery, watermark or cut
needs.

Each rule is pure: it takes the rows of one table in their order, and the moment before which rows
are old, and returns a verdict for each row. Age alone never decides on a row that correctness
needs, so a wrong clock can't lose any.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from waldelta.lake.ledger.check_records import (
    ExpectationResult,
    PassedSuite,
    Profile,
    Reconciliations,
    keep_profiles,
    keep_results,
    keep_suites,
)
from waldelta.lake.ledger.decisions import Decisions
from waldelta.lake.ledger.ledger import OF_BATCHES, Ledger
from waldelta.lake.ledger.records import (
    COPYING,
    SYNCED,
    BatchCut,
    ColumnState,
    Gap,
    ReadWindowSetting,
    Run,
    SlotMove,
    TableState,
)


def prune_ledger(ledger: Ledger, oldest: datetime, first_batch: int | None) -> int:
    """Drop rows older than ``oldest`` that nothing needs, and compact; returns how many were
    dropped.

    ``first_batch`` is the lowest batch that the change log still has.
    """
    return (
        ledger.table(SlotMove).prune(lambda rows: keep_moves(rows, oldest, first_batch))
        + ledger.table(TableState).prune(lambda rows: keep_states(rows, oldest))
        + ledger.table(BatchCut).prune(lambda rows: keep_cuts(rows, oldest, first_batch))
        + ledger.table(Run).prune(lambda rows: keep_newest(rows, oldest))
        + ledger.table(Gap).prune(lambda rows: keep_gaps(rows, oldest))
        + ledger.table(ReadWindowSetting).prune(lambda rows: keep_newest(rows, oldest))
        + Decisions(ledger.lake).prune(oldest)
        + Reconciliations(ledger.lake).prune(oldest)
        + ledger.table(ExpectationResult).prune(lambda rows: keep_results(rows, oldest))
        + ledger.table(Profile).prune(keep_profiles)
        + ledger.table(PassedSuite).prune(keep_suites)
    )


def keep_moves(
    moves: Sequence[SlotMove], oldest: datetime, first_batch: int | None = None
) -> list[bool]:
    """Returns which rows stay: those since ``oldest``, a slot's incarnations, and the rows by which
    recovery detects a gap.

    The latter are the furthest intent of each incarnation on each timeline, and the rows on its
    last batch. Rows on all batches still in the change log, from ``first_batch`` on, are also kept:
    they show whether the log lacks one.
    """
    ordered = sorted(enumerate(moves), key=lambda pair: pair[1].lsn)
    furthest = {(m.slot, m.incarnation, m.timeline): i for i, m in ordered}
    batches = sorted(
        (m.batch, i) for i, m in enumerate(moves) if m.event == "intent" and m.batch is not None
    )
    last = {(moves[i].slot, moves[i].incarnation): batch for batch, i in batches}
    of_last = {
        i
        for i, m in enumerate(moves)
        if m.batch is not None and last.get((m.slot, m.incarnation)) == m.batch
    }
    in_log = {
        i for i, m in enumerate(moves) if first_batch is not None and (m.batch or 0) >= first_batch
    }
    needed = {*furthest.values(), *of_last, *in_log}
    return [m.at >= oldest or m.event not in OF_BATCHES or i in needed for i, m in enumerate(moves)]


def keep_states(states: Sequence[TableState], oldest: datetime) -> list[bool]:
    """Returns which rows stay: those since ``oldest``, each target's latest state, and the states
    that describe its data.

    The latter are its latest complete copy and that copy's beginning, and the first state with each
    set of columns.
    """
    needed = set({state.table_name: i for i, state in enumerate(states)}.values())
    complete = [(i, state) for i, state in enumerate(states) if state.status == SYNCED]
    newest = {state.table_name: i for i, state in complete}
    needed |= set(newest.values())
    copies = {(name, states[i].generation) for name, i in newest.items()}
    needed |= {
        i
        for i, s in enumerate(states)
        if s.status == COPYING and (s.table_name, s.generation) in copies
    }
    columns: dict[str, list[ColumnState]] = {}
    for i, state in complete:
        if columns.get(state.table_name) != state.columns:
            columns[state.table_name] = state.columns
            needed.add(i)
    return [state.at >= oldest or i in needed for i, state in enumerate(states)]


def keep_cuts(cuts: Sequence[BatchCut], oldest: datetime, first_batch: int | None) -> list[bool]:
    """Returns which rows stay: those since ``oldest``, the newest cut, on which watermarks depend,
    and the cuts around the change log's batches.

    The last are the cuts of batches that are still in the log, and the cut where they begin.
    """
    is_of_log = [first_batch is not None and cut.batch >= first_batch - 1 for cut in cuts]
    return [cut.at >= oldest or is_of_log[i] or i == len(cuts) - 1 for i, cut in enumerate(cuts)]


def keep_gaps(gaps: Sequence[Gap], oldest: datetime) -> list[bool]:
    """Returns which rows stay: those since ``oldest``, and the newest of each slot incarnation,
    because an open gap must still be closed.
    """
    newest = set({(gap.slot, gap.incarnation): i for i, gap in enumerate(gaps)}.values())
    return [gap.at >= oldest or i in newest for i, gap in enumerate(gaps)]


def keep_newest(rows: Sequence[Run | ReadWindowSetting], oldest: datetime) -> list[bool]:
    """Returns which rows stay: those since ``oldest``, and the newest."""
    return [row.at >= oldest or i == len(rows) - 1 for i, row in enumerate(rows)]
