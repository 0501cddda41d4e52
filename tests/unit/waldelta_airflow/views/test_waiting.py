"""The page of what waits for a decision."""

import json
import re
from dataclasses import replace
from datetime import timedelta

from tests.cases import cases
from tests.support.bookkeeping import release_of
from tests.support.data.shop_pages import OWN, RUN_ID, Links, lacking, quarantined, stopped
from waldelta.config import load_pipeline_file
from waldelta.decision_kinds import MESSAGE
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ColumnState,
    Decision,
    Decisions,
    ExternalCommit,
    Ledger,
    SentMessage,
    TableState,
    now,
)
from waldelta_airflow.views._installed_pipelines import (
    ActionDag,
)

ROW = "0123456789abcdef"


DECISIONS = [
    ("all rows read again", {"action": "retry"},
     {"action": "retry", "tables": None, "ids": None, "reason": None}),
    ("a table's rows read again", {"action": "retry", "table": "public.orders"},
     {"action": "retry", "tables": ["public.orders"], "ids": None, "reason": None}),
    ("rows discarded", {"action": "discard", "id": [ROW, ROW], "reason": " noise "},
     {"action": "discard", "tables": None, "ids": [ROW, ROW], "reason": "noise"}),
    ("rows accepted", {"action": "accept", "id": ROW, "reason": "known"},
     {"action": "accept", "tables": None, "ids": [ROW], "reason": "known"}),
    ("a table released", {"action": "release", "table": "public.orders", "reason": "known"},
     {"action": "release", "tables": ["public.orders"], "ids": None, "reason": "known"}),
    ("rows discarded without a reason", {"action": "discard", "id": ROW}, None),
    ("rows accepted without a reason", {"action": "accept", "id": ROW, "reason": " "}, None),
    ("a table released without a reason", {"action": "release", "table": "public.orders"}, None),
    ("a message skipped", {"action": "skip", "id": ROW, "reason": "known"},
     {"action": "skip", "tables": None, "ids": [ROW], "reason": "known"}),
    ("a message skipped without a reason", {"action": "skip", "id": ROW}, None),
    ("no message", {"action": "skip", "reason": "known"}, None),
    ("no rows", {"action": "discard"}, None),
    ("no rows to accept", {"action": "accept", "reason": "known"}, None),
    ("no table", {"action": "release"}, None),
    ("no row of ours", {"action": "discard", "id": "--by=x"}, None),
    ("nothing that we do", {"action": "drop"}, None),
]  # fmt: skip


@cases("form, conf", DECISIONS)
def test_buttons_of_the_quarantine_trigger_its_dag(read_shop, open_pages, decided, form, conf):
    """In the name of who pressed it; a form that isn't ours is refused."""
    answer = open_pages("op").post("/p/shop/waiting", data=form, headers=OWN)
    if conf is None:
        assert (answer.status_code, decided) == (400, [])
        return
    assert (answer.history[0].status_code, answer.status_code) == (303, 200)
    assert f"Run <code>{form['action']}__1</code>" in answer.text
    assert decided == [("shop_decide", conf, "somebody")]


def test_a_table_says_since_when_its_rows_wait(write_pipeline, schedules, open_pages):
    """Since the first of them; since when another decision waits, too."""
    pipeline, first = load_pipeline_file(write_pipeline("rows")), now() - timedelta(hours=2)
    lake = Lake(pipeline.target.root)
    commit = ExternalCommit(4, "UPDATE", "notebook", first - timedelta(hours=1))
    states = [
        TableState(first, "s", "public.orders", 1, "synced"),
        TableState(first, "s", "public.notes", 1, "synced", external_commits=[commit]),
    ]
    Ledger(lake).append_all(states)
    Decisions(lake).add([replace(quarantined(n), at=first + timedelta(hours=n)) for n in (1, 0)])
    times = {"orders": first, "notes": commit.at}
    for table, since in times.items():
        text = open_pages("viewer").get(f"/p/rows/table/public.{table}").text
        assert f'Since</dt><dd><time datetime="{since:%Y-%m-%dT%H:%M:%S}' in text, table


