"""What was fine before a run was overdue, or before the lake can't be read, isn't green."""

import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from tests.cases import cases
from tests.support.bookkeeping import NOON, result, run
from tests.support.fixtures.airflow import PIPELINE
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake, local_path
from waldelta.lake.ledger import Ledger, Reconciliation, TableState, TargetCut
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta_airflow.views._installed_pipelines import DagState, Schedule

TABLES = ("public.a", "public.b")
# The overview, the pipeline's page, a table's, that of comparisons, and what a search finds.
PAGES = ("/", "/p/shop", "/p/shop/table/public.a", "/p/shop/reconciliation", "/?q=public")
# Signs of what is fine now, other than those of a legend.
GREEN = re.compile(r'(?<!<span>)<span class="mark passed"')
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _at_noon(monkeypatch):
    for module in ("_pages", "_overview", "_render"):
        monkeypatch.setattr(f"waldelta_airflow.views.{module}.now", lambda: NOON)


@pytest.fixture(scope="module")
def in_order(tmp_path_factory):
    """The lake of a pipeline in order: its last runs checked two tables and found them equal."""
    folder, at = tmp_path_factory.mktemp("in-order") / "shop", NOON - timedelta(hours=3, seconds=2)
    ledger = Ledger(Lake(folder.as_uri()))
    ledger.append_all([TableState(at, "s", name, 1, "synced") for name in TABLES])
    cuts = [TargetCut(name, 1, 1, inserted=1) for name in TABLES]
    slot = {"lag_before_bytes": 9, "retained_bytes": 9, "wal_status": "reserved", "targets": cuts}
    ledger.append_all([run(f"r{n}", at + n * HOUR, **slot) for n in range(3)])
    ledger.append_all([result(at + 2 * HOUR, "r2", name) for name in TABLES])
    Reconciliations(ledger.lake).add([Reconciliation(at, "r", name, "equal") for name in TABLES])
    return folder


@pytest.fixture
def shop(write_pipeline, schedules, in_order):
    """Writes a pipeline of that lake, which all tests read and none changes."""
    return partial(write_pipeline, "shop", text=PIPELINE.replace("{root}", in_order.as_uri()))


@pytest.fixture
def ledger(write_pipeline, schedules, in_order):
    """The ledger of a copy of that lake."""
    root = load_pipeline_file(write_pipeline("shop")).target.root
    copytree(in_order, local_path(root))
    return Ledger(Lake(root))


# What Airflow says an hour after the last run, and whether the pages may be green.
SITUATIONS = [
    ("in time", {"next_run_at": HOUR}, True),
    ("a little late", {"next_run_at": -HOUR / 10}, True),
    ("overdue", {"next_run_at": -HOUR}, False),
    ("paused", {"is_paused": True}, False),
    ("a run that only Airflow knows failed", {"failed": "scheduled__x"}, False),
]


def now_on(client, page):
    """What a page says of now: the history of comparisons below it stays as it was."""
    return client.get(page).text.partition("<main")[2].partition('<h2 id="history">')[0]


@cases("schedule, is_green", SITUATIONS)
def test_what_was_fine_before_is_grey_with_its_age(shop, schedules, open_pages, schedule, is_green):
    shop()
    due = schedule.get("next_run_at")
    given = schedule | ({"next_run_at": NOON + due} if due else {})
    schedules["shop"] = Schedule(**given)
    client = open_pages("viewer")
    for page in PAGES:
        text = now_on(client, page)
        assert bool(GREEN.search(text)) is is_green, page
        assert ('class="state ok"' in text) is (is_green and page in PAGES[1:3]), page
        if page in PAGES[1:3]:
            assert ("synced</span>" in text, "Next</dt>" in text) == (True, True)
            aged = 'earlier: synced</span> (complete as of|<span class="dim nowrap">)'
            assert bool(re.search(aged, text)) is not is_green, page
    text = client.get("/p/shop").text
    # The charts don't end in the past: the lag grows until now, the slot isn't known since.
    assert ('class="unknown"' in text, "not known since" in text) == (not is_green, not is_green)
    assert "at most 1 h 2 min, at last 1 h 2 min" in text
    # The WAL is as old as the reading of it.
    assert re.search(r"shop_cdc, <time[^>]*>1 h ago</time></span></li>", text)
    assert ('Unread WAL</dt><dd><span class="dim">' in text) is not is_green


