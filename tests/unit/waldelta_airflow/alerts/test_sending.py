"""What a manual DAG's failure sends at once, and what happens when a channel refuses it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.support.servers.hook_server import HookServer
from tests.support.servers.serving import serving
from waldelta.errors import AlertNotSent, SlotGap
from waldelta_airflow.dags.factory import create_dags
from waldelta_airflow.settings import ALERTS_VARIABLE

pytestmark = pytest.mark.airflow


@pytest.fixture
def server(monkeypatch):
    with serving(HookServer()) as running:
        for name in ("one", "two"):
            connection = {"conn_type": "http", "host": running.url(f"/{name}")}
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))
        monkeypatch.setenv(ALERTS_VARIABLE, "one,two")
        yield running


def fail(write_pipeline, error: BaseException) -> None:
    write_pipeline("shop")
    dag = create_dags()["shop_setup"]
    task = SimpleNamespace(dag_id="shop_setup", task_id="set_up", log_url="https://airflow/log")
    (callback,) = dag.get_task("set_up").on_failure_callback
    callback({"dag": dag, "ti": task, "exception": error})


def test_a_failure_is_sent_to_every_connection(server, write_pipeline):
    fail(write_pipeline, SlotGap("slot 's' stands too far: find out who"))
    (one,), (two,) = server.take("/one"), server.take("/two")
    assert one == two
    (alert,) = one["alerts"]
    assert alert["text"] == (
        "task set_up of shop_setup failed: SlotGap: slot 's' stands too far: find out who"
    )
    expected = ("new", "failed", "https://airflow/log")
    assert (alert["state"], alert["severity"], alert["url"]) == expected
    assert alert["remedy"]


def test_a_foreign_error_is_not_quoted(server, write_pipeline):
    fail(write_pipeline, ValueError("password=s3cr3t"))
    assert "s3cr3t" not in json.dumps(server.take("/one"))


def test_a_channel_that_refuses_does_not_stop_the_others(server, write_pipeline):
    server.answers["/one"] = 500
    with pytest.raises(AlertNotSent, match="'one'"):
        fail(write_pipeline, SlotGap("x"))
    assert len(server.take("/two")) == 1
    server.answers["/two"] = 500
    with pytest.raises(AlertNotSent, match=r"'one'.*'two'"):
        fail(write_pipeline, SlotGap("x"))
