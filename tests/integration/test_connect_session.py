"""Sessions of a real Spark Connect server: a second run leaves a healthy first one alone, a dead one's work is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from demo.embedded_postgres import free_port
from demo.stack.processes import stop, wait_until
from demo.stack.spark_connect_server import SparkConnectServer
from tests.pipelines import pipeline_file

pytestmark = [pytest.mark.pg, pytest.mark.spark]

# pyspark keeps a process in one mode, classic or Connect, so a client is a process of its own.
CLIENT = """
import json, os, sys, time
from pathlib import Path
from spark_jobs.session import open_session
from waldelta.job import load_job
from waldelta.pipeline_file import PipelineFile

folder, document = Path(sys.argv[1]), json.loads(sys.argv[2])

def work(parts):
    for part in parts:
        (folder / "draft").write_text(str(os.getpid()))
        (folder / "draft").rename(folder / "working")
        while not (folder / "go").exists():
            time.sleep(0.02)
        yield part

with open_session("test", load_job(PipelineFile.model_validate(document)), "one run at a time") as spark:
    rows = spark.range(0, 1, 1, 1).mapInArrow(work, "id bigint").collect()
    print(f"done {len(rows)}", flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connect")
    made = SparkConnectServer(folder, free_port(), "test-token", folder / "spark.log", memory="1g")
    part = made.start(os.environ)
    try:
        wait_until(made.is_listening, "the Spark Connect server", 120, [part])
        yield made
    finally:
        stop([part], grace_s=5)


@pytest.fixture
def client(server, database, lake, tmp_path):
    """Starts a client that works in Spark until its file ``go`` is there."""
    document = json.dumps(pipeline_file(lake, f"s_{database.name}").model_dump(mode="json"))
    environment = os.environ | {"SPARK_REMOTE": server.remote}

    @contextmanager
    def start(name):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", CLIENT, str(folder), document]
        with subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                yield process, folder
            finally:
                process.kill()

    return start


def until_working(process: subprocess.Popen, folder: Path) -> psutil.Process:
    """The worker that runs the client's task."""
    wait_until(lambda: (folder / "working").exists() or process.poll() is not None, "the client's task", 120)
    assert process.poll() is None, process.communicate()[1]
    return psutil.Process(int((folder / "working").read_text()))


def test_a_second_run_started_by_mistake_leaves_the_first_alone(client):
    """The lock comes before the session: whoever doesn't get it interrupts nothing."""
    with client("first") as (first, folder):
        until_working(first, folder)
        with client("second") as (second, _):
            _, error = second.communicate(timeout=120)
        assert second.returncode == 1
        assert "waldelta.errors.LockHeld" in error
        assert "is held by another run" in error
        (folder / "go").touch()
        output, error = first.communicate(timeout=120)
    assert (first.returncode, output) == (0, "done 1\n"), error


def test_what_a_killed_run_left_behind_is_ended(client):
    """Its lock went with it, its work on the server did not; the next run interrupts that, and works."""
    with client("killed") as (killed, folder):
        worker = until_working(killed, folder)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    with client("next") as (following, folder):
        (folder / "go").touch()
        output, error = following.communicate(timeout=120)
    assert (following.returncode, output) == (0, "done 1\n"), error
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker's end", 60)
