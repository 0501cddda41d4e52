"""The demo in small, through real Airflow."""

import io
import shutil
from datetime import UTC, datetime

import pytest
from rich.console import Console

from demo.outcome import show
from demo.run_demo import CONN_ID, MAINTENANCE, PIPELINE, Demo
from demo.stack import Stack
from tests.e2e.shop import have_parsed
from tests.support.bookkeeping import read_expectation_results
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.overview import read_glance

pytestmark = pytest.mark.long("starts Airflow's stack and runs the whole demo")


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
    glance = read_glance(pipeline, Ledger(Lake(pipeline.target.root)), datetime.now(UTC))
    assert glance.attention == ()
    assert len(glance.compared.equal) == len(outcome.differences)
    with demo.stack.client() as airflow:
        assert not airflow.get(f"/dags/{MAINTENANCE}")["is_paused"]
        assert [run.state for run in airflow.runs(MAINTENANCE)] == ["success"]
