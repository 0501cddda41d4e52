"""Waiting for locks of other runs: for which errors, how long, and that it is visible."""

import pytest

from tests.cases import cases
from waldelta.errors import ApplyError, LockHeld, SchemaChanged, SyncFailed, TableBusy
from waldelta.pipeline import advisory_locks, waiting_for_locks
from waldelta.pipeline.advisory_locks import is_of_locks

HELD = LockHeld("lock 'target t' is held by another run, pid 7")


def several(*causes: Exception) -> ApplyError:
    error = ApplyError("several tables failed")
    error.causes = causes
    return error


OF_LOCKS = [
    ("a lock", HELD, True),
    ("locks of several tables", several(HELD, HELD), True),
    ("of tables that couldn't be copied", SyncFailed({"a": HELD}), True),
    ("a lock beside another error", several(HELD, SchemaChanged("a: retyped")), False),
    ("a table locked by the application", TableBusy("a is locked"), False),
    ("an error without causes", ApplyError("no room"), False),
]


@cases("err, waits", OF_LOCKS)
def test_only_locks_of_other_runs_are_waited_for(err, waits):
    assert is_of_locks(err) is waits


def test_an_attempt_begins_again_until_the_lock_is_free(monkeypatch, caplog):
    monkeypatch.setattr(advisory_locks, "_PAUSE_S", 0.0)
    caplog.set_level("INFO")
    outcomes, noted = [HELD, HELD, "done"], []

    def attempt():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert waiting_for_locks(60, attempt, noted.append) == "done"
    assert noted == [str(HELD)] * 2
    assert f"waiting for another run, for at most 60 s more: {HELD}" in caplog.text


def test_without_time_to_wait_the_error_is_raised_at_once():
    noted = []

    def attempt():
        raise HELD

    with pytest.raises(LockHeld, match="pid 7"):
        waiting_for_locks(0, attempt, noted.append)
    assert noted == []