def test_messages_that_cant_be_read(shop, open_pages, decided):
    """With its bytes and a button; skipped, by whom and which table lacks it. It is no row."""
    row = Decision(
        now(), RUN_ID, "waiting", "public.orders", 1, 0, ROW, lsn=1 << 20, kind=MESSAGE,
        incarnation="", reason="length at byte 0",
        messages=[SentMessage(None, None, 1 << 20, 77, b"I<b>")],
    )  # fmt: skip
    quarantine, client = Decisions(Lake(shop.target.root)), open_pages("op")
    quarantine.add([row])
    page = client.get("/p/shop/waiting").text
    said = ("Insert", "length at byte 0", "49 3c 62 3e", "I&lt;b&gt;", 'value="skip"', ROW)
    assert not lacking(page, *said)
    assert f"message {ROW} can&#39;t be read" in client.get("/p/shop").text
    of_run = client.get(f"/p/shop/run/consume/{RUN_ID}").text
    assert ("Rows in quarantine" in of_run, ROW in of_run) == (True, False)
    quarantine.add([replace(row, status="skipped", by="Ann", why="known")])
    page = client.get("/p/shop/waiting").text
    assert not lacking(page, "by Ann: known", "not yet applied")
    assert (
        f"may miss a change: message {ROW} was skipped, which no run has applied yet"
        in client.get("/p/shop").text
    )
    quarantine.add([replace(row, status="resolved", by="Ann", why="compared")])
    page = client.get("/p/shop/waiting").text
    assert "Unreadable messages" not in page
    assert ">resolved</td>" in page


def test_external_commits_wait_until_they_are_accepted(shop, open_pages):
    """What was written, by whom and when, with a button and the way to repair it."""
    ledger = Ledger(Lake(shop.target.root))
    commits = [ExternalCommit(7, "UPDATE", "notebook", now())]
    ledger.append(
        replace(ledger.table_states()["public.orders"], at=now(), external_commits=commits)
    )
    text = open_pages("op").get("/p/shop/waiting").text
    section = text[text.index('id="commits"') : text.index('id="rows"')]
    said = ("version 7 (UPDATE by notebook", 'value="accept"', "/p/shop/repair/public.orders")
    assert not lacking(section, *said)
    assert section.index("Compare and repair") < section.index("Accept as it is")
    seen = open_pages("viewer").get("/p/shop/waiting").text
    assert "/p/shop/repair" not in seen
    assert 'value="accept"' not in seen


def test_changes_of_source_tables_wait_until_they_are_decided_on(shop, open_pages, decided):
    """What a run would do, with both buttons; what is agreed to until a run has followed it."""
    ledger, decisions = Ledger(Lake(shop.target.root)), Decisions(Lake(shop.target.root))
    ledger.append(
        replace(
            ledger.table_states()["public.orders"],
            at=now(),
            columns=[ColumnState("note", 25, -1, "text", "string", False, 3)],
            relation_ids=[77],
        )
    )
    state = ledger.table_states()["public.orders"]
    row = Decision(
        now(), RUN_ID, "waiting", "public.orders", state.generation, 0,
        json.dumps({"dropped": "note", "attnum": 3, "relation": 77}),
        columns=["note"], reason="dropped <note>: 7 rows lose it", kind="dropped_column",
    )  # fmt: skip
    decisions.add([row])
    page = open_pages("op").get("/p/shop/waiting").text
    said = ("dropped &lt;note&gt;: 7 rows lose it", 'value="agree"', 'value="refuse"', row.id)
    assert not lacking(page, *said)
    assert 'value="agree"' not in open_pages("viewer").get("/p/shop/waiting").text
    form = {"action": "agree", "id": row.id, "reason": "ticket"}
    assert open_pages("op").post("/p/shop/waiting", data=form, headers=OWN).is_success
    assert decided[-1][1]["action"] == "agree"
    decisions.add([row.decided("agreed", "d", now(), "ann", "ticket")])
    page = open_pages("op").get("/p/shop/waiting").text
    assert not lacking(page, "not yet applied", "agreed by ann: the next run of", ">agreed</td>")
    decisions.add([row.decided("refused", "d", now(), "ann", "ticket")])
    page = open_pages("op").get("/p/shop/waiting").text
    assert not lacking(page, "refused by ann: the next run of", ">refused</td>")
    stopped = [replace(column, stopped=True) for column in state.columns]
    ledger.append(replace(state, at=now(), columns=stopped))
    page = open_pages("op").get("/p/shop/waiting").text
    assert ("Changes of source tables" in page, ">refused</td>" in page) == (False, True)
    assert "last values only of note" in open_pages("op").get("/p/shop/table/public.orders").text


