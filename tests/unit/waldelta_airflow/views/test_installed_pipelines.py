"""A pipeline's DAGs and runs in Airflow's database and on its pages, and their buttons."""

import re
from contextlib import nullcontext
from datetime import timedelta

import pytest
from airflow.jobs.job import Job
from airflow.models.asset import AssetModel, DagScheduleAssetReference
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.log import Log
from airflow.models.pool import Pool
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from fastapi import HTTPException
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from tests.support.airflow_rows import add_dag, add_run
from tests.support.bookkeeping import NOON, run
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, now
from waldelta_airflow.reporting.notify import IDLE_CHECK
from waldelta_airflow.views._installed_pipelines import (
    ActionDag,
    DagRunTasks,
    DagState,
    Schedule,
    read_action_dag,
    read_consumers,
    read_dag_run,
    read_dags,
    read_schedules,
    unpause,
)
from waldelta_airflow.views._render import airflow_url

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
def test_what_runs_say(write_pipeline, airflow_tables, runs, failed, looked):
    engine = airflow_tables(DagModel, DagRun, XComModel, Pool, Connection, Job)
    with Session(engine) as session:
        add_dag(session, "shop_cdc")
        for n, (state, answer) in enumerate(runs):
            add_run(session, "shop_cdc", n, state, id=n, run_type=DagRunType.SCHEDULED)
            if answer is not SILENT:
                told = {"dag_run_id": n, "dag_id": "shop_cdc", "run_id": f"run-{n}"}
                told |= {"task_id": IDLE_CHECK, "key": "return_value", "value": answer}
                at = NOON + timedelta(hours=n)
                session.execute(insert(XComModel).values(**told, timestamp=at))
        session.commit()
    found = read_schedules([load_pipeline_file(write_pipeline("shop"))])["shop"]
    assert found.failed == (None if failed is None else f"run-{failed}")
    well = [n for n, (state, _) in enumerate(runs) if state == WELL]
    assert found.succeeded_at == (NOON + timedelta(hours=well[-1]) if well else None)
    assert found.idle_checked_at == (None if looked is None else NOON + timedelta(hours=looked))


def test_what_airflow_lacks(write_pipeline, monkeypatch, airflow_tables):
    """The slot's pool, always; connections until a run has succeeded, which needed them."""
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_SOURCE", raising=False)
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", "spark-connect://spark")
    engine = airflow_tables(DagModel, DagRun, XComModel, Pool, Connection, Job)
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
        for n, kind in enumerate(("SchedulerJob", "SchedulerJob", "TriggererJob")):
            session.add(Job(job_type=kind, latest_heartbeat=NOON + timedelta(hours=n)))
        session.flush()
        assert read_schedules([shop])["shop"].scheduler_at == NOON + timedelta(hours=1)


OWN = {"sec-fetch-site": "same-origin"}
REFRESH = '<meta http-equiv="refresh"'


@pytest.fixture
def airflow_db(airflow_tables):
    """Airflow's tables of DAGs and runs, empty."""
    engine = airflow_tables(DagModel, DagRun, TaskInstance, Log)
    with Session(engine) as session:
        yield session


LATEST = {
    "none": ([], (None, None)),
    "the latest": (["success", "failed"], ("run-1", "failed")),
    "one under way before a queued one": (["success", "running", "queued"], ("run-1", "running")),
    "the first of several that are queued": (["success", "queued", "queued"], ("run-1", "queued")),
}


@pytest.mark.parametrize("states, expected", LATEST.values(), ids=LATEST)
def test_which_run_of_a_dag_is_shown(airflow_db, states, expected):
    """One under way, else the latest; not of forgotten DAGs or other pipelines."""
    add_dag(airflow_db, "shop_cdc")
    add_dag(airflow_db, "shop_resync", stale=True)
    for n, state in enumerate(states):
        add_run(airflow_db, "shop_cdc", n, state)
        add_run(airflow_db, "other_cdc", n + 10, "running")
    (found,) = (dag for dag in read_dags(airflow_db, ["shop"])["shop"] if not dag.is_stale)
    assert found.dag_id == "shop_cdc"
    assert (found.run_id, found.run_state) == expected


def test_a_queued_run_of_a_paused_dag_is_not_under_way():
    assert DagState("cdc", "d", False, "r", "queued").is_under_way
    assert not DagState("cdc", "d", True, "r", "queued").is_under_way
    assert DagState("cdc", "d", True, "r", "running").is_under_way


def test_what_airflow_knows_of_one_run(airflow_db):
    add_run(airflow_db, "shop_cdc", 1, "running")
    assert read_dag_run("shop_cdc", "run-1") == DagRunTasks("running", frozenset())
    assert read_dag_run("shop_cdc", "run-2") is None


