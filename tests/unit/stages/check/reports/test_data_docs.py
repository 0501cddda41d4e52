"""Data Docs: what a check puts on the list of reports, and pages in which every text is escaped."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.bookkeeping import NOON
from tests.support.pipelines import pipeline_file
from waldelta.errors import StateError
from waldelta.lake import Lake
from waldelta.lake.ledger import ExpectationResult, Ledger
from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.reports.data_docs import (
    _content,
    check_page,
    list_reports,
    read_trends,
)
from waldelta.stages.check.reports.docs_store import CHECKS, DocsStore
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    TableVerdict,
    unchecked,
)


def test_a_run_is_listed_with_the_table_that_it_couldnt_check(tmp_path):
    """It failed for it; there is no page to lead to, also where no table has one."""
    pipeline = pipeline_file(f"file://{tmp_path}", "shop", ["public.t"])
    docs = DocsStore(pipeline, Lake(pipeline.target.root))
    gone = TableVerdict(
        "public.gone", None, (unchecked(StateError("it isn't there")),), (), None, 0.0
    )
    for links in ([], ["public.t"]):
        run = docs.begin(CHECKS, "run", at := datetime.now(UTC))
        pages = [run.write_page(name, "<h1>page</h1>") for name in links]
        verdicts = [gone, *(TableVerdict("public.t", 3, (), (), page, 0.0) for page in pages)]
        index = list_reports(run, "run", at, verdicts).read_text()
        assert re.findall(r"<a [^>]+>(\w[^<]+)", index) == links
        assert 'class="mark failed"' in index
    assert "1 of 1 not met<ul><li>couldn&#39;t be checked: it isn&#39;t there" in index
    assert index.count("public.gone") == 3


BAD = "<script>\"'&</script>"
SAFE = "&lt;script&gt;&#34;&#39;&amp;&lt;/script&gt;"
SENTENCE = {
    "content_block_type": "string_template",
    "string_template": {"template": "$x", "params": {"x": BAD}},
}
CHART = {"datasets": {BAD: [{BAD: BAD}]}}


def sentence(template, **params):
    return {
        "content_block_type": "string_template",
        "string_template": {"template": template, "params": params},
    }


TAGS = {"br", "code", "details", "div", "p", "pre", "summary"} | {
    "table", "tbody", "td", "th", "thead", "tr"
}  # fmt: skip
BLOCKS = {
    "a text": (BAD, SAFE),
    "a list": ([BAD, None, 3], f"<div>{SAFE}</div><div></div><div>3</div>"),
    "a template's words": (sentence(f"{BAD} $$x $y", x=1), f"{SAFE} $$x $y"),
    "a parameter": (sentence("a ${x}b $xy", x=BAD), f"a <code>{SAFE}</code>b $xy"),
    "a parameter that is none of its text's": (sentence("$x", x="$y", y=BAD), "<code>$y</code>"),
    "a dict as a parameter": (sentence("$x", x={BAD: 1}), None),
    "one of what is counted":
     (sentence("$n unexpected values found, $m characters of $m rows", n=1, m="1"),
      "<code>1</code> unexpected value found, <code>1</code> character of <code>1</code> row"),
    "several": (sentence("$n unexpected values, $m rowsets", n=11, m=1),
                "<code>11</code> unexpected values, <code>1</code> rowsets"),
    "lines": (sentence("a<br>b<br/>$x", x=1), "a<br>b<br><code>1</code>"),
    "a schema": (sentence("$formatted_json", formatted_json=f"<pre>{SAFE}</pre>"),
                 f"<pre>{SAFE}</pre>"),
    "an icon that is HTML":
     (sentence("$html_success_icon", html_success_icon="<i class=x></i>"),
      "<code>&lt;i class=x&gt;&lt;/i&gt;</code>"),
    "a template that is none":
     ({"content_block_type": "string_template", "string_template": BAD}, SAFE),
    "a table": ({"content_block_type": "table", "header_row": [BAD], "table": [[BAD, [SENTENCE]]]},
                None),
    "a container": ({"content_block_type": "content_block_container", "content_blocks": [SENTENCE]},
                    None),
    "what folds": ({"content_block_type": "collapse", "collapse_toggle_link": BAD,
                    "collapse": [BAD]},
                   f"<details><summary>{SAFE}</summary><div>{SAFE}</div></details>"),
    "a chart": ({"content_block_type": "graph", "graph": CHART}, None),
    "a chart as text": ({"content_block_type": "graph", "graph": json.dumps(CHART)}, None),
    "a chart of another form": ({"content_block_type": "graph", "graph": {BAD: BAD}}, None),
    "a chart that is none": ({"content_block_type": "graph", "graph": BAD}, None),
    "a kind that isn't known": ({"content_block_type": BAD, BAD: BAD}, None),
    "an hstore value that looks like a table":
     ({"content_block_type": "table",
       "table": [["fine"], [{"content_block_type": "table", BAD: BAD}]]}, None),
    "one that looks like a sentence": ({"content_block_type": "string_template", BAD: BAD}, None),
    "one whose kind is a list": ({"content_block_type": [], BAD: BAD}, None),
}  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), BLOCKS.values(), ids=BLOCKS)
def test_every_text_is_escaped(block, expected):
    """As given, or within JSON or Python's notation of what has no HTML of its own."""
    shown = _content(block)
    assert expected is None or shown == expected
    assert expected is not None or "&lt;/script&gt;" in shown
    assert "<script" not in shown
    assert set(re.findall(r"</?(\w+)", shown)) <= TAGS


