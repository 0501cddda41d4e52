"""A rehearsal's report: its verdicts, and its forms for people and for CI."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from waldelta.rehearsal.impact_kinds import FAILING
from waldelta.rehearsal.report import Impact, Report, StepReport

DROP = StepReport(
    "m.sql:3",
    ["alter table t\n  drop column a|b"],
    [
        Impact("note", "", "worth knowing"),
        Impact("app-error", "public.t", "UPDATE fails: no `identity` of <t>\x02", "give it one"),
        Impact("copy", "public.t", "all rows"),
    ],
    1.25,
)
REHEARSED = "2 steps rehearsed"
REPORT = Report(
    "shop", "PostgreSQL 18", [StepReport("m.sql:1", ["select 1"], []), DROP], ["a note"]
)


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ([], "follows"),
        (["note"], "note"),
        (["readers", "copy"], "copy"),
        (["lock", "wait"], "wait"),
        (["copy", "stop", "data-loss"], "data-loss"),
        (["app-error", "error"], "error"),
    ],
)
def test_a_verdict_is_the_gravest_kind(kinds, verdict):
    assert StepReport("m:1", [], [Impact(kind, "", "") for kind in kinds]).verdict == verdict


@pytest.mark.parametrize(
    ("fail_on", "failing", "summary"),
    [
        (FAILING, ["app-error"], f"{REHEARSED}: 1 × app-error"),
        (
            ["copy", "app-error"],
            ["app-error", "copy"],
            "2 steps rehearsed: 1 × app-error, 1 × copy",
        ),
        (["stop"], [], f"{REHEARSED}: none of stop"),
    ],
)
def test_failures(fail_on, failing, summary):
    assert [found.kind for _, found in REPORT.failures(fail_on)] == failing
    assert REPORT.summary(fail_on) == summary


def test_text_names_place_parts_and_the_safe_way():
    lines = REPORT.as_text(FAILING).splitlines()
    assert lines[:2] == ["pipeline shop, rehearsed on PostgreSQL 18", "note: a note"]
    assert (
        lines.index("m.sql:3: app-error") < lines.index("  application") < lines.index("  pipeline")
    )
    assert "      safe way: give it one" in lines


def test_markdown_keeps_a_statement_in_its_cell():
    row = REPORT.as_markdown(FAILING).splitlines()[-1]
    assert row.count("|") - row.count("\\|") == 4
    assert "drop column a\\|b" in row
    assert "no 'identity' of &lt;t&gt;" in row


def test_junit_has_a_case_for_each_step():
    suite = ET.fromstring(REPORT.as_junit(FAILING))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    passed, failed = suite.findall("testcase")
    assert passed.find("failure") is None
    assert failed.get("time") == "1.25"
    assert failed.find("failure").get("type") == "app-error"


def test_json_has_each_verdict():
    assert [step["verdict"] for step in REPORT.as_json()["steps"]] == ["follows", "app-error"]