def test_rows_in_quarantine_by_table_and_reason(write_pipeline, schedules, open_pages, decided):
    """By links; what is retried is the chosen table's, and choices stay on other pages."""
    pipeline = load_pipeline_file(write_pipeline("shop"))
    for table in ("public.a", "public.b & c"):
        Ledger(Lake(pipeline.target.root)).append(TableState(now(), "s", table, 1, "synced"))
    rows = [quarantined(n, "public.a", "gone" if n else None) for n in range(80)]
    Decisions(Lake(pipeline.target.root)).add([*rows, quarantined(1, "public.b & c", "gone")])
    client = open_pages("op")
    page = client.get("/p/shop/waiting")
    links = {link for link in Links(page.text).links if "?" in link}
    base = "/p/shop/waiting"
    of_table, of_reason = f"{base}?table=public.b%20%26%20c", f"{base}?reason=gone"
    assert links >= {of_table, of_reason, f"{base}?reason="}
    assert "81 rows" in page.text
    one = client.get(of_table).text
    assert (one.count('name="id"'), "1 row" in one) == (1, True)
    assert "Retry the rows of public.b &amp; c" in one
    assert "/p/shop/waiting?table=public.a&amp;reason=gone" in client.get(of_reason).text
    assert client.get("/p/shop/waiting?reason=").text.count('name="id"') == 1
    older = f"{base}?page=2&table=public.a&reason=gone"
    first = client.get(f"{base}?table=public.a&reason=gone").text
    assert older.replace("&", "&amp;") in first
    assert client.get(older).text.count('name="id"') == 29
    assert "No rows match" in client.get(f"{base}?table=x").text
    client.post(base, data={"action": "retry", "table": "public.b & c"}, headers=OWN)
    assert [conf["tables"] for _, conf, _ in decided] == [["public.b & c"]]


def test_what_came_of_a_row_is_shown_to_those_who_read_its_pipeline(shop, open_pages):
    """Values and messages as sent, cut in the list; also once it is decided on."""
    raw = b"U\x00\xff<b>" + b"x" * 5000
    row = quarantined(8, outdated=True, messages=[SentMessage(1, 2, 1 << 20, 77, raw)])
    row = replace(row, values=json.dumps({"amount": "-1", "note": None, "long": "y" * 300}))
    Decisions(Lake(shop.target.root)).add([row])
    client, page = open_pages("viewer"), f"/p/shop/waiting/row/{row.id}"
    text = client.get("/p/shop/waiting").text
    said = ("<summary>3 values</summary>", '<span class="dim">null</span>')
    assert not lacking(text, page, *said, "-1", "and 100 more characters")
    text = client.get(page).text
    said = ("0/100000", "transaction 77", "5,006 bytes", "first 4,096", "y" * 300)
    assert not lacking(text, *said, "55 00 ff 3c 62 3e 78", "U..&lt;b&gt;xxx", "000ff0 ")
    assert "001000 " not in text
    assert "target has" in text
    again = replace(row, at=now(), by="bob", why="still fails", lsn=2 << 20)
    Decisions(Lake(shop.target.root)).add([again])
    assert re.search(r'class="mark warning".* waiting<.*by bob: still fails', client.get(page).text)
    Decisions(Lake(shop.target.root)).add(
        [replace(row, status="discarded", at=now(), by="ann", why="noise")]
    )
    text = client.get(page).text
    assert re.search(r"discarded.*by ann: noise", text)
    assert "target has" not in text
    assert client.get("/p/shop/waiting/row/0000").status_code == 404
    assert open_pages(None).get(page).status_code == 404


OTHER_COPIES = [
    ("one under way", [(2, "copying")], False),
    ("one that failed", [(2, "copying"), (2, "failed")], False),
    ("one of a table that left", [(2, "copying"), (2, "failed"), (2, "removed")], False),
    ("one that ended", [(2, "copying"), (2, "synced")], True),
    ("to be", [(2, "copying"), (2, "synced"), (2, "needs_sync"), (3, "copying")], True),
    ("one that was undone", [(2, "copying"), (1, "synced")], False),
]


