"""A table's page: its state, what it has of its source, and how to read it."""

import html
import json
import re
from dataclasses import replace

from tests.support.bookkeeping import run
from tests.support.data.shop_pages import lacking, leave_behind, stopped
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ColumnState,
    Ledger,
    Reconciliation,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta.pipeline.drift.type_change import TypeChange


def test_a_tables_page_says_how_to_read_it(read_shop, open_pages):
    """In Spark, DuckDB and delta-rs, as texts that a click selects whole."""
    uri = f"{read_shop.target.root}/public/orders"
    rows = 'rows = pa.table(query.execute("select * from target"))'
    text = html.unescape(open_pages("viewer").get("/p/shop/table/public.orders").text)
    for way in (
        f'spark.read.format("delta").load("{uri}")',
        f"install delta; load delta;\nselect * from delta_scan('{uri}');",
        f'query = QueryBuilder().register("target", DeltaTable("{uri}"))\n{rows}',
    ):
        assert re.search(rf'<pre class="copyable">[^<]*{re.escape(way)}</pre>', text), way
    assert re.search(r"Not checked</h3>\s*<ul><li[^>]*>fine</li></ul>", text)


def test_a_column_of_another_type_has_both(shop, open_pages):
    """As long as the table's changes wait because of it."""
    column = ColumnState("amount", 0, -1, "numeric(12,2)", "decimal(12,2)", False, 1)
    ledger = Ledger(Lake(shop.target.root))
    state = TableState(now(), "s", "public.orders", 1, "synced", columns=[column])
    ledger.append(state)
    change = TypeChange("amount", "numeric(12,2)", "numeric(14,4)")
    why = {"class": "SchemaChanged", "message": f"public.orders: {change}; its changes wait"}
    stuck = {"error": why, "not_applied": ["public.orders"]}
    failed = run("stuck", now(), "failed", result=json.dumps(stuck))
    ledger.append(replace(failed, applied=False))
    both = "<code>numeric(12,2)</code> → <code>numeric(14,4)</code>"
    assert both in open_pages("viewer").get("/p/shop/table/public.orders").text
    ledger.append(run("later", now()))
    text = open_pages("viewer").get("/p/shop/table/public.orders").text
    assert (both in text, "<code>numeric(12,2)</code>" in text) == (False, True)


def test_a_table_whose_changes_wait_names_the_cause_and_its_run(shop, open_pages):
    why = {"class": "SchemaChanged", "message": "public.orders: column a changed its type"}
    found = {"error": why, "not_applied": ["public.orders"]}
    failed = run("stuck", now(), "failed", result=json.dumps(found))
    Ledger(Lake(shop.target.root)).append(replace(failed, applied=False))
    text = open_pages("viewer").get("/p/shop/table/public.orders").text
    assert "SchemaChanged: public.orders: column a changed its type" in text
    assert re.search(r'href="/p/shop/run/any/stuck">Read the error', text)
    heals = "Heals by itself</dt><dd>{}"
    assert heals.format("no: the next run fails the same way") in text
    todo = "To do</dt><dd>run shop_initial_sync with the table in tables"
    assert todo in text
    page = open_pages("viewer").get("/p/shop/run/any/stuck").text
    no = heals.format("no: the next run fails the same way")
    assert not lacking(page, "public.orders: column a changed its type", todo, no)
    Ledger(Lake(shop.target.root)).append(run("later", now()))
    page = open_pages("viewer").get("/p/shop/run/any/stuck").text
    assert heals.format("yes: a later run succeeded, ") in page


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
