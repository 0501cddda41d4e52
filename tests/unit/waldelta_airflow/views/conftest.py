"""What Airflow's database says, for tests of pages that are made without one."""

from dataclasses import replace

import pytest

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
    monkeypatch.setattr(
        "waldelta_airflow.views.app.read_action_dag",
        lambda dag_id, requested=None: replace(
            known.get(dag_id, ActionDag(dag_id)), requested=requested and "running"
        ),
    )
    return known
