"""Data Docs whose names and values are markup, in Chromium: from the disk and by the plugin."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import great_expectations as gx
import pandas as pd
import pytest
import yaml
from great_expectations.expectations.registry import (
    get_expectation_impl,
    list_registered_expectation_implementations,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

import waldelta.stages.check.great_expectations.run_suite  # noqa: F401 - it registers ours
from tests.support.browser import open_browser
from tests.support.pipelines import pipeline_file
from tests.support.plugin_app import plugin_app, serve
from waldelta.config import PipelineFile, split_table_name
from waldelta.lake import Lake, target_uri
from waldelta.lake.ledger import ColumnState, Ledger, Reconciliation, RowDifference, TableState, now
from waldelta.lake.ledger.check_records import ColumnDifference
from waldelta.spark import OnSpark
from waldelta.stages.check.check import check
from waldelta.stages.check.great_expectations.run_suite import _open_context
from waldelta.stages.check.reports.data_docs import check_page, list_reconciliation
from waldelta.stages.check.suite.expectation import QualityReport
from waldelta.stages.check.suite.kinds import KINDS

pytestmark = pytest.mark.spark

RUN = "document.documentElement.className='ran'"
SCRIPT, REFRESH = f"<script>{RUN}</script>", '<meta http-equiv=refresh content="0;url=about:blank">'
CLOSING = (
    "\"'</script></pre></code></td></table><svg"
    f' onload="{RUN}"></svg><style>body{{display:none}}</style>'
)
VALUES = [SCRIPT, REFRESH, CLOSING]
COLUMN, OTHER = f"<img src=x onerror={RUN}>", f"{REFRESH}$icon"
TABLE = f'public."<img src=x onerror={RUN}>{REFRESH.replace(chr(34), chr(39))}"'
RUN_ID = f"manual__{SCRIPT}{REFRESH}"
MANY = [COLUMN, OTHER]
PATTERNS = [f"^{SCRIPT}$"]
# Great Expectations' expectations of one column, with the arguments that they fail by.
NOT_FOR = {"expect_column_" + name: {} for name in (
    "values_to_be_dateutil_parseable", "values_to_be_decreasing", "values_to_be_increasing",
    "values_to_be_json_parseable", "values_to_be_null", "values_to_be_unique",
    "values_to_not_be_null", "values_to_not_be_outliers",
)}  # fmt: skip
TOO_MUCH = {f"expect_column_{name}_to_be_between": {"max_value": 0} for name in (
    "max", "mean", "median", "stdev", "sum", "unique_value_count", "values",
    "proportion_of_non_null_values", "proportion_of_unique_values",
)}  # fmt: skip
IN_NONE = {f"expect_column_{name}_set": {"value_set": [f"<b>{SCRIPT}</b>"]} for name in (
    "distinct_values_to_be_in", "distinct_values_to_contain", "distinct_values_to_equal",
    "most_common_value_to_be_in", "values_to_be_in",
)}  # fmt: skip
OF_A_COLUMN = {
    **NOT_FOR, **TOO_MUCH, **IN_NONE,
    "expect_column_kl_divergence_to_be_less_than":
     {"partition_object": {"values": [*VALUES, "absent"], "weights": [0.1, 0.1, 0.1, 0.7]},
      "threshold": 0.001},
    "expect_column_min_to_be_between": {"min_value": 0},
    "expect_column_quantile_values_to_be_between":
     {"quantile_ranges": {"quantiles": [0.5], "value_ranges": [[0, 1]]}},
    "expect_column_to_exist": {"column_index": 5},
    "expect_column_type_to_be": {"type_": SCRIPT},
    "expect_column_value_lengths_to_be_between": {"max_value": 1},
    "expect_column_value_lengths_to_equal": {"value": 1},
    "expect_column_value_z_scores_to_be_less_than": {"threshold": 0.1, "double_sided": True},
    "expect_column_values_to_be_in_type_list": {"type_list": [SCRIPT]},
    "expect_column_values_to_be_of_type": {"type_": SCRIPT},
    "expect_column_values_to_match_json_schema": {"json_schema": {"title": CLOSING}},
    "expect_column_values_to_match_like_pattern": {"like_pattern": SCRIPT},
    "expect_column_values_to_match_like_pattern_list": {"like_pattern_list": VALUES[:1]},
    "expect_column_values_to_match_regex": {"regex": PATTERNS[0]},
    "expect_column_values_to_match_regex_list": {"regex_list": PATTERNS},
    "expect_column_values_to_match_strftime_format": {"strftime_format": f"%Y{SCRIPT}"},
    "expect_column_values_to_not_be_in_set": {"value_set": VALUES},
    "expect_column_values_to_not_match_like_pattern": {"like_pattern": "%"},
    "expect_column_values_to_not_match_like_pattern_list": {"like_pattern_list": ["%"]},
    "expect_column_values_to_not_match_regex": {"regex": "[<]"},
    "expect_column_values_to_not_match_regex_list": {"regex_list": ["[<]"]},
}  # fmt: skip
OTHERS = {
    "expect_column_pair_values_a_to_be_greater_than_b": {"column_A": COLUMN, "column_B": COLUMN},
    "expect_column_pair_values_to_be_equal": {"column_A": COLUMN, "column_B": OTHER},
    "expect_column_pair_values_to_be_in_set":
     {"column_A": COLUMN, "column_B": OTHER, "value_pairs_set": [[SCRIPT, REFRESH]]},
    "expect_compound_columns_to_be_unique": {"column_list": MANY},
    "expect_multicolumn_sum_to_equal": {"column_list": MANY, "sum_total": 1},
    "expect_multicolumn_values_to_be_equal": {"column_list": MANY},
    "expect_query_results_to_match_comparison":
     {"base_query": SCRIPT, "comparison_data_source_name": SCRIPT, "comparison_query": SCRIPT},
    "expect_select_column_values_to_be_unique_within_record": {"column_list": [COLUMN, COLUMN]},
    "expect_table_column_count_to_be_between": {"max_value": 1},
    "expect_table_column_count_to_equal": {"value": 1},
    "expect_table_columns_to_match_ordered_list": {"column_list": VALUES},
    "expect_table_columns_to_match_set": {"column_set": VALUES},
    "expect_table_row_count_to_be_between": {"max_value": 1},
    "expect_table_row_count_to_equal": {"value": 1},
    "expect_table_row_count_to_equal_other_table": {"other_table_name": SCRIPT},
    "unexpected_rows_expectation":
     {"unexpected_rows_query": "select *, '<script>' as `<b>` from {batch}", "description": SCRIPT},
    "expect_kept_rows_to_hold": {"columns": MANY, "meaning": SCRIPT},
    "expect_target_columns_to_match": {"columns": {SCRIPT: REFRESH}},
    "expect_target_key_to_be_unique": {"columns": [COLUMN]},
    "expect_target_rows_to_refer_to_rows": {"columns": [COLUMN], "meaning": SCRIPT},
    "expect_target_rows_to_satisfy": {"condition": f"`{COLUMN}` = '<b>'", "meaning": SCRIPT},
    "expect_target_to_be_as_before":
     {"columns": [[COLUMN, False]], "bounds": {"rows": [0, 1]}, "part": "rows", "meaning": SCRIPT},
    "expect_target_to_be_fresh": {"meaning": SCRIPT, "is_met": False, "observed": REFRESH},
    "expect_target_to_know_all_values": {"meaning": SCRIPT, "is_met": False, "observed": REFRESH},
}  # fmt: skip
IN_SPARK = [
    name
    for name in OTHERS
    if "target" in name or "kept" in name or name == "unexpected_rows_expectation"
]
OF_ONE_IN_SPARK = [
    "expect_column_values_to_be_in_set",
    "expect_column_most_common_value_to_be_in_set",
]
ROWS = [(one, other) for one in VALUES for other in VALUES[:2]] * 2
# What would come alive if a name or a value were markup.
ALIVE = (
    "script, img, svg, iframe, form, object, embed, link, a, meta[http-equiv=refresh],"
    " style:not(head > style)"
)
SEEN = f"""
return [document.documentElement.className, document.querySelectorAll("{ALIVE}").length,
  performance.getEntriesByType('resource').length, getComputedStyle(document.body).display]