def test_consumers_are_the_dags_scheduled_on_a_pipelines_assets(monkeypatch, airflow_tables):
    """Once each; another pipeline whose name begins alike is another."""
    engine = airflow_tables(AssetModel, DagScheduleAssetReference)
    names = ("shop/public.orders", "shop/public.items", "shop_eu/public.orders")
    with Session(engine) as session:
        monkeypatch.setattr(
            "waldelta_airflow.views._installed_pipelines.create_session",
            lambda: nullcontext(session),
        )
        for number, name in enumerate(names):
            asset = {"id": number, "name": name, "uri": name, "group": "", "extra": {}}
            session.execute(insert(AssetModel).values(**asset, created_at=NOON, updated_at=NOON))
        for number, dag_id in ((0, "report"), (0, "export"), (1, "export"), (2, "other")):
            reads = {"asset_id": number, "dag_id": dag_id}
            session.execute(insert(DagScheduleAssetReference).values(**reads))
        found = read_consumers("shop")
    assert found == ["export", "report"]


def test_what_a_button_needs_to_know(airflow_db):
    """Whether its DAG is paused, its runs and who asked for them, and how one ended."""
    add_dag(airflow_db, "shop_decide", paused=True)
    asked = {"triggering_user_name": "ann", "conf": {"action": "retry"}}
    for n, state in enumerate(("success", "failed", "queued")):
        add_run(airflow_db, "shop_decide", n, state, **asked)
    found = read_action_dag("shop_decide", "run-1")
    expected = (True, False, False, "failed")
    assert (found.is_paused, found.is_ready, found.is_under_way, found.requested_state) == expected
    (queued,) = found.under_way
    assert (queued.run_id, queued.state, queued.triggering_user_name) == ("run-2", "queued", "ann")
    assert queued.conf == {"action": "retry"}
    add_run(airflow_db, "shop_decide", 3, "running", **asked)
    assert read_action_dag("shop_decide").is_under_way
    assert read_action_dag("shop_reconcile") == ActionDag("shop_reconcile")
    assert ActionDag("shop_reconcile").is_ready


def test_unpausing_is_entered_into_airflows_audit_log(airflow_db):
    add_dag(airflow_db, "shop_cdc", paused=True)
    airflow_db.commit()
    unpause("shop_cdc", "ann")
    airflow_db.expire_all()
    assert airflow_db.get(DagModel, "shop_cdc").is_paused is False
    assert airflow_db.execute(select(Log.dag_id, Log.owner, Log.event)).all() == [
        ("shop_cdc", "ann", "patch_dag")
    ]
    with pytest.raises(HTTPException, match="doesn't know"):
        unpause("gone_cdc", "ann")


def test_airflows_own_pages_are_where_the_application_is_mounted():
    assert airflow_url("/waldelta", "dags", "a b") == "/dags/a%20b"
    assert (
        airflow_url("/behind/waldelta", "dags", "d", "runs", "r/1") == "/behind/dags/d/runs/r%2F1"
    )


@pytest.fixture
def shop(write_pipeline, monkeypatch):
    """A pipeline with a paused DAG and a running one; what was asked of Airflow."""
    loaded = load_pipeline_file(write_pipeline("shop"))
    Ledger(Lake(loaded.target.root)).append(run("manual__9", now()))
    states = (
        DagState("cdc", "shop_cdc", True, "manual__9", "success", now()),
        DagState("reconcile", "shop_reconcile", False, "night", "running", now()),
        DagState("maintenance", "shop_maintenance", False),
        DagState("resync", "shop_resync", False),
    )
    pages, app = "waldelta_airflow.views._pages", "waldelta_airflow.views.app"
    for module in (pages, "waldelta_airflow.views._overview"):
        monkeypatch.setattr(
            f"{module}.read_schedules", lambda names, **_: {"shop": Schedule(dags=states)}
        )
    monkeypatch.setattr(
        f"{pages}.read_dag_run", lambda dag_id, run_id: DagRunTasks("running", frozenset({"land"}))
    )
    asked = []
    monkeypatch.setattr(
        f"{app}.trigger_run",
        lambda dag_id, prefix, conf, user: asked.append((dag_id, prefix, conf)),
    )
    monkeypatch.setattr(f"{app}.unpause", lambda dag_id, name: asked.append((dag_id, name)))
    return asked


BUTTONS = {
    "viewer": set(),
    "user": {"Unpause shop_cdc", "Run now shop_maintenance"},
    "op": {"Unpause shop_cdc", "Run now shop_maintenance"},
}


@pytest.mark.parametrize("role", BUTTONS)
def test_buttons_are_there_for_whom_airflow_lets_do_it(shop, open_pages, role):
    """None beside a running DAG, and none for a resync, which only a lost slot needs."""
    text = open_pages(role).get("/p/shop").text
    found = re.findall(
        r"<button type=\"submit\">(.*?)<span class=\"visually-hidden\">(.*?)</span>", text
    )
    assert {f"{label}{dag_id}" for label, dag_id in found} == BUTTONS[role]


