"""What happened to a table, from the ledger's rows."""

from datetime import timedelta

from tests.support.bookkeeping import NOON
from waldelta.lake import Lake
from waldelta.lake.ledger import ExternalCommit, Ledger, Reconciliation, Run, TableState, TargetCut
from waldelta.monitoring.decisions import Decided
from waldelta.monitoring.table_history import table_events
from waldelta.monitoring.table_list import read_rows_by_run

NAME = "public.t"
COMMIT = ExternalCommit(7, "DELETE", "notebook", NOON + timedelta(hours=3))


def state(hours, status, generation=1, **more):
    return TableState(NOON + timedelta(hours=hours), f"r{hours}", NAME, generation, status, **more)


def compared(hours, status, **more):
    return Reconciliation(NOON + timedelta(hours=hours), f"c{hours}", NAME, status, **more)


def test_events_are_told_once_newest_first():
    """A copy's begin, an unchanged state and an equal comparison are no events."""
    states = [
        state(0, "copying"),
        state(1, "synced", rows=5),
        state(2, "synced", reason="column b was added"),
        state(4, "synced", reason="column b was added", external_commits=[COMMIT]),
        state(5, "synced", reason="column b was added", external_commits=[COMMIT]),
        state(8, "failed", 2, reason="no key"),
        state(9, "copying", 2),
    ]
    results = [
        compared(2, "equal"),
        compared(6, "different", missing=1, different=1, source_rows=9),
        compared(7, "repaired", repaired=2, source_rows=9),
        compared(7.5, "equal"),
        compared(9, "equal"),
    ]
    decided = [Decided(NOON + timedelta(hours=10), "discarded", NAME, "ann", "noise", "d", rows=2)]
    events = table_events(states, decided, results)
    assert [event.at for event in events] == sorted((event.at for event in events), reverse=True)
    assert [(event.word, event.text) for event in reversed(events)] == [
        ("copied", "5 rows, copy generation 1"),
        ("changed", "column b was added"),
        ("external commit", "DELETE by notebook, Delta version 7"),
        ("different", "2 rows of 9 rows"),
        ("repaired", "2 rows of 9 rows"),
        ("equal", "to the source"),
        ("failed", "copy generation 2: no key"),
        ("copying", "copy generation 2"),
        ("discarded", "2 rows by ann: noise"),
    ]


def test_rows_by_run_add_up_attempts_of_one_table(tmp_path):
    ledger = Ledger(Lake((tmp_path / "lake").as_uri()))
    for n, run_id in enumerate(("a", "a", "b", "c")):
        targets = [TargetCut(NAME, 1, n, inserted=n + 1), TargetCut("public.u", 1, n, deleted=9)]
        at = NOON + timedelta(hours=n)
        ledger.append(Run(at, run_id, "consume", "succeeded", targets=targets[run_id == "c" :]))
    rows = read_rows_by_run(ledger, NAME, NOON - timedelta(days=1), 5)
    assert [(row.run_id, row.operations.inserted, row.operations.deleted) for row in rows] == [
        ("b", 3, 0),
        ("a", 3, 0),
    ]
    assert [row.run_id for row in read_rows_by_run(ledger, NAME, NOON, 1)] == ["b"]
