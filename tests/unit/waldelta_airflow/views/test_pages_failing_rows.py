"""Rows that fail an expectation: where pages and alerts show them, and to whom."""

import json
import time
from datetime import timedelta
from functools import cache
from shutil import copytree

import pytest
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel

from tests.support.bookkeeping import add_reports
from tests.support.fixtures.airflow import PIPELINE
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake, local_path
from waldelta.lake.ledger import ExpectationResult, Ledger, Run, TableState, now
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.check_results import HeatMap, read_failed
from waldelta.stages.check.reports.entries import ReportEntry
from waldelta_airflow.alerts.evaluation import Alert, _with_details
from waldelta_airflow.alerts.sending import message_of
from waldelta_airflow.views._pages import _by_column

RUN_ID, TABLE = "scheduled__2026-01-01T12:00:00+00:00", "public.orders"
MEANING = "status has labels of its enum only"
HOSTILE = "<script>alert(1)</script>\u202e"
# A pipeline file's row_values, a role, and whether the role sees values.
READERS = [("read", "viewer", True), ("edit", "viewer", False), ("edit", "op", True)]


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """Writes the lake of a pipeline with a check that failed, once for each value."""

    @cache
    def write(value):
        folder = tmp_path_factory.mktemp("failing")
        path, lake = folder / "shop.yml", folder / "shop"
        path.write_text(PIPELINE.format(name="shop", root=lake.as_uri(), more=""))
        pipeline = load_pipeline_file(path)
        ledger, at = Ledger(Lake(pipeline.target.root)), now()
        ledger.append(TableState(at - timedelta(days=1), "manual__1", TABLE, 1, "synced"))
        ledger.append(Run(at, RUN_ID, "consume", "failed", as_of=at))
        examples = [json.dumps({"key": {"id": "881204"}, "values": {"status": value}})]
        examples += [json.dumps({"key": {}, "values": {"status": None}})]
        results = (
            (MEANING, "critical", False, examples),
            ("created_at isn't in the future", "warning", False, None),
            ("key (id) is unique", "critical", True, None),
        )
        ledger.append_all(
            [
                ExpectationResult(
                    at, RUN_ID, TABLE, f"e{n}", meaning, severity, "key", success, None,
                    None if success else 2, 3, examples=some,
                )
                for n, (meaning, severity, success, some) in enumerate(results)
            ]
        )  # fmt: skip
        run = (at, pipeline.pipeline, RUN_ID)
        add_reports(pipeline, ReportEntry(*run, TABLE, 3, 3, (MEANING,), (), "page"), name="page")
        return lake

    return write


@pytest.fixture
def fill(write_pipeline, airflow_tables, failing):
    """Writes a pipeline with a copy of such a lake; returns it."""
    airflow_tables(DagModel, DagRun, XComModel, TaskInstance)

    def write(more="", value=HOSTILE):
        pipeline = load_pipeline_file(write_pipeline("shop", more))
        copytree(failing(value), local_path(pipeline.target.root))
        return pipeline

    return write


@pytest.mark.parametrize("page", [f"/p/shop/run/consume/{RUN_ID}", f"/p/shop/table/{TABLE}"])
@pytest.mark.parametrize(("permission", "role", "shown"), READERS)
def test_pages_show_failing_rows(fill, open_pages, page, permission, role, shown):
    fill(f"row_values: {permission}")
    text = open_pages(role).get(page).text
    assert MEANING in text
    assert "2 rows" in text
    assert ("id = 881204" in text) is shown
    assert ("&lt;script&gt;alert(1)&lt;/script&gt;\\u202e" in text) is shown
    assert "<script>alert" not in text
    assert ("examples hidden" in text) is not shown
    assert 'page.html#failed"' in text


def test_a_page_lists_the_first_of_many_expectations(fill, open_pages):
    ledger, at = Ledger(Lake(fill().target.root)), now()
    ledger.append_all(
        [
            ExpectationResult(
                at, RUN_ID, TABLE, f"e{n}", f"rule {n:03d}", "critical", "key", False, None, 1, 4
            )
            for n in range(53)
        ]
    )
    text = open_pages("viewer").get(f"/p/shop/table/{TABLE}").text
    listed = text.partition("Expectations that failed")[2].partition("<h2>")[0]
    assert [f"rule {n:03d}<" in listed for n in (0, 49, 50)] == [True, True, False]
    assert "and 3 more expectations" in listed


def test_expectations_of_a_wide_table_find_their_columns():
    """Each row of the map has each column's name looked for in it."""
    columns = [f"column {n}" for n in range(900)]
    labels = [f"{name} is never null" for name in columns[:400]]
    start = time.process_time()
    rows = [(label, ()) for label in (*labels, "column 1 equals column 2", "a rule")]
    beside, others = _by_column(HeatMap((), tuple(rows)), columns)
    assert time.process_time() - start < 1.5
    assert {name: rows[0][0] for name, rows in beside.items()} == dict(
        zip(columns[:400], labels, strict=True)
    )
    assert [label for label, _ in others] == ["column 1 equals column 2", "a rule"]


def test_the_last_check_counts(fill):
    ledger = Ledger(Lake(fill().target.root))
    first, second = read_failed(ledger, [TABLE])
    assert (first.meaning, first.verdict, second.verdict) == (MEANING, "failed", "warning")
    assert [one["key"] for one in first.examples] == [{"id": "881204"}, {}]
    ledger.append(
        ExpectationResult(now(), "later", TABLE, "e0", MEANING, "critical", "key", True, None, 0, 4)
    )
    assert read_failed(ledger, [TABLE]) == []
    assert read_failed(ledger, ["public.other"]) == []


# Whether the installation's alerts may have values, the file's row_values, and whether they do.
ALERTS = [("", "read", False), ("true", "read", True), ("true", "edit", False)]


@pytest.mark.parametrize(("setting", "permission", "shown"), ALERTS)
def test_alerts_name_expectations(fill, monkeypatch, setting, permission, shown):
    """They have values of rows only where the setting and the pipeline file allow it."""
    monkeypatch.setenv("WALDELTA_ALERT_VALUES", setting)
    pipeline = fill(f"row_values: {permission}", value="s3cret<b>\nPROBLEM: forged")
    found = [
        Attention("failed", "failed_expectations", "text", objects=(TABLE,)),
        Attention("warning", "warned_expectations", "text", objects=(TABLE,)),
        Attention("failed", "slot", "text"),
    ]
    items = _with_details(pipeline, Ledger(Lake(pipeline.target.root)), found)
    message = message_of("shop", [Alert("new", item, now()) for item in items], "")
    assert [len(one["details"]) for one in message.document["alerts"]] == [1, 1, 0]
    assert f"  - {TABLE}: {MEANING}: 2 rows, run {RUN_ID}" in message.text
    assert f"{TABLE}: created_at isn't in the future: 2 rows" in message.text
    for text in (message.text, json.dumps(message.document), json.dumps(message.slack)):
        assert ("s3cret" in text) is shown
        assert "\nPROBLEM: forged" not in text
    assert "<b>" not in json.dumps(message.slack)
    assert items[0].only(["public.other"]).details == ()
