"""Data Docs: only for users who may read the DAG, only files of reports, only below their
folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from waldelta.config import load_pipeline_file
from waldelta.stages.check.reports.index import ReportEntry, add_entry
from waldelta_airflow.views._reports import reports_of, served_report
from waldelta_airflow.views.deferred_app import DeferredApp

pytestmark = pytest.mark.airflow

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def docs(write_pipeline, tmp_path):
    folder = tmp_path / "lake" / "shop" / "_waldelta" / "data_docs"
    (folder / "validations").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>index</h1>")
    (folder / "validations" / "run.html").write_text("<h1>run</h1>")
    for name in ("unlisted.html", "validations/unlisted.html", "passwords.json"):
        (folder / name).write_text("values")
    (folder / "listed.json").write_text("values")
    (folder / "notes.txt").write_text("not a report")
    (folder / ".results" / "other").mkdir(parents=True)
    for kept in ("other/kept.json", "kept.html"):
        (folder / ".results" / kept).write_text("values")
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    write_pipeline("shop")
    return folder


@pytest.fixture
def listed(docs):
    """The list names a page, a file that is none and a link that leads out of the folder."""
    for page in ("validations/run.html", "listed.json", "link.html"):
        add_entry(docs, ReportEntry(NOON, "shop", "r", "public.t", 1, 1, (), (), page))


@pytest.fixture
def client(docs, open_pages):
    return open_pages("viewer")


def checked(
    folder,
    at,
    table="public.orders",
    run_id="scheduled__1",
    failures=(),
    warnings=(),
    pipeline="shop",
):
    """A report on the list, with its page."""
    page = f"validations/{table}/{at:%H%M%S} {run_id}.html"
    (folder / page).parent.mkdir(parents=True, exist_ok=True)
    (folder / page).write_text("<h1>page</h1>")
    add_entry(
        folder,
        ReportEntry(at, pipeline, run_id, table, 3, 4, tuple(failures), tuple(warnings), page),
    )


HOSTILE = "<script>alert(1)</script>"


def test_the_index_lists_the_runs_newest_first(client, docs):
    """Run, table, time and result; what failed is said at once and comes first; the links lead to
    pages.
    """
    checked(docs, NOON, "public.a", "old_run")
    checked(docs, NOON + timedelta(hours=1), "public.a", "new_run")
    checked(
        docs,
        NOON + timedelta(hours=1),
        "public.z",
        "new_run",
        failures=["key (id) is unique (2 rows)"],
    )
    text = client.get("/docs/").text
    places = [text.index(part) for part in ("new_run", "public.z", "public.a", "old_run")]
    assert places == sorted(places)
    assert "2026-01-01 13:00:00 UTC" in text
    assert "key (id) is unique (2 rows)" in text
    links = re.findall(r'href="(/docs/shop/[^"]+)"', text)
    assert len(links) == 3
    assert [client.get(link).text for link in links] == ["<h1>page</h1>"] * 3


def test_a_table_that_couldnt_be_checked_has_no_link(client, docs):
    """Its run failed, and there is no page of it to lead to."""
    checked(docs, NOON, "public.a")
    failures = ("couldn't be checked: it isn't there",)
    add_entry(
        docs, ReportEntry(NOON, "shop", "scheduled__1", "public.gone", None, 1, failures, (), "")
    )
    text = client.get("/docs/?failed=true").text
    assert "couldn&#x27;t be checked" in text
    assert "<td>public.gone</td>" in text
    assert re.findall(r'href="/docs/shop/([^"/]+)', text) == ["validations"]


def test_nothing_in_the_index_is_markup(client, docs):
    """Names of runs, tables and expectations are text."""
    checked(docs, NOON, 'public."<img src=x>"', HOSTILE.replace("/", "|"), [HOSTILE])
    text = client.get("/docs/").text
    assert "&lt;img src=x&gt;" in text
    assert "<script>" not in text
    assert "<img" not in text


def test_the_index_has_pages_and_can_show_failed_runs_only(client, docs):
    """Long lists are cut, with links to the rest; the failed runs can be had alone."""
    for minute in range(45):
        failures = ["no nulls"] if minute == 2 else []
        checked(
            docs, NOON + timedelta(minutes=minute), run_id=f"run_{minute:02}", failures=failures
        )
    first, second = client.get("/docs/").text, client.get("/docs/?page=2").text
    assert (first.count('class="run"'), second.count('class="run"')) == (30, 15)
    assert "run_44" in first
    assert '<a href="/docs/?page=2">older</a>' in first
    assert '<a href="/docs/?page=1">newer</a>' in second
    failed = client.get("/docs/?failed=true").text
    assert re.findall(r"run_\d\d", re.sub(r'href="[^"]*"', "", failed)) == ["run_02"]
    assert (
        client.get("/docs/?page=99").status_code == client.get("/docs/?page=-1").status_code == 200
    )


def test_without_reports_the_index_says_so(client, docs):
    """An entry whose page is gone isn't listed, nor is a broken one."""
    checked(docs, NOON)
    next((docs / "validations" / "public.orders").iterdir()).unlink()
    (docs / ".entries" / "broken.json").write_text("{")
    assert "No reports yet" in client.get("/docs/").text


