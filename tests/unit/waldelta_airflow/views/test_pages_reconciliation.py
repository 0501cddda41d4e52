"""The page of comparisons with the source."""

import re
from datetime import timedelta

from tests.cases import cases
from tests.support.data.shop_pages import OWN, lacking
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    Ledger,
    Reconciliation,
    TableState,
    now,
)
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta.lake.ledger.table import LedgerTable


def test_the_page_of_a_reconciliation_shows_what_differs(read_shop, open_pages, monkeypatch):
    """Counts, positions, and each differing row's key, columns and values."""
    client, scanned, scan = open_pages("op"), [], LedgerTable.scan
    monkeypatch.setattr(
        LedgerTable, "scan", lambda *a, **k: scanned.append((a[0].uri, a[1])) or scan(*a, **k)
    )
    text = client.get("/p/shop/reconciliation").text
    # The history is read once, and then the differing rows of its latest results.
    counts = [u for u, names in scanned if u.endswith("/reconciliations") and "missing" in names]
    assert len(counts) == 2
    # Nothing was counted of a table that couldn't be compared, and the list says where it ends.
    last = text[text.index("Last 30 days") :]
    assert re.search(
        r"not compared.{,40}<td class=\"num\">–</td>\s*<td class=\"num\">–</td>", last, re.DOTALL
    )
    assert "before" not in last
    monkeypatch.setattr("waldelta_airflow.views._pages._COMPARED_PER_PAGE", 1)
    newest, oldest = (client.get(f"/p/shop/reconciliation?earlier={n}").text for n in (1, 2))
    assert 'href="/p/shop/reconciliation?earlier=2&amp;page=1#history">next</a>' in newest
    listed = [
        text.partition('id="history"')[2].count('<th scope="row">') for text in (newest, oldest)
    ]
    assert listed == [1, 1]
    said = ("12,345", "0/100000", "missing", "fine", "not compared", "null")
    assert not lacking(text, *said, "Repair the table that differs")
    assert "public.orders: different from the source" in client.get("/").text


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


def test_the_button_triggers_the_run_that_repairs(read_shop, open_pages, decided):
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
