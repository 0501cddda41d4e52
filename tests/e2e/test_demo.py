"""The demo in small, through real Airflow."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from demo.outcome import show
from demo.run_demo import CONN_ID, MAINTENANCE, PIPELINE, Demo
from demo.stack import Stack
from demo.stack.airflow_entries import environment_of
from tests.support.bookkeeping import read_expectation_results
from tests.support.fixtures.stack import have_parsed
from waldelta.lake import Lake, target_uri
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.overview import read_glance

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def demo(stack):
    """A demo of a few thousand flights on the session's stack, in a lake of its own."""
    name = f"{PIPELINE}.yml"
    text = (Stack.pipelines / name).read_text()
    (stack.pipelines / name).write_text(text.replace("${WALDELTA_LAKE}", "${WALDELTA_LAKE}/demo"))
    suites = stack.pipelines.parent / "expectations" / PIPELINE
    shutil.copytree(Stack.pipelines.parent / "expectations" / PIPELINE, suites)
    stack.add_source(CONN_ID, "flights")
    stack.create_pools()
    have_parsed(stack)
    yield Demo(stack, Console(file=io.StringIO(), width=250), flights=3000, slices=1)
    (stack.pipelines / name).unlink()
    shutil.rmtree(suites)
    shutil.rmtree(stack.folder / "lake" / "demo", ignore_errors=True)


@pytest.fixture(scope="module")
def outcome(demo):
    return demo.run()


def test_every_target_ends_equal(outcome):
    """All five tables were compared, with rows in them, and nothing differs."""
    assert outcome.equal
    assert {d.table for d in outcome.differences} == {
        "public.airlines",
        "public.airports",
        "public.flights",
        "public.planes",
        "public.weather",
    }
    assert all(d.source_rows == d.target_rows > 0 for d in outcome.differences)


def test_rows_crossed_the_filter_in_both_directions(outcome):
    """The target saw inserts and deletes of flights that the source only updated."""
    flights = outcome.applied()["public.flights"]
    assert flights["inserted"] > outcome.operations["flights", "insert"]
    assert flights["deleted"] > 0
    assert outcome.operations["weather", "truncate"] == 1
    assert outcome.applied()["public.weather"]["truncated"] == 1


def test_the_outcome_is_shown(demo, outcome):
    """What the demo prints at its end: rows, seconds, verdict, and where to look."""
    show(outcome, demo.console)
    text = demo.console.file.getvalue()
    assert "0 differences between 5 targets" in text
    assert "changes/s" in text
    assert str(outcome.report) in text
    assert all(run.run_id in text for run in outcome.runs)


def test_the_engineers_own_expectations_were_checked(demo, outcome):
    """Airflow's tasks stand in another folder than whoever wrote the suites."""
    results = read_expectation_results(demo.pipeline.target.root)
    seen = [r for r in results if r.run_id in {run.run_id for run in outcome.runs}]
    own = {(r.table_name, r.expectation) for r in seen if r.origin == "own"}
    assert ("public.flights", "expect_column_pair_values_a_to_be_greater_than_b") in own
    assert all(r.success for r in seen if r.severity == "critical")


def test_the_first_page_has_nothing_to_attend_to(demo, outcome):
    """The targets were compared by a run, and maintenance has run and goes on each night."""
    pipeline = demo.pipeline
    glance = read_glance(pipeline, Ledger(Lake(pipeline.target.root)), datetime.now(UTC), 24)
    assert glance.attention == ()
    assert len(glance.compared.equal) == len(outcome.differences)
    with demo.stack.client() as airflow:
        assert not airflow.get(f"/dags/{MAINTENANCE}")["is_paused"]
        assert [run.state for run in airflow.runs(MAINTENANCE)] == ["success"]


@pytest.mark.nightly("a comparison that fails, as in test_compare")
def test_one_changed_value_is_found(demo, outcome):
    """The comparison fails, and names the row."""
    from waldelta.spark import open_session

    uri = target_uri(demo.pipeline.target.root, "public", "flights")
    with environment_of(demo.stack.job_environment()), open_session("tamper") as spark:
        row = (
            spark.read.format("delta")
            .load(uri)
            .where("air_time is not null")
            .orderBy("carrier", "flight")
            .first()
        )
        key = (
            f"carrier = '{row.carrier}' and flight = {row.flight} and month = {row.month} and day ="
            f" {row.day}"
        )
        spark.sql(
            f"update delta.`{uri}` set air_time = air_time + 1 where {key} and origin ="
            f" '{row.origin}'"
        ).collect()
    found = {d.table: d for d in demo.compare()}
    flights = found.pop("public.flights")
    assert (flights.missing, flights.extra) == (1, 1)
    assert any(f"flight={row.flight}" in text for text in flights.keys)
    assert not any(d.rows for d in found.values())
    assert not replace(outcome, differences=[flights, *found.values()]).equal