"""
DEAD = ["", 3, 0, "block"]  # The links of the page itself.


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> PipelineFile:
    folder = tmp_path_factory.mktemp("hostile")
    suites = folder / "suites"
    suites.mkdir()
    own = [
        {"type": name, "kwargs": OTHERS[name], "notes": f"{name} {REFRESH}"} for name in IN_SPARK
    ]
    own += [
        {"type": name, "kwargs": {"column": COLUMN, **OF_A_COLUMN[name]}}
        for name in OF_ONE_IN_SPARK
    ]
    (suites / f"{TABLE}.yml").write_text(yaml.safe_dump({"expectations": own}))
    return pipeline_file(f"file://{folder}/lake", "shop", [TABLE], quality={"suites": str(suites)})


@pytest.fixture(scope="module")
def report(spark_jvm, pipeline) -> QualityReport:
    """A check that nothing passes, of columns whose names and values are markup."""
    frame = spark_jvm().createDataFrame(
        [*ROWS, (None, None)], f"`{COLUMN}` string, `{OTHER}` string"
    )
    options = {"delta.columnMapping.mode": "name"}
    uri = target_uri(pipeline.target.root, *split_table_name(TABLE))
    frame.write.format("delta").options(**options).save(uri)
    columns = [ColumnState(name, 25, -1, "text", "string", not_null=True) for name in MANY]
    state = TableState(now(), "sync", TABLE, 1, "synced", key_columns=[COLUMN], columns=columns)
    ledger = Ledger(Lake(pipeline.target.root))
    ledger.append(state)
    return check(OnSpark(spark_jvm()), pipeline, ledger, RUN_ID)


def seen(browser: WebDriver, address: str) -> list[object]:
    """What came alive of a page, seen from another tab: a sandboxed page has no timers."""
    browser.get(address)
    page = browser.current_window_handle
    browser.switch_to.new_window("tab")
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    browser.close()
    browser.switch_to.window(page)
    assert browser.current_url == address
    alive: list[object] = browser.execute_script(SEEN)
    return alive


def page_of(report: QualityReport) -> Path:
    (verdict,) = report.tables
    assert verdict.page is not None
    return verdict.page


def test_every_type_of_expectation_is_tried():
    """One that Great Expectations adds, or we do, is missing here."""
    registered = {
        name
        for name in list_registered_expectation_implementations()
        # Other tests of this process register their own.
        if name in KINDS or get_expectation_impl(name).__module__.startswith("great_expectations.")
    }
    assert registered == set(OF_A_COLUMN) | set(OTHERS)


def test_from_the_disk_nothing_of_a_report_comes_alive(browser, report):
    """Each text is shown as it is: values, names of tables and columns, arguments, notes."""
    page = page_of(report)
    assert seen(browser, page.as_uri()) == DEAD
    shown = browser.find_element(By.TAG_NAME, "body").text
    assert [text for text in (*VALUES, COLUMN, OTHER, TABLE, RUN_ID) if text not in shown] == []
    first = browser.execute_script("return document.head.firstElementChild.outerHTML")
    assert "Content-Security-Policy" in first
    assert "default-src 'none'" in first


def test_nor_of_any_type_of_expectation(browser, tmp_path):
    """Evaluated by Great Expectations in pandas: quicker than Spark, with the same results."""
    context = _open_context()
    frame = pd.DataFrame(ROWS, columns=MANY)
    batch = (
        context.data_sources.add_pandas("p")
        .add_dataframe_asset("a")
        .add_batch_definition_whole_dataframe("b")
    )
    suite = gx.ExpectationSuite(name=TABLE)
    for name, kwargs in [
        *((n, {"column": COLUMN, **k}) for n, k in OF_A_COLUMN.items()),
        *OTHERS.items(),
    ]:
        suite.add_expectation(get_expectation_impl(name)(**kwargs, notes=f"{name} {REFRESH}"))
    result = batch.get_batch({"dataframe": frame}).validate(suite, result_format="SUMMARY")
    page = tmp_path / "page.html"
    page.write_text(check_page(result))
    assert seen(browser, page.as_uri()) == DEAD
    shown = browser.find_element(By.TAG_NAME, "body").text
    assert [text for text in (*VALUES, COLUMN, OTHER, TABLE) if text not in shown] == []
    marks = [mark.text for mark in browser.find_elements(By.CSS_SELECTOR, "td .mark")]
    assert len(marks) == len(OF_A_COLUMN) + len(OTHERS)


def reconciliation() -> Reconciliation:
    """A comparison of which each text is markup."""
    columns = [ColumnDifference(COLUMN, SCRIPT, CLOSING)]
    return Reconciliation(
        now(), RUN_ID, TABLE, 1, "different", REFRESH, position=1, snapshot=SCRIPT, version=1,
        source_rows=1, target_rows=1, different=1,
        differences=[RowDifference("different", SCRIPT, columns=columns)],
    )  # fmt: skip


def test_nor_of_the_lists_and_of_a_comparison(browser, report, pipeline):
    index = list_reconciliation(pipeline, Lake(pipeline.target.root), [reconciliation()])
    folder = index.parent
    compared = next((folder / "reconciliations").rglob("*.html"))
    for page in (index, compared):
        alive = seen(browser, page.as_uri())
        links = len(browser.find_elements(By.TAG_NAME, "a"))
        assert alive == ["", links, 0, "block"], page
        assert "Content-Security-Policy" in browser.execute_script(
            "return document.head.firstElementChild.outerHTML"
        )
    browser.get(index.as_uri())
    links = [
        unquote(str(a.get_property("pathname"))) for a in browser.find_elements(By.TAG_NAME, "a")
    ]
    assert len(links) == 4  # Each by table and by time.
    assert all(Path(link).is_file() for link in links)


def test_through_the_plugin_nothing_comes_alive_either(
    browser, report, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setenv("WALDELTA_PIPELINES", str(tmp_path))
    # A copy of the lake, because the lists of the others must not have what is added here.
    lake = tmp_path / "lake"
    whole = Path(pipeline.target.root.removeprefix("file://"))
    shutil.copytree(whole, lake)
    document = pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["target"]["root"] = f"file://{lake}"
    (tmp_path / "shop.yml").write_text(yaml.safe_dump(document))
    page = lake / page_of(report).relative_to(whole)
    folder = lake / "_waldelta" / "data_docs"
    with serve(plugin_app("viewer")) as base:
        address = f"{base}/docs/shop/{quote(page.relative_to(folder).as_posix())}"
        assert seen(browser, address) == DEAD
        browser.get(f"{base}/docs/")
        assert browser.execute_script("return document.documentElement.className") == ""
        assert SCRIPT in browser.find_element(By.TAG_NAME, "body").text
