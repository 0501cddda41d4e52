"""The page of all pipelines: what it reads, what it finds, and for whom."""

import re
from dataclasses import replace
from datetime import timedelta

import pytest
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.pool import Pool
from airflow.models.xcom import XComModel
from sqlalchemy import event
from sqlalchemy.orm import Session

from benchmarks.installation import name_of, write_installation
from tests.cases import cases
from tests.support.airflow_rows import add_dag, add_run
from tests.support.bookkeeping import NOON, pipeline
from tests.support.fixtures.airflow import PIPELINE
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.lake.ledger import ColumnState, Ledger, RowCounts, Run, TableState, now
from waldelta.lake.ledger.table import LedgerTable
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.reconciliation_status import Compared
from waldelta_airflow.views import _overview
from waldelta_airflow.views._access import Reader
from waldelta_airflow.views._installed_pipelines import DagState, Schedule
from waldelta_airflow.views._overview import Card
from waldelta_airflow.views._situation import Situation

HOSTILE = '"><script>alert(1)</script>\u202e'
SMALL = {"tables": 2, "runs": 3}


@pytest.fixture
def engine(airflow_tables):
    """Airflow's database, empty."""
    return airflow_tables(DagModel, DagRun, XComModel, Pool, Connection)


@pytest.fixture
def install(tmp_path, monkeypatch, engine):
    """Writes so many pipelines, with their CDC DAGs; returns the folder."""

    def write(pipelines):
        folder = tmp_path / str(pipelines)
        folder.mkdir()
        write_installation(folder, pipelines, **SMALL, end=now())
        monkeypatch.setenv("WALDELTA_PIPELINES", str(folder))
        with Session(engine) as session:
            for number in range(1, pipelines + 1):
                add_dag(session, f"{name_of(number)}_cdc")
            session.commit()
        return folder

    return write


@pytest.fixture
def work(monkeypatch, engine):
    """The lakes that were read and the queries of Airflow's database, since they were cleared."""
    done = []
    scan = LedgerTable.scan

    def recorded(table, *args, **more):
        done.append(table.uri.partition("/lakes/")[2].partition("/")[0])
        return scan(table, *args, **more)

    monkeypatch.setattr(LedgerTable, "scan", recorded)
    event.listen(engine, "before_cursor_execute", lambda *_: done.append("query"))
    return done


def test_only_changed_lakes_are_read_again(install, work, open_pages):
    folder, client = install(3), open_pages("viewer")
    client.get("/")
    assert {name_of(1), name_of(2), name_of(3)} < set(work)
    work.clear()
    text = client.get("/").text
    assert set(work) == {"query"}
    ledger = Ledger(Lake(load_pipeline_file(folder / f"{name_of(2)}.yml").target.root))
    last = ledger.table(Run).read()[-1]
    ledger.append(replace(last, at=last.at + timedelta(seconds=1), status="failed"))
    work.clear()
    assert client.get("/").text.count("the latest run failed") == 1
    assert "the latest run failed" not in text
    assert set(work) == {name_of(2), "query"}


def test_queries_dont_grow_with_the_pipelines(install, work, open_pages, engine):
    counts = []
    for pipelines in (2, 5):
        install(pipelines)
        client = open_pages("viewer")
        client.get("/")
        work.clear()
        client.get("/")
        counts.append(work.count("query"))
        with Session(engine) as session:
            session.query(DagModel).delete()
            session.commit()
    assert counts[0] == counts[1] < 12


