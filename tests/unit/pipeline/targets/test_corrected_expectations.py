"""Which targets failed their last check by own expectations that were edited since."""

from pathlib import Path

import pytest

from tests.cases import cases
from tests.support.bookkeeping import append_by_kind, minutes
from tests.support.pipelines import job_of, whole_database
from waldelta.config.expectation_files import read_own_suites
from waldelta.lake.ledger import CAN_BE_JUDGED, ExpectationResult, SlotMove, TableState
from waldelta.pipeline.targets.corrected_expectations import find_corrected

KIND = "expect_column_values_to_not_be_null"
BEFORE, AFTER = (
    f"expectations: [{{type: {KIND}, kwargs: {{column: {name}}}}}]" for name in ("a", "b")
)
TABLES = ("app.t", "old.t", "app.u")


@pytest.fixture
def job(lake, tmp_path):
    """A pipeline with three synced tables, of which the publication has lost old.t."""
    (tmp_path / "suites").mkdir()
    job = job_of(whole_database(lake, quality={"suites": str(tmp_path / "suites")}))
    job.ledger.append(SlotMove(minutes(-9), "setup", "created", "s", "1", 1, "1", 16))
    states = [TableState(minutes(-8), "s", name, 1, "synced", incarnation="1") for name in TABLES]
    append_by_kind(job.ledger, states)
    return job


def write(job, name, text):
    (Path(job.pipeline.quality.suites) / name).write_text(text)


def check(job, success, minute=1, kind=KIND, origin="own", **more):
    """Record a result of app.t's check by the files as they are now."""
    own = read_own_suites(Path(job.pipeline.quality.suites), TABLES)
    fields = {"version": 1, "suite": own.digest_of("app.t")} | more
    job.ledger.append(
        ExpectationResult(
            minutes(minute), "r", "app.t", kind, "m", "critical", origin, success, None, 1, **fields
        )
    )


CASES = [
    ("failed", [{"success": False}], True),
    ("not evaluated", [{"success": None}], True),
    ("its file was refused", [{"success": None, "kind": CAN_BE_JUDGED, "origin": "catalog"}], True),
    ("met", [{"success": True}], False),
    ("met since", [{"success": False}, {"success": True, "minute": 2}], False),
    ("failed since", [{"success": True}, {"success": False, "minute": 2}], True),
    ("an expectation of the catalog", [{"success": False, "origin": "catalog"}], False),
    ("a gate before the merge", [{"success": False, "version": None, "suite": None}], False),
    ("a check of an earlier version", [{"success": False, "suite": None}], False),
]


@cases("results, is_asked", CASES)
def test_edited_expectations_that_failed_are_asked_again(job, results, is_asked):
    write(job, "app.t.yml", BEFORE)
    for each in results:
        check(job, **each)
    assert find_corrected(job, ["app.t", "app.u"]) == []
    write(job, "app.t.yml", AFTER)
    assert find_corrected(job, ["app.t", "app.u"]) == (["app.t"] if is_asked else [])
    assert find_corrected(job, ["app.u"]) == []


def test_a_file_that_fits_two_tables_is_no_reason_for_each_run(job):
    """The check refuses it for both, also if only one of them is still replicated."""
    write(job, "t.yml", BEFORE)
    check(job, None, kind=CAN_BE_JUDGED, origin="catalog")
    assert find_corrected(job, ["app.t"]) == []
    write(job, "app.t.yml", BEFORE)
    (Path(job.pipeline.quality.suites) / "t.yml").unlink()
    assert find_corrected(job, ["app.t"]) == ["app.t"]
