"""The demo in small with its lake, and its reports, in an S3 server."""

import io
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from demo.outcome import DemoOutcome, show
from demo.run_demo import PIPELINE, Demo
from demo.stack import Stack
from tests.e2e.shop import own_folder
from tests.e2e.shown_secrets import (
    assert_none_shown,
    contains,
    files,
    none_in_arguments,
    readable_by_others,
    spark_configuration,
)

pytestmark = pytest.mark.soak("the demo on another store")


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """A demo of a few thousand flights on a stack of its own."""
    with (
        own_folder() as folder,
        Stack(folder, store=True, spark_memory="2g", triggerer=False) as stack,
    ):
        yield Demo(stack, Console(file=io.StringIO(), width=250), flights=3000, slices=1)


@pytest.fixture(scope="module")
def outcome(demo: Demo) -> DemoOutcome:
    with none_in_arguments([demo.stack.secrets.store]):
        return demo.run()


def test_every_target_ends_equal(demo, outcome):
    """All five tables were compared, with rows in them; nothing was written to this machine."""
    assert outcome.equal
    assert len(outcome.differences) == 5
    assert all(d.source_rows == d.target_rows > 0 for d in outcome.differences)
    assert outcome.applied()["public.weather"]["truncated"] == 1
    show(outcome, demo.console)
    text = demo.console.file.getvalue()
    assert "0 differences between 5 targets" in text
    assert f"tables:  {demo.pipeline.target.root}" in text
    assert not (demo.stack.folder / "lake").exists()


def test_airflow_shows_the_reports(demo, outcome):
    """The page that the last run names, to a user who is logged in."""
    docs, _, page = outcome.report.partition("/data_docs/")
    assert docs == f"{demo.pipeline.target.root}/_waldelta"
    user = {"username": demo.stack.user, "password": demo.stack.password}
    # The first request loads the application, and pages read the store.
    with httpx.Client(base_url=demo.stack.url, trust_env=False, timeout=120) as browser:
        assert browser.get("/waldelta/docs/").status_code == 401
        token = browser.post("/auth/token", json=user).json()["access_token"]
        browser.headers["Authorization"] = f"Bearer {token}"
        address = f"/waldelta/docs/{PIPELINE}/{page}/public.flights.html"
        assert address in browser.get("/waldelta/docs/").text
        shown = browser.get(address)
    assert shown.status_code == 200
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert "Check of public.flights" in shown.text


def test_the_stores_key_is_nowhere_to_be_seen(demo, outcome):
    """Not in a log, a template, an XCom, Spark's configuration, or a file of others."""
    stack = demo.stack
    secrets = [stack.secrets.store]
    with stack.client() as client:
        for run in outcome.runs:
            assert_none_shown(client, run, secrets)
    assert stack.secrets.store not in spark_configuration(stack.spark.remote)
    assert [p for p in files(stack.logs) if contains(p, secrets)] == []
    # Of the store itself: ledger, targets and reports, in its volumes.
    assert [p for p in files(stack.folder / "store/server/data") if contains(p, secrets)] == []
    assert [
        p
        for p in files(stack.folder)
        if readable_by_others(p, stack.folder) and contains(p, secrets)
    ] == []
