"""A run's page, and what runs did."""

import json
from dataclasses import replace

from tests.support.bookkeeping import run
from tests.support.data.shop_pages import RUN_ID, lacking
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    Ledger,
    TableState,
    now,
)


def test_a_failed_runs_page_leads_to_the_rows(shop, open_pages):
    message = "1 critical expectation failed (the changes are applied and safe):\n  - x: y"
    why = {"class": "QualityFailed", "message": message}
    failed = run(RUN_ID, now(), "failed", result=json.dumps({"error": why}))
    Ledger(Lake(shop.target.root)).append(failed)
    page = open_pages("viewer").get(f"/p/shop/run/consume/{RUN_ID}").text
    card = page[page.index('class="state') :].partition("</section>")[0]
    assert not lacking(card, "public.orders: ", "2 rows fail", 'href="#failed"', "<dd>look at the",
                       "<dd>no: the target has these rows until")  # fmt: skip
    assert "safe):" not in card
    assert '<h2 id="failed">' in page


def test_pages_say_what_a_run_did_in_the_unit_of_its_verb(shop, open_pages):
    """A copy of many rows isn't "0 changes"; and a run that copied in two attempts copied all."""
    ledger, at = Ledger(Lake(shop.target.root)), now()
    for n, status in ((1, "copying"), (2, "synced")):
        state = TableState(at, "manual__sync", "public.big", 1, status, rows=428_206 * (n - 1))
        ledger.append(replace(state, snapshot="1:1:" * (n - 1)))
    runs = (
        ("sync", "manual__sync", {"public.small": {"rows": 4}}),
        ("reconcile", "compared", {"public.big": {"compared": 4_538}}),
        ("decide", "decided", {"public.big": {"inserted": 2}}),
        ("maintain", "night", {"public.big": {}}),
    )
    for verb, run_id, tables in runs:
        result = json.dumps({"tables": tables})
        row = run(run_id, at, result=result, as_of=None, changes=0)
        ledger.append(replace(row, verb=verb))
    client = open_pages("viewer")
    text = client.get("/p/shop/runs").text
    done = ("428,210 rows copied", "4,538 rows compared", "2 rows corrected", "12,345 changes")
    assert not lacking(text, *(f'<td class="num">{one}</td>' for one in done))
    page = client.get("/p/shop/run/sync/manual__sync").text
    assert "428,210 rows copied" in page
    assert "Unread WAL" not in page
    assert ">428,206<" in page
    for address in ("/", "/p/shop"):
        assert "428,206" in client.get(address).text
