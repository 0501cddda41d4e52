"""The plugin's application serves reports to those who may read them."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.bookkeeping import add_reports
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta.stages.check.reports.entries import ReportEntry
from waldelta_airflow.plugin import DeferredApp
from waldelta_airflow.views._pages import reports_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def docs(write_pipeline, tmp_path):
    folder = tmp_path / "lake" / "shop" / "_waldelta" / "data_docs"
    (folder / "checks").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>index</h1>")
    for name in ("unlisted.html", "checks/unlisted.html", "passwords.json", "notes.txt"):
        (folder / name).write_text("values")
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    write_pipeline("shop")
    return folder


@pytest.fixture
def listed(docs, tmp_path, pipelines):
    """A page, and in its run's folder a file that isn't listed and a link that leads outside."""
    (entry,) = checked(pipelines, NOON, run_id="r")
    run = (docs / entry.page).parent
    for name in ("unlisted.html", "notes.txt"):
        (run / name).write_text("values")
    linked = docs / checked(pipelines, NOON, run_id="linked")[0].page
    linked.unlink()
    linked.symlink_to(tmp_path / "secret.html")
    return [run.relative_to(docs).as_posix(), linked.relative_to(docs).as_posix()]


@pytest.fixture
def client(docs, open_pages):
    return open_pages("viewer")


def checked(
    pipelines, at, table="public.orders", run_id="scheduled__1", failures=(), pipeline="shop", **of
):
    """Reports of a run, with their pages; ``of`` are other tables of it that failed."""
    shop = load_pipeline_file(pipelines / "shop.yml")
    tables = {table: failures} | {f"public.{name}": [why] for name, why in of.items()}
    run = (at, pipeline, run_id)
    return add_reports(
        shop, *(ReportEntry(*run, name, 3, 4, tuple(w), (), "x") for name, w in tables.items())
    )


HOSTILE = "<script>alert(1)</script>"


def test_the_index_lists_the_runs_newest_first(client, pipelines):
    """Run, table, time, result; failures first; the links lead to pages."""
    checked(pipelines, NOON, "public.a", "old_run")
    late = NOON + timedelta(hours=1)
    checked(pipelines, late, "public.a", "new_run", z="key (id) is unique (2 rows)")
    text = client.get("/docs/").text
    places = [text.index(part) for part in ("new_run", "public.z", "public.a", "old_run")]
    assert places == sorted(places)
    assert "2026-01-01 13:00:00 UTC" in text
    assert "key (id) is unique (2 rows)" in text
    links = re.findall(r'href="(/docs/shop/[^"]+)"', text)
    assert len(links) == 3
    assert [client.get(link).text for link in links] == ["<h1>page</h1>"] * 3


def test_a_table_that_couldnt_be_checked_has_no_link(client, pipelines):
    """Its run failed, and there is no page of it to lead to. What names it is no markup."""
    checked(pipelines, NOON, "public.a")
    why = (f"couldn't be checked: {HOSTILE}",)
    gone = ReportEntry(NOON, "shop", HOSTILE, 'public."<img src=x>"', 3, 4, why, (), "")
    add_reports(load_pipeline_file(pipelines / "shop.yml"), gone)
    text = client.get("/docs/?failed=true").text
    assert "couldn&#39;t be checked" in text
    assert "&lt;img src=x&gt;" in text
    assert not [
        part
        for part in ("/docs/shop/c", '<a class="failed', "<script>alert", "<img")
        if part in text
    ]


def test_the_index_has_pages_and_can_show_failed_runs_only(client, pipelines):
    """Long lists are cut, with links to the rest; the failed runs can be had alone."""
    for minute in range(45):
        at, failures = NOON + timedelta(minutes=minute), ["no nulls"] if minute == 2 else []
        checked(pipelines, at, run_id=f"run_{minute:02}", failures=failures)
    first, second = client.get("/docs/").text, client.get("/docs/?page=2").text
    assert (first.count('class="run"'), second.count('class="run"')) == (30, 15)
    assert "run_44" in first
    assert '<a href="/docs/?page=2">older</a>' in first
    assert '<a href="/docs/?page=1">newer</a>' in second
    failed = client.get("/docs/?failed=true").text
    assert re.findall(r"run_\d\d", re.sub(r'href="[^"]*"', "", failed)) == ["run_02"]
    assert [client.get(f"/docs/?page={n}").status_code for n in (99, -1)] == [200, 200]


def test_without_reports_the_index_says_so(client, docs):
    """A run that hasn't listed its pages isn't shown, nor is a broken list."""
    for number, text in enumerate(("", "{", "[{}]")):
        run = docs / f"checks/2026-01-01T12000{number}.000000Z-shop-0123456789abcdef"
        run.mkdir()
        (run / "public.orders.html").write_text("values")
        if text:
            (run / "entries.json").write_text(text)
    assert "No reports yet" in client.get("/docs/").text


def test_reports_are_served_without_scripts(client, listed):
    """No script in a report may act with the reader's login, and no image is fetched."""
    answer = client.get(f"/docs/shop/{listed[0]}/public.orders.html")
    assert answer.text == "<h1>page</h1>"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.endswith("; sandbox allow-same-origin")
    assert "script-src" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("path", ["", "index.html"])
