"""What was fine before a run was overdue, or before the lake can't be read, isn't green."""

import re
from datetime import timedelta
from pathlib import Path
from shutil import rmtree

import pytest

from tests.cases import cases
from tests.support.bookkeeping import result, run
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake, local_path
from waldelta.lake.ledger import Ledger, Reconciliation, TableState, TargetCut, now
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta_airflow.views._installed_pipelines import DagState, Schedule

TABLES = ("public.a", "public.b")
# The overview, the pipeline's page and a table's.
PAGES = ("/", "/p/shop", "/p/shop/table/public.a")
# Signs of what is fine now, other than those of a legend.
GREEN = re.compile(r'(?<!<span>)<span class="mark passed"')
HOUR = timedelta(hours=1)


@pytest.fixture
def lake(write_pipeline, schedules, lake):
    """A pipeline in order: two tables that were checked and found equal by their last runs."""
    root, at = load_pipeline_file(write_pipeline("shop")).target.root, now() - 3 * HOUR
    ledger = Ledger(Lake(root))
    ledger.append_all([TableState(at, "s", name, 1, "synced") for name in TABLES])
    cuts = [TargetCut(name, 1, 1, inserted=1) for name in TABLES]
    slot = {"lag_before_bytes": 9, "retained_bytes": 9, "wal_status": "reserved", "targets": cuts}
    ledger.append_all([run(f"r{n}", at + n * HOUR, **slot) for n in range(3)])
    ledger.append_all([result(at + 2 * HOUR, "r2", name) for name in TABLES])
    Reconciliations(ledger.lake).add([Reconciliation(at, "r", name, "equal") for name in TABLES])
    return ledger


# What Airflow says an hour after the last run, and whether the pages may be green.
SITUATIONS = [
    ("in time", {"next_run_at": HOUR}, True),
    ("a little late", {"next_run_at": -HOUR / 10}, True),
    ("overdue", {"next_run_at": -HOUR}, False),
    ("paused", {"is_paused": True}, False),
    ("a run that only Airflow knows failed", {"failed": "scheduled__x"}, False),
]


@cases("schedule, is_green", SITUATIONS)
def test_what_was_fine_before_is_grey_with_its_age(lake, schedules, open_pages, schedule, is_green):
    due = schedule.get("next_run_at")
    given = schedule | ({"next_run_at": now() + due} if due else {})
    schedules["shop"] = Schedule(**given)
    client = open_pages("viewer")
    for page in PAGES:
        text = client.get(page).text.partition("<main")[2]
        assert bool(GREEN.search(text)) is is_green, page
        assert ('class="state ok"' in text) is (is_green and page != "/"), page
        if page != "/":
            assert ("</span> synced</span>" in text, "Next</dt>" in text) == (True, True)
            aged = r'\? ?</span> synced</span> (complete as of|<span class="dim nowrap">)'
            assert bool(re.search(aged, text)) is not is_green, page
    text = client.get("/p/shop").text
    # The charts don't end in the past: the lag grows until now, the slot isn't known since.
    assert ('class="unknown"' in text, "not known since" in text) == (not is_green, not is_green)
    assert "at most 1 h 2 min, at last 1 h 2 min" in text


def test_a_run_without_an_update_outdates_what_was_fine(lake, open_pages):
    lake.append(run("r3", now() - HOUR, "running", as_of=None))
    for page in PAGES[1:]:
        text = open_pages("viewer").get(page).text.partition("<main")[2]
        assert not GREEN.search(text), page
        assert "No update from the latest run for 1 hour" in text


def test_a_run_that_fails_later_leaves_other_tables_as_they_are(lake, open_pages):
    """Its changes were landed, and applied to them."""
    result = '{"not_applied": ["public.b"], "error": {"class": "SchemaChanged", "message": "b: c"}}'
    cut = [TargetCut("public.a", 1, 1, inserted=1)]
    lake.append(run("r3", now(), "failed", applied=False, targets=cut, result=result))
    client = open_pages("viewer")
    texts = [client.get(f"/p/shop/table/{name}").text for name in TABLES]
    assert ['class="state ok"' in text for text in texts] == [True, False]
    assert "SchemaChanged" not in texts[0]


def test_a_lake_that_cant_be_read_keeps_nothing_green(lake, open_pages):
    client = open_pages("viewer")
    for file in Path(local_path(lake.lake.root), "_waldelta/runs").rglob("*.parquet"):
        file.unlink()
    assert not GREEN.search(client.get("/").text)
    assert client.get("/p/shop").status_code == 502


def test_a_difference_leaves_runs_and_checks_as_they_are(lake, open_pages):
    """They are of now; only the table that differs isn't called synced."""
    different = Reconciliation(now(), "r9", "public.b", "different", missing=1)
    Reconciliations(lake.lake).add([different])
    for page in PAGES[:2]:
        text = open_pages("viewer").get(page).text
        assert '<span class="mark passed"><span aria-hidden="true">✓</span> succeeded<' in text
    assert ("</span> differs</span>" in text, text.count("</span> synced</span>")) == (True, 1)


def test_nothing_compared_is_not_equal(lake, open_pages):
    rmtree(Path(local_path(lake.lake.root), "_waldelta/reconciliations"))
    for page in PAGES[:2]:
        text = open_pages("viewer").get(page).text
        assert '<span class="mark unknown"><span aria-hidden="true">?</span> 0 of 2 tables' in text
    assert "never compared" in open_pages("viewer").get(PAGES[2]).text


# A table's own state and one of the whole pipeline: the table's page has when, and what is next.
def test_a_tables_page_has_since_when_and_what_is_next(lake, schedules, open_pages):
    due = now() - HOUR
    state = DagState("cdc", "shop_cdc", run_id="r2", run_state="success")
    schedules["shop"] = Schedule(next_run_at=due, dags=(state,))
    for page in PAGES[1:]:
        text = open_pages("viewer").get(page).text
        card = text[text.index('class="state warning"') :].partition("</section>")[0]
        assert "The next run is overdue by 1 hour" in card
        labels = re.findall("<dt>([^<]+)</dt>", card)
        assert [name for name in labels if name in ("Since", "Next", "To do")] == [
            "Since", "Next", "To do",
        ]  # fmt: skip
        assert "Open shop_cdc in Airflow" in card