POSTS = {
    "a run": ("p/shop/dags/cdc/run", "user", OWN, 200, [("shop_cdc", "manual", {})]),
    "unpause": ("p/shop/dags/cdc/unpause", "user", OWN, 200, [("shop_cdc", "somebody")]),
    "a run by a viewer": ("p/shop/dags/cdc/run", "viewer", OWN, 403, []),
    "unpause by a viewer": ("p/shop/dags/cdc/unpause", "viewer", OWN, 403, []),
    "by nobody": ("p/shop/dags/cdc/run", None, OWN, 404, []),
    "from another site": ("p/shop/dags/cdc/run", "op", {"sec-fetch-site": "cross-site"}, 403, []),
    "unpause from another site": ("p/shop/dags/cdc/unpause", "op", {"origin": "http://elsewhere"},
     403, []),
    "of two tables": ("p/shop/dags/initial_sync/run?table=a.b&table=c", "user", OWN, 200,
                      [("shop_initial_sync", "manual", {
                          "tables": ["a.b", "c"], "reason": "requested on the pipeline's page"})]),
    "a resync without a reason": ("p/shop/dags/resync/run", "op", OWN, 400, []),
    "a decision": ("p/shop/dags/decide/run", "op", OWN, 403, []),
    "no DAG of a pipeline": ("p/shop/dags/other/run", "op", OWN, 422, []),
    "another pipeline": ("p/none/dags/cdc/run", "op", OWN, 404, []),
}  # fmt: skip


@pytest.mark.parametrize("path, role, headers, status, expected", POSTS.values(), ids=POSTS)
def test_what_the_buttons_do(shop, open_pages, path, role, headers, status, expected):
    assert open_pages(role).post(f"/{path}", headers=headers).status_code == status
    assert shop == expected


def test_a_button_that_is_pressed_twice_starts_one_run(shop, dags, open_pages):
    under_way = DagRun("shop_initial_sync", "manual__1", state="queued")
    dags["shop_initial_sync"] = ActionDag("shop_initial_sync", under_way=[under_way])
    answer = open_pages("op").post("/p/shop/dags/initial_sync/run?table=a.b", headers=OWN)
    assert (answer.status_code, shop) == (200, [])


def test_a_resync_has_its_reason(shop, open_pages):
    form = {"reason": " lost <slot> "}
    answer = open_pages("op").post("/p/shop/dags/resync/run", headers=OWN, data=form)
    assert (answer.status_code, shop) == (
        200,
        [("shop_resync", "manual", {"reason": "lost <slot>"})],
    )


def test_what_runs_is_shown_and_the_page_asks_again(shop, open_pages, monkeypatch):
    """Also without its script; once nothing runs it asks less often, by its script alone."""
    client = open_pages("viewer")
    for page in ("/", "/p/shop", "/p/shop/runs", "/p/shop/run/consume/manual__9"):
        answer = client.get(page)
        assert REFRESH in answer.text, page
        assert "script-src 'self';" in answer.headers["content-security-policy"]
        assert 'data-every="5"' in answer.text
    assert "reconcile running" in client.get("/").text
    monkeypatch.setattr(
        "waldelta_airflow.views._pages.read_schedules", lambda names, **_: {"shop": Schedule()}
    )
    text = client.get("/p/shop").text
    assert (REFRESH in text, 'data-every="60"' in text) == (False, True)


def test_a_runs_page_shows_the_task_that_is_running(shop, pipelines, open_pages, monkeypatch):
    """Since when, with its log; not one whose result the ledger has already."""
    lake = Lake(load_pipeline_file(pipelines / "shop.yml").target.root)
    result = '{"stages": {"land": {"status": "succeeded", "seconds": 2.0}}}'
    Ledger(lake).append(run("manual__9", now(), "running", result=result))
    began = {"land": now() - timedelta(hours=2), "apply": now() - timedelta(minutes=4)}
    monkeypatch.setattr(
        "waldelta_airflow.views._pages.read_dag_run",
        lambda *_: DagRunTasks("running", frozenset(began), began),
    )
    text = open_pages("viewer").get("/p/shop/run/consume/manual__9").text
    assert "apply running" in text
    stages = text[text.index(">Stages<") :]
    assert re.search(r"apply</th><td>.*running.*4 min", stages)
    assert stages.count('scope="row">land<') == 1


def test_a_run_leads_to_airflow_and_its_logs(shop, open_pages):
    """By links that leave the frame; also a run that the ledger hasn't got."""
    client = open_pages("viewer")
    book = client.get("/p/shop/run/consume/manual__9").text
    assert '<a target="_top" href="/dags/shop_cdc/runs/manual__9">' in book
    unknown = client.get("/p/shop/run/consume/manual__10")
    assert unknown.status_code == 404
    assert '<a target="_top" href="/dags/shop_cdc/runs/manual__10">' in unknown.text
    assert '<a target="_top" href="/dags/shop_reconcile/runs/night">' in client.get("/p/shop").text