def check_result(*found):
    """A check's result: the type, arguments, severity and success of each expectation."""
    import_great_expectations()
    from great_expectations.core import (
        ExpectationSuiteValidationResult,
        ExpectationValidationResult,
    )
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    return ExpectationSuiteValidationResult(
        success=all(success for *_, success in found),
        results=[
            ExpectationValidationResult(
                success=success,
                expectation_config=ExpectationConfiguration(
                    type=kind, kwargs=kwargs, severity=severity
                ),
                result={},
            )
            for kind, kwargs, severity, success in found
        ],
        suite_name="public.t",
        statistics={},
        meta={},
    )


@pytest.mark.parametrize(
    ("severity", "success", "mark"),
    [("critical", False, "failed"), ("warning", False, "warning"), ("warning", True, "passed")],
)
def test_the_mark_of_an_expectation(severity, success, mark):
    """The check's verdict and the expectation's row agree: an unmet warning is no failure."""
    result = check_result(("expect_column_to_exist", {"column": "a"}, severity, success))
    page = check_page(result)
    assert re.findall(r'class="mark (\w+)"', page) == [mark, mark]
    # It leads back, and shows only what failed.
    assert re.findall(r'href="([^"]+)"', page) == ["../../index.html", "#failed", "#"]
    assert ":has(#failed:target)" in page


def test_an_expectation_that_only_measures_is_not_met():
    """The page counts what was judged, as the list of reports does."""
    column = ("expect_column_to_exist", {"column": "a"}, "critical", True)
    as_before = {"part": "rows", "meaning": "as before", "columns": []}
    measured, judged = (
        ("expect_target_to_be_as_before", as_before | {"bounds": bounds}, "warning", True)
        for bounds in ({}, {"rows": [1, 2]})
    )
    page = check_page(check_result(column, measured))
    assert "1 of 1 expectation met, 1 not judged yet</p>" in page
    assert sorted(re.findall(r'class="mark [\w-]+">([\w ]+)<', page)) == [
        "not judged yet",
        "passed",
        "passed",
    ]
    assert "2 of 2 expectations met</p>" in check_page(check_result(column, judged))


def recorded(meaning, at, success, severity="critical", table="public.t", version=1):
    fixed = (meaning, severity, "key", success, None, 0, version)
    return ExpectationResult(at, f"run {at}", table, "kind", *fixed)


def outcome(meaning, success):
    return Outcome(PlannedExpectation("kind", {}, "critical", "key", meaning), success, None, 0)


def test_the_trend_ends_with_this_check(tmp_path):
    """Of checks of the last days, by meaning; gates' results aren't among them."""
    ledger = Ledger(Lake(f"file://{tmp_path}"))
    times = [NOON + timedelta(hours=hour) for hour in range(4)]
    for rows in (
        [recorded(BAD, NOON - timedelta(days=30), False)],
        [recorded(BAD, times[0], True), recorded("b", times[0], False, "warning")],
        [recorded(BAD, times[1], None), recorded("b", times[1], True)],
        [recorded(BAD, times[2], False, version=None)],
        [recorded(BAD, times[2], False, table="public.other")],
    ):
        ledger.append_all(rows)
    trends = read_trends(ledger, ["public.t", "public.new"], times[3])
    text = trends["public.t"].with_outcomes([outcome("b", True), outcome(BAD, False)], times[3])
    assert BAD not in text
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
