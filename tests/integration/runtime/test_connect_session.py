"""Sessions of a real Spark Connect server: one healthy run, and a dead one's work."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from demo.stack.processes import stop, wait_until
from demo.stack.spark_connect_server import SparkConnectServer
from tests.support.disk import open_to_others
from tests.support.pipelines import bare_slot, pipeline_file
from waldelta.lake import MESSAGES
from waldelta.rehearsal.embedded_postgres import free_port

pytestmark = [pytest.mark.pg, pytest.mark.spark]

# pyspark keeps a process in one mode, classic or Connect, so a client is a process of its own.
CLIENT = """
import json, os, sys, time
from pathlib import Path
from waldelta.spark.session import open_session
from waldelta.pipeline.job import load_job
from waldelta.config.pipeline_file import PipelineFile

folder, document = Path(sys.argv[1]), json.loads(sys.argv[2])

def work(parts):
    for part in parts:
        (folder / "draft").write_text(str(os.getpid()))
        (folder / "draft").rename(folder / "working")
        while not (folder / "go").exists():
            time.sleep(0.02)
        yield part

job = load_job(PipelineFile.model_validate(document))
with open_session("test", job, "one run at a time") as spark:
    (folder / "session").write_text(spark.session_id)
    rows = spark.range(0, 1, 1, 1).mapInArrow(work, "id bigint").collect()
    print(f"done {len(rows)}", flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connect")
    made = SparkConnectServer(
        folder, free_port(), "1g", token="test-token", log=folder / "spark.log"
    )
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
    wait_until(
        lambda: (folder / "working").exists() or process.poll() is not None,
        "the client's task",
        120,
    )
    assert process.poll() is None, process.communicate()[1]
    return psutil.Process(int((folder / "working").read_text()))


@pytest.mark.soak("a second Connect server and its zombies")
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


@pytest.mark.soak("a second Connect server and its zombies")
def test_what_a_killed_run_left_behind_is_ended(client):
    """Its lock went with it, its work on the server did not; the next run interrupts that, and
    works.

    In a session of its own: a run that only lost its lock would go on to set what tags the commits
    of the next one.
    """
    with client("killed") as (killed, folder):
        worker = until_working(killed, folder)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        sessions = [(folder / "session").read_text()]
    for name in ("next", "and the next"):
        with client(name) as (following, folder):
            (folder / "go").touch()
            output, error = following.communicate(timeout=120)
        assert (following.returncode, output) == (0, "done 1\n"), error
        sessions.append((folder / "session").read_text())
    assert sessions[0] != sessions[1] == sessions[2]
    wait_until(
        lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE,
        "the worker's end",
        60,
    )


COLUMNS = """
import json, os, sys
from waldelta.lake.delta_statements import COMMIT_SETTINGS
from waldelta.spark.session import open_session
from waldelta.pipeline.job import load_job
from waldelta.config.pipeline_file import PipelineFile

job = load_job(PipelineFile.model_validate(json.loads(sys.argv[1])))
with open_session("test", job, "columns") as spark:
    left = [key for key in COMMIT_SETTINGS if spark.conf.get(key, None) is not None]
    print(spark.read.format("delta").load(sys.argv[2]).columns, left, flush=True)
    for key in COMMIT_SETTINGS:
        spark.conf.set(key, "7")
    os._exit(0)
"""


@pytest.mark.nightly("a server's own caches, which make test-all asks")
def test_the_next_run_is_given_nothing_of_an_earlier_one(server, database, lake, tmp_path):
    """The server keeps analysed plans for a session under numbers that each process counts from the
    same beginning.

    A run that dies within a commit leaves its tag there, and Delta skips what it takes for the same
    commit.
    """
    document = json.dumps(pipeline_file(lake, f"s_{database.name}").model_dump(mode="json"))
    target, seen = str(tmp_path / "target"), []
    for row in ({"id": 1}, {"id": 2, "later": 2}):
        write_deltalake(target, pa.Table.from_pylist([row]), mode="append", schema_mode="merge")
        done = subprocess.run(
            [sys.executable, "-c", COLUMNS, document, target],
            env=os.environ | {"SPARK_REMOTE": server.remote}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        seen.append(done.stdout.strip())
    assert seen == ["['id'] []", "['id', 'later'] []"], done.stderr


# Copies the table, lets it grow text columns, copies it again and applies changes to it.
RESYNC = """
import json, os, sys
import psycopg
from waldelta.jobs.consume import consume
from waldelta.spark import OnSpark, open_session
from waldelta.stages.sync.sync import sync
from waldelta.pipeline.job import load_job
from waldelta.config.pipeline_file import PipelineFile

job = load_job(PipelineFile.model_validate(json.loads(sys.argv[1])))
connect, conninfo = psycopg.connect, job.source.conninfo
with open_session("test", job, "resync") as spark, connect(conninfo, autocommit=True) as source:
    runner = OnSpark(spark)
    sync(runner, job)
    source.execute("alter table t add column w text, add column l text[]")
    sync(runner, job, ["public.t"])
    source.execute("alter table t add column x text default 'd';"
                   "insert into t values (1, 'a', 'b', '{c}', 'e')")
    source.execute("select pg_logical_emit_message(true, 'p', 'first')")
    consume(runner, job)
    source.execute("select pg_logical_emit_message(true, 'p', 'second')")
    consume(runner, job)
"""


@pytest.mark.soak("the same columns over Connect")
def test_text_columns_added_over_connect_are_read_by_delta_rs(server, database, lake):
    """A Connect client sends strings with an explicit collation, which delta-rs doesn't know."""
    database.execute("create table t(id int primary key, v text); insert into t values (2, 'z')")
    pipeline = pipeline_file(lake, f"s_{database.name}", options={"messages": True})
    job = bare_slot(database, pipeline)
    document = json.dumps(pipeline.model_dump(mode="json"))
    command, environment = (
        [sys.executable, "-c", RESYNC, document],
        os.environ | {"SPARK_REMOTE": server.remote},
    )
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False,
        umask=0o022,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = (
        DeltaTable(job.lake.target("public.t").uri)
        .to_pyarrow_table()
        .select(["id", "v", "w", "l", "x"])
    )
    rows = [
        {"id": 1, "v": "a", "w": "b", "l": ["c"], "x": "e"},
        {"id": 2, "v": "z", "w": None, "l": None, "x": "d"},
    ]
    assert table.sort_by("id").to_pylist() == rows
    messages = (
        DeltaTable(job.lake.bookkeeping(MESSAGES).uri)
        .to_pyarrow_table(columns=["prefix", "content"])
        .to_pylist()
    )
    assert {(row["prefix"], row["content"]) for row in messages} == {
        ("p", b"first"),
        ("p", b"second"),
    }
    assert open_to_others(Path(job.lake.target("public.t").uri.removeprefix("file://"))) == []


REACH = """
from waldelta.spark.session import spark_session
from waldelta.errors import SparkUnreachable

try:
    spark_session(session_key="one run at a time").stop()
except SparkUnreachable as err:
    print(err.retryable, err)
else:
    print("reached")
"""


@pytest.mark.nightly("a server of its own, refusing a token")
def test_a_token_is_accepted_refused_or_goes_by_tls_alone(server):
    """PySpark speaks TLS to every host but the one named localhost."""
    refused = f"False the Spark Connect server localhost:{server.port} refused the token"
    by_tls = (
        f"False the Spark Connect server 127.0.0.1:{server.port} doesn't speak TLS, and PySpark"
        " sends a token"
    )
    addresses = {
        server.remote: "reached",
        server.remote.replace(server.token, "another"): refused,
        server.remote.partition(";")[0]: refused,
        server.remote.replace("localhost", "127.0.0.1"): by_tls,
    }
    for address, told in addresses.items():
        done = subprocess.run(
            [sys.executable, "-c", REACH], env=os.environ | {"SPARK_REMOTE": address},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.stdout.startswith(told), (address, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert server.token not in done.stdout + done.stderr


SECRET = "s3cret-"
VALUES = f"""
from waldelta.spark.session import spark_session

spark = spark_session(session_key=None)
print(spark.conf.get("spark.authenticate"))
try:
    spark.range(0, 4, 1, 2).selectExpr("cast(concat('{SECRET}', id) as int)").collect()
except Exception as err:
    print(type(err).__name__)
"""


@pytest.mark.nightly("a server's log; unit tests have its settings")
def test_the_servers_log_has_no_values_of_rows(server):
    """Of an error about a value, it has the name; its ports want Spark's secret."""
    done = subprocess.run(
        [sys.executable, "-c", VALUES], env=os.environ | {"SPARK_REMOTE": server.remote},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["true", "NumberFormatException"], done.stderr
    log = server.log.read_text()
    assert "CAST_INVALID_INPUT" in log
    assert SECRET not in log