# What Airflow says of the DAGs beside the CDC DAG, and what which pages say; the reconciliation has
# a schedule, maintenance has one by default.
OTHERS = [
    ("both in time", {"next_of": {"maintenance": HOUR, "reconcile": HOUR}}, "overdue", (), True),
    ("a late reconciliation", {"next_of": {"reconcile": -HOUR}},
     "the next run of the reconcile DAG is overdue by 1 hour", PAGES[:4], False),
    ("a paused reconciliation", {"paused": frozenset({"reconcile"})},
     "the reconcile DAG is paused", PAGES[:4], False),
    ("late maintenance", {"next_of": {"maintenance": -HOUR}},
     "the next run of the maintenance DAG is overdue by 1 hour", PAGES[:2], True),
]  # fmt: skip


@cases("schedule, sentence, pages, is_equal", OTHERS)
def test_what_was_equal_is_grey_once_nothing_compares(
    shop, schedules, open_pages, schedule, sentence, pages, is_equal
):
    """Runs and checks stay as they are: they are of now."""
    shop(more="quality: {reconcile: {schedule: '30 2 * * *'}}")
    due = {kind: NOON + after for kind, after in schedule.get("next_of", {}).items()}
    schedules["shop"] = Schedule(**schedule | {"next_of": due})
    client = open_pages("viewer")
    for page, equal in zip(PAGES, ("2 of 2 tables", "2 of 2 tables", "equal", "no differences"),
                           strict=False):  # fmt: skip
        text = client.get(page).text
        sign = "<span[^>]+>✓</span> " if is_equal else "(earlier: )?"
        assert re.search(f'"mark (passed|unknown)">{sign}{equal}<', text), page
        assert (f"{sentence[1:]}" in text) is (page in pages), page
        if page in PAGES[:2]:
            assert '<span class="mark passed"><span aria-hidden="true">✓</span> succeeded<' in text


def test_a_run_without_an_update_outdates_what_was_fine(ledger, open_pages):
    ledger.append(run("r3", NOON - HOUR, "running", as_of=None))
    for page in PAGES[1:4]:
        text = now_on(open_pages("viewer"), page)
        assert not GREEN.search(text), page
        assert page == PAGES[3] or "No update from the latest run for 1 hour" in text


def test_a_run_that_fails_later_leaves_other_tables_as_they_are(ledger, open_pages):
    """Its changes were landed, and applied to them."""
    result = '{"not_applied": ["public.b"], "error": {"class": "SchemaChanged", "message": "b: c"}}'
    cut = [TargetCut("public.a", 1, 1, inserted=1)]
    ledger.append(run("r3", NOON, "failed", applied=False, targets=cut, result=result))
    client = open_pages("viewer")
    texts = [client.get(f"/p/shop/table/{name}").text for name in TABLES]
    assert ['class="state ok"' in text for text in texts] == [True, False]
    assert "SchemaChanged" not in texts[0]


def test_a_lake_that_cant_be_read_keeps_nothing_green(ledger, open_pages):
    client = open_pages("viewer")
    for file in Path(local_path(ledger.lake.root), "_waldelta/runs").rglob("*.parquet"):
        file.unlink()
    assert not GREEN.search(client.get("/").text)
    assert client.get("/p/shop").status_code == 502


def test_a_difference_leaves_runs_and_checks_as_they_are(ledger, open_pages):
    """They are of now; only the table that differs isn't called synced."""
    different = Reconciliation(NOON, "r9", "public.b", "different", missing=1)
    Reconciliations(ledger.lake).add([different])
    for page in PAGES[:2]:
        text = open_pages("viewer").get(page).text
        assert '<span class="mark passed"><span aria-hidden="true">✓</span> succeeded<' in text
    assert ("</span> differs</span>" in text, text.count("</span> synced</span>")) == (True, 1)


def test_nothing_compared_is_not_equal(ledger, open_pages):
    rmtree(Path(local_path(ledger.lake.root), "_waldelta/reconciliations"))
    for page in PAGES[:2]:
        text = open_pages("viewer").get(page).text
        assert '<span class="mark unknown">0 of 2 tables' in text
    assert "never compared" in open_pages("viewer").get(PAGES[2]).text


# A table's own state and one of the whole pipeline: the table's page has when, and what is next.
def test_a_tables_page_has_since_when_and_what_is_next(shop, schedules, open_pages):
    shop()
    due = NOON - HOUR
    state = DagState("cdc", "shop_cdc", run_id="r2", run_state="success")
    schedules["shop"] = Schedule(next_run_at=due, dags=(state,))
    for page in PAGES[1:3]:
        text = open_pages("viewer").get(page).text
        card = text[text.index('class="state failed"') :].partition("</section>")[0]
        assert "The next run is overdue by 1 hour" in card
        labels = re.findall("<dt>([^<]+)</dt>", card)
        assert [name for name in labels if name in ("Since", "Next", "To do")] == [
            "Since", "Next", "To do",
        ]  # fmt: skip
        assert "restart the scheduler&#39;s service" in card