def test_reports_are_served_without_scripts(client, listed):
    """Reports show values from the source; no script in them may act with the reader's login, and
    no image is fetched.
    """
    answer = client.get("/docs/shop/validations/run.html")
    assert answer.text == "<h1>run</h1>"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.endswith("; sandbox")
    assert "script-src" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("path", ["", "index.html"])
def test_a_pipelines_own_list_is_made_anew(client, docs, path):
    """The folder's own index may have been written by another pipeline, or by hand."""
    checked(docs, NOON, "public.mine")
    checked(docs, NOON, "public.theirs", pipeline="other")
    answer = client.get(f"/docs/shop/{path}")
    assert "public.mine" in answer.text
    assert "public.theirs" not in answer.text
    assert "<h1>index</h1>" not in answer.text
    (link,) = re.findall(r'href="([^"]+mine[^"]+)"', answer.text)
    assert client.get(f"/docs/shop/{link}").text == "<h1>page</h1>"


@pytest.mark.parametrize(
    "path",
    [
        "shop/absent.html",
        "shop/notes.txt",
        "shop/unlisted.html",
        "shop/validations/unlisted.html",
        "shop/passwords.json",
        "shop/listed.json",
        "shop/link.html",
        "shop/.results/other/kept.json",
        "shop/validations/../.results/other/kept.json",
        "shop/.results/kept.html",
        "shop/validations",
        "shop/%2e%2e/%2e%2e/%2e%2e/secret.html",
        "shop/..%2f..%2f..%2fsecret.html",
        "shop/%2fetc%2fpasswd",
        "shop/x%00.html",
        "other/index.html",
        "%2e%2e/index.html",
    ],
)
def test_nothing_else_is_served(client, listed, path):
    """Neither other files nor kept results nor anything outside the folder, by dots, absolute paths
    or symbolic links.
    """
    assert client.get(f"/docs/{path}").status_code == 404


def test_of_a_shared_folder_each_pipeline_shows_its_own_reports(client, docs):
    """Who may read one pipeline may not read the others' values."""
    checked(docs, NOON, "public.mine")
    checked(docs, NOON, "public.theirs", pipeline="other")
    paths = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("public.*/*.html"))]
    paths += [path.relative_to(docs).as_posix() for path in docs.glob(".entries/*.json")]
    assert len(paths) == 4
    shown = [path for path in paths if client.get(f"/docs/shop/{path}").status_code == 200]
    assert [path.partition(".")[2].partition("/")[0] for path in shown] == ["mine"], shown


def test_a_check_that_is_tried_again_has_the_report_of_how_it_ended(docs, pipelines):
    """Its task was cleared, so that its run has two."""
    checked(docs, NOON, "public.a", failures=["no nulls"])
    checked(docs, NOON + timedelta(minutes=5), "public.a")
    checked(docs, NOON, "public.b", failures=["no nulls"])
    found = reports_of(load_pipeline_file(pipelines / "shop.yml"), "scheduled__1")
    assert {table: entry.verdict for table, entry in found.items()} == {
        "public.a": "passed",
        "public.b": "failed",
    }


def test_an_absolute_path_doesnt_leave_the_folder(docs, listed, tmp_path, pipelines):
    """Joining an absolute path replaces the folder; it must be refused."""
    shop = load_pipeline_file(pipelines / "shop.yml")
    assert served_report(shop, str(docs / "validations" / "run.html")) is not None
    assert served_report(shop, str(tmp_path / "secret.html")) is None


@pytest.mark.parametrize("path", ["/", "/p/shop", "/style.css", "/docs/shop/index.html"])
def test_without_login_nothing_is_shown(docs, path):
    """The deferred application, as the plugin mounts it, asks for a login first."""
    from airflow.api_fastapi.app import create_auth_manager
    from fastapi.testclient import TestClient

    create_auth_manager()
    assert TestClient(DeferredApp()).get(path).status_code == 401


def test_the_plugin_loads_nothing_heavy():
    """Airflow loads plugins in every task; FastAPI and Airflow's security come with the first
    request only.
    """
    script = (
        "import sys, airflow.plugins_manager; before = set(sys.modules)\nfrom"
        " waldelta_airflow.plugin import WaldeltaPlugin\nnew = {m.partition('.')[0] for m in"
        " set(sys.modules) - before}\nprint(WaldeltaPlugin.name, sorted(new & {'fastapi',"
        " 'starlette', 'pyarrow', 'pyspark', 'deltalake'}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "waldelta []"
