"""A shop's pipeline with its lake, and what Airflow's database says, which unit tests lack."""

import time
from dataclasses import replace
from functools import cache
from shutil import copytree

import pytest

from tests.support.data.shop_pages import RUN_ID, fill
from tests.support.fixtures.airflow import PIPELINE
from waldelta.config import load_pipeline_file
from waldelta.lake import local_path
from waldelta_airflow.views._installed_pipelines import ActionDag, Schedule


@pytest.fixture
def schedules(monkeypatch, dags):
    """What Airflow's database says, by pipeline; a unit test has none."""
    known: dict[str, Schedule] = {}
    for module in ("_pages", "_overview"):
        monkeypatch.setattr(
            f"waldelta_airflow.views.{module}.read_schedules",
            lambda files, **_: {
                f.pipeline: known[f.pipeline] for f in files if f.pipeline in known
            },
        )
    return known


@pytest.fixture
def dags(monkeypatch):
    """What Airflow's database says of the DAGs behind buttons, by DAG; others are ready."""
    known: dict[str, ActionDag] = {}
    for module in ("app", "_access"):
        monkeypatch.setattr(
            f"waldelta_airflow.views.{module}.read_action_dag",
            lambda dag_id, requested=None: replace(
                known.get(dag_id, ActionDag(dag_id)),
                requested=requested,
                requested_state=requested and "running",
            ),
        )
    return known


# Of a lake that is older, pages say that it is late.
_FRESH_S = 300


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """Makes the lake of a shop, once of the same values, with a part that only some tests need."""

    def make(**values):
        return fill_in(int(time.monotonic() // _FRESH_S), **values)

    @cache
    def fill_in(_period, run_id=RUN_ID, said="fine", add=None):
        folder = tmp_path_factory.mktemp("filled")
        path, lake = folder / "shop.yml", folder / "shop"
        path.write_text(PIPELINE.format(name="shop", root=lake.as_uri(), more=""))
        pipeline = fill(load_pipeline_file(path), run_id, said)
        if add is not None:
            add(pipeline)
        return lake

    return make


@pytest.fixture
def write_shop(write_pipeline, schedules, filled):
    """Writes a pipeline with a copy of such a lake: to write one anew takes longer than a test."""

    def write(name="shop", more="", **values):
        pipeline = load_pipeline_file(write_pipeline(name, more))
        copytree(filled(**values), local_path(pipeline.target.root))
        return pipeline

    return write


@pytest.fixture
def read_shop(write_pipeline, schedules, filled):
    """The pipeline of ``shop`` for tests that write nothing into its lake, which they share."""
    lake = filled()
    files = sum(1 for _ in lake.rglob("*"))
    text = PIPELINE.replace("{root}", lake.as_uri())
    yield load_pipeline_file(write_pipeline("shop", text=text))
    assert sum(1 for _ in lake.rglob("*")) == files, "use the fixture shop, which is a copy"


@pytest.fixture
def shop(write_shop):
    """A pipeline whose latest check and comparison failed, with a row in quarantine."""
    return write_shop()


@pytest.fixture
def decided(monkeypatch):
    """The runs that were asked for; a unit test's Airflow has no DAGs to run."""
    runs = []
    monkeypatch.setattr(
        "waldelta_airflow.views.app.trigger_run",
        lambda dag_id, prefix, conf, user: (
            runs.append((dag_id, conf, user.get_name())) or f"{prefix}__1"
        ),
    )
    return runs
