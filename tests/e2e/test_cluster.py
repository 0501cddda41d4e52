"""A standalone Spark cluster, by the Airflow connection alone."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyspark
import pytest
import tenacity
from deltalake import DeltaTable

from tests.e2e.shown_secrets import contains, files, none_in_arguments
from tests.support.other_python import python_without_ours
from tests.support.servers.s3_server import ADMIN, REGION, WRITER
from waldelta.changes.merge.file_merge import MERGED
from waldelta.changes.stage.stage import COUNTS, DIVIDED
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.pipeline import RunResult
from waldelta.rehearsal.embedded_postgres import free_port
from waldelta_airflow.operators.job_operator import WaldeltaJobOperator

pytestmark = pytest.mark.spark

HERE = "127.0.0.1"
PIPELINE = """\
pipeline: {name}
source:
  conn_id: {name}_source
  slot: {name}_cdc
  publications: [{{name: {name}_pub, tables: [{{name: public.orders}}]}}]
target: {{root: {root}}}
batch: {{max_changes: 300000}}
runner: spark
"""
# Two tasks read it, and its target is one that tasks merge file by file.
TABLE = """
create table orders (id bigint primary key, note text, amount numeric(12,2));
insert into orders select n, repeat('x', 60) || n, n / 100.0 from generate_series(1, 150000) n
"""
# A batch of which more than one task collapses, decoded into buckets; it is a step, and applied
# while the next one lands.
CHANGES = """
update orders set amount = amount + 1, note = 'updated ' || id where id % 2 = 0;
delete from orders where id % 10 = 1;
insert into orders select n, 'new', 0 from generate_series(150001, 600000) n;
insert into orders select n, 'newer', 0 from generate_series(600001, 750000) n
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``folder`` has the workers' folders and the applications' event logs.

    ``python`` is the executors', which knows none of our packages.
    """

    folder: Path
    port: int
    python: Path

    def executors_with_tasks(self) -> list[set[str]]:
        """Of each application, in their order, which executors ran tasks to their end."""
        return [
            {
                event["Task Info"]["Executor ID"]
                for event in _events(log)
                if event["Event"] == "SparkListenerTaskEnd"
            }
            for log in self._logs()
        ]

    def tasks_that_told(self, answer: pa.Schema) -> list[int]:
        """Of each round of tasks whose answers are of this schema, how many there were."""
        columns = re.compile(
            r"\[" + ", ".join(rf"{name}#\d+L?" for name in answer.names) + ", _wd_failed"
        )
        told = (
            event.get("physicalPlanDescription", "")
            for log in self._logs()
            for event in _events(log)
            if event["Event"].endswith("SparkListenerSQLExecutionStart")
        )
        return [
            int(splits[1])
            for plan in told
            if columns.search(plan) and (splits := re.search(r"splits=\D*(\d+)", plan))
        ]

    def _logs(self) -> list[Path]:
        return sorted((self.folder / "events").iterdir(), key=lambda path: path.stat().st_mtime)

    def shipped(self) -> set[str]:
        """The workers whose executors were sent our packages."""
        return {
            path.relative_to(self.folder).parts[0]
            for path in self.folder.glob("worker*/app-*/*/waldelta-*.zip")
        }


def _events(log: Path) -> Iterator[dict]:
    files = [log] if log.is_file() else sorted(log.glob("events_*"))
    for file in files:
        yield from map(json.loads, file.read_text().splitlines())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Processes of their own without our packages; the executors have a key of their own."""
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    (folder / "events").mkdir()
    spark = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SPARK_REMOTE")
    }
    python = python_without_ours(folder / "python")
    environment |= {"SPARK_LOCAL_IP": HERE, "PYSPARK_PYTHON": str(python)}
    environment |= {
        "AWS_ACCESS_KEY_ID": WRITER.access_key,
        "AWS_SECRET_ACCESS_KEY": WRITER.secret_key,
    }
    deploy, started = "org.apache.spark.deploy", []

    def start(name: str, kind: str, *arguments: str) -> None:
        command = [str(spark), f"{deploy}.{kind}", "--host", HERE, "--webui-port", "0", *arguments]
        with (folder / f"{name}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def has_said(text: str, times: int) -> None:
        told = (folder / "master.log").read_text()
        assert told.count(text) >= times, told[-2000:]

    wait = tenacity.Retrying(
        stop=tenacity.stop_after_delay(120), wait=tenacity.wait_fixed(0.2), reraise=True
    )
    try:
        start("master", "master.Master", "--port", str(port))
        wait(has_said, "New state: ALIVE", 1)
        for number in (1, 2):
            work = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker{number}"))
            start(f"worker{number}", "worker.Worker", *work, f"spark://{HERE}:{port}")
        wait(has_said, "Registering worker", 2)
        yield Cluster(folder, port, python)
    finally:
        for process in started:
            for child in [
                *psutil.Process(process.pid).children(recursive=True),
                psutil.Process(process.pid),
            ]:
                child.kill()
            process.wait()


@pytest.fixture
def connection(cluster, monkeypatch, tmp_path) -> str:
    """What leads to the cluster: an Airflow connection, and what an administrator has set there."""
    defaults = tmp_path / "conf" / "spark-defaults.conf"
    defaults.parent.mkdir()
    settings = {
        "spark.driver.host": HERE,
        "spark.executor.memory": "512m",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (cluster.folder / "events").as_uri(),
        "spark.eventLog.compress": "false",
        # On a busy machine the first executor would be done before the second is there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    defaults.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    fields = {"conn_type": "spark", "host": f"spark://{HERE}", "port": cluster.port}
    monkeypatch.setenv("SPARK_CONF_DIR", str(defaults.parent))
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", json.dumps(fields))
    monkeypatch.setenv("WALDELTA_DRIVER_MEMORY", "1g")
    # The driver tells the executors which Python is theirs.
    monkeypatch.setenv("PYSPARK_PYTHON", str(cluster.python))
    return "waldelta_spark"


@pytest.fixture
def run(connection, write_pipeline, database, monkeypatch, make_context):
    """Runs a verb as a task of Airflow does; the connection is all that says where."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)

    def job(verb: str, text: str = PIPELINE) -> dict:
        path = write_pipeline("shop", text=text)
        operator = WaldeltaJobOperator(
            task_id=verb, pipeline_path=path, pipeline=load_pipeline_file(path), verb=verb,
            stage=None, first=True,
        )  # fmt: skip
        return operator.execute(make_context())

    return job


@pytest.mark.soak("a cluster of two workers")
def test_a_cluster_is_a_connection_away(run, cluster, database, lake):
    """Copy, decoding, merge and check on executors that have the shipped packages only."""
    for statement in TABLE.split(";"):
        database.execute(statement)
    run("setup")
    run("sync")
    for statement in CHANGES.split(";"):
        database.execute(statement)
    run("consume")
    (told,) = (run for run in Ledger(Lake(f"{lake}/shop")).runs() if run.verb == "consume")
    run("teardown")
    stages = RunResult.from_json(told.result).stages
    assert stages["land"].detail.endswith("; 1 apply batch applied during landing")
    assert stages["check"].status == "succeeded"
    assert_equal(database, f"{lake}/shop/public/orders")
    assert cluster.executors_with_tasks() == [{"0", "1"}] * 2
    # The events of several tasks went by buckets to two that collapsed them, wherever they ran.
    (decoding,) = cluster.tasks_that_told(DIVIDED)
    assert decoding > 1
    assert cluster.tasks_that_told(COUNTS) == [2, 1]
    # And of both their new rows were written by a task each.
    assert 2 in cluster.tasks_that_told(MERGED)
    assert cluster.shipped() == {"worker1", "worker2"}


@pytest.mark.soak("a cluster of two workers")
def test_a_lake_in_an_object_store_is_written_by_the_workers(
    run, cluster, bucket, database, monkeypatch, caplog, capfd
):
    """The driver's key is in no argument, log or file of the workers."""
    database.execute("create table orders (id bigint primary key, note text, amount numeric(12,2))")
    database.execute("insert into orders select n, 'note ' || n, n from generate_series(1, 9000) n")
    store = {
        "conn_type": "aws",
        "login": bucket.identity.access_key,
        "password": bucket.identity.secret_key,
        "extra": {"endpoint_url": bucket.endpoint, "region_name": REGION},
    }
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_STORE", json.dumps(store))
    root = f"root: {bucket.uri('lake')}, conn_id: lake_store"
    text = PIPELINE.replace("root: {root}", root)
    before = len(cluster.executors_with_tasks())
    keys = [ADMIN.secret_key, WRITER.secret_key]
    with none_in_arguments(keys):
        run("setup", text)
        run("sync", text)
        database.execute("update orders set amount = amount + 1 where id % 2 = 0")
        database.execute("delete from orders where id % 10 = 1")
        database.execute(
            "insert into orders select n, 'new', 0 from generate_series(9001, 20000) n"
        )
        run("consume", text)
    run("teardown", text)
    assert_equal(database, bucket.uri("lake/public/orders"), bucket.storage_options)
    assert {"0", "1"} in cluster.executors_with_tasks()[before:]
    shown = caplog.text + "".join(capfd.readouterr())
    assert "Spark-Submit cmd" in shown
    assert [key for key in keys if key in shown] == []
    assert [path for path in files(cluster.folder) if contains(path, keys)] == []


def assert_equal(database, uri: str, options: dict[str, str] | None = None) -> None:
    """The target has exactly the rows of the source."""
    columns = ["id", "note", "amount"]
    target = DeltaTable(uri, storage_options=options)
    held = target.to_pyarrow_table(columns=columns).sort_by("id")
    wanted = database.execute("select id, note, amount from orders order by id")
    assert list(zip(*(held[name].to_pylist() for name in columns), strict=True)) == wanted
