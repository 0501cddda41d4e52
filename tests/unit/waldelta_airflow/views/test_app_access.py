"""Who sees and starts what on the pages."""

import asyncio
import json
import re
from datetime import timedelta

import pytest
from airflow.models.dagrun import DagRun

from tests.support.data.shop_pages import OWN, PAGES, RUN_ID, lacking, quarantined, stopped
from tests.support.plugin_app import plugin_app
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    Decisions,
    ExpectationResult,
    Ledger,
    Run,
    now,
)
from waldelta.pipeline.targets.quarantined_rows import STOP
from waldelta_airflow.views._installed_pipelines import (
    ActionDag,
    DagRunTasks,
    DagState,
    Schedule,
)

MEGABYTES = 64


@pytest.mark.parametrize(
    "role, headers, status, most_read",
    [
        ("op", OWN | {"content-length": str(MEGABYTES << 20)}, 413, 0),
        ("op", OWN, 413, 2),
        ("viewer", OWN, 403, 0),
        ("op", {"sec-fetch-site": "cross-site"}, 403, 0),
    ],
    ids=["a length that is stated", "chunked", "not permitted", "another site's form"],
)
def test_a_body_is_read_no_further_than_it_may_be(read_shop, role, headers, status, most_read):
    """Permission and stated length come first; a body of unknown length is read up to the limit."""
    read = 0

    async def receive():
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * (1 << 20), "more_body": read < MEGABYTES}

    answered = []

    async def send(message):
        answered.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    form = (b"content-type", b"application/x-www-form-urlencoded")
    path = "/p/shop/waiting"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [*named, form],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
    }
    asyncio.run(plugin_app(role)(scope, receive, send))
    assert answered[0]["status"] == status
    assert read <= most_read


@pytest.mark.parametrize(
    "page",
    [*PAGES, f"p/shop/run/consume/{RUN_ID}", "docs/", "docs/shop/index.html", "dag/shop_cdc"],
)
def test_who_may_not_read_the_dag_sees_nothing_of_its_pipeline(read_shop, open_pages, page):
    """Not even that there is one."""
    answer = open_pages(None).get(f"/{page}")
    assert "shop" not in answer.text.replace("shop_cdc", "")
    if page.startswith(("p/", "docs/shop")):
        assert answer.status_code == 404


def test_each_pipeline_is_asked_for_by_its_own_dag(
    read_shop, write_pipeline, open_pages, monkeypatch
):
    """An auth manager that lets somebody read one DAG shows that pipeline alone."""
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    write_pipeline("secret")
    monkeypatch.setattr(
        SimpleAuthManager,
        "is_authorized_dag",
        lambda _, *, method, details, user, access_entity=None: details.id == "shop_cdc",
    )
    client = open_pages("viewer")
    assert "secret" not in client.get("/").text
    paths = ("p/shop", "p/secret", "p/absent", "docs/secret/index.html")
    assert [client.get(f"/{path}").status_code for path in paths] == [200, 404, 404, 404]
    # Nothing but the time tells one that exists from one that doesn't.
    pages = [
        re.sub(r"20\d\d-\d\d-\d\d[T ][\d:.+]+", "", client.get(f"/p/{name}").text).replace(name, "")
        for name in ("secret", "absent")
    ]
    assert pages[0] == pages[1]


def test_links_to_dag_runs_are_of_dags_that_the_reader_may_read(
    read_shop, schedules, open_pages, monkeypatch
):
    """On the overview and on the page of a run: another DAG's id and run are none of theirs."""
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    states = [
        DagState(kind, f"shop_{kind}", run_id="r", run_state="running")
        for kind in ("cdc", "resync")
    ]
    schedules["shop"] = Schedule(dags=tuple(states))
    monkeypatch.setattr(
        "waldelta_airflow.views._pages.read_dag_run",
        lambda *_: DagRunTasks("success", frozenset({"land"})),
    )
    pages = ("/", f"/p/shop/run/consume/{RUN_ID}", "/p/shop/run/resync/r")
    for reads_all in (True, False):
        monkeypatch.setattr(
            SimpleAuthManager,
            "is_authorized_dag",
            lambda _, *, method, details, user, access_entity=None, reads=reads_all: (
                reads or details.id == "shop_cdc"
            ),
        )
        text = "".join(open_pages("viewer").get(page).text for page in pages)
        assert "dags/shop_cdc/runs" in text
        assert ("dags/shop_resync/runs" in text) is reads_all


