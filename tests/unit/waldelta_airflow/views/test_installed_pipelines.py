"""What Airflow's database says of a pipeline's runs, and what it doesn't."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.pool import Pool
from airflow.models.xcom import XComModel
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session

from tests.support.airflow_rows import add_dag, add_run
from tests.support.bookkeeping import NOON
from waldelta.config import load_pipeline_file
from waldelta_airflow.reporting.notify import IDLE_CHECK
from waldelta_airflow.views._installed_pipelines import _schedule, read_schedules

WELL, BAD, BUSY = DagRunState.SUCCESS, DagRunState.FAILED, DagRunState.RUNNING
NOTHING, CHANGES, SILENT = False, True, None

# Each run's state, and its look's own answer, an hour apart; which of them is the failed one, and
# which the last that found nothing.
RUNS = {
    "none": ([], None, None),
    "nothing to do": ([(WELL, CHANGES), (WELL, NOTHING)], None, 1),
    "with changes": ([(WELL, NOTHING), (WELL, CHANGES)], None, 0),
    "failed": ([(WELL, NOTHING), (BAD, SILENT)], 1, 0),
    "failed, the next is tried again":
     ([(WELL, NOTHING), (BAD, SILENT), (BAD, SILENT), (BUSY, SILENT)], 2, 0),
    "well again, the next under way": ([(BAD, SILENT), (WELL, NOTHING), (BUSY, SILENT)], None, 1),
    "marked by hand": ([(WELL, NOTHING), (WELL, SILENT)], None, 0),
}  # fmt: skip


@pytest.mark.parametrize(("runs", "failed", "looked"), RUNS.values(), ids=RUNS)
def test_what_runs_say(runs, failed, looked):
    engine = create_engine("sqlite://")
    for model in (DagRun, XComModel):
        model.__table__.create(engine)
    with Session(engine) as session:
        for n, (state, answer) in enumerate(runs):
            add_run(session, "shop_cdc", n, state, id=n, run_type=DagRunType.SCHEDULED)
            if answer is not SILENT:
                told = {"dag_run_id": n, "dag_id": "shop_cdc", "run_id": f"run-{n}"}
                told |= {"task_id": IDLE_CHECK, "key": "return_value", "value": answer}
                at = NOON + timedelta(hours=n)
                session.execute(insert(XComModel).values(**told, timestamp=at))
        found = _schedule(session, "shop", {"shop_cdc": (False, None)})
    assert found.failed == (None if failed is None else f"run-{failed}")
    well = [n for n, (state, _) in enumerate(runs) if state == WELL]
    assert found.well == (NOON + timedelta(hours=well[-1]) if well else None)
    assert found.idle_checked_at == (None if looked is None else NOON + timedelta(hours=looked))


def test_what_airflow_lacks(write_pipeline, monkeypatch, airflow_tables):
    """The slot's pool, always; connections until a run has succeeded, which needed them."""
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_SOURCE", raising=False)
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", "spark-connect://spark")
    engine = airflow_tables(DagModel, DagRun, XComModel, Pool, Connection)
    shop = load_pipeline_file(write_pipeline("shop"))
    with Session(engine) as session:
        monkeypatch.setattr(
            "waldelta_airflow.views._installed_pipelines.create_session",
            lambda: nullcontext(session),
        )
        assert read_schedules([shop]) == {}  # Airflow has not parsed its DAGs yet.
        add_dag(session, "shop_cdc")
        pool, source = read_schedules([shop])["shop"].lacks
        assert "no pool waldelta_shop_cdc" in pool.text
        assert "no connection shop_source" in source.text
        # Only the workers may have it.
        assert (pool.severity, source.severity) == ("failed", "warning")
        add_run(session, "shop_cdc", 1, WELL, run_type=DagRunType.SCHEDULED)
        assert read_schedules([shop])["shop"].lacks == (pool,)
        session.execute(insert(Pool).values(pool=shop.pool, slots=1, include_deferred=False))
        assert read_schedules([shop])["shop"].lacks == ()
