"""Messages reach real servers, as the connection's type wants them; errors name no address."""

from __future__ import annotations

import json
import logging

import pytest

from tests.support.bookkeeping import NOON
from tests.support.servers.hook_server import HookServer
from tests.support.servers.mail_server import MailServer
from tests.support.servers.serving import serving
from waldelta.errors import AlertNotSent, ConfigError
from waldelta.monitoring.attention import Attention
from waldelta_airflow.alerts.changes import Alert
from waldelta_airflow.alerts.sending import message_of, send

pytestmark = pytest.mark.airflow

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
        "scheme apart": {
            "host": f"{place}/services",
            "schema": "http",
            "password": "/T0/B0/s3cr3t",
        },
    }


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