@pytest.mark.parametrize("role, shown", [("admin", True), ("viewer", True), (None, False)])
def test_a_refused_file_is_shown_to_those_who_see_import_errors(
    pipelines, schedules, open_pages, role, shown
):
    (pipelines / "broken.yml").write_text("pipeline: <b>")
    assert ("broken.yml is refused" in open_pages(role).get("/").text) is shown


@pytest.mark.parametrize(
    "role, headers, status",
    [("viewer", OWN, 403), (None, OWN, 404), ("op", {}, 403),
     ("op", {"sec-fetch-site": "cross-site"}, 403),
     ("op", {"origin": "http://elsewhere"}, 403), ("op", {"origin": "http://testserver"}, 200)],
)  # fmt: skip
@pytest.mark.parametrize(
    "page, path, form",
    [
        ("reconciliation", "repair", None),
        ("reconciliation", "repair/public.orders", None),
        ("waiting", "waiting", {"action": "retry"}),
    ],
)
def test_who_may_not_trigger_the_dag_and_who_did_not_press_the_button_do_nothing(
    read_shop, open_pages, decided, page, path, form, role, headers, status
):
    """Airflow's permission to trigger the DAG, and a form of our own page."""
    client = open_pages(role)
    assert client.post(f"/p/shop/{path}", data=form, headers=headers).status_code == status
    assert bool(decided) is (status == 200)
    if role is not None and not headers.keys() - OWN.keys() and path != "repair":
        assert ("<button" in client.get(f"/p/shop/{page}").text) is (role == "op")


def test_behind_a_proxy_the_page_has_the_address_that_airflow_is_told(
    read_shop, open_pages, decided, monkeypatch
):
    """The proxy has its own Host, and plain HTTP lacks Sec-Fetch-Site."""
    client, form = open_pages("op"), {"action": "retry"}
    headers = {"origin": "http://lake.example:8080"}
    refused = client.post("/p/shop/waiting", data=form, headers=headers)
    assert (refused.status_code, decided) == (403, [])
    assert "http://lake.example:8080" in refused.text
    assert "testserver" in refused.text
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://lake.example:8080/airflow")
    assert client.post("/p/shop/waiting", data=form, headers=headers).status_code == 200
    headers = {"origin": "null"}
    assert client.post("/p/shop/waiting", data=form, headers=headers).status_code == 403
    assert len(decided) == 1


PAGES_WITH_BUTTONS = [
    ("waiting", "shop_decide", "waiting", {"action": "retry"}),
    ("reconciliation", "shop_reconcile", "repair", {}),
]


