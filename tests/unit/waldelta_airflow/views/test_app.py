"""All pages: what they lead to, their headers, and that nothing in them is markup."""

import json
import re
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.cases import cases
from tests.support.bookkeeping import run
from tests.support.data.shop_pages import HOSTILE, PAGES, RUN_ID, Links, lacking, quarantined
from tests.support.plugin_app import plugin_app
from waldelta.config.pipeline_folder import pipelines_folder
from waldelta.lake import Lake, local_path
from waldelta.lake.ledger import (
    Decisions,
    Ledger,
    now,
)
from waldelta_airflow.views._installed_pipelines import (
    load_pipelines,
    pipeline_of,
)


def test_all_links_lead_somewhere(read_shop, open_pages):
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
def test_every_answer_has_the_security_headers(read_shop, monkeypatch, path, status):
    """Those of FastAPI itself and of errors too; what can't be read is named without its value."""

    def break_off(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr("waldelta_airflow.views._pages.scan_runs", break_off)
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


def test_values_are_never_markup(write_shop, open_pages):
    """Ids, tables, columns, keys and messages, on every page and in every address."""
    write_shop(run_id=HOSTILE, said=HOSTILE)
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


def test_a_lake_that_isnt_there_and_one_that_cant_be_read(write_shop, write_pipeline, open_pages):
    """One lake's trouble takes no other down, and no page names a folder of this server."""
    write_shop()
    write_pipeline("fresh")
    broken = write_shop("broken")
    root = Path(local_path(broken.target.root))
    for file in (root / "_waldelta/runs").rglob("*.parquet"):
        file.unlink()
    client = open_pages("viewer")
    text, page = client.get("/").text, client.get("/p/broken/runs").text
    said = ("see the next step", "its lake can&#39;t be read from here", "keeps 16 ")
    assert not lacking(text, *said)
    assert "_waldelta/runs" in page
    assert str(root) not in text + page
    paths = ("shop", "fresh", "broken", "broken/runs")
    assert [client.get(f"/p/{path}").status_code for path in paths] == [200, 200, 502, 502]
    for page in PAGES[1:]:
        assert client.get(f"/{page.replace('shop', 'fresh')}").status_code == 200


def test_from_airflows_own_pages(read_shop, open_pages):
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


@pytest.mark.parametrize(
    "path", ["table/..%2f..%2fsecret", "run/consume/..%2f..%2f..%2fetc%2fpasswd", "run/no/x"]
)
def test_addresses_lead_to_nothing_but_the_ledger(shop, open_pages, path):
    """Ids in addresses are looked for in tables, never on a disk."""
    assert open_pages("viewer").get(f"/p/shop/{path}").status_code == 404


@pytest.mark.parametrize(
    "page, counted",
    [
        ("/docs/", "1 run, newest first"),
        ("/p/shop/runs", "3 runs of the last 30 days, newest first"),
        ("/p/shop/runs?failed=true", "1 failed run of the last 30 days, newest first"),
        ("/p/shop/waiting", "1 row, by table"),
    ],
)
def test_lists_count_what_they_show(read_shop, open_pages, page, counted):
    assert f">{counted}, page 1 of 1<" in open_pages("admin").get(page).text


@pytest.mark.parametrize("page", ["", "/runs", "/expectations", "/waiting", "/table/public.orders"])
def test_the_navigation_counts_what_waits(read_shop, open_pages, page):
    count = re.compile(r'waiting for you <span class="mark warning">(\d+)<')
    assert count.findall(open_pages("viewer").get(f"/p/shop{page}").text) == ["1"]


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
