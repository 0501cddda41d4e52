"""Data Docs of a lake in S3: written, pruned, and shown by Airflow's pages with permissions."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.bookkeeping import add_reports
from tests.support.fixtures.stores import ON_EACH_SERVER
from tests.support.pipelines import pipeline_file
from tests.support.plugin_app import plugin_app
from tests.support.servers.s3_server import READER, Identity
from waldelta.config import load_pipeline_file
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation
from waldelta.pipeline.report_folder import judge_docs
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.check.reports.data_docs import list_reconciliation, list_reports, prune_reports
from waldelta.stages.check.reports.docs_store import CHECKS, DocsStore
from waldelta.stages.check.reports.entries import ReportEntry
from waldelta.stages.check.suite.expectation import TableVerdict
from waldelta_airflow.views._pages import read_reports, reports_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DOCS = "lake/_waldelta/data_docs"
PIPELINE = """\
pipeline: {name}
source:
  {{conn_id: c, slot: {name}_cdc, publications: [{{name: p, tables: [{{name: public.orders}}]}}]}}
target: {{root: "{root}", conn_id: lake_store}}
{more}
"""


@pytest.fixture
def lake(bucket):
    return Lake(bucket.uri("lake"), bucket.storage_options)


@pytest.fixture
def shop(bucket, pipelines, monkeypatch):
    """A pipeline whose lake the connection opens, as Airflow's API server knows both."""
    connect(monkeypatch, bucket)
    return write(pipelines, "shop", bucket.uri("lake"))


def write(pipelines, name, root, more=""):
    path = pipelines / f"{name}.yml"
    path.write_text(PIPELINE.format(name=name, root=root, more=more))
    return load_pipeline_file(path)


