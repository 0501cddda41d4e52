"""What people read at the end of a run: columns of the verb, the stage's own outcome, warnings."""

import io
import json
import os
from datetime import UTC, datetime

import pytest
from rich.console import Console

from waldelta.cli._run_summary import print_summary
from waldelta.errors import ApplyError, LockHeld, QualityFailed
from waldelta.lake.ledger import TargetCut
from waldelta.pipeline import RunResult, StageResult, TableResult
from waldelta.pipeline.run_result import CheckFindings
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    QualityReport,
    TableVerdict,
)


def shown(result: RunResult, stage: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=140)
    print_summary(result, console, stage)
    return console.file.getvalue()


HEADINGS = {
    "consume": (TableResult(inserted=1234, version=7), ["inserted", "skipped", "1,234"],
                ["rows copied"]),
    "sync": (TableResult(rows=99, version=1), ["rows copied", "99", "raw_rows"], ["inserted"]),
    "validate": (TableResult(), ["expectation", "result"], ["rows copied", "inserted"]),
    "maintain": (TableResult(), ["public.t"], ["rows copied", "inserted"]),
}  # fmt: skip


@pytest.mark.parametrize("verb", HEADINGS)
def test_columns_say_what_the_verb_does(verb):
    """Nothing is copied by a check, so nothing says so."""
    table, there, absent = HEADINGS[verb]
    text = shown(RunResult(verb, "r", "succeeded", tables={"public.t": table}))
    assert [word for word in there if word not in text] == []
    assert [word for word in absent if word in text] == []


def test_the_title_of_one_stage_is_how_that_stage_ended():
    """The run isn't over then, but what was asked for is."""
    result = RunResult("consume", "r", "running", {"land": StageResult("succeeded", 1.0)})
    assert "consume r, stage land: succeeded" in shown(result, "land")
    assert "consume r: running" in shown(result)
    result.stages["apply"] = StageResult("failed", 1.0)
    assert "consume r, stage apply: failed" in shown(result, "apply")


def test_the_title_of_a_narrow_table_is_one_line():
    """Maintenance tells no numbers of its tables, and run ids are longer than their names."""
    name = "scheduled__2026-11-25T17:48:19.325406+00:00"
    result = RunResult("maintain", name, "succeeded", tables={"public.t": TableResult()})
    assert shown(result).splitlines()[0] == f"maintain {name}: succeeded"


def test_a_run_that_came_to_no_table_shows_no_empty_one():
    text = shown(RunResult("consume", "r", "failed", {"land": StageResult("failed", 0.1)}))
    assert text.splitlines() == ["consume r: failed", "stages: land 0.1 s (failed)"]


STATES = {
    "stopped": ("public.b", {"public.b": QualityFailed("no")}, ()),
    "failed: ApplyError": ("public.b", {"public.b": ApplyError("no")}, ()),
    "in use by another run": ("public.b", {"public.b": LockHeld("no")}, ()),
    "behind": ("public.[b]", {}, ["public.[b]"]),
}


@pytest.mark.parametrize("verb", ["consume", "sync", "maintain", "decide"])
@pytest.mark.parametrize("state", STATES)
def test_a_table_that_the_run_did_not_change_is_a_row_with_its_state(state, verb):
    """Also one that has no numbers, and where no other table has any."""
    name, failures, others = STATES[state]
    for tables in ({}, {"public.a": HEADINGS["consume"][0]}):
        result = RunResult(verb, "r", "failed", tables=tables)
        result.targets.leave_behind(failures, others)
        (line,) = [line for line in shown(result).splitlines() if name in line]
        assert line.split(maxsplit=1)[1].strip() == state
        assert RunResult.from_json(result.to_json()).targets == result.targets


def test_names_are_whole_in_a_narrow_terminal():
    result = RunResult("consume", "r", "failed", tables={"public.customers": TableResult()})
    result.targets.leave_behind({"warehouse.order_positions": ApplyError("no")})
    console = Console(file=io.StringIO(), width=80)
    print_summary(result, console)
    lines = console.file.getvalue().splitlines()
    (line,) = [line for line in lines if "warehouse.order_positions" in line]
    assert line.endswith("failed: ApplyError  ")


def test_tables_without_a_copy_are_rows_with_their_state():
    result = RunResult("consume", "r", "succeeded")
    result.targets.never_copied, result.targets.needs_sync = ["public.a"], ["public.b"]
    lines = [line.split(maxsplit=1) for line in shown(result).splitlines() if "public" in line]
    expected = [("public.a", "not copied"), ("public.b", "waits for a sync")]
    assert [(name, state.strip()) for name, state in lines] == expected


def judged(success: bool | None, rows: int | None = None, origin: str = "catalog") -> Outcome:
    planned = PlannedExpectation("kind", {"column": "n"}, "critical", origin, "n is positive")
    return Outcome(planned, success, None, rows)


def test_validate_shows_a_verdict_for_each_expectation():
    """Which are met, too: otherwise nobody sees what was judged."""
    outcomes = (judged(True), judged(False, 2, "own"), judged(None))
    result = RunResult("validate", "r", "failed", tables={"public.a": TableResult()})
    result.add_check(QualityReport("r", (TableVerdict("public.a", 1, outcomes, ()),)))
    lines = [line.split("  ") for line in shown(result).splitlines() if "public.a" in line]
    assert [[part.strip() for part in line if part.strip()] for line in lines] == [
        ["public.a", "n is positive", "critical", "met"],
        ["public.a", "n is positive on n", "critical", "not met: 2 rows"],
        ["public.a", "n is positive", "critical", "not evaluated"],
    ]
    assert [one["result"] for one in result.expectations()] == [
        "met", "not met: 2 rows", "not evaluated"
    ]  # fmt: skip