def test_a_page_doesnt_wait_for_slow_lakes(install, open_pages, monkeypatch):
    install(2)
    client = open_pages("viewer")
    for name in ("FIRST_S", "AGAIN_S"):
        monkeypatch.setattr(f"waldelta.monitoring.glance_cache.{name}", 0.0)
    monkeypatch.setattr("waldelta.monitoring.glance_cache.GlanceCache._read", lambda *_: None)
    text = client.get("/?q=shop").text
    assert text.count("being read</span>") >= 2
    assert "reads 2 pipelines of 2 for the first time" in text
    assert 'http-equiv="refresh" content="2"' in text


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A lake with a table, columns and runs that are to be found; tests only read it."""
    folder, at = tmp_path_factory.mktemp("searched") / "shop", now()
    ledger = Ledger(Lake(folder.as_uri()))
    columns = [
        ColumnState(name, 25, -1, "text", "string", not_null=False) for name in ("amount", HOSTILE)
    ]
    states = (("orders", "synced", columns, None), (HOSTILE, "failed", [], "so"))
    ledger.append_all(
        [
            TableState(at, "manual__1", f"public.{name}", 1, status, columns=some, reason=why)
            for name, status, some, why in states
        ]
    )
    ledger.append(Run(at, "scheduled__early", "consume", "failed", as_of=at))
    return folder


@pytest.fixture
def shop(write_pipeline, engine, searched):
    """The pipeline of that lake, with its runs in Airflow."""
    text = PIPELINE.replace("{root}", searched.as_uri())
    found = load_pipeline_file(write_pipeline("shop", text=text))
    with Session(engine) as session:
        add_dag(session, "shop_cdc")
        add_run(session, "shop_cdc", 7, "success")
        add_run(session, "other_cdc", 7, "success")
    return found


# A search, and what it leads to.
FOUND = {
    "a pipeline": ("SHO", ['href="/p/shop"']),
    "a table": ("orders", ['href="/p/shop/table/public.orders"', "1 table<"]),
    "a column": ("amoun", ['href="/p/shop/table/public.orders">amount', "1 column<"]),
    "a column of a table": ("orders.am", [">amount</a>", "1 column<"]),
    "a run of the ledger": ("early", ['href="/p/shop/run/any/scheduled__early"', "1 run<"]),
    "a run that only Airflow knows": ("run-7", ['href="/p/shop/run/any/run-7"', "1 run<"]),
    "nothing": ("nowhere", ["Nothing has", "nowhere"]),
    "what no database takes": ("or\0ders", ["1 table<"]),
    "a pattern is a text": ("run_7", ["Nothing has"]),
}


@pytest.mark.parametrize(("text", "parts"), FOUND.values(), ids=FOUND)
def test_what_a_search_finds(shop, open_pages, text, parts):
    answer = open_pages("viewer").get("/", params={"q": text})
    assert [part for part in parts if part not in answer.text] == []


def test_names_are_never_markup(shop, open_pages):
    client = open_pages("viewer")
    for text in (HOSTILE, "public", "<script>", "%00", "x" * 5_000):
        answer = client.get("/", params={"q": text})
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
        assert "\u202e" not in answer.text
    assert client.get("/?state=lost").status_code == 422


def test_a_search_finds_only_what_the_reader_may_see(shop, write_pipeline, open_pages, monkeypatch):
    write_pipeline("other")
    client = open_pages("viewer")
    monkeypatch.setattr(Reader, "may_read_dag", lambda _, dag_id: dag_id == "other_cdc")
    for text, _ in FOUND.values():
        assert "shop" not in client.get("/", params={"q": text}).text
    assert 'href="/p/other/run/any/run-7"' in client.get("/?q=run-7").text
    monkeypatch.setattr(Reader, "may_read_dag", lambda *_: False)
    assert "No pipelines" in client.get("/?q=orders").text


def test_a_found_run_isnt_hidden_by_those_of_other_dags(shop, open_pages, engine, monkeypatch):
    """Newer ones, which the reader may not see."""
    with Session(engine) as session:
        for number in range(60):
            add_run(session, "shop_maintenance", 70_000 + number, "success")
    monkeypatch.setattr(Reader, "may_read_dag", lambda _, dag_id: dag_id == "shop_cdc")
    assert 'href="/p/shop/run/any/run-7"' in open_pages("viewer").get("/?q=run-7").text


def fails(name):
    return Attention("failed", "failed_run", "the latest run failed", cause=name)


# A pipeline's attention, whether a run is under way, and its state.
GRAVITY = [
    ("a difference", [Attention("failed", "different", "t")], False, "person"),
    ("an error that stays, and a run", [fails("SchemaChanged")], True, "person"),
    ("a stopped table", [Attention("failed", "decision", "t: stopped by a gate", waiting="gate")],
     False, "person"),
    ("a lost slot", [Attention("failed", "data_gap", "lost")], False, "person"),
    ("overdue, and no scheduler", [Attention("failed", "overdue", "x")], True, "person"),
    ("a server that is away", [fails("SourceUnreachable")], False, "failing"),
    ("a run that only Airflow knows", [Attention("failed", "failed_dag_run", "x")], False,
     "failing"),
    ("overdue", [Attention("warning", "overdue", "x")], True, "late"),
    ("rows in quarantine", [Attention("warning", "decision", "t: rows", waiting="rows")], False,
     "warning"),
    ("a run", [], True, "running"),
    ("nothing", [], False, "healthy"),
]  # fmt: skip
EMPTY = Glance(True, NOON, (), None, (), RowCounts(), 0, 0, (), (), Compared())


def card_of(name, attention, is_running, glance=EMPTY):
    dag = DagState("cdc", f"{name}_cdc", run_id="r", run_state="running" if is_running else None)
    about = ("", pipeline("file:///lake"), glance, Schedule(dags=(dag,)), (), NOON, attention)
    return Card(name, Situation(*about))


@cases("attention, is_running, state", GRAVITY)
def test_what_a_pipeline_needs_most(attention, is_running, state):
    assert card_of("shop", attention, is_running).state == state


def test_many_pipelines_are_in_order_of_gravity_then_of_name(
    pipelines, engine, open_pages, monkeypatch
):
    """On all pages of the list; a filter and a search keep the order."""
    never = (card_of("n", [], False, replace(EMPTY, is_set_up=False)), Card("n"))
    made = [
        replace(card, name=f"{letter}{n}")
        for letter in "zay"
        for n, card in enumerate((*(card_of("", *case[1:3]) for case in GRAVITY), *never), start=10)
    ]
    monkeypatch.setattr(_overview, "_cards", lambda *_: made)
    monkeypatch.setattr(_overview, "_PER_PAGE", 20)
    client = open_pages("viewer")

    def listed(**query):
        texts = [client.get("/", params={"page": n, **query}).text for n in (1, 2)]
        return [name for text in texts for name in re.findall(r'href="/p/([azy]\d+)">', text)]

    states = list(_overview.STATES)
    order = sorted(made, key=lambda card: (states.index(card.state), card.name))
    names = list(dict.fromkeys(listed()))
    assert names == [card.name for card in order]
    assert (names[:5], names[-3:]) == (["a10", "a11", "a12", "a13", "a14"], ["a21", "y21", "z21"])
    assert set(listed(state="failing")) == {f"{letter}{n}" for letter in "azy" for n in (15, 16)}
    assert list(dict.fromkeys(listed(q="z")))[:5] == ["z10", "z11", "z12", "z13", "z14"]


def test_pipelines_that_need_a_person_come_first(shop, write_pipeline, open_pages):
    write_pipeline("empty")
    client = open_pages("viewer")
    text = client.get("/").text
    assert text.index('href="/p/shop"') < text.index('href="/p/empty"')
    assert "1 needs a person" in text
    assert 'href="/p/empty"' not in client.get("/?state=person").text
    assert 'href="/p/shop"' not in client.get("/?state=setup").text


def test_reports_of_a_pipeline_by_table_and_by_time(install, open_pages):
    """In the looks of the other pages; each square leads to a report, and this one back."""
    install(1)
    client = open_pages("viewer")
    for address in (f"/docs/{name_of(1)}/", f"/docs/{name_of(1)}/index.html"):
        answer = client.get(address)
        assert 'class="squares"' in answer.text
        assert 'aria-current="page">reports</a>' in answer.text
        links = re.findall(r'<a class="passed"[^>]* href="([^"]+)"', answer.text)
        assert links
        assert client.get(links[-1]).status_code == 200
    assert f'href="/docs/{name_of(1)}/"' in client.get("/docs/").text
