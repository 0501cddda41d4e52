"""What a message says: pipeline, what, since when, what to do and where; never a foreign text."""

from __future__ import annotations

import json

import pytest

from tests.support.bookkeeping import NOON
from waldelta.monitoring.attention import KINDS, Attention
from waldelta_airflow.alerts.changes import Alert
from waldelta_airflow.alerts.sending import message_of

BASE = "https://airflow.example/af/"
COPY = Attention("failed", "failed_copy", "a&b: the copy <failed>", (), "tables", ("a&b",))
ROWS = Attention("warning", "quarantine", "5 rows in quarantine", ("quarantine",), "", ("c",))


@pytest.fixture
def message():
    alerts = [
        Alert("new", COPY, NOON),
        Alert("lasting", ROWS, NOON),
        Alert("recovered", COPY, NOON),
    ]
    return message_of("shop", alerts, BASE)


def test_as_text(message):
    assert message.text.splitlines() == [
        "waldelta shop: 2 alerts",
        "PROBLEM: a&b: the copy <failed>",
        f"  since 2026-01-01 12:00 UTC; to do: {KINDS['failed_copy'].remedy}",
        "  https://airflow.example/af/waldelta/p/shop#tables",
        "WARNING CONTINUES: 5 rows in quarantine",
        f"  since 2026-01-01 12:00 UTC; to do: {KINDS['quarantine'].remedy}",
        "  https://airflow.example/af/waldelta/p/shop/quarantine",
        "RECOVERED: a&b: the copy <failed>",
        "  since 2026-01-01 12:00 UTC",
    ]


def test_as_slack_shows_it(message):
    """Slack's own characters are escaped; links are short."""
    subject, first, *_ = [block["text"]["text"] for block in message.slack["blocks"]]
    expected = ("waldelta shop: 2 alerts", "*waldelta shop: 2 alerts*")
    assert (message.slack["text"], subject) == expected
    assert first.startswith("*PROBLEM*: a&amp;b: the copy &lt;failed&gt;\n_since 2026-01-01")
    assert first.endswith("_ <https://airflow.example/af/waldelta/p/shop#tables|open>")


def test_a_name_forges_no_line():
    """Names of tables may have any characters."""
    name = 'public."a\nRECOVERED: all\u202e"'
    alert = Alert(
        "new", Attention("failed", "failed_copy", f"{name} failed", objects=(name,)), NOON
    )
    message = message_of("shop", [alert], BASE)
    for text in (message.text, json.dumps(message.slack, ensure_ascii=False).replace("\\n", "\n")):
        assert [line for line in text.splitlines() if line.startswith("RECOVERED")] == []
        assert "\u202e" not in text
    assert message.document["alerts"][0]["tables"] == [name]


def test_slack_takes_fifty_blocks():
    many = [Alert("new", Attention("failed", "stopped", "x" * 9_000), NOON)] * 60
    blocks = message_of("shop", many, BASE).slack["blocks"]
    assert len(blocks) == 47
    assert max(len(block["text"]["text"]) for block in blocks) <= 3_000
    assert blocks[-1]["text"]["text"] == "and 15 more alerts"


def test_as_json(message):
    document = json.loads(json.dumps(message.document))
    assert (document["pipeline"], document["text"]) == ("shop", message.text)
    assert document["alerts"][1] == {
        "state": "lasting",
        "severity": "warning",
        "kind": "quarantine",
        "tables": ["c"],
        "text": "5 rows in quarantine",
        "since": NOON.isoformat(),
        "remedy": KINDS["quarantine"].remedy,
        "url": "https://airflow.example/af/waldelta/p/shop/quarantine",
    }


CAUSES = {
    "waldelta's own": ("SlotLost", "the latest run failed: SlotLost: run resync"),
    "another's": ("PSQLException", "the latest run failed: PSQLException: see its log"),
}


@pytest.mark.parametrize(("cause", "text"), CAUSES.values(), ids=CAUSES)
def test_a_foreign_error_is_not_quoted(cause, text):
    """It may contain a row's value or a secret."""
    said = "run resync" if cause == "SlotLost" else "Key (id)=(1234 secret) exists"
    item = Attention("failed", "failed_run", f"the latest run failed: {cause}: {said}", cause=cause)
    (line,) = message_of("shop", [Alert("new", item, NOON)], BASE).lines
    assert line.attention.text == text
