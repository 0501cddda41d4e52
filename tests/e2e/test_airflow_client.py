"""The REST client against real Airflow: runs and their logs, values, asset events and backfills."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from demo.airflow_client import AirflowError

# Every other test of the stack uses this client, and so does the demo.
pytestmark = [pytest.mark.e2e, pytest.mark.airflow, pytest.mark.soak("a second stack of Airflow")]

DAG_FILE = """
from airflow.sdk import DAG, Asset, BaseHook, CronDataIntervalTimetable, task

table = Asset("client_table", uri="file:///lake/client_table")

with DAG("client_probe", schedule=CronDataIntervalTimetable("0 0 * * *", "UTC"), catchup=False):

    @task(outlets=[table])
    def write(outlet_events=None, params=None, dag_run=None):
        outlet_events[table].extra = {"rows": 3}
        print("interval", dag_run.run_type.value, dag_run.data_interval_start)
        return (dag_run.conf or {}).get("answer", 41)

    @task
    def fail_when_asked(dag_run=None):
        print("password", BaseHook.get_connection("client_source").password)
        if (dag_run.conf or {}).get("fail"):
            raise ValueError("asked to fail")

    write() >> fail_when_asked()
"""


@pytest.fixture(scope="module")
def client(stack):
    stack.add_source("client_source", "client_source")
    (stack.dags / "client_probe.py").write_text(DAG_FILE)
    with stack.client() as made:
        made.wait_for_dags(["client_probe"])
        made.unpause("client_probe")
        yield made


def test_a_run_gives_its_tasks_values_log_and_asset_events(client, stack):
    seen = []
    run = client.run_to_end(
        "client_probe", {"answer": 42}, timeout_s=90, on_poll=lambda r: seen.append(r.state)
    )
    assert run.states == {"write": "success", "fail_when_asked": "success"}
    assert [task.task_id for task in run.tasks] == ["write", "fail_when_asked"]
    assert seen[-1] == "success"
    assert run.seconds > 0
    assert run.conf == {"answer": 42}
    assert client.xcom("client_probe", run.run_id, "write") == 42
    assert "interval manual" in client.log("client_probe", run.run_id, "write")
    (event,) = client.asset_events(source_dag_id="client_probe", source_run_id=run.run_id)
    assert (event["name"], event["extra"]["rows"]) == ("client_table", 3)
    # A connection's password is masked in a task's log.
    log = client.log("client_probe", run.run_id, "fail_when_asked")
    assert "password ***" in log
    assert stack.secrets.source not in log


def test_a_failed_run_is_an_error_with_the_failing_tasks_log(client):
    with pytest.raises(AirflowError, match=r"is failed(.|\n)*fail_when_asked(.|\n)*asked to fail"):
        client.run_to_end("client_probe", {"fail": True}, timeout_s=90)


def test_a_backfill_runs_over_past_intervals(client):
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    client.backfill(
        "client_probe", today - timedelta(days=4), today - timedelta(days=2), max_active_runs=1
    )
    runs = client.runs("client_probe", run_type="backfill")
    assert len(runs) >= 2
    done = [client.wait("client_probe", run.run_id, 90) for run in runs]
    assert {run.state for run in done} == {"success"}


def test_a_dag_that_never_comes_is_named_with_the_import_errors(client, stack):
    (stack.dags / "broken_dag.py").write_text(
        "from airflow.sdk import dag\nraise RuntimeError('broken on purpose')\n"
    )
    try:
        client._until(client.import_errors, 60, "import error")
        with pytest.raises(AirflowError, match=r"no_such_dag(.|\n)*broken on purpose"):
            client.wait_for_dags(["no_such_dag"], timeout_s=0.1)
    finally:
        (stack.dags / "broken_dag.py").unlink()


def test_what_the_api_refuses_is_said_in_its_own_words(client):
    with pytest.raises(AirflowError, match="404"):
        client.trigger("no_such_dag")
