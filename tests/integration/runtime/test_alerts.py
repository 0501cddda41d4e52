"""Alerts under real Airflow, with the real slot and real servers that receive them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.support.pipelines import bare_slot
from tests.support.servers.hook_server import HookServer
from tests.support.servers.serving import serving
from waldelta.config import load_pipeline_file
from waldelta.lake.ledger import TableState, now

SLACK = "/services/T0/B0/s3cr3t"
# Answers each line with the state of a run of the DAG, or with what the line evaluates to.
PROGRAM = """
import sys
from airflow.utils.db import initdb
initdb()
from waldelta_airflow import pipelines
from airflow.models.dag import DagModel
from airflow.utils.session import create_session
dag = pipelines()["waldelta_alerts"]
for line in sys.stdin:
    if line.strip() == "run":
        print("answer", dag.test().state, flush=True)
    else:
        with create_session() as session:
            session.get(DagModel, line.split()[1]).is_paused = line.startswith("pause")
        print("answer done", flush=True)
"""


class Alerts:
    """Airflow with a database of its own, and the servers behind its connections."""

    def __init__(self, process: subprocess.Popen[str], server: HookServer) -> None:
        self.process, self.server = process, server

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        for answer in self.process.stdout:
            if answer.startswith("answer "):
                return answer.split()[1]
        raise AssertionError("Airflow ended")

    def run(self) -> tuple[str, list[str], int]:
        """The run's state, what the webhook got, and how many messages Slack got."""
        state = self.say("run")
        alerts = [alert for one in self.server.take("/hook") for alert in one["alerts"]]
        told = sorted(f"{alert['state']} {alert['kind']} {alert['text']}" for alert in alerts)
        return state, told, len(self.server.take(SLACK))


@pytest.fixture
def job(database, lake, tmp_path):
    """A pipeline whose table is synced, and whose slot exists."""
    database.execute("create table t (id int primary key)")
    name = f"s_{database.name}"
    publication = {"name": f"{name}_pub", "tables": [{"name": "public.t"}]}
    source = {"conn_id": "test_source", "slot": name, "publications": [publication]}
    document = {"pipeline": name, "source": source, "target": {"root": lake}}
    file = tmp_path / "pipelines" / "shop.yml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(document))
    made = bare_slot(database, load_pipeline_file(file))
    made.ledger.append(TableState(now(), "sync", "public.t", 1, "synced"))
    return made


@pytest.fixture
def alerts(job, database, tmp_path) -> Iterator[Alerts]:
    home = tmp_path / "airflow"
    (home / "dags").mkdir(parents=True)
    (home / "dags" / "pipelines.py").write_text(
        "from waldelta_airflow import pipelines; globals().update(pipelines())  # the DAGs\n"
    )
    with serving(HookServer()) as server:
        environment = os.environ | {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
            "AIRFLOW__API__BASE_URL": "https://airflow.example",
            "WALDELTA_PIPELINES": str(tmp_path / "pipelines"),
            "WALDELTA_ALERTS": "hook, slack",
            "WALDELTA_RETRY_DELAY": "0.1",
            "AIRFLOW_CONN_TEST_SOURCE": database.uri,
            "AIRFLOW_CONN_HOOK": json.dumps({"conn_type": "http", "host": server.url("/hook")}),
            "AIRFLOW_CONN_SLACK": json.dumps(
                {"conn_type": "slackwebhook", "password": server.url(SLACK)}
            ),
        }
        with (tmp_path / "airflow.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment,
            )  # fmt: skip
            yield Alerts(process, server)
            process.communicate(timeout=60)


@pytest.mark.nightly("whole runs; unit tests have each alert and channel")
def test_alerts_begin_wait_for_their_channel_and_end(alerts, job, database):
    """A paused DAG, a failing copy, a refusing channel, a missing slot; no run takes part."""
    name = job.pipeline.pipeline
    paused = "the CDC DAG is paused: no changes are read, and the slot keeps WAL"
    maintenance = "the maintenance DAG is paused: no compaction, no pruning, no full checks"
    others = [f"new paused {paused}", f"new paused_maintenance {maintenance}"]
    assert alerts.run() == ("success", others, 1)
    assert alerts.run() == ("success", [], 0)

    job.ledger.append(TableState(now(), "sync", "public.t", 2, "failed"))
    alerts.server.answers[SLACK] = 503
    copy = "new failed_copy public.t: the copy failed"
    assert alerts.run() == ("failed", [copy], 0)
    alerts.server.answers.clear()
    assert alerts.run() == ("success", [], 1)

    alerts.say(f"unpause {name}_cdc")
    database.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))
    job.ledger.append(TableState(now(), "sync", "public.t", 3, "synced"))
    state, told, slack = alerts.run()
    assert (state, slack) == ("success", 1)
    assert told == [
        f"new slot slot {job.pipeline.source.slot!r} doesn't exist: run _resync",
        copy.replace("new", "recovered"),
        f"recovered paused {paused}",
    ]
