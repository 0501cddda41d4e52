"""The pipelines' pages: what they show, to whom, and that nothing is markup."""

import asyncio
import html
import json
import re
import subprocess
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from shutil import copytree

import pytest
from fastapi.testclient import TestClient

from tests.cases import cases
from tests.support.bookkeeping import add_reports, release_of, run
from tests.support.fixtures.airflow import PIPELINE
from tests.support.plugin_app import plugin_app
from waldelta.config import load_pipeline_file
from waldelta.config.pipeline_folder import pipelines_folder
from waldelta.lake import Lake, local_path
from waldelta.lake.ledger import (
    ColumnState,
    Decision,
    Decisions,
    ExpectationResult,
    ExternalCommit,
    Ledger,
    Reconciliation,
    RowDifference,
    Run,
    SentMessage,
    TableState,
    TargetCut,
    now,
)
from waldelta.lake.ledger.check_records import ColumnDifference, Reconciliations
from waldelta.lake.ledger.decisions import MESSAGE
from waldelta.lake.ledger.table import LedgerTable
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.stopped_tables import Stopped, Unmet
from waldelta.stages.check.gate.quarantined_rows import STOP
from waldelta.stages.check.reports.page import ReportEntry
from waldelta_airflow.views import _pages as pages
from waldelta_airflow.views._access import Reader
from waldelta_airflow.views._installed_pipelines import (
    ActionDag,
    DagPaused,
    DagRunTasks,
    DagState,
    Schedule,
    UnderWay,
    load_pipelines,
    pipeline_of,
)

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x9b'
OWN = {"sec-fetch-site": "same-origin"}
RUN_ID = "scheduled__2026-01-01T12:00:00+00:00"
# A page may have been made in the minute before it is looked at.
LATE = (timedelta(0), timedelta(minutes=-1))
PAGES = [
    "",
    "p/shop",
    "p/shop?hours=168",
    "p/shop/runs",
    "p/shop/runs?failed=true",
    "p/shop/expectations",
    "p/shop/reconciliation",
    "p/shop/waiting",
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """The lake of a pipeline, with values that would like to be markup."""
    folder = tmp_path_factory.mktemp("filled")
    path, lake = folder / "shop.yml", folder / "shop"
    path.write_text(PIPELINE.format(name="shop", root=lake.as_uri(), more=""))
    fill(load_pipeline_file(path))
    return lake


@pytest.fixture
def shop(write_pipeline, schedules, filled):
    """A pipeline with a copy of that lake: writing it anew takes longer than most tests."""
    pipeline = load_pipeline_file(write_pipeline("shop"))
    copytree(filled, local_path(pipeline.target.root))
    return pipeline


def fill(pipeline, run_id=RUN_ID, said="fine"):
    root, at = pipeline.target.root, now()
    ledger = Ledger(Lake(root))
    for table, status in (("public.orders", "synced"), (f"public.{said}", "failed")):
        ledger.append(
            TableState(at - timedelta(hours=9), "manual__1", table, 1, status, reason=said)
        )
    for n, status in ((30, "succeeded"), (20, "failed"), (10, "succeeded")):
        result = {
            "stages": {"land": {"status": "succeeded", "seconds": 1.25, "detail": said}},
            "tables": {"public.orders": {"inserted": 12345, "completed": 7, "version": 3}},
            "warnings": [said],
            "error": {"class": "ApplyError", "message": said} if status == "failed" else None,
        }
        ended = at - timedelta(minutes=n)
        name = run_id if n == 10 else f"{run_id}{n}"
        ledger.append(
            Run(
                ended, name, "consume", status, start_lsn=1 << 20, end_lsn=2 << 20, changes=12345,
                seconds=9.0, result=json.dumps(result), as_of=ended - timedelta(minutes=1),
                lag_before_bytes=5 << 20, lag_bytes=0, retained_bytes=16 << 20,
                wal_status="reserved", applied=status == "succeeded",
                targets=[TargetCut("public.orders", 1, 3, inserted=n)],
            )
        )  # fmt: skip
    found = ExpectationResult(
        at, run_id, "public.orders", "k", said, "critical", "key", False, said, 2, 3, [said]
    )
    Ledger(Lake(root)).append_all([found])
    row = Decision(
        at, run_id, "waiting", "public.orders", 1, 1, json.dumps({"id": said}), [said],
        json.dumps({said: said, "n": None}), reason=said,
        messages=[SentMessage(1, 2, 1 << 20, 77, said.encode()), SentMessage(1, 3, None, 77)],
    )  # fmt: skip
    gone = replace(row, status="discarded", key=json.dumps({"id": f"{said} 2"}), by=said)
    Decisions(Lake(root)).add([row, gone])
    ledger.append(release_of(at, run_id, "public.orders", 1, ("1", 1), 1 << 20, said, said))
    odd = RowDifference(
        "different", json.dumps({"id": said}), 1, [ColumnDifference(said, said, None)]
    )
    gone = RowDifference("missing", json.dumps({"id": "2"}))
    Reconciliations(Lake(root)).add(
        [
            Reconciliation(at, run_id, "public.orders", "different", position=1 << 20, version=3,
                           source_rows=12345, target_rows=12344, missing=1, different=1, buckets=64,
                           differing_buckets=2, differences=[odd, gone], by=said),
            Reconciliation(at, run_id, f"public.{said}", "not compared", said),
        ]
    )  # fmt: skip
    run = (at, pipeline.pipeline, run_id)
    entry = ReportEntry(*run, "public.orders", 3, 1, (said,), (), "page")
    add_reports(pipeline, entry, name="a b")
    return pipeline


class Links(HTMLParser):
    """Collects what a page leads to, and whether its tables say what their headers are for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.unscoped = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if "href" in found:
            self.links.append(found["href"])
        self.unscoped += tag == "th" and "scope" not in found


def lacking(text, *parts):
    """Those of the parts that a page doesn't have."""
    return [part for part in parts if part not in text]


def test_the_overview_tells_each_pipeline_in_a_row(shop, open_pages):
    text = open_pages("viewer").get("/").text
    assert not lacking(text, "shop", "healthy", "keeps 16 MB", "1 failed", "rows are in quarantine")
    # The lake was filled before the first of these tests.
    as_of = Ledger(Lake(shop.target.root)).table(Run).read()[-1].as_of
    minutes = {(now() - as_of + late) // timedelta(minutes=1) for late in LATE}
    assert any(f"{number} min ago" in text for number in minutes)


def test_all_links_lead_somewhere(shop, open_pages):
    """Every page can be reached from the overview; none is broken or lacks a way on."""
    client = open_pages("viewer")
    seen, todo = set(), ["/"]
    while todo:
        path = todo.pop()
        answer = client.get(path)
        assert answer.status_code == 200, path
        if path.startswith("/docs/shop") or path in ("/style.css", "/icon.svg"):
            continue
        page = Links(answer.text)
        assert page.unscoped == 0, path
        assert page.tags.count("h1") == 1
        assert '<a class="skip" href="#content">' in answer.text
        fresh = {link.partition("#")[0] for link in page.links if link.startswith("/")} - seen
        fresh = {link for link in fresh if not link.startswith("/dags/")}  # Airflow's
        assert all(link.startswith(("/", "#")) for link in page.links), page.links
        seen |= fresh
        todo += fresh
    below = {f"/p/shop{page}" for page in ("", "/runs", "/expectations", "/waiting")}
    assert below | {"/docs/", "/style.css"} <= seen
    assert any(link.startswith("/docs/shop/checks/") for link in seen)


@pytest.mark.parametrize(
    "page, counted",
    [
        ("/docs/", "1 run, newest first"),
        ("/p/shop/runs", "3 runs of the last 30 days, newest first"),
        ("/p/shop/runs?failed=true", "1 failed run of the last 30 days, newest first"),
        ("/p/shop/waiting", "1 row, by table"),
    ],
)
def test_lists_count_what_they_show(shop, open_pages, page, counted):
    assert f">{counted}, page 1 of 1<" in open_pages("admin").get(page).text


def test_a_tables_page_says_how_to_read_it(shop, open_pages):
    """In Spark, DuckDB and delta-rs, as texts that a click selects whole."""
    uri = f"{shop.target.root}/public/orders"
    rows = 'rows = pa.table(query.execute("select * from target"))'
    text = html.unescape(open_pages("viewer").get("/p/shop/table/public.orders").text)
    for way in (
        f'spark.read.format("delta").load("{uri}")',
        f"install delta; load delta;\nselect * from delta_scan('{uri}');",
        f'query = QueryBuilder().register("target", DeltaTable("{uri}"))\n{rows}',
    ):
        assert re.search(rf'<pre class="copyable">[^<]*{re.escape(way)}</pre>', text), way
    assert re.search(r"Not checked</h3>\s*<ul><li[^>]*>fine</li></ul>", text)


def test_pages_say_that_a_table_has_no_copy(shop, open_pages):
    Ledger(Lake(shop.target.root)).append(
        TableState(now(), "s", "public.orders", 9, "synced", copy_skipped=True)
    )
    client = open_pages("viewer")
    page, listed = client.get("/p/shop/table/public.orders").text, client.get("/p/shop").text
    assert "no initial copy: earlier rows of the source are missing" in page
    assert re.search(r"public\.orders</a> <span class=\"dim\">without a copy</span>", listed)


def test_a_pipelines_tables_fill_pages_of_their_own(shop, open_pages, monkeypatch):
    """Those that need attention are on the first."""
    monkeypatch.setattr("waldelta_airflow.views._pages._TABLES_PER_PAGE", 1)
    client = open_pages("viewer")
    first, second = (client.get(f"/p/shop?page={n}&hours=168").text for n in (1, 2))
    listed = [re.findall(r'row" class="wrap"><a href="[^"]+">([^<]+)', t) for t in (first, second)]
    assert listed == [["public.fine"], ["public.orders"]]
    assert 'href="/p/shop?page=2&amp;hours=168#tables"' in first
    assert "page 2 of 2" in second


def test_no_page_names_the_servers_folders(shop, open_pages):
    """Warnings, errors and reasons name files as the repository does; reports are linked to."""
    folder = pipelines_folder()
    reason = f"fails a plane has seats ({folder.parent}/expectations/shop/public.orders.yml)"
    row = replace(quarantined(8, reason=reason), run_id="told")
    Decisions(Lake(shop.target.root)).add([row])
    (folder / "broken.yml").write_text("pipeline: broken")
    result = {"warnings": [f"{folder.parent}/expectations/shop/x.yml fits no table"]}
    result["error"] = {
        "class": "ConfigError",
        "message": f"pipeline file {folder}/shop.yml is refused\nreport: /srv/docs/a b.html",
    }
    Ledger(Lake(shop.target.root)).append(run("told", now(), "failed", result=json.dumps(result)))
    client = open_pages("admin")
    set_aside = ("/p/shop/waiting", f"/p/shop/waiting/row/{row.id}")
    for page in ("/", "/p/shop", *set_aside, "/p/shop/run/consume/told"):
        text = client.get(page).text
        assert str(folder.parent) not in text, page
        assert "/srv/docs" not in text, page
    assert "expectations/shop/x.yml fits no table" in text
    assert "fails a plane has seats (expectations/shop/public.orders.yml)" in text
    assert "pipeline file broken.yml is refused" in client.get("/").text


ANSWERS = [
    ("found", "/", 200),
    ("the styles", "/style.css", 200),
    ("the script", "/page.js", 200),
    ("the navigation's icon", "/icon.svg", 200),
    ("the navigation's icon where it is dark", "/icon-dark.svg", 200),
    ("an address that can't be read", "/p/shop?hours=x", 422),
    ("no such address", "/nowhere", 404),
    ("no such pipeline", "/p/other", 404),
    ("led elsewhere", "/dag/shop_cdc", 307),
    ("an error of ours", "/p/shop/runs", 500),
]


@cases("path, status", ANSWERS)
def test_every_answer_has_the_security_headers(shop, monkeypatch, path, status):
    """Those of FastAPI itself and of errors too; what can't be read is named without its value."""

    def break_off(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr("waldelta_airflow.views._pages.runs_page", break_off)
    client = TestClient(plugin_app("viewer"), raise_server_exceptions=False, follow_redirects=False)
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'self'" in policy
    # No script but the page's own, which asks no other host.
    assert not [word for word in ("unsafe", "http", "*") if word in policy]
    assert "script-src 'self'; connect-src 'self'" in policy
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cache-control"].startswith("private")
    assert ("no-store" in answer.headers["cache-control"]) is not path.endswith(
        (".css", ".js", ".svg")
    )
    assert "secret" not in answer.text
    if status == 422:
        assert "hours" in answer.text


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
def test_a_body_is_read_no_further_than_it_may_be(shop, role, headers, status, most_read):
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


def test_values_are_never_markup(write_pipeline, schedules, open_pages):
    """Ids, tables, columns, keys and messages, on every page and in every address."""
    fill(load_pipeline_file(write_pipeline("shop")), HOSTILE, HOSTILE)
    client, seen = open_pages("viewer"), set()
    script = "%3Cscript%3E"
    todo = ["/", f"/dag/%22%3E{script}", f"/p/shop/table/{script}", f"/p/shop/run/consume/{script}"]
    while todo:
        path = todo.pop()
        text = client.get(path).text
        assert re.findall("<script[^>]*>", text) == ['<script src="/page.js">'], path
        assert "<img" not in text, path
        assert not set("\u202e\x9b") & set(text), path
        links = {link.partition("#")[0] for link in Links(text).links if link.startswith("/p/")}
        todo += links - seen
        seen |= links
    assert any("/run/consume/" in path for path in seen)


@pytest.mark.parametrize(
    "page",
    [*PAGES, f"p/shop/run/consume/{RUN_ID}", "docs/", "docs/shop/index.html", "dag/shop_cdc"],
)
def test_who_may_not_read_the_dag_sees_nothing_of_its_pipeline(shop, open_pages, page):
    """Not even that there is one."""
    answer = open_pages(None).get(f"/{page}")
    assert "shop" not in answer.text.replace("shop_cdc", "")
    if page.startswith(("p/", "docs/shop")):
        assert answer.status_code == 404


def test_each_pipeline_is_asked_for_by_its_own_dag(shop, write_pipeline, open_pages, monkeypatch):
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
    shop, schedules, open_pages, monkeypatch
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


def test_of_two_files_of_one_pipeline_the_first_counts(
    pipelines, write_pipeline, schedules, open_pages
):
    """As for the DAGs: the pages show whose DAGs there are, and the other file as refused."""
    (pipelines / "shop2.yml").write_text(write_pipeline("shop").read_text())
    found = load_pipelines()
    assert set(found) == {"shop", "shop2.yml"}
    assert found["shop"].target.root.endswith("/shop")
    assert "is also in" in found["shop2.yml"]
    assert "shop2.yml is refused" in open_pages("admin").get("/").text


def test_a_lake_that_isnt_there_and_one_that_cant_be_read(write_pipeline, schedules, open_pages):
    """One lake's trouble takes no other down, and no page names a folder of this server."""
    fill(load_pipeline_file(write_pipeline("shop")))
    write_pipeline("fresh")
    broken = fill(load_pipeline_file(write_pipeline("broken")))
    root = Path(local_path(broken.target.root))
    for file in (root / "_waldelta/runs").rglob("*.parquet"):
        file.unlink()
    client = open_pages("viewer")
    text, page = client.get("/").text, client.get("/p/broken/runs").text
    said = ("run setup, then the initial sync", "its lake can&#39;t be read from here", "keeps 16 ")
    assert not lacking(text, *said)
    assert "_waldelta/runs" in page
    assert str(root) not in text + page
    paths = ("shop", "fresh", "broken", "broken/runs")
    assert [client.get(f"/p/{path}").status_code for path in paths] == [200, 200, 502, 502]
    for page in PAGES[1:]:
        assert client.get(f"/{page.replace('shop', 'fresh')}").status_code == 200


def test_from_airflows_own_pages(shop, open_pages):
    """Tabs of DAGs and runs lead to ours; other DAGs' say that they aren't ours."""
    client = open_pages("viewer")
    assert client.get("/dag/shop_initial_sync").url.path == "/p/shop"
    run = client.get(f"/dag/shop_cdc/run/{RUN_ID}")
    assert run.url.path == f"/p/shop/run/consume/{RUN_ID}"
    said = ("0/100000..", "0/200000", "12,345", "1.2 s", "public.orders", "report")
    assert not lacking(run.text, *said)
    assert client.get("/dag/shop_cdc/run/scheduled__idle").status_code == 404
    assert "does not belong to a waldelta pipeline" in client.get("/dag/other").text


DAGS = [
    ("shop_cdc", ("shop", "consume")),
    ("shop_initial_sync", ("shop", "sync")),
    ("shop_eu_cdc", ("shop_eu", "consume")),
    ("shop", None),
    ("x_cdc", None),
]


@pytest.mark.parametrize("dag_id, found", DAGS)
def test_the_pipeline_of_a_dag(dag_id, found):
    assert pipeline_of(dag_id, {"shop", "shop_eu"}) == found


def test_consumers_are_named_to_those_who_may_read_them(shop, open_pages, monkeypatch):
    consumers = {"public.orders": ["report", "payroll"], "public.items": ["report"]}
    monkeypatch.setattr(pages, "read_consumers", lambda _: consumers)
    monkeypatch.setattr(Reader, "may_read_dag", lambda _, dag_id: dag_id != "payroll")
    text = open_pages("viewer").get("/p/shop").text
    assert "<b>1 DAG</b><span>report</span>" in text
    assert "payroll" not in text


def test_what_only_airflow_knows(shop, write_pipeline, schedules, open_pages):
    """A paused or late DAG, one that fails before its ledger knows; idle runs are news."""
    client, at = open_pages("viewer"), now()
    early = {"failed": "scheduled__early"}
    schedules["shop"] = Schedule(is_paused=True, idle_checked_at=at, succeeded_at=at, **early)
    text = client.get("/").text
    assert not lacking(text, "DAG is paused", "scheduled__early")
    assert re.search(r'title="[^"]+">[\d.]+ s ago', text)
    last = r"Last successful run</dt><dd><time[^>]*>[\d.]+ s ago"
    assert re.search(last, client.get("/p/shop").text)
    schedules["shop"] = Schedule(next_run_at=at - timedelta(hours=1), **early)
    text = client.get("/p/shop").text
    assert re.search("the next run was due <time[^>]*>1 h ago", text)
    # Problems come before warnings.
    assert text.index("scheduled__early") < text.index("overdue by 1 hour")
    write_pipeline("before_setup")  # Setup's DAG needs the pool, too.
    lacks = Schedule(lacks=(Attention("failed", "lacks", "Airflow has no pool <x>"),))
    schedules |= {"shop": lacks, "before_setup": lacks}
    for address in ("/", "/p/shop", "/p/before_setup"):
        assert "problem" in (text := client.get(address).text)
        assert "Airflow has no pool &lt;x&gt;" in text
    schedules["shop"] = Schedule(paused=frozenset({"maintenance", "reconcile"}))
    text = client.get("/p/shop").text
    assert "the maintenance DAG is paused" in text
    assert "the reconcile DAG is paused" not in text  # it has no schedule: it is triggered by hand


@pytest.mark.parametrize(
    "path", ["table/..%2f..%2fsecret", "run/consume/..%2f..%2f..%2fetc%2fpasswd", "run/no/x"]
)
def test_addresses_lead_to_nothing_but_the_ledger(shop, open_pages, path):
    """Ids in addresses are looked for in tables, never on a disk."""
    assert open_pages("viewer").get(f"/p/shop/{path}").status_code == 404


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


def test_the_page_of_a_reconciliation_shows_what_differs(shop, open_pages, monkeypatch):
    """Counts, positions, and each differing row's key, columns and values."""
    client, scanned, scan = open_pages("op"), [], LedgerTable.scan
    monkeypatch.setattr(
        LedgerTable, "scan", lambda self, *a, **k: scanned.append(self.uri) or scan(self, *a, **k)
    )
    text = client.get("/p/shop/reconciliation").text
    # The history is read once, and then the differing rows of its latest results.
    assert sum(uri.endswith("/reconciliations") for uri in scanned) == 2
    # Nothing was counted of a table that couldn't be compared, and the list says where it ends.
    last = text[text.index("Last 30 days") :]
    assert re.search(
        r"not compared.{,40}<td class=\"num\">–</td>\s*<td class=\"num\">–</td>", last, re.DOTALL
    )
    assert "before" not in last
    monkeypatch.setattr("waldelta_airflow.views._pages._MOST_LISTED", 1)
    assert "and 1 earlier result" in client.get("/p/shop/reconciliation").text
    said = ("12,345", "0/100000", "missing", "fine", "not compared", "null")
    assert not lacking(text, *said, "Repair the table that differs")
    assert "public.orders: different from the source" in client.get("/").text


def test_a_table_that_failed_before_the_runs_shown_is_where_the_overview_leads(
    shop, open_pages, monkeypatch
):
    """The overview's link leads to a page that has the table, with what was found and when."""
    monkeypatch.setattr("waldelta_airflow.views._pages._HEAT_MAP_RUNS", 1)
    later = ExpectationResult(
        now(), "later", "public.fine", "k", "m", "critical", "key", True, None, 0, 3
    )
    Ledger(Lake(shop.target.root)).append_all([later])
    client = open_pages("viewer")
    assert "public.orders: critical expectations failed" in client.get("/").text
    text = client.get("/p/shop/expectations").text
    assert re.search(
        r"before the runs shown below.*public\.orders.*failed.*[\d.]+ s ago.*1 failed of 1",
        text,
        re.DOTALL,
    )


EQUAL = [
    ("all", ["equal", "repaired"], "2 of 2 tables", "no differences"),
    ("an attempt alone", ["equal", "not compared"], "1 no result", None),
    ("one that failed", ["repaired", "failed"], "1 no result", None),
    ("one that nobody compared", ["equal"], "1 never compared", None),
    ("none", [], "never compared", None),
]


@cases("found, told, fine", EQUAL)
def test_nothing_is_fine_that_was_not_compared(
    write_pipeline, schedules, open_pages, found, told, fine
):
    """Of how many tables the lake is known to equal its source, and since when."""
    root = load_pipeline_file(write_pipeline("shop")).target.root
    names = ["public.a", "public.b"]
    for name in names:
        Ledger(Lake(root)).append(TableState(now(), "s", name, 1, "synced"))
    at = now() - timedelta(hours=7, minutes=1)
    rows = [
        Reconciliation(at, "r", name, status) for name, status in zip(names, found, strict=False)
    ]
    Reconciliations(Lake(root)).add(rows)
    client = open_pages("viewer")
    pages = [client.get(path).text for path in ("/", "/p/shop", "/p/shop/reconciliation")]
    assert all(told in text for text in (pages if found else pages[:2]))
    assert [bool(re.search("oldest result .*7 h 1 min ago", text)) for text in pages] == [
        bool(found)
    ] * 3
    assert ("no differences" in pages[2]) is (fine is not None)


def test_rows_left_out_of_a_comparison_are_no_difference_and_not_in_quarantine_now(
    write_pipeline, schedules, open_pages
):
    """They were quarantined or discarded then; the quarantine itself may be empty by now."""
    root = load_pipeline_file(write_pipeline("shop")).target.root
    Ledger(Lake(root)).append(TableState(now(), "s", "public.a", 1, "synced"))
    row = Reconciliation(now(), "r", "public.a", "equal", source_rows=9, lacking=3)
    Reconciliations(Lake(root)).add([row])
    client = open_pages("viewer")
    text = client.get("/p/shop/reconciliation").text
    assert re.search(r"<td>nothing</td>\s*<td>3 quarantined or discarded<br></td>", text)
    assert "in quarantine" not in text
    for page in ("/", "/p/shop", "/p/shop/reconciliation"):
        assert "3 rows not compared: quarantined or discarded" in client.get(page).text
    assert "No row is in quarantine." in client.get("/p/shop/waiting").text


def test_a_difference_stays_on_its_page_when_it_could_not_be_compared_again(
    shop, open_pages, decided
):
    """With its rows and its button; and the attempt is told beside it."""
    locked = Reconciliation(
        now(), "later", "public.orders", "not compared", "it is locked just now"
    )
    Reconciliations(Lake(shop.target.root)).add([locked])
    client = open_pages("op")
    text = client.get("/p/shop/reconciliation").text
    said = ("12,345", "fine", "not compared since", "it is locked just now")
    assert not lacking(text, *said, "Repair the table that differs")
    client.post("/p/shop/repair", headers=OWN)
    assert [conf["tables"] for _, conf, _ in decided] == [["public.orders"]]


def test_the_button_triggers_the_run_that_repairs(shop, open_pages, decided):
    """Of one table or of all that differ; who pressed it is who asks for the run."""
    client = open_pages("op")
    answer = client.post("/p/shop/repair/public.orders", headers=OWN)
    assert (answer.history[0].status_code, answer.status_code) == (303, 200)
    assert "Run <code>repair__1</code>" in answer.text
    client.post("/p/shop/repair", headers=OWN)
    conf = {
        "tables": ["public.orders"],
        "repair": True,
        "reason": "requested on the reconciliation page",
    }
    assert decided == [("shop_reconcile", conf, "somebody")] * 2


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
    shop, open_pages, decided, page, path, form, role, headers, status
):
    """Airflow's permission to trigger the DAG, and a form of our own page."""
    client = open_pages(role)
    assert client.post(f"/p/shop/{path}", data=form, headers=headers).status_code == status
    assert bool(decided) is (status == 200)
    if role is not None and not headers.keys() - OWN.keys() and path != "repair":
        assert ("<button" in client.get(f"/p/shop/{page}").text) is (role == "op")


ROW = "0123456789abcdef"
DECISIONS = [
    ("all rows read again", {"action": "retry"},
     {"action": "retry", "tables": None, "ids": None, "reason": None}),
    ("a table's rows read again", {"action": "retry", "table": "public.orders"},
     {"action": "retry", "tables": ["public.orders"], "ids": None, "reason": None}),
    ("rows discarded", {"action": "discard", "id": [ROW, ROW], "reason": " noise "},
     {"action": "discard", "tables": None, "ids": [ROW, ROW], "reason": "noise"}),
    ("rows accepted", {"action": "accept", "id": ROW, "reason": "known"},
     {"action": "accept", "tables": None, "ids": [ROW], "reason": "known"}),
    ("a table released", {"action": "release", "table": "public.orders", "reason": "known"},
     {"action": "release", "tables": ["public.orders"], "ids": None, "reason": "known"}),
    ("rows discarded without a reason", {"action": "discard", "id": ROW}, None),
    ("rows accepted without a reason", {"action": "accept", "id": ROW, "reason": " "}, None),
    ("a table released without a reason", {"action": "release", "table": "public.orders"}, None),
    ("a message skipped", {"action": "skip", "id": ROW, "reason": "known"},
     {"action": "skip", "tables": None, "ids": [ROW], "reason": "known"}),
    ("a message skipped without a reason", {"action": "skip", "id": ROW}, None),
    ("no message", {"action": "skip", "reason": "known"}, None),
    ("no rows", {"action": "discard"}, None),
    ("no rows to accept", {"action": "accept", "reason": "known"}, None),
    ("no table", {"action": "release"}, None),
    ("no row of ours", {"action": "discard", "id": "--by=x"}, None),
    ("nothing that we do", {"action": "drop"}, None),
]  # fmt: skip


@cases("form, conf", DECISIONS)
def test_buttons_of_the_quarantine_trigger_its_dag(shop, open_pages, decided, form, conf):
    """In the name of who pressed it; a form that isn't ours is refused."""
    answer = open_pages("op").post("/p/shop/waiting", data=form, headers=OWN)
    if conf is None:
        assert (answer.status_code, decided) == (400, [])
        return
    assert (answer.history[0].status_code, answer.status_code) == (303, 200)
    assert f"Run <code>{form['action']}__1</code>" in answer.text
    assert decided == [("shop_decide", conf, "somebody")]


def test_messages_that_cant_be_read(shop, open_pages, decided):
    """With its bytes and a button; skipped, by whom and which table lacks it. It is no row."""
    row = Decision(
        now(), RUN_ID, "waiting", "public.orders", 1, 0, ROW, lsn=1 << 20, kind=MESSAGE,
        incarnation="", reason="length at byte 0",
        messages=[SentMessage(None, None, 1 << 20, 77, b"I<b>")],
    )  # fmt: skip
    quarantine, client = Decisions(Lake(shop.target.root)), open_pages("op")
    quarantine.add([row])
    page = client.get("/p/shop/waiting").text
    said = ("Insert", "length at byte 0", "49 3c 62 3e", "I&lt;b&gt;", 'value="skip"', ROW)
    assert not lacking(page, *said)
    assert f"message {ROW} can&#39;t be read" in client.get("/p/shop").text
    of_run = client.get(f"/p/shop/run/consume/{RUN_ID}").text
    assert ("Rows in quarantine" in of_run, ROW in of_run) == (True, False)
    quarantine.add([replace(row, status="skipped", by="Ann", why="known")])
    page = client.get("/p/shop/waiting").text
    assert not lacking(page, "by Ann: known", "not yet applied")
    assert (
        f"may miss a change: message {ROW} was skipped, which no run has applied yet"
        in client.get("/p/shop").text
    )
    quarantine.add([replace(row, status="resolved", by="Ann", why="compared")])
    page = client.get("/p/shop/waiting").text
    assert "Unreadable messages" not in page
    assert ">resolved</td>" in page


def test_external_commits_wait_until_they_are_accepted(shop, open_pages):
    """What was written, by whom and when, with a button and the way to repair it."""
    ledger = Ledger(Lake(shop.target.root))
    commits = [ExternalCommit(7, "UPDATE", "notebook", now())]
    ledger.append(
        replace(ledger.table_states()["public.orders"], at=now(), external_commits=commits)
    )
    text = open_pages("op").get("/p/shop/waiting").text
    section = text[text.index('id="commits"') : text.index('id="rows"')]
    said = ("version 7 (UPDATE by notebook", 'value="accept"', "/p/shop/repair/public.orders")
    assert not lacking(section, *said)
    assert section.index("Compare and repair") < section.index("Accept as it is")
    seen = open_pages("viewer").get("/p/shop/waiting").text
    assert "/p/shop/repair" not in seen
    assert 'value="accept"' not in seen


@pytest.mark.parametrize("page", ["", "/runs", "/expectations", "/waiting", "/table/public.orders"])
def test_the_navigation_counts_what_waits(shop, open_pages, page):
    count = re.compile(r'waiting for you <span class="mark warning">(\d+)<')
    assert count.findall(open_pages("viewer").get(f"/p/shop{page}").text) == ["1"]


def test_a_pipeline_that_isnt_set_up_has_steps(write_pipeline, schedules, open_pages):
    """Each leads to its DAG, also where Airflow's database doesn't say how it is."""
    write_pipeline("fresh")
    setup = DagState("setup", "fresh_setup", is_paused=True)
    for dags, word in (((), "state not known"), ((setup,), "</span> paused</span>")):
        schedules["fresh"] = Schedule(dags=dags)
        text = open_pages("viewer").get("/p/fresh").text
        steps = text[text.index('<ol class="steps">') :].partition("</ol>")[0]
        links = re.findall(r'target="_top" href="/dags/([^"]+)"', steps)
        assert links == ["fresh_setup", "fresh_initial_sync", "fresh_cdc"]
        assert word in steps


def test_what_was_equal_before_a_problem_is_grey(shop, schedules, open_pages):
    """And a table that differs isn't called synced."""
    ledger = Ledger(Lake(shop.target.root))
    for table in ("public.orders", "public.fine"):
        Reconciliations(ledger.lake).add([Reconciliation(now(), "r", table, "equal")])
    client = open_pages("viewer")
    assert 'passed"><span aria-hidden="true">✓</span> 2 of 2 tables<' in client.get("/p/shop").text
    schedules["shop"] = Schedule(is_paused=True)
    for address in ("/", "/p/shop"):
        text = client.get(address).text
        assert '<span class="mark unknown"><span aria-hidden="true">?</span> 2 of 2 tables' in text
        assert "before the problem" in text
    differs = Reconciliation(now(), "r2", "public.orders", "different", missing=1)
    Reconciliations(ledger.lake).add([differs])
    for address in ("/p/shop", "/p/shop/table/public.orders"):
        text = client.get(address).text
        assert "</span> differs</span>" in text, address
        assert "</span> synced</span>" not in text, address


def test_a_table_whose_changes_wait_names_the_cause_and_its_run(shop, open_pages):
    why = {"class": "SchemaChanged", "message": "public.orders: column a changed its type"}
    found = {"error": why, "not_applied": ["public.orders"]}
    failed = run("stuck", now(), "failed", result=json.dumps(found))
    Ledger(Lake(shop.target.root)).append(replace(failed, applied=False))
    text = open_pages("viewer").get("/p/shop/table/public.orders").text
    assert "SchemaChanged: public.orders: column a changed its type" in text
    assert re.search(r'href="/p/shop/run/any/stuck">See the error', text)
    assert "Heals by itself</dt><dd>no, as long as the latest run fails" in text
    todo = "To do</dt><dd>run shop_initial_sync with the table in tables"
    assert todo in text
    page = open_pages("viewer").get("/p/shop/run/any/stuck").text
    assert not lacking(page, "public.orders: column a changed its type", todo)


def test_a_failed_runs_page_leads_to_the_rows(shop, open_pages):
    message = "1 critical expectation failed (the changes are applied and safe):\n  - x: y"
    why = {"class": "QualityFailed", "message": message}
    failed = run(RUN_ID, now(), "failed", result=json.dumps({"error": why}))
    Ledger(Lake(shop.target.root)).append(failed)
    page = open_pages("viewer").get(f"/p/shop/run/consume/{RUN_ID}").text
    card = page[page.index('class="state') :].partition("</section>")[0]
    assert not lacking(card, "public.orders: ", "2 rows fail", 'href="#failed"', "<dd>look at the")
    assert "safe):" not in card
    assert '<h2 id="failed">' in page


def test_a_failed_check_is_told_by_what_failed(shop, open_pages):
    """Not by the run, whose next one may succeed although the rows are as they were."""
    why = {"class": "QualityFailed", "message": "1 critical expectation failed:\n  - x: y"}
    failed = run("late", now(), "failed", result=json.dumps({"error": why}))
    Ledger(Lake(shop.target.root)).append(failed)
    for address in ("/", "/p/shop"):
        text = open_pages("viewer").get(address).text
        assert ("QualityFailed" in text, "the latest run failed" in text) == (False, False)
        assert "public.orders: " in text


def test_changes_of_source_tables_wait_until_they_are_decided_on(shop, open_pages, decided):
    """What a run would do, with both buttons; what is agreed to until a run has followed it."""
    ledger, decisions = Ledger(Lake(shop.target.root)), Decisions(Lake(shop.target.root))
    ledger.append(
        replace(
            ledger.table_states()["public.orders"],
            at=now(),
            columns=[ColumnState("note", 25, -1, "text", "string", False, 3)],
            relation_ids=[77],
        )
    )
    state = ledger.table_states()["public.orders"]
    row = Decision(
        now(), RUN_ID, "waiting", "public.orders", state.generation, 0,
        json.dumps({"dropped": "note", "attnum": 3, "relation": 77}),
        columns=["note"], reason="dropped <note>: 7 rows lose it", kind="dropped_column",
    )  # fmt: skip
    decisions.add([row])
    page = open_pages("op").get("/p/shop/waiting").text
    said = ("dropped &lt;note&gt;: 7 rows lose it", 'value="agree"', 'value="refuse"', row.id)
    assert not lacking(page, *said)
    assert 'value="agree"' not in open_pages("viewer").get("/p/shop/waiting").text
    form = {"action": "agree", "id": row.id, "reason": "ticket"}
    assert open_pages("op").post("/p/shop/waiting", data=form, headers=OWN).is_success
    assert decided[-1][1]["action"] == "agree"
    decisions.add([row.decided("agreed", "d", now(), "ann", "ticket")])
    page = open_pages("op").get("/p/shop/waiting").text
    assert not lacking(page, "not yet applied", "agreed by ann: the next run of", ">agreed</td>")
    decisions.add([row.decided("refused", "d", now(), "ann", "ticket")])
    page = open_pages("op").get("/p/shop/waiting").text
    assert not lacking(page, "refused by ann: the next run of", ">refused</td>")
    stopped = [replace(column, stopped=True) for column in state.columns]
    ledger.append(replace(state, at=now(), columns=stopped))
    page = open_pages("op").get("/p/shop/waiting").text
    assert ("Changes of source tables" in page, ">refused</td>" in page) == (False, True)
    assert "last values only of note" in open_pages("op").get("/p/shop/table/public.orders").text


def quarantined(n, table="public.orders", reason="fails amount is positive", **more):
    key, sent = json.dumps({"id": str(n)}), json.dumps({"id": str(n), "amount": "-1", "note": None})
    return Decision(
        now(), "r", "waiting", table, 1, 1, key, [], sent, 1 << 20, reason=reason, **more
    )


def test_rows_in_quarantine_by_table_and_reason(write_pipeline, schedules, open_pages, decided):
    """By links; what is retried is the chosen table's, and choices stay on other pages."""
    pipeline = load_pipeline_file(write_pipeline("shop"))
    for table in ("public.a", "public.b & c"):
        Ledger(Lake(pipeline.target.root)).append(TableState(now(), "s", table, 1, "synced"))
    rows = [quarantined(n, "public.a", "gone" if n else None) for n in range(130)]
    Decisions(Lake(pipeline.target.root)).add([*rows, quarantined(1, "public.b & c", "gone")])
    client = open_pages("op")
    page = client.get("/p/shop/waiting")
    links = {link for link in Links(page.text).links if "?" in link}
    base = "/p/shop/waiting"
    of_table, of_reason = f"{base}?table=public.b%20%26%20c", f"{base}?reason=gone"
    assert links >= {of_table, of_reason, f"{base}?reason="}
    assert "131 rows" in page.text
    one = client.get(of_table).text
    assert (one.count('name="id"'), "1 row" in one) == (1, True)
    assert "Retry the rows of public.b &amp; c" in one
    assert "/p/shop/waiting?reason=gone&amp;table=public.a" in client.get(of_reason).text
    assert client.get("/p/shop/waiting?reason=").text.count('name="id"') == 1
    older = f"{base}?page=2&table=public.a&reason=gone"
    first = client.get(f"{base}?table=public.a&reason=gone").text
    assert older.replace("&", "&amp;") in first
    assert client.get(older).text.count('name="id"') == 29
    assert "No rows match" in client.get(f"{base}?table=x").text
    client.post(base, data={"action": "retry", "table": "public.b & c"}, headers=OWN)
    assert [conf["tables"] for _, conf, _ in decided] == [["public.b & c"]]


def test_what_came_of_a_row_is_shown_to_those_who_read_its_pipeline(shop, open_pages):
    """Values and messages as sent, cut in the list; also once it is decided on."""
    raw = b"U\x00\xff<b>" + b"x" * 5000
    row = quarantined(8, outdated=True, messages=[SentMessage(1, 2, 1 << 20, 77, raw)])
    row = replace(row, sent=json.dumps({"amount": "-1", "note": None, "long": "y" * 300}))
    Decisions(Lake(shop.target.root)).add([row])
    client, page = open_pages("viewer"), f"/p/shop/waiting/row/{row.id}"
    text = client.get("/p/shop/waiting").text
    said = ("<summary>3 values</summary>", '<span class="dim">null</span>')
    assert not lacking(text, page, *said, "-1", "and 100 more characters")
    text = client.get(page).text
    said = ("0/100000", "transaction 77", "5,006 bytes", "first 4,096", "y" * 300)
    assert not lacking(text, *said, "55 00 ff 3c 62 3e 78", "U..&lt;b&gt;xxx", "000ff0 ")
    assert "001000 " not in text
    assert "target has" in text
    again = replace(row, at=now(), by="bob", why="still fails", lsn=2 << 20)
    Decisions(Lake(shop.target.root)).add([again])
    assert re.search(r'class="mark warning".* waiting<.*by bob: still fails', client.get(page).text)
    Decisions(Lake(shop.target.root)).add(
        [replace(row, status="discarded", at=now(), by="ann", why="noise")]
    )
    text = client.get(page).text
    assert re.search(r"discarded.*by ann: noise", text)
    assert "target has" not in text
    assert client.get("/p/shop/waiting/row/0000").status_code == 404
    assert open_pages(None).get(page).status_code == 404


OTHER_COPIES = [
    ("one under way", [(2, "copying")], False),
    ("one that failed", [(2, "copying"), (2, "failed")], False),
    ("one of a table that left", [(2, "copying"), (2, "failed"), (2, "removed")], False),
    ("one that ended", [(2, "copying"), (2, "synced")], True),
    ("to be", [(2, "copying"), (2, "synced"), (2, "needs_sync"), (3, "copying")], True),
    ("one that was undone", [(2, "copying"), (1, "synced")], False),
]


@cases("rows, is_past", OTHER_COPIES)
def test_a_row_is_lacking_until_another_copy_has_ended(shop, open_pages, rows, is_past):
    """Until then the target is what it was."""
    row = quarantined(8)
    Decisions(Lake(shop.target.root)).add([row])
    ledger = Ledger(Lake(shop.target.root))
    for generation, status in rows:
        ledger.append(TableState(now(), "s", "public.orders", generation, status))
    client, address = open_pages("viewer"), f"/p/shop/waiting/row/{row.id}"
    page = client.get(address).text
    assert ("past" in page, "target had" in page) == (is_past, is_past)
    assert (address in client.get("/p/shop/waiting").text) is not is_past


def test_what_was_decided_stays_on_the_page(shop, open_pages):
    """Who, when and why: rows discarded and read again, one line for all that went at once, and
    tables released.

    A repair takes what was discarded along into the next generation, and an update to another key:
    that is no other decision.
    """
    rows = [quarantined(n) for n in range(3)]
    Decisions(Lake(shop.target.root)).add(rows)
    again = {"status": "resolved", "by": "ben", "run_id": "retry__1", "why": "read again"}
    Decisions(Lake(shop.target.root)).add([replace(row, at=now(), **again) for row in rows])
    changed = replace(quarantined(9), status="resolved", reason="a later change")
    gone = {"status": "discarded", "by": "cid", "run_id": "discard__1"}
    dropped = [replace(quarantined(n), **gone) for n in (20, 21)]
    Decisions(Lake(shop.target.root)).add([changed, *dropped])
    later = now() + timedelta(days=2)
    for generation in (2, 3):
        Decisions(Lake(shop.target.root)).add(
            [replace(dropped[0], at=later, generation=generation)]
        )
    elsewhere = replace(quarantined(22), status="discarded", reason="discarded at another key")
    Decisions(Lake(shop.target.root)).add([replace(elsewhere, at=later)])
    text = open_pages("viewer").get("/p/shop/waiting").text
    decided = text[text.index("Decisions") :]
    assert "at another key" not in decided
    (cid,) = re.findall(r"<tr>(?:(?!</tr>).)*cid.*?</tr>", decided, re.DOTALL)
    assert (f"{later:%Y-%m-%d}" in cid, "and 1 more" in cid) == (False, True)
    said = ("ben", "retry__1", "and 2 more", "discarded", "fine")
    assert not lacking(decided, *said, "everything landed up to 0/100000")
    assert (decided.count(">retried</td>"), decided.count("read again</td>")) == (1, 1)
    assert "a later change" not in decided


def test_behind_a_proxy_the_page_has_the_address_that_airflow_is_told(
    shop, open_pages, decided, monkeypatch
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


def test_enter_in_a_field_presses_its_own_button(shop, open_pages, monkeypatch):
    """A browser presses the form's first button: none that lets rows pass."""
    monkeypatch.setattr(
        "waldelta.monitoring.decisions.read_stopped", lambda *_: [stopped("public.orders")]
    )
    text = open_pages("op").get("/p/shop/waiting").text
    forms = re.findall(r"<form method=\"post\".*?</form>", text, re.DOTALL)
    first = {form: re.findall(r'<button[^>]* value="(\w+)"', form)[0] for form in forms}
    expected = ["release", "discard"]
    assert [button for form, button in first.items() if 'name="reason"' in form] == expected
    assert "retry" in first.values()


def stopped(table, waiting=7, released=None, may_pass=True):
    since = now() - timedelta(hours=3)
    examples = (
        {"key": {"id": "7"}, "values": {"amount": "v4lue"}},
        {"key": {}, "values": {"amount": None}},
    )
    unmet = (Unmet("amount is positive", since, "2 rows", may_pass, examples),)
    return Stopped(table, unmet, waiting, released)


def test_only_stopped_tables_can_be_released(shop, open_pages, dags, monkeypatch):
    """Which expectation, since when, how many changes; not released or hopeless ones."""
    released = release_of(now(), "r", "public.b", 1, ("1", 1), 9, "ann", "known")
    found = [stopped("public.a"), stopped("public.b", released=released)]
    found.append(stopped("public.c", None, may_pass=False))
    monkeypatch.setattr("waldelta.monitoring.decisions.read_stopped", lambda *_: found)
    text = open_pages("op").get("/p/shop/waiting").text
    section = text[text.index('id="stopped"') : text.index("Decisions")]
    assert re.findall(r'name="table" value="([^"]+)"', section) == ["public.a"]
    said = ("amount is positive", "2 rows", "3 h", ">7</td>", ">many</td>", "released by ann")
    assert not lacking(section, *said, "a release does not apply to")
    assert 'name="table"' not in open_pages("viewer").get("/p/shop/waiting").text
    found.clear()
    assert "No table is stopped" in open_pages("op").get("/p/shop/waiting").text
    # Above the button it is seen that the DAG is paused.
    found.append(stopped("public.orders"))
    dags["shop_decide"] = ActionDag("shop_decide", is_paused=True)
    text = open_pages("admin").get("/p/shop/waiting").text
    assert text.index("Unpause <code>shop_decide</code>") < text.index("Release<")


def leave_behind(shop, *tables: str) -> None:
    """A run that applied the changes of all other tables."""
    result = json.dumps({"not_applied": list(tables)})
    Ledger(Lake(shop.target.root)).append(
        run("late", now(), "failed", applied=False, result=result)
    )


def test_a_stopped_tables_page_says_so(shop, open_pages, monkeypatch):
    """And leads to where it is released."""
    leave_behind(shop, "public.orders")
    found = [stopped("public.orders"), stopped("public.other")]
    monkeypatch.setattr("waldelta.monitoring.decisions.read_stopped", lambda *_: found)
    text = open_pages("viewer").get("/p/shop/table/public.orders").text
    assert "public.orders: stopped by a gate (amount is positive), 7 changes wait" in text
    assert "/p/shop/waiting" in text
    assert "public.other" not in text
    assert "</span> behind</span>" in text


def test_a_run_that_airflow_retries_is_no_problem(shop, schedules, open_pages, monkeypatch):
    """Every page says that it is retried, and none of them is red because of it."""
    held = {"error": {"class": "LockHeld", "message": "held by pid 7"}}
    Ledger(Lake(shop.target.root)).append(run("again", now(), "failed", result=json.dumps(held)))
    state = DagState("cdc", "shop_cdc", run_id="again", run_state="running")
    schedules["shop"] = Schedule(dags=(state,))
    monkeypatch.setattr(
        "waldelta_airflow.views._pages.read_dag_run",
        lambda *_: DagRunTasks("running", frozenset({"land"})),
    )
    client = open_pages("viewer")
    for address in ("/", "/p/shop", "/p/shop/runs", "/p/shop/run/consume/again"):
        assert "</span> retrying</span>" in client.get(address).text, address
    assert "the latest run goes on; an attempt at it failed: LockHeld" in client.get("/").text
    assert "the latest run failed" not in client.get("/").text


def holds(text: str) -> tuple[str, str]:
    """What a table's page says its target holds, and why not all of the source."""
    found = re.search(r"<dt>Holds</dt><dd>([^<]*)</dd>(?:<dd>([^<]*))?", text)
    return html.unescape(found[1]), html.unescape(found[2] or "")


def test_a_tables_page_claims_all_rows_only_when_nothing_speaks_against_it(shop, open_pages):
    """A table that differs, or that another error than a gate's left behind, isn't all there."""
    ledger = Ledger(Lake(shop.target.root))
    every = ["delete", "insert", "truncate", "update"]
    for name in ("public.fine", "public.late", "public.differs"):
        ledger.append(TableState(now(), "s", name, 1, "synced", publishes=every))
    inserts = TableState(now(), "s", "public.log", 1, "synced", publishes=["insert"])
    ledger.append(inserts)
    different = Reconciliation(now(), "r", "public.differs", "different", missing=1)
    Reconciliations(ledger.lake).add([different])
    leave_behind(shop, "public.late")
    client = open_pages("viewer")
    names = ("fine", "late", "differs", "log", "orders")
    pages = {name: client.get(f"/p/shop/table/public.{name}").text for name in names}
    assert holds(pages["fine"])[0] == "all rows and columns of the source"
    assert holds(pages["late"])[0] == holds(pages["differs"])[0] == "not known: see above"
    assert "</span> behind</span>" in pages["late"]
    assert holds(pages["log"])[1].startswith("updates aren't published")
    headline, why = holds(pages["orders"])
    assert headline == "not all of the source"
    assert why.startswith("1 row missing or outdated: in quarantine; 1 row missing or outdated:")
    assert "rows in quarantine <a" not in pages["orders"]
    noted = r"public\.log</a> <span class=\"dim\">no updates, deletes, truncates</"
    assert re.search(noted, client.get("/p/shop").text)


def test_pages_say_what_a_run_did_in_the_unit_of_its_verb(shop, open_pages):
    """A copy of many rows isn't "0 changes"; and a run that copied in two attempts copied all."""
    ledger, at = Ledger(Lake(shop.target.root)), now()
    for n, status in ((1, "copying"), (2, "synced")):
        state = TableState(at, "manual__sync", "public.big", 1, status, rows=428_206 * (n - 1))
        ledger.append(replace(state, snapshot="1:1:" * (n - 1)))
    runs = (
        ("sync", "manual__sync", {"public.small": {"rows": 4}}),
        ("reconcile", "compared", {"public.big": {"compared": 4_538}}),
        ("decide", "decided", {"public.big": {"inserted": 2}}),
        ("maintain", "night", {"public.big": {}}),
    )
    for verb, run_id, tables in runs:
        result = json.dumps({"tables": tables})
        row = run(run_id, at, result=result, as_of=None, changes=0)
        ledger.append(replace(row, verb=verb))
    client = open_pages("viewer")
    text = client.get("/p/shop/runs").text
    done = ("428,210 rows copied", "4,538 rows compared", "2 rows corrected", "12,345 changes")
    assert not lacking(text, *(f'<td class="num">{one}</td>' for one in done))
    page = client.get("/p/shop/run/sync/manual__sync").text
    assert "428,210 rows copied" in page
    assert "Unread WAL" not in page
    assert ">428,206<" in page
    for address in ("/", "/p/shop"):
        assert "428,206" in client.get(address).text


PAGES_WITH_BUTTONS = [
    ("waiting", "shop_decide", "waiting", {"action": "retry"}),
    ("reconciliation", "shop_reconcile", "repair", {}),
]


@pytest.mark.parametrize(
    "page, dag_id, path, form", PAGES_WITH_BUTTONS, ids=[case[0] for case in PAGES_WITH_BUTTONS]
)
def test_a_button_says_what_keeps_it(
    shop, open_pages, decided, dags, monkeypatch, page, dag_id, path, form
):
    """Of a paused DAG, or while a run is running; nobody meets a bare error."""
    client = open_pages("op")

    def buttons():
        text = client.get(f"/p/shop/{page}").text
        found = re.findall(r"<button([^>]*)>", text)
        decide = [one for one in found if "action" in one or page == "reconciliation"]
        return text, {"disabled" in button for button in decide}

    assert buttons()[1] == {False}
    run = UnderWay("retry__9", "queued", "ben", now() - timedelta(minutes=2), {"action": "retry"})
    dags[dag_id] = ActionDag(dag_id, under_way=(run,))
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

    def paused(asked_for, *_):
        raise DagPaused(asked_for)

    monkeypatch.setattr("waldelta_airflow.views.app.trigger_run", paused)
    answer = client.post(f"/p/shop/{path}", data=form, headers=OWN)
    assert (answer.history[0].status_code, answer.status_code) == (303, 200)
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


@pytest.mark.parametrize("permission, sees", [("read", True), ("trigger", False), ("edit", False)])
def test_values_of_rows_can_need_more_than_reading(
    write_pipeline, schedules, open_pages, monkeypatch, permission, sees
):
    """Counts, tables and reasons stay; neither keys, values, reports nor messages are served."""
    monkeypatch.setattr(
        "waldelta.monitoring.decisions.read_stopped", lambda *_: [stopped("public.b")]
    )
    pipeline = fill(
        load_pipeline_file(write_pipeline("shop", f"row_values: {permission}")), said="s3cret"
    )
    row, lake = quarantined(5), Lake(pipeline.target.root)
    Decisions(lake).add([row])
    left = json.dumps({"not_applied": ["public.orders"]})
    Ledger(lake).append(Run(now(), RUN_ID, "consume", "failed", result=left))
    gate = ExpectationResult(
        now(), RUN_ID, "public.orders", "k", f"{STOP}m", "critical", "own", False, None, 1, None,
        examples=[json.dumps({"key": {"id": "7"}, "values": {"amount": "v4lue"}})],
    )  # fmt: skip
    Ledger(lake).append(gate)
    paths = ("waiting", f"waiting/row/{row.id}", "reconciliation", f"run/consume/{RUN_ID}")
    for role, shown in (("op", True), ("viewer", sees)):
        client = open_pages(role)
        answers = [client.get(f"/p/shop/{path}") for path in paths]
        assert [answer.status_code for answer in answers] == [200, 200 if shown else 403, 200, 200]
        for answer in (answers[0], *answers[2:]):
            assert ("&#34;id&#34;" in answer.text) is shown
            assert ("row_values" in answer.text) is not shown
        assert [("v4lue" in answers[n].text) for n in (0, 3)] == [shown, shown]
        assert "Gates that stopped tables" in answers[3].text
        assert row.id in answers[0].text
        pages = re.findall(r'href="(/docs/shop/[^"]+a%20b.html)"', client.get("/docs/").text)
        assert [client.get(page).status_code for page in pages] == [200 if shown else 403]


# What page.js needs of a browser, and which pauses in ms it makes before it asks the server again.
_BROWSER = """
const kept = { getAttributeNames: () => [], childNodes: [], nodeType: 1, isEqualNode: () => true };
const body = (parts, every) => ({
  body: { dataset: { every } }, querySelector: (name) => parts[name] ?? null,
});
const whole = { "header.top": kept, main: kept };
globalThis.localStorage = { getItem: () => null };
globalThis.document = {
  ...body(whole, process.argv[2]), documentElement: { dataset: {} }, querySelectorAll: () => [],
};
document.body.dataset.now = "2026-01-01T00:00:00Z";
const shown = [], pauses = [];
globalThis.addEventListener = (name, then) => name === "DOMContentLoaded" && shown.push(then);
globalThis.setInterval = () => 0;
globalThis.setTimeout = (then, pause) => pauses.push([then, pause]);
globalThis.location = { href: "/" };
globalThis.fetch = async () => ({ ok: true, redirected: false, text: async () => "" });
globalThis.DOMParser = class {
  parseFromString() {
    return body({ whole, login: { main: kept } }[process.argv[3]], process.argv[4]);
  }
};
require(process.argv[1]);
shown.forEach((then) => then());
pauses[0][0]().then(() => console.log(pauses.map(([, pause]) => pause).join(" ")));
"""
PAUSES = [
    ("a page", ("5", "whole", "7"), "5000 7000"),
    ("a page without a pause", ("5", "whole"), "5000 60000"),
    ("a proxy's login", ("5", "login"), "5000 5000"),
]


@cases("arguments, pauses", PAUSES)
def test_a_page_asks_again_whatever_the_answer(arguments, pauses):
    script = str(files("waldelta_airflow.views").joinpath("page.js"))
    node = str(files("playwright").joinpath("driver", "node"))
    command = [node, "-e", _BROWSER, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == pauses