def connect(monkeypatch, bucket):
    """What the connection of the pipeline files is in Airflow; the environment has nothing else."""
    for name in bucket.storage_options:
        monkeypatch.delenv(name, raising=False)
    connection = {
        "conn_type": "aws",
        "login": bucket.identity.access_key,
        "password": bucket.identity.secret_key,
        "extra": {"endpoint_url": bucket.endpoint, "region_name": "us-east-1"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_STORE", json.dumps(connection))


def client(role):
    from fastapi.testclient import TestClient

    return TestClient(plugin_app(role))


def check_of(lake, pipeline, at, run_id="scheduled__1", tables=("public.orders",)):
    """Write what a check does of these tables; returns the pages' places among the reports."""
    run = DocsStore(pipeline, lake).begin(CHECKS, run_id, at)
    pages = [run.write_page(table, f"<h1>{table} {run_id}</h1>") for table in tables]
    verdicts = [
        TableVerdict(table, 3, (), (), page) for table, page in zip(tables, pages, strict=True)
    ]
    assert list_reports(run, run_id, at, verdicts) == f"{run.docs.uri}/{run.path}"
    return [run.page_of(page) for page in pages]


@ON_EACH_SERVER
def test_a_run_appears_with_all_its_pages(lake, shop):
    """Until its list is written, it has none; a run whose check was tried again has its last."""
    reports = DocsStore(shop, lake)
    run = reports.begin(CHECKS, "scheduled__1", NOON)
    written = run.page_of(run.write_page("public.orders", "<h1>é</h1>"))
    assert reports.read_entries() == []
    assert reports.read_page(written) is None
    gone = ReportEntry(NOON, "shop", "scheduled__1", "public.gone", None, 1, ("lost",), (), "")
    listed = [
        ReportEntry(NOON, "shop", "scheduled__1", "public.orders", 3, 4, (), (), written),
        gone,
    ]
    run.write_list(listed)
    assert reports.read_entries() == reports.read_entries("scheduled__1") == listed
    assert reports.read_page(written) == "<h1>é</h1>".encode()
    (again,) = check_of(lake, shop, NOON + timedelta(minutes=5))
    check_of(lake, shop, NOON, "scheduled__2")
    found = reports_of(shop, "scheduled__1")
    assert {table: entry.page for table, entry in found.items()} == {
        "public.orders": again,
        "public.gone": "",
    }
    assert [run.run_id for run in read_reports(shop)] == [
        "scheduled__1",
        "scheduled__2",
        "scheduled__1",
    ]


@ON_EACH_SERVER
def test_only_old_runs_are_pruned(lake, shop, bucket):
    """Also one that was killed before it wrote its list; of each kind the last ones stay."""
    killed = DocsStore(shop, lake).begin(CHECKS, "killed", NOON - timedelta(days=1))
    killed.write_page("public.orders", "values")
    pages = [check_of(lake, shop, NOON + timedelta(hours=n), f"run_{n}")[0] for n in range(3)]
    compared = [
        list_reconciliation(
            shop,
            lake,
            [Reconciliation(NOON + timedelta(hours=n), f"rec_{n}", "public.orders", 1, "equal")],
        )
        for n in range(2)
    ]
    other = f"{DOCS}/checks/notes/mine.txt"
    bucket.create(other, b"another writer's")
    assert prune_reports(shop, lake, keep=1) == 2 + 1 + 1
    assert prune_reports(shop, lake, keep=1) == 0
    last = pages[-1].rpartition("/")[0]
    kept = compared[-1].removeprefix(f"{lake.root}/_waldelta/data_docs/")
    assert sorted(bucket.keys(DOCS)) == sorted(
        [
            other,
            f"{DOCS}/{last}/entries.json",
            f"{DOCS}/{last}/public.orders.html",
            f"{DOCS}/{kept}/entries.json",
            f"{DOCS}/{kept}/public.orders.html",
        ]
    )
    assert [run.run_id for run in read_reports(shop)] == ["run_2", "rec_1"]


def test_airflows_pages_show_them(lake, shop, bucket, pipelines):
    """With the headers and permissions of all reports; the lists lead to them."""
    (page,) = check_of(lake, shop, NOON)
    viewer = client("viewer")
    for address in ("/docs/", "/docs/shop/"):
        assert page in viewer.get(address).text
    answer = viewer.get(f"/docs/shop/{page}")
    assert (answer.status_code, answer.text) == (200, "<h1>public.orders scheduled__1</h1>")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "private, no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    # Values are for who may see values, lists for who may read the DAG.
    stranger = client(None)
    for address in ("/docs/shop/", f"/docs/shop/{page}"):
        assert stranger.get(address).status_code == 404
    assert page not in stranger.get("/docs/").text
    write(pipelines, "shop", bucket.uri("lake"), "row_values: edit")
    assert client("viewer").get(f"/docs/shop/{page}").status_code == 403
    assert client("admin").get(f"/docs/shop/{page}").status_code == 200


def test_only_its_listed_pages_are_served(lake, shop, bucket):
    """Neither a list, an unlisted page, another pipeline's, nor any other object of the store."""
    other = shop.model_copy(update={"pipeline": "other"})
    (page,) = check_of(lake, shop, NOON)
    (others,) = check_of(lake, other, NOON, "others")
    run = page.rpartition("/")[0]
    for name in (f"{DOCS}/{run}/unlisted.html", "lake/secret.html", f"{DOCS}/secret.html"):
        bucket.create(name, b"values")
    paths = [
        others,
        f"{run}/entries.json",
        f"{run}/unlisted.html",
        f"{run}/../{run.rpartition('/')[2]}/public.orders.html",
        f"{run}/..%2F..%2F..%2F..%2F..%2Fsecret.html",
        f"{run}/%2e%2e/%2e%2e/secret.html",
        "secret.html",
        "../../secret.html",
        f"/{page}",
        f"{page}/",
        f"s3a://{bucket.name}/{DOCS}/{page}",
        f"{page}\x00",
        f"{page}\n",
    ]
    viewer = client("viewer")
    assert viewer.get(f"/docs/shop/{page}").status_code == 200
    assert [path for path in paths if DocsStore(shop, lake).read_page(path)] == []
    shown = [
        path
        for path in paths
        if not path.endswith(("\x00", "\n"))
        # The client itself resolves dots, as a browser does: what remains may be the page.
        and "/../" not in path
        and viewer.get(f"/docs/shop/{path}").status_code == 200
    ]
    assert shown == []


def test_a_list_that_names_other_objects_leads_nowhere(lake, shop, bucket):
    """Another writer of the bucket can write a list, too."""
    run = DocsStore(shop, lake).begin(CHECKS, "r", NOON)
    bucket.create("lake/secret.html", b"values")
    names = ["../../../../secret.html", f"{run.path}/../../secret.html", "secret.html", 5, None]
    entry = {
        "at": NOON.isoformat(), "pipeline": "shop", "run_id": "r", "table": "t", "version": 1,
        "expectations": 1, "failures": [], "warnings": [],
    }  # fmt: skip
    lists = [[entry | {"page": name} for name in names], {"page": "x"}, 7, [[]], [None]]
    for n, content in enumerate(lists):
        odd = DocsStore(shop, lake).begin(CHECKS, "r", NOON + timedelta(hours=n))
        bucket.create(f"{DOCS}/{odd.path}/entries.json", json.dumps(content).encode())
    torn = DocsStore(shop, lake).begin(CHECKS, "torn", NOON)
    bucket.create(f"{DOCS}/{torn.path}/entries.json", b"\xff{")
    assert DocsStore(shop, lake).read_entries() == []


def test_a_store_that_refuses_is_said_and_hides_no_other_reports(
    lake, shop, bucket, pipelines, tmp_path, monkeypatch
):
    """Without the key, and with the reports of the pipelines whose lake can be read."""
    (page,) = check_of(lake, shop, NOON)
    (pipelines / "local.yml").write_text(
        PIPELINE.format(name="local", root=tmp_path.as_uri(), more="").replace(
            ", conn_id: lake_store", ""
        )
    )
    local = load_pipeline_file(pipelines / "local.yml")
    gone = ReportEntry(NOON, "local", "locals_run", "public.t", None, 1, (), (), "")
    add_reports(local, gone)
    wrong = Identity("nobody", "wrong-secret")
    connect(monkeypatch, bucket.seen_by(wrong))
    viewer = client("viewer")
    said = viewer.get("/docs/").text
    assert "locals_run" in said
    assert "The reports of shop can't be read from here" in said
    answers = [viewer.get(f"/docs/shop/{path}") for path in ("", page)]
    assert [answer.status_code for answer in answers] == [502, 502]
    assert "wrong-secret" not in said + "".join(answer.text for answer in answers)


def test_a_key_that_may_not_write_is_named(shop, bucket):
    readers = Lake(bucket.uri("lake"), bucket.seen_by(READER).storage_options)
    run = DocsStore(shop, readers).begin(CHECKS, "r", NOON)
    with pytest.raises(TargetNotWritable, match="check the credentials") as refused:
        run.write_page("public.orders", "text")
    assert READER.secret_key not in str(refused.value)


def test_a_run_writes_its_pages_into_the_store(database, bucket, runner, pipelines, monkeypatch):
    """Of checks and comparisons; a failed check's error names the page; nothing is left here."""
    from waldelta import Pipeline

    monkeypatch.chdir(pipelines)
    # A small target gets no page of its copy.
    monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 0)
    for name, value in bucket.storage_options.items():
        monkeypatch.setenv(name, value)
    bucket.configure(runner)
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select n, '<b>' || n from generate_series(1, 9) n")
    suites = pipelines / "own"
    suites.mkdir()
    kept = {"suites": str(suites), "keep_reports": 2}
    file = pipeline_file(bucket.uri("lake"), f"s_{database.name}", quality=kept)
    assert list(judge_docs(file)) == []
    pipeline = Pipeline(file)
    pipeline.setup(spark=runner.spark())
    checked = pipeline.sync(runner).checked.report
    (suites / "public.t.yml").write_text(
        "expectations: [{type: expect_column_max_to_be_between, kwargs: {column: id, max_value:"
        " 0}}]"
    )
    with pytest.raises(RunFailed, match=r"report: s3a://.*/public\.t\.html"):
        pipeline.validate(runner)
    compared = pipeline.reconcile(runner).checked.report
    docs = f"{file.target.root}/_waldelta/data_docs"
    assert checked.startswith(f"{docs}/checks/")
    assert compared.startswith(f"{docs}/reconciliations/")
    runs = read_reports(file)
    assert [(run.verdict, len(run.entries)) for run in runs] == [
        ("passed", 1),
        ("failed", 1),
        ("passed", 1),
    ]
    page = bucket.read(f"{DOCS}/{runs[1].entries[0].page}").decode()
    assert "public.t" in page
    assert bucket.identity.secret_key not in page
    assert [path.name for path in pipelines.iterdir()] == ["own"]
    pipeline.teardown()