@cases("rows, is_past", OTHER_COPIES)
def test_a_row_is_lacking_until_another_copy_has_ended(shop, open_pages, rows, is_past):
    """Until then the target is what it was."""
    row = quarantined(8)
    Decisions(Lake(shop.target.root)).add([row])
    ledger = Ledger(Lake(shop.target.root))
    for generation, status in rows:
        ledger.append(TableState(now(), "s", "public.orders", generation, status))
    client, address = open_pages("viewer"), f"/p/shop/waiting/row/{row.id}"
    page = client.get(address).text
    assert ("past" in page, "target had" in page) == (is_past, is_past)
    assert (address in client.get("/p/shop/waiting").text) is not is_past


def test_what_was_decided_stays_on_the_page(shop, open_pages):
    """Who, when and why: rows discarded and read again, one line for all that went at once, and
    tables released.

    A repair takes what was discarded along into the next generation, and an update to another key:
    that is no other decision.
    """
    rows = [quarantined(n) for n in range(3)]
    Decisions(Lake(shop.target.root)).add(rows)
    again = {"status": "resolved", "by": "ben", "run_id": "retry__1", "why": "read again"}
    Decisions(Lake(shop.target.root)).add([replace(row, at=now(), **again) for row in rows])
    changed = replace(quarantined(9), status="resolved", reason="a later change")
    gone = {"status": "discarded", "by": "cid", "run_id": "discard__1"}
    dropped = [replace(quarantined(n), **gone) for n in (20, 21)]
    Decisions(Lake(shop.target.root)).add([changed, *dropped])
    later = now() + timedelta(days=2)
    for generation in (2, 3):
        Decisions(Lake(shop.target.root)).add(
            [replace(dropped[0], at=later, generation=generation)]
        )
    elsewhere = replace(quarantined(22), status="discarded", reason="discarded at another key")
    Decisions(Lake(shop.target.root)).add([replace(elsewhere, at=later)])
    text = open_pages("viewer").get("/p/shop/waiting").text
    decided = text[text.index("Decisions") :]
    assert "at another key" not in decided
    (cid,) = re.findall(r"<tr>(?:(?!</tr>).)*cid.*?</tr>", decided, re.DOTALL)
    assert (f"{later:%Y-%m-%d}" in cid, "and 1 more" in cid) == (False, True)
    said = ("ben", "retry__1", "and 2 more", "discarded", "fine")
    assert not lacking(decided, *said, "everything landed up to 0/100000")
    assert (decided.count(">retried</td>"), decided.count("read again</td>")) == (1, 1)
    assert "a later change" not in decided


def test_enter_in_a_field_presses_its_own_button(read_shop, open_pages, monkeypatch):
    """A browser presses the form's first button: none that lets rows pass."""
    monkeypatch.setattr(
        "waldelta.monitoring.decisions.read_stopped", lambda *_: [stopped("public.orders")]
    )
    text = open_pages("op").get("/p/shop/waiting").text
    forms = re.findall(r"<form method=\"post\".*?</form>", text, re.DOTALL)
    first = {form: re.findall(r'<button[^>]* value="(\w+)"', form)[0] for form in forms}
    expected = ["release", "discard"]
    assert [button for form, button in first.items() if 'name="reason"' in form] == expected
    assert "retry" in first.values()


def test_only_stopped_tables_can_be_released(read_shop, open_pages, dags, monkeypatch):
    """Which expectation, since when, how many changes; not released or hopeless ones."""
    released = release_of(now(), "r", "public.b", 1, ("1", 1), 9, "ann", "known")
    found = [stopped("public.a"), stopped("public.b", released=released)]
    found.append(stopped("public.c", None, may_pass=False))
    monkeypatch.setattr("waldelta.monitoring.decisions.read_stopped", lambda *_: found)
    text = open_pages("op").get("/p/shop/waiting").text
    section = text[text.index('id="stopped"') : text.index("Decisions")]
    assert re.findall(r'name="table" value="([^"]+)"', section) == ["public.a"]
    said = ("amount is positive", "2 rows", "3 h", ">7</td>", ">many</td>", "released by ann")
    assert not lacking(section, *said, "a release does not apply to")
    assert 'name="table"' not in open_pages("viewer").get("/p/shop/waiting").text
    found.clear()
    assert "No table is stopped" in open_pages("op").get("/p/shop/waiting").text
    # Above the button it is seen that the DAG is paused.
    found.append(stopped("public.orders"))
    dags["shop_decide"] = ActionDag("shop_decide", is_paused=True)
    text = open_pages("admin").get("/p/shop/waiting").text
    assert text.index("Unpause <code>shop_decide</code>") < text.index("Release<")
