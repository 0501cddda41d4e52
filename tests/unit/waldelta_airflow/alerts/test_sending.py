"""What is sent, how it reaches real servers, and what happens when a channel refuses it."""

import json
import logging
from types import SimpleNamespace

import pytest

from tests.support.bookkeeping import NOON
from tests.support.servers.hook_server import HookServer
from tests.support.servers.mail_server import MailServer
from tests.support.servers.serving import serving
from waldelta.errors import AlertNotSent, ConfigError, SlotGap
from waldelta.monitoring.attention import KINDS, Attention
from waldelta_airflow.alerts.evaluation import Alert
from waldelta_airflow.alerts.sending import message_of, send
from waldelta_airflow.dags.factory import create_dags
from waldelta_airflow.settings import ALERTS_VARIABLE

BASE = "https://airflow.example/af/"
COPY = Attention("failed", "failed_copy", "a&b: the copy <failed>", (), "tables", ("a&b",))
ROWS = Attention("warning", "decision", "c: rows are in quarantine", ("waiting",), "", ("c",))


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
        "WARNING CONTINUES: c: rows are in quarantine",
        f"  since 2026-01-01 12:00 UTC; to do: {KINDS['decision'].remedy}",
        "  https://airflow.example/af/waldelta/p/shop/waiting",
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
    many = [Alert("new", Attention("failed", "decision", "x" * 9_000), NOON)] * 60
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
        "kind": "decision",
        "tables": ["c"],
        "text": "c: rows are in quarantine",
        "details": [],
        "since": NOON.isoformat(),
        "remedy": KINDS["decision"].remedy,
        "url": "https://airflow.example/af/waldelta/p/shop/waiting",
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


MESSAGE = message_of("shop", [Alert("new", Attention("failed", "slot", "lost <soon>"), NOON)], "")
SECRET = "/services/T0/B0/s3cr3t"


@pytest.fixture
def server():
    with serving(HookServer()) as running:
        yield running


@pytest.fixture
def connect(monkeypatch):
    def make(**fields):
        monkeypatch.setenv("AIRFLOW_CONN_ALERTS", json.dumps(fields))

    return make


def slack_connections(server):
    place = f"127.0.0.1:{server.server_port}"
    return {
        "whole address": {"password": server.url(SECRET)},
        "token": {"host": server.url("/services"), "password": "T0/B0/s3cr3t"},
        "scheme apart": {"host": f"{place}/services", "schema": "http",
                         "password": "/T0/B0/s3cr3t"},
    }  # fmt: skip


@pytest.mark.parametrize("form", ["whole address", "token", "scheme apart"])
def test_slack(server, connect, form):
    connect(conn_type="slackwebhook", **slack_connections(server)[form])
    send("alerts", MESSAGE)
    assert server.take(SECRET) == [MESSAGE.slack]


def test_a_webhook(server, connect):
    """With the connection's login, and its extras as headers, as Airflow's http provider."""
    connect(
        conn_type="http", host="127.0.0.1", port=server.server_port, login="me", password="pw",
        extra={"X-Token": "t0k", "verify": False},
    )  # fmt: skip
    send("alerts", MESSAGE)
    (posted,) = server.posted
    assert (posted.path, posted.document) == ("/", MESSAGE.document)
    assert (posted.headers["X-Token"], posted.headers["Authorization"]) == ("t0k", "Basic bWU6cHc=")
    connect(conn_type="http", host=server.url("/a/hook"))
    send("alerts", MESSAGE)
    assert server.take("/a/hook") == [MESSAGE.document]


def test_a_mail(connect):
    with serving(MailServer()) as server:
        plain = {"disable_ssl": True, "disable_tls": True, "from_email": "airflow@example.org"}
        to = ["dba@example.org", "team@example.org"]
        connect(conn_type="smtp", host="127.0.0.1", port=server.port, extra=plain | {"to": to})
        send("alerts", MESSAGE)
        (mail,) = server.mails
    assert (mail["subject"], mail["to"]) == (MESSAGE.subject, ", ".join(to))
    assert "PROBLEM: lost &lt;soon&gt;" in mail.get_body().get_content()


def test_what_is_refused(server, connect, caplog):
    """The error names the connection and the status; neither it nor the log shows the address."""
    caplog.set_level(logging.WARNING)
    server.answers[SECRET] = 404
    connect(conn_type="slackwebhook", password=server.url(SECRET))
    with pytest.raises(AlertNotSent, match=r"connection 'alerts' \(HTTP status 404\)") as caught:
        send("alerts", MESSAGE)
    assert "s3cr3t" not in str(caught.value) + caplog.text
    connect(conn_type="slackwebhook", password="http://127.0.0.1:1/s3cr3t")
    with pytest.raises(AlertNotSent, match=r"'alerts' \(ConnectError\)") as caught:
        send("alerts", MESSAGE)
    assert caught.value.__suppress_context__


WRONG = {
    "missing": ("nowhere", {}, "Airflow has no connection 'nowhere'"),
    "another type": ("alerts", {"conn_type": "slack"}, "types slackwebhook, smtp, http"),
    "mail without address": ("alerts", {"conn_type": "smtp"}, 'has no "to"'),
}


@pytest.mark.parametrize(("conn_id", "fields", "says"), WRONG.values(), ids=WRONG)
def test_a_connection_that_cant_be_used(connect, conn_id, fields, says):
    connect(**fields or {"conn_type": "http"})
    with pytest.raises(ConfigError, match=says):
        send(conn_id, MESSAGE)


@pytest.fixture
def channels(server, monkeypatch):
    """Two that alerts go to."""
    for name in ("one", "two"):
        connection = {"conn_type": "http", "host": server.url(f"/{name}")}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))
    monkeypatch.setenv(ALERTS_VARIABLE, "one,two")
    return server


def fail(write_pipeline, error: BaseException) -> None:
    write_pipeline("shop")
    dag = create_dags()["shop_setup"]
    task = SimpleNamespace(dag_id="shop_setup", task_id="set_up", log_url="https://airflow/log")
    (callback,) = dag.get_task("set_up").on_failure_callback
    callback({"dag": dag, "ti": task, "exception": error})


def test_a_failure_is_sent_to_every_connection(channels, write_pipeline):
    fail(write_pipeline, SlotGap("slot 's' stands too far: find out who"))
    (one,), (two,) = channels.take("/one"), channels.take("/two")
    assert one == two
    (alert,) = one["alerts"]
    assert alert["text"] == (
        "task set_up of shop_setup failed: SlotGap: slot 's' stands too far: find out who"
    )
    expected = ("new", "failed", "https://airflow/log")
    assert (alert["state"], alert["severity"], alert["url"]) == expected
    assert alert["remedy"]


def test_a_foreign_error_of_a_task_is_not_quoted(channels, write_pipeline):
    fail(write_pipeline, ValueError("password=s3cr3t"))
    assert "s3cr3t" not in json.dumps(channels.take("/one"))


def test_a_channel_that_refuses_does_not_stop_the_others(channels, write_pipeline):
    channels.answers["/one"] = 500
    with pytest.raises(AlertNotSent, match="'one'"):
        fail(write_pipeline, SlotGap("x"))
    assert len(channels.take("/two")) == 1
    channels.answers["/two"] = 500
    with pytest.raises(AlertNotSent, match=r"'one'.*'two'"):
        fail(write_pipeline, SlotGap("x"))
