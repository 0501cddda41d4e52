"""What a check enters into the lake's bookkeeping."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.support.bookkeeping import read_expectation_results
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    DISCARDED,
    WAITING,
    Decision,
    Decisions,
    Ledger,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import describe_unknown, newest_versions
from waldelta.pipeline.targets import quarantined_rows as quarantined
from waldelta.stages.check import check as reports
from waldelta.stages.check.check import keep_report
from waldelta.stages.check.check_run import CheckHistory
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    QualityReport,
    SourceRules,
    TableVerdict,
)
from waldelta.stages.check.suite.kinds import plan_suite

PLANNED = (
    PlannedExpectation("a", {}, "critical", "catalog", "m"),
    PlannedExpectation("b", {}, "critical", "catalog", "n"),
)


def report(run_id, version, *, success):
    found = tuple(Outcome(planned, success, None, None) for planned in PLANNED)
    return QualityReport(
        run_id, (TableVerdict("public.t", version, found, ("c: not checked",), None, 0.0),)
    )


@pytest.mark.parametrize("late", [False, True], ids=["before it looks", "once it has looked"])
@pytest.mark.parametrize(
    ("version", "expected"),
    [(3, ["run"]), (4, ["run", "night"]), (5, ["run", "night"]), (None, ["run", "night"])],
)
def test_a_verdict_on_an_older_version_is_not_the_last_word(
    lake, monkeypatch, version, expected, late
):
    """A run has judged a later one while maintenance was looking."""
    ledger, began = Ledger(Lake(lake)), now() - timedelta(seconds=9)
    runs = [report("run", 4, success=False)]
    if not late:
        keep_report(ledger, runs.pop(), CheckHistory(), {})

    def look(*asked):
        found = newest_versions(*asked)
        if runs:
            keep_report(ledger, runs.pop(), CheckHistory(), {})
        return found

    monkeypatch.setattr(reports, "newest_versions", look)
    keep_report(ledger, report("night", version, success=True), CheckHistory(), {}, began)
    assert list(dict.fromkeys(row.run_id for row in read_expectation_results(lake))) == expected


def test_what_was_not_checked_is_said_once(lake):
    keep_report(Ledger(Lake(lake)), report("run", 4, success=True), CheckHistory(), {})
    assert [row.not_checked for row in read_expectation_results(lake)] == [["c: not checked"], None]


def lacking(key, status=WAITING):
    return Decision(now(), "r", status, "public.t", 1, 1, key, ["big"])


def told(lake):
    """What was said last of rows that lack values, and by whom."""
    last = [row for row in read_expectation_results(lake) if row.expectation == ALL_VALUES_KNOWN][
        -1
    ]
    return last.run_id, last.success, last.observed


@pytest.mark.parametrize(
    ("counted", "left", "expected"),
    [
        (2, 2, ("check", False, describe_unknown(2))),
        (2, 1, ("check", False, describe_unknown(1))),
        (2, 0, ("check", True, describe_unknown(0))),
        (0, 1, ("check", False, describe_unknown(1))),
    ],
)
def test_rows_discarded_while_a_check_looks_are_counted_as_they_are_since(
    lake, counted, left, expected
):
    """Who discarded them has told that before the check enters what it had counted."""
    state = TableState(now(), "s", "public.t", 1, "synced", key_columns=["id"])
    ledger = Ledger(Lake(lake))
    ledger.append(state)
    ledger.append(
        replace(state, at=now(), generation=2, status="copying")
    )  # which leaves the target as it was
    Decisions(Lake(lake)).add(
        [
            *(lacking(str(n)) for n in range(3)),
            *(lacking(str(n), DISCARDED) for n in range(left, 3)),
        ]
    )
    suite = plan_suite(state, ["id"], None, SourceRules(unknown_rows=counted))
    (planned,) = (p for p in suite.expectations if p.type == ALL_VALUES_KNOWN)
    found = Outcome(planned, planned.kwargs["is_met"], planned.kwargs["observed"], None)
    verdict = TableVerdict("public.t", 4, (found,), (), None, 0.0)
    keep_report(ledger, QualityReport("check", (verdict,)), CheckHistory(), {"public.t": state})
    assert told(lake) == expected


def test_who_tells_between_anothers_count_and_its_entry_has_the_last_word(lake, monkeypatch):
    """A repair tells once it has let the target go: rows may be discarded at that moment."""
    ledger, append = Ledger(Lake(lake)), Ledger.append_all
    ledger.append(TableState(now(), "s", "public.t", 1, "synced"))
    Decisions(Lake(lake)).add([lacking("1"), lacking("2")])

    def late(*entry):
        monkeypatch.setattr(Ledger, "append_all", append)
        Decisions(Lake(lake)).add([lacking("1", DISCARDED)])
        quarantined.record_unknown(ledger, "discard", {"public.t": None})
        append(*entry)

    monkeypatch.setattr(Ledger, "append_all", late)
    quarantined.record_unknown(ledger, "repair", {"public.t": None})
    assert told(lake) == ("repair", False, describe_unknown(1))