def test_expectations_that_only_warn_are_shown():
    """By every verb that checks, once."""
    result = RunResult("consume", "r", "succeeded", warnings=["public.a: b"])
    result.checked = CheckFindings(warned_expectations=["public.a: b", "public.a: c"])
    lines = shown(result).splitlines()
    expected = ["warning: public.a: b", "warning: public.a: c"]
    assert [line for line in lines if line.startswith("warning")] == expected


def test_warnings_are_shown_and_kept():
    """Whatever brackets a name has."""
    result = RunResult("consume", "r", warnings=["slot 's' [bold] holds back 9 GB"])
    assert "warning: slot 's' [bold] holds back 9 GB" in shown(result)
    assert RunResult.from_json(result.to_json()).warnings == result.warnings


def test_files_that_fit_no_table_are_told():
    """Once, also by a check that is tried again; and no more once they are gone."""
    result = RunResult("consume", "r")
    for notes in (("x.yml fits no table",), ("x.yml fits no table",)):
        result.add_check(QualityReport("r", (), notes=notes))
    expected = (["x.yml fits no table"], ["x.yml fits no table"])
    assert (result.checked.unused_suites, result.warnings) == expected
    assert RunResult.from_json(result.to_json()) == result
    result.add_check(QualityReport("r", ()))
    assert result.checked.unused_suites == []


# The JSON that runs of earlier versions recorded, and that Airflow's operator and pages read.
SLOT = {
    "at": "2026-01-01T12:00:00+00:00",
    "wal_status": "reserved",
    "lag_bytes": 900,
    "retained_bytes": 1024,
    "safe_wal_size": None,
}
ERROR = {"class": "ApplyError", "message": "no", "retryable": False}
STORED = {
    "verb": "consume",
    "run_id": "r",
    "status": "failed",
    "stages": {"apply": {"status": "failed", "seconds": 2.0, "detail": "1 table changed",
                         "error": ERROR, "runner": "Spark"}},
    "tables": {"public.a": {"inserted": 1, "updated": 2, "deleted": 3, "skipped": 4,
                            "truncated": True, "version": 7, "rows": None, "completed": 5,
                            "quarantined": 6, "raw_rows": 8, "compared": None, "unchanged": None,
                            "differing": None, "in_flight": None, "lacking": None}},
    "changes": 3,
    "start_lsn": "0/10",
    "end_lsn": "0/20",
    "lag_bytes": 5,
    "landed_as_of": 731,
    "report": "/d/index.html",
    "failed_expectations": ["public.a: f"],
    "warned_expectations": ["public.a: w"],
    "is_apply_reported": True,
    "not_applied": ["public.b"],
    "table_errors": {"public.b": ERROR},
    "needs_sync": ["public.c"],
    "never_copied": ["public.d"],
    "unpublished": ["public.e"],
    "new_tables": ["public.h"],
    "external_commits": ["public.f"],
    "passed": ["public.g"],
    "corrected": [],
    "warnings": ["look"],
    "unused_suites": ["x.yml"],
    "slot_critical": ["slot 's' is lost"],
    "unreadable": "no",
    "store_requests": 0,
    "source": {"slot_calls": 1, "wal_read_bytes": 2, "decoded_bytes": 3, "spilled_bytes": 4,
               "streamed_bytes": 5, "slot_seconds": 6.0, "snapshot_seconds": 7.0, "xmin_age": 8,
               "timeouts": 9, "server_seconds": 10.0, "database_temp_bytes": 11},
    "as_of": "2026-01-01T12:00:00+00:00",
    "slot_before": SLOT,
    "slot_after": SLOT,
    "error": ERROR,
}  # fmt: skip


def test_the_stored_form_of_a_result():
    """Its keys and values stay, whatever parts a result has in memory."""
    assert json.loads(RunResult.from_json(json.dumps(STORED)).to_json()) == STORED


def test_the_stored_form_has_nothing_of_the_attempt_alone():
    """The next attempt continues from it, and would add the same changes once more."""
    result = RunResult("consume", "r")
    result.add_target(TargetCut("public.a", 1, 7, inserted=1))
    result.attempt.begun = datetime(2026, 1, 1, tzinfo=UTC)
    assert list(result.attempt.done) == ["public.a"]
    assert json.loads(result.to_json()).keys() == STORED.keys()


def test_two_cuts_of_a_run_truncate_a_table():
    """It is truncated, with the other counts of both, at the version of the later one."""
    result = RunResult("consume", "r")
    for version in (7, 8):
        result.add_target(TargetCut("public.a", 1, version, inserted=2, truncated=True))
    (done,) = result.attempt.done.values()
    assert done == TargetCut("public.a", 1, 8, inserted=4, truncated=True)
    assert result.tables["public.a"] == TableResult(inserted=4, truncated=True, version=8)
    assert done.truncated is result.tables["public.a"].truncated is True


def test_a_result_of_an_earlier_version_lacks_keys():
    """The source's load, and the slot's states; the rest has its defaults."""
    known = RunResult.from_json('{"verb": "sync", "run_id": "r", "stages": {}, "tables": {}}')
    assert known == RunResult("sync", "r")


def test_a_result_goes_into_a_pipe_and_leaves_it_one(tmp_path):
    """Run by root, a file that takes the place of /dev/null would break the machine."""
    pipe, result = tmp_path / "pipe", RunResult("consume", "r1", "succeeded")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result.write(pipe)
        assert pipe.is_fifo()
        assert json.loads(os.read(reader, 65536)) == json.loads(result.to_json())
    finally:
        os.close(reader)
