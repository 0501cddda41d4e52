"""A pipeline on its page, and in the list of all."""

import json
import re
from dataclasses import replace
from datetime import timedelta

from tests.cases import cases
from tests.support.bookkeeping import run
from tests.support.data.shop_pages import lacking
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ExpectationResult,
    Gap,
    Ledger,
    Reconciliation,
    Run,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.run_details import CopyProgress
from waldelta_airflow.views import _pages as pages
from waldelta_airflow.views._access import Reader
from waldelta_airflow.views._installed_pipelines import (
    DagRunTasks,
    DagState,
    Schedule,
)

# A page may have been made in the minute before it is looked at.
LATE = (timedelta(0), timedelta(minutes=-1))


def test_the_overview_tells_each_pipeline_in_a_row(shop, open_pages):
    text = open_pages("viewer").get("/").text
    assert not lacking(text, "shop", "healthy", "keeps 16 MB", "1 failed", "rows are in quarantine")
    # The lake was filled before the first of these tests.
    as_of = Ledger(Lake(shop.target.root)).table(Run).read()[-1].as_of
    minutes = {(now() - as_of + late) // timedelta(minutes=1) for late in LATE}
    assert any(f"{number} min ago" in text for number in minutes)


def test_a_pipelines_tables_fill_pages_of_their_own(read_shop, open_pages, monkeypatch):
    """Those that need attention are on the first."""
    monkeypatch.setattr("waldelta_airflow.views._pages._TABLES_PER_PAGE", 1)
    client = open_pages("viewer")
    first, second = (client.get(f"/p/shop?page={n}&hours=168").text for n in (1, 2))
    listed = [re.findall(r'row" class="wrap"><a href="[^"]+">([^<]+)', t) for t in (first, second)]
    assert listed == [["public.fine"], ["public.orders"]]
    assert 'href="/p/shop?page=2&amp;hours=168#tables"' in first
    assert "page 2 of 2" in second


def test_pages_say_that_a_table_has_no_copy(shop, open_pages):
    Ledger(Lake(shop.target.root)).append(
        TableState(now(), "s", "public.orders", 9, "synced", copy_skipped=True)
    )
    client = open_pages("viewer")
    page, listed = client.get("/p/shop/table/public.orders").text, client.get("/p/shop").text
    assert "no initial copy: earlier rows of the source are missing" in page
    assert re.search(r"public\.orders</a> <span class=\"dim\">without a copy</span>", listed)


def test_consumers_are_named_to_those_who_may_read_them(read_shop, open_pages, monkeypatch):
    monkeypatch.setattr(pages, "read_consumers", lambda _: ["payroll", "report"])
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
    running = DagState("cdc", "shop_cdc", run_id="long", run_state="running")
    late = Schedule(next_run_at=at - timedelta(hours=1), dags=(running,), **early)
    schedules["shop"] = late
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


def test_an_open_gap_explains_a_run_that_failed_before_it_wrote(shop, schedules, open_pages):
    """The page offers the way back, which the failed task's log doesn't."""
    schedules["shop"] = Schedule(failed="scheduled__early")
    client = open_pages("viewer")
    assert "The latest DAG run failed" in client.get("/p/shop").text
    why = ("SlotMissing", "slot 'shop_cdc' is missing", "run shop_resync")
    gap = Gap(now(), "scheduled__early", "open", shop.source.slot, "1", 1, "0/1", 1, 2, *why)
    Ledger(Lake(shop.target.root)).append(gap)
    text = client.get("/p/shop").text
    assert "The slot lost changes" in text
    assert "latest DAG run failed" not in text


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
        r"before the runs shown below.*public\.orders.*failed.*[\d.]+ (s|min) ago.*1 failed of 1",
        text,
        re.DOTALL,
    )


