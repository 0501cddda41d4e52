"""Tables that a gate stopped, as the pages know them from a lake's bookkeeping alone."""

import json
from dataclasses import replace

import pytest

from tests.support.bookkeeping import minutes, pipeline, result, run
from waldelta.errors import ConfigError, StateError
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, SlotMove, TableState
from waldelta.monitoring.overview import OVERVIEW, read_glance
from waldelta.monitoring.stopped_tables import (
    check_stopped,
    read_failures,
    read_stopped,
    unmet_in_run,
)
from waldelta.pipeline import Job, SourceConnections
from waldelta.pipeline.targets.quarantined_rows import QUARANTINE, STOP

STUCK = json.dumps({"stages": {"land": {}, "apply": {}}, "not_applied": ["public.a"]})
DOWN = json.dumps(
    {"stages": {"land": {}}, "error": {"class": "SourceUnreachable", "message": "no connection"}}
)


@pytest.fixture
def book(lake):
    """A lake whose table ``public.a`` was stopped by the run of minute 2."""
    book = Ledger(Lake(lake))
    book.append(SlotMove(minutes(-9), "setup", "created", "s", "1", 1, "1", 16))
    book.append(TableState(minutes(-8), "sync", "public.a", 1, "synced", incarnation="1"))
    book.append(run("stuck", minutes(2), "failed", result=STUCK))
    found = result(
        minutes(2), "stuck", "public.a", False, meaning=f"{STOP}amount is positive", count=2
    )
    Ledger(Lake(lake)).append_all([replace(found, version=None)])
    return book


def stopped(book):
    return [one.table_name for one in read_stopped(pipeline(book.lake.root), book)]


def told(book):
    glance = read_glance(pipeline(book.lake.root), book, minutes(120), OVERVIEW)
    return [item.text for item in glance.attention]


def test_a_table_stays_stopped_while_no_run_comes_to_it(book):
    """While the source can't be reached, the pages still say that a gate stops it."""
    down = run("down", minutes(3), "failed", result=DOWN, applied=None)
    for rows in ([down], [replace(down, run_id=f"{n}", at=minutes(4 + n)) for n in range(29)]):
        book.append_all(rows)
        assert stopped(book) == ["public.a"]
        assert any(
            text.startswith("public.a: stopped by a gate (amount is positive)")
            for text in told(book)
        )


def test_a_retry_that_the_gate_stops_too_changes_nothing(book):
    """It judges what waits and records that; what is met by now stops nothing any more."""
    again = replace(
        result(minutes(3), "retry", "public.a", False, meaning=f"{STOP}amount is positive"),
        version=None,
    )
    book.append_all([again])
    (one,) = read_stopped(pipeline(book.lake.root), book)
    assert (one.table_name, one.since) == ("public.a", minutes(2))
    book.append_all([replace(again, at=minutes(4), success=True)])
    assert stopped(book) == []


def test_a_slot_that_was_torn_down_holds_nothing_back(book):
    """The lake stays, and so do its pages."""
    book.append(SlotMove(minutes(3), "teardown", "dropped", "s", "1", 1, "1", 16))
    assert stopped(book) == []
    told(book)


def test_a_run_keeps_the_examples_of_the_gates_that_stopped_its_tables(book):
    """Also once a later run has found them to be met; a gate that a retry met isn't among them."""
    text = json.dumps({"key": {"id": "7"}, "values": {"amount": "-1"}})
    for name, at, success in (("amount", 2, False), ("total", 2, False), ("total", 3, True)):
        meaning = f"{STOP}{name} is positive"
        judged = result(minutes(at), "stuck", "public.a", success, meaning=meaning, count=1)
        book.append_all([replace(judged, version=None, examples=[text])])
    later = result(minutes(9), "later", "public.a", meaning=f"{STOP}amount is positive")
    book.append_all([replace(later, version=None)])
    ((table, (unmet,)),) = unmet_in_run(book, "stuck", ["public.a", "public.b"]).items()
    assert (table, unmet.meaning) == ("public.a", "amount is positive")
    assert unmet.examples == ({"key": {"id": "7"}, "values": {"amount": "-1"}},)
    assert unmet_in_run(book, "stuck", ["public.b"]) == {}


def test_only_a_stopped_table_can_be_released(book, lake):
    """Another table is a mistake of the operator, who would wait for nothing."""
    book.append(TableState(minutes(-8), "sync", "public.b", 1, "synced", incarnation="1"))
    job = Job(pipeline(lake), SourceConnections(pipeline(lake).source), "release")
    check_stopped(job, ["public.a"])
    for tables in (["public.b"], ["public.a", "public.b"]):
        with pytest.raises(StateError, match=r"public\.b: no gate stops it"):
            check_stopped(job, tables)
    with pytest.raises(ConfigError, match=r"public\.c"):
        check_stopped(job, ["public.c"])


def test_a_release_does_not_help_rows_that_are_set_aside(book, lake):
    found = result(minutes(3), "stuck", "public.a", True, meaning=f"{STOP}amount is positive")
    aside = result(minutes(3), "stuck", "public.a", False, meaning=f"{QUARANTINE}x", count=20_000)
    book.append_all([replace(one, version=None) for one in (found, aside)])
    job = Job(pipeline(lake), SourceConnections(pipeline(lake).source), "release")
    with pytest.raises(StateError, match=r"public\.a: an expectation with gate: quarantine"):
        check_stopped(job, ["public.a"])


def test_a_table_that_was_copied_since_then_is_not_stopped(book):
    """The copy has all rows, whatever a gate said of the changes."""
    book.append(TableState(minutes(3), "sync", "public.a", 2, "copying", incarnation="1"))
    assert stopped(book) == ["public.a"]
    book.append(
        TableState(minutes(4), "sync", "public.a", 2, "synced", incarnation="1", snapshot="7:7:")
    )
    assert stopped(book) == []


def test_an_error_keeps_a_table_behind_until_a_run_applies_it(book):
    error = {"class": "ApplyError", "message": "public.a: no", "retryable": False}
    failed = json.loads(STUCK) | {"table_errors": {"public.a": error}}
    book.append(run("failed", minutes(4), "failed", result=json.dumps(failed)))
    (found,) = read_failures(book).values()
    assert (found["class"], found["message"], found["run_id"]) == (
        "ApplyError", "public.a: no", "failed"
    )  # fmt: skip
    book.append(run("fine", minutes(5)))
    assert read_failures(book) == {}