@pytest.mark.parametrize(
    "page, dag_id, path, form", PAGES_WITH_BUTTONS, ids=[case[0] for case in PAGES_WITH_BUTTONS]
)
def test_a_button_says_what_keeps_it(
    read_shop, open_pages, decided, dags, monkeypatch, page, dag_id, path, form
):
    """Of a paused DAG, or while a run is running; nobody meets a bare error."""
    client = open_pages("op")

    def buttons():
        text = client.get(f"/p/shop/{page}").text
        found = re.findall(r"<button([^>]*)>", text)
        decide = [one for one in found if "action" in one or page == "reconciliation"]
        return text, {"disabled" in button for button in decide}

    assert buttons()[1] == {False}
    asked = {"triggering_user_name": "ben", "conf": {"action": "retry"}}
    run = DagRun(dag_id, "retry__9", state="queued", **asked)
    run.queued_at = now() - timedelta(minutes=2)
    dags[dag_id] = ActionDag(dag_id, under_way=[run])
    text, disabled = buttons()
    assert disabled == {True}
    assert 'http-equiv="refresh"' in text
    assert not lacking(text, "retry__9", "queued", "by ben", "2 min")
    answer = client.post(f"/p/shop/{path}", data=form, headers=OWN)
    assert (answer.history[0].status_code, decided) == (303, [])
    assert "Another run" in answer.text
    dags[dag_id] = ActionDag(dag_id, is_paused=True)
    pressed = []
    monkeypatch.setattr(
        "waldelta_airflow.views.app.unpause", lambda dag, user: pressed.append((dag, user))
    )
    answer = client.post(f"/p/shop/{path}", data=form, headers=OWN)
    assert (answer.history[0].status_code, answer.status_code, decided) == (303, 200, [])
    assert "Nothing was triggered" in answer.text
    assert f"Unpause <code>{dag_id}</code>" in answer.text
    unpause = f"/p/shop/dags/{dag_id.removeprefix('shop_')}/unpause?to={page}"
    assert unpause in answer.text
    assert client.post(unpause, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert open_pages("viewer").post(unpause, headers=OWN).status_code == 403
    assert unpause not in open_pages("viewer").get(f"/p/shop/{page}").text
    elsewhere = unpause.replace(f"to={page}", "to=//elsewhere")
    assert client.post(elsewhere, headers=OWN).status_code == 422
    answer = client.post(unpause, headers=OWN)
    expected = (f"/p/shop/{page}", [(dag_id, "somebody")])
    assert (answer.history[0].headers["location"], pressed) == expected


SET_ASIDE = quarantined(5)


def add_values(pipeline):
    """A quarantined row, and a gate that stopped a table with a row that fails it."""
    ledger = Ledger(Lake(pipeline.target.root))
    Decisions(ledger.lake).add([SET_ASIDE])
    left = json.dumps({"not_applied": ["public.orders"]})
    ledger.append(Run(now(), RUN_ID, "consume", "failed", result=left))
    ledger.append(
        ExpectationResult(
            now(), RUN_ID, "public.orders", "k", f"{STOP}m", "critical", "own", False, None, 1,
            None, examples=[json.dumps({"key": {"id": "7"}, "values": {"amount": "v4lue"}})],
        )
    )  # fmt: skip


@pytest.mark.parametrize("permission, sees", [("read", True), ("trigger", False), ("edit", False)])
def test_values_of_rows_can_need_more_than_reading(
    write_shop, open_pages, monkeypatch, permission, sees
):
    """Counts, tables and reasons stay; neither keys, values, reports nor messages are served."""
    monkeypatch.setattr(
        "waldelta.monitoring.decisions.read_stopped", lambda *_: [stopped("public.b")]
    )
    write_shop(more=f"row_values: {permission}", said="s3cret", add=add_values)
    paths = ("waiting", f"waiting/row/{SET_ASIDE.id}", "reconciliation", f"run/consume/{RUN_ID}")
    for role, shown in (("op", True), ("viewer", sees)):
        client = open_pages(role)
        answers = [client.get(f"/p/shop/{path}") for path in paths]
        assert [answer.status_code for answer in answers] == [200, 200 if shown else 403, 200, 200]
        for answer in (answers[0], *answers[2:]):
            assert ("&#34;id&#34;" in answer.text) is shown
            assert ("row_values" in answer.text) is not shown
        assert [("v4lue" in answers[n].text) for n in (0, 3)] == [shown, shown]
        assert "Gates that stopped tables" in answers[3].text
        assert SET_ASIDE.id in answers[0].text
        pages = re.findall(r'href="(/docs/shop/[^"]+a%20b.html)"', client.get("/docs/").text)
        assert [client.get(page).status_code for page in pages] == [200 if shown else 403]