def test_a_pipelines_own_list_is_made_anew(client, pipelines, path):
    """The folder's own index may have been written by another pipeline, or by hand."""
    checked(pipelines, NOON, "public.mine")
    checked(pipelines, NOON, "public.theirs", pipeline="other")
    answer = client.get(f"/docs/shop/{path}")
    assert "public.mine" in answer.text
    assert "public.theirs" not in answer.text
    assert "<h1>index</h1>" not in answer.text
    (link,) = set(re.findall(r'href="([^"]+mine[^"]+)"', answer.text))
    assert client.get(link).text == "<h1>page</h1>"


def test_nothing_else_is_served(client, docs, listed, tmp_path, pipelines):
    """No other file, nor any outside the folder, by dots, absolute paths or links."""
    run, linked = listed
    files = ("absent.html", "notes.txt", "unlisted.html", "checks/unlisted.html", "passwords.json")
    of_run = ("", "/entries.json", "/unlisted.html", "/notes.txt")
    dots = ("%2e%2e/%2e%2e/%2e%2e/secret.html", "..%2f..%2f..%2fsecret.html")
    below = [*files, *(f"{run}{name}" for name in of_run), "link.html", linked, *dots]
    below += ["%2fetc%2fpasswd", "x%00.html"]
    paths = [*(f"shop/{path}" for path in below), "other/index.html", "%2e%2e/index.html"]
    assert [path for path in paths if client.get(f"/docs/{path}").status_code != 404] == []
    # Joining an absolute path would replace the folder.
    shop, page = load_pipeline_file(pipelines / "shop.yml"), f"{run}/public.orders.html"
    store = DocsStore(shop, Lake(shop.target.root))
    assert store.read_page(page) is not None
    for path in (docs / page, tmp_path / "secret.html"):
        assert store.read_page(str(path)) is None


def test_of_a_shared_folder_each_pipeline_shows_its_own_reports(client, docs, pipelines):
    """Who may read one pipeline may not read the others' values."""
    checked(pipelines, NOON, "public.mine")
    checked(pipelines, NOON, "public.theirs", pipeline="other")
    paths = [path.relative_to(docs).as_posix() for path in docs.glob("checks/*/*")]
    assert len(paths) == 4
    shown = [path for path in paths if client.get(f"/docs/shop/{path}").status_code == 200]
    assert [path.rpartition("/")[2] for path in shown] == ["public.mine.html"], shown


def test_a_check_that_is_tried_again_has_the_report_of_how_it_ended(docs, pipelines):
    """Its task was cleared, so that its run has two."""
    checked(pipelines, NOON, "public.a", failures=["no nulls"], b="no nulls")
    checked(pipelines, NOON + timedelta(minutes=5), "public.a")
    found = reports_of(load_pipeline_file(pipelines / "shop.yml"), "scheduled__1")
    expected = {"public.a": "passed", "public.b": "failed"}
    assert {table: entry.verdict for table, entry in found.items()} == expected


@pytest.mark.parametrize("path", ["/", "/p/shop", "/style.css", "/docs/shop/index.html"])
def test_without_login_nothing_is_shown(docs, path):
    """The deferred application, as the plugin mounts it, asks for a login first."""
    from airflow.api_fastapi.app import create_auth_manager
    from fastapi.testclient import TestClient

    create_auth_manager()
    assert TestClient(DeferredApp()).get(path).status_code == 401
