"""The trend of a table's expectations on its page."""

import re
from datetime import timedelta

from tests.support.bookkeeping import NOON
from waldelta.lake import Lake
from waldelta.lake.ledger import ExpectationResult, Ledger
from waldelta.stages.check.reports.trend import read_trends
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation

HOSTILE = "<script>alert(1)</script>"


def result(meaning, at, success, severity="critical", table="public.t", version=1):
    fixed = (meaning, severity, "key", success, None, 0, version)
    return ExpectationResult(at, f"run {at}", table, "kind", *fixed)


def outcome(meaning, success):
    return Outcome(PlannedExpectation("kind", {}, "critical", "key", meaning), success, None, 0)


def test_the_trend_ends_with_this_check(tmp_path):
    """Of checks of the last days, by meaning; gates' results aren't among them."""
    ledger = Ledger(Lake(f"file://{tmp_path}"))
    times = [NOON + timedelta(hours=hour) for hour in range(4)]
    for rows in (
        [result(HOSTILE, NOON - timedelta(days=30), False)],
        [result(HOSTILE, times[0], True), result("b", times[0], False, "warning")],
        [result(HOSTILE, times[1], None), result("b", times[1], True)],
        [result(HOSTILE, times[2], False, version=None)],
        [result(HOSTILE, times[2], False, table="public.other")],
    ):
        ledger.append_all(rows)
    trends = read_trends(ledger, ["public.t", "public.new"], times[3])
    text = trends["public.t"].with_outcomes([outcome("b", True), outcome(HOSTILE, False)], times[3])
    assert HOSTILE not in text
    assert "the last 3 checks" in text
    rows = re.findall(r"<tr>.*?</tr>", text)[1:]
    assert [re.findall(r'class="(\w+)"', row) for row in rows] == [
        ["passed", "unknown", "failed"],
        ["warning", "passed", "passed"],
    ]
    assert trends["public.new"].with_outcomes([outcome("b", True)], times[3]) == ""


def test_of_results_with_one_meaning_the_worst_counts():
    """Limits of one domain share it."""
    trends = read_trends(Ledger(Lake("file:///nowhere")), ["t"], NOON)
    trend = trends["t"]
    for success in (True, False, None):
        trend.add("a", NOON, "critical", success=success)
    assert trend.verdicts == {"a": {NOON: "failed"}}