def test_a_pipeline_that_isnt_set_up_has_steps(write_pipeline, schedules, open_pages):
    """Each leads to its DAG, and the next says how it is done, also where Airflow lacks the DAG."""
    write_pipeline("fresh")
    setup = DagState("setup", "fresh_setup", is_paused=True)
    for dags, word in (((), "wait until Airflow has read fresh.yml"), ((setup,), "unpause fresh")):
        schedules["fresh"] = Schedule(dags=dags)
        text = open_pages("viewer").get("/p/fresh").text
        steps = text[text.index('<ol class="steps">') :].partition("</ol>")[0]
        links = re.findall(r'target="_top" href="/dags/([^"]+)"', steps)
        assert links == ["fresh_setup", "fresh_initial_sync", "fresh_cdc"]
        assert word in steps


def test_before_the_first_copy_only_dags_whose_turn_it_is_have_a_button(
    write_pipeline, schedules, open_pages
):
    write_pipeline("fresh")
    kinds = ("setup", "initial_sync", "cdc", "reconcile", "maintenance")
    states = [DagState(kind, f"fresh_{kind}", is_paused=kind == "cdc") for kind in kinds]
    for result, turns in ((None, kinds[:1]), ("success", kinds[:2])):
        states[0] = replace(states[0], run_state=result)
        schedules["fresh"] = Schedule(is_paused=True, dags=tuple(states))
        text = open_pages("op").get("/p/fresh").text
        listed = text.partition('id="dags"')[2]
        addresses = re.findall('action="/p/fresh/dags/([^"]+)"', listed)
        assert addresses == [f"{kind}/run" for kind in turns]


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
        assert '<span class="mark unknown">2 of 2 tables' in text
        assert "before this" in text
    differs = Reconciliation(now(), "r2", "public.orders", "different", missing=1)
    Reconciliations(ledger.lake).add([differs])
    for address in ("/p/shop", "/p/shop/table/public.orders"):
        text = client.get(address).text
        assert "</span> differs</span>" in text, address
        assert "</span> synced</span>" not in text, address


# How far a copy is, and what its page says of the time left.
COPIES = [
    ("all copied before", CopyProgress(2, ("a",), 5, 9, 1.0), "4.0 s</dd><dd>at this speed,"),
    ("one is new", CopyProgress(2, ("a", "b"), 5, None, 1.0, new=("b",)),
     "–</dd><dd>not known: b was never copied"),
    ("none is copied yet", CopyProgress(0, ("a",), 0, 9, None),
     "–</dd><dd>not known before the first table is copied"),
]  # fmt: skip


@cases("progress, left", COPIES)
def test_a_copys_page_says_the_time_left(read_shop, open_pages, monkeypatch, progress, left):
    monkeypatch.setattr(pages, "_progress", lambda *_: progress)
    assert f"time left</dt><dd>{left}" in open_pages("viewer").get("/p/shop").text


def test_what_the_card_says_isnt_repeated_below_it(shop, open_pages, monkeypatch):
    differs = Attention("failed", "different", "t: different", objects=("t",))
    commit = Attention("warning", "decision", "t: another program wrote", ("waiting",),
                       objects=("t",), details=(("t", "version 17"),),
                       waiting="external_commit")  # fmt: skip
    for items, count in (((differs, commit), 1), ((commit,), 1)):
        monkeypatch.setattr(pages, "attention_of", lambda *_, items=items: items)
        text = open_pages("viewer").get("/p/shop").text
        assert text.count("version 17") == count
    monkeypatch.setattr(pages, "attention_of", lambda *_: (differs, commit))
    assert ">waiting for you</a></span>" in open_pages("viewer").get("/p/shop").text


def test_a_failed_check_is_told_by_what_failed(shop, open_pages):
    """Not by the run, whose next one may succeed although the rows are as they were."""
    why = {"class": "QualityFailed", "message": "1 critical expectation failed:\n  - x: y"}
    failed = run("late", now(), "failed", result=json.dumps({"error": why}))
    Ledger(Lake(shop.target.root)).append(failed)
    for address in ("/", "/p/shop"):
        text = open_pages("viewer").get(address).text
        assert ("QualityFailed" in text, "the latest run failed" in text) == (False, False)
        assert "public.orders: " in text


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
