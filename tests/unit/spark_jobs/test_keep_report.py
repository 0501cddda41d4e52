"""What a check enters into the lake's bookkeeping."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spark_jobs.expectation_suite import PlannedExpectation
from spark_jobs.judged_before import Known
from spark_jobs.keep_report import keep_report
from spark_jobs.verdict import Outcome, QualityReport, TableVerdict
from waldelta.expectation_results import read_expectation_results
from waldelta.ledger import Ledger
from waldelta.ledger_rows import now

PLANNED = (
    PlannedExpectation("a", {}, "critical", "catalog", "m"),
    PlannedExpectation("b", {}, "critical", "catalog", "n"),
)


def report(run_id, version, *, success):
    found = tuple(Outcome(planned, success, None, None) for planned in PLANNED)
    return QualityReport(run_id, (TableVerdict("public.t", version, found, ("c: not checked",), None, 0.0),))


@pytest.mark.parametrize(
    ("version", "expected"), [(3, ["run"]), (4, ["run", "night"]), (5, ["run", "night"]), (None, ["run", "night"])]
)
def test_a_verdict_on_an_older_version_is_not_the_last_word(lake, version, expected):
    """A run has judged a later one while maintenance was looking."""
    ledger, began = Ledger(lake), now() - timedelta(seconds=9)
    keep_report(ledger, report("run", 4, success=False), Known(), {})
    keep_report(ledger, report("night", version, success=True), Known(), {}, began)
    assert list(dict.fromkeys(row.run_id for row in read_expectation_results(lake))) == expected


def test_what_was_not_checked_is_said_once(lake):
    keep_report(Ledger(lake), report("run", 4, success=True), Known(), {})
    assert [row.not_checked for row in read_expectation_results(lake)] == [["c: not checked"], None]
