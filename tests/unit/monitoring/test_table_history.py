"""What happened to a table, from the ledger's rows."""

from dataclasses import replace
from datetime import timedelta

from tests.cases import cases
from tests.support.bookkeeping import NOON
from waldelta.lake import Lake
from waldelta.lake.ledger import ExternalCommit, Ledger, Reconciliation, Run, TableState, TargetCut
from waldelta.monitoring.decisions import Decided
from waldelta.monitoring.run_details import read_progress
from waldelta.monitoring.table_history import table_events
from waldelta.monitoring.table_list import read_rows_by_run

NAME = "public.t"
COMMIT = ExternalCommit(7, "DELETE", "notebook", NOON + timedelta(hours=3))


def state(hours, status, generation=1, **more):
    more.setdefault("table_name", NAME)
    at = NOON + timedelta(hours=hours)
    return TableState(at, f"r{hours}", generation=generation, status=status, **more)


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


PROGRESS = [
    ("not begun", [], None),
    ("all done", [state(0, "copying"), state(1, "synced", rows=500)], (1, 500, 500, 5.0, 0.0)),
    ("copied before", [state(0, "copying", 2)], (0, 0, 300, None, None)),
    ("never copied", [state(0, "copying", table_name="public.u")], (0, 0, None, None, None)),
]


@cases("states, expected", PROGRESS)
def test_how_far_a_copy_is(tmp_path, states, expected):
    """What it comes to is known once each table in work was copied before."""
    ledger = Ledger(Lake((tmp_path / "lake").as_uri()))
    ledger.append(state(-9, "copying"))
    ledger.append(state(-8, "synced", rows=300, snapshot="s"))
    for one in states:
        ledger.append(replace(one, run_id="sync"))
    found = read_progress(ledger, "sync", 100.0)
    names = ("done", "rows", "expected", "rows_per_second", "remaining_seconds")
    assert (found and tuple(getattr(found, name) for name in names)) == expected


def test_a_copy_counts_the_tables_that_it_has_not_reached(tmp_path):
    ledger = Ledger(Lake((tmp_path / "lake").as_uri()))
    ledger.append(replace(state(1, "copying"), run_id="sync"))
    found = read_progress(ledger, "sync", 100.0, [NAME, "public.z"])
    assert (found.done, found.count, found.missing) == (0, 2, ("public.z",))
    assert (found.new, found.expected) == ((NAME,), None)


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
