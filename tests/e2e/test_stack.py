"""The stack comes up healthy, lets nobody in without its secrets, leaves nothing behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from demo.airflow_client import AirflowClient, AirflowError
from demo.stack import Stack
from demo.stack.__main__ import READERS
from demo.stack.processes import marked, wait_until
from demo.stack.stack import SPARK_CONN_ID
from tests.e2e.shop import own_folder

pytestmark = pytest.mark.nightly("starts stacks of its own; test_demo uses one")

# pyspark keeps a process in one mode, classic or Connect, so a client is a process of its own.
SELECT_ONE = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
try:
    print("rows", spark.sql("select 1 as one").collect())
finally:
    spark.stop()
"""


@pytest.fixture(scope="module")
def folder_of_own_stack():
    with own_folder() as folder:
        yield folder
        Stack(folder).stop()


@pytest.fixture
def own_stack(folder_of_own_stack):
    """A stack that these tests may stop: started from the command line, as ``make up`` does."""
    stack = Stack(folder_of_own_stack)
    if not stack.is_running():
        done = command("up", stack.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert stack.is_running()
    return stack


def command(verb: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "demo.stack", verb, "--folder", str(folder), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def select_one(remote: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SPARK_REMOTE": remote}
    line = [sys.executable, "-c", SELECT_ONE]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def ports(stack: Stack) -> list[int]:
    return [stack.postgres.port, stack.spark.port, stack.airflow.port]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes_of(folder: Path) -> list[psutil.Process]:
    """The stack's processes, PostgreSQL's included: they carry its mark, or name its folder."""
    named = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(folder / "postgres") in " ".join(p.info["cmdline"] or [])
    ]
    return marked(folder) + named


def test_a_user_logs_in_and_finds_connections_and_pool(own_stack):
    with own_stack.client() as client:
        assert client.health()["scheduler"]["status"] == "healthy"
        source, spark = client.connection("flights_source"), client.connection(SPARK_CONN_ID)
        assert (source["conn_type"], source["schema"], source["port"]) == (
            "postgres",
            "flights",
            own_stack.postgres.port,
        )
        assert (spark["conn_type"], spark["port"]) == ("spark_connect", own_stack.spark.port)
        assert "waldelta_flights_cdc" in {pool["name"] for pool in client.get("/pools")["pools"]}


def test_the_scheduler_starts_when_the_api_server_answers(own_stack):
    """A task that finds no API server is killed."""
    (scheduler,) = [part for part in own_stack.parts if "scheduler" in part.name]
    (log,) = [part.log for part in own_stack.parts if "api-server" in part.name]
    # A stack that was started again writes on in the log of before.
    (*_, last) = [line for line in log.read_text().splitlines() if "Uvicorn running" in line]
    served = last.split()[0]
    # Processes' ages are told from the boot time, in whole seconds; without waiting it is many.
    assert (
        psutil.Process(scheduler.pid).create_time() > datetime.fromisoformat(served).timestamp() - 1
    )


def test_a_wrong_password_is_refused(own_stack):
    with (
        AirflowClient(own_stack.url, own_stack.user, "wrong") as client,
        pytest.raises(AirflowError, match="refused"),
    ):
        client.dag_ids()


def test_spark_answers_to_the_token(own_stack):
    done = select_one(own_stack.spark.remote)
    assert "rows [Row(one=1)]" in done.stdout, done.stderr


@pytest.mark.parametrize("ending", ["", "/;token=wrong"])
def test_spark_refuses_who_lacks_the_token(own_stack, ending):
    done = select_one(f"sc://localhost:{own_stack.spark.port}{ending}")
    assert done.returncode != 0
    assert "UNAUTHENTICATED" in done.stderr
    assert "rows" not in done.stdout


def test_everything_listens_on_loopback_only(own_stack):
    listening = {
        connection.laddr.ip
        for process in processes_of(own_stack.folder)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_another_user_cant_take_its_clients_or_keep_it_waiting(own_stack):
    """Neither by the other address of Spark's host, which the JVM holds, nor by its lock."""
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("::1", own_stack.spark.port))
    assert stat.S_IMODE((own_stack.folder / "stack.lock").stat().st_mode) == 0o600


def test_secrets_are_in_no_argument_and_no_file_that_others_can_read(own_stack):
    secrets = [value for value in vars(own_stack.secrets).values() if isinstance(value, str)]
    secrets.append(own_stack.postgres.password)
    for process in processes_of(own_stack.folder):
        line = " ".join(process.cmdline())
        assert not [n for n, secret in enumerate(secrets) if secret in line], process.name()
    readable = [p for p in own_stack.folder.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    for path in readable:
        text = path.read_bytes()
        assert not [n for n, secret in enumerate(secrets) if secret.encode() in text], path


def test_a_second_up_says_that_it_is_running(own_stack):
    before = {part.pid for part in own_stack.parts}
    done = command("up", own_stack.folder)
    assert done.returncode == 0
    assert "running already" in done.stdout
    assert all(text in done.stdout for text in ("make psql", *READERS))
    assert own_stack.is_running()
    assert {part.pid for part in own_stack.parts} == before


def test_psql_opens_the_source_as_the_pipelines_role(own_stack):
    """With psql's own options and exit code, and no password asked for."""
    done = command(
        "psql", own_stack.folder, "-w", "-Atc", "select current_user, current_database()"
    )
    assert (done.stdout.strip(), done.returncode) == ("waldelta|flights", 0), done.stderr
    assert command("psql", own_stack.folder, "-w", "-c", "select 1 / 0").returncode == 1


def test_down_leaves_no_process_and_no_open_port(own_stack):
    """Runs behind those: another process than the one that started the stack ends it."""
    was = ports(own_stack)
    assert all(map(is_open, was))
    done = command("down", own_stack.folder)
    assert done.returncode == 0
    assert processes_of(own_stack.folder) == []
    assert not any(map(is_open, was))
    assert "not running" in command("down", own_stack.folder).stdout
    assert command("status", own_stack.folder).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_stops_what_was_started(stack_folder, number):
    line = [sys.executable, "-m", "demo.stack", "up", "--folder", str(stack_folder)]
    # A background job of a shell that isn't interactive ignores Ctrl-C, as what it starts would.
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    starting = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, was)
    wait_until((stack_folder / "logs/airflow-db-migrate.log").exists, "the migration", 60)
    starting.send_signal(number)
    assert starting.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert processes_of(stack_folder) == []
