"""What the demo's stack needs for a lake in its S3 server, without starting it."""

import os
import subprocess

import pytest

from demo.stack import Stack, StackError
from demo.stack.object_store import DemoStore
from demo.stack.processes import finish
from demo.stack.spark_connect_server import SparkConnectServer
from waldelta.config import load_pipeline_file
from waldelta.lake import read_store_options
from waldelta.rehearsal.embedded_postgres import free_port


@pytest.fixture
def store(tmp_path):
    return DemoStore(tmp_path / "store", 4321, "the-secret", tmp_path / "s3.log")


def test_the_copied_pipelines_name_the_connection(store, monkeypatch):
    """The files of the repository don't: their lake is in a folder."""
    store.copy_pipelines(Stack.pipelines)
    store.copy_pipelines(Stack.pipelines)
    monkeypatch.setenv("WALDELTA_LAKE", store.root)
    copied = load_pipeline_file(store.pipelines / "flights.yml")
    original = load_pipeline_file(Stack.pipelines / "flights.yml")
    assert (copied.target.conn_id, original.target.conn_id) == ("demo_lake", None)
    assert copied.target.root == store.root
    assert copied.quality.suites == str(store.folder / "expectations" / "flights")
    assert copied.source == original.source


def test_a_copied_pipeline_may_have_either_suffix(store, tmp_path):
    """Airflow reads both. A lake elsewhere would be opened without the connection."""
    (folder := tmp_path / "pipelines").mkdir()
    for name in ("a.yml", "b.yaml"):
        (folder / name).write_text("target:\n  root: '${WALDELTA_LAKE}/a' # here\n")
    store.copy_pipelines(folder)
    copied = {path.name: path.read_text() for path in store.pipelines.iterdir()}
    assert copied.keys() == {"a.yml", "b.yaml"}
    assert all(text.endswith("# here\n  conn_id: demo_lake\n") for text in copied.values())
    (folder / "a.yml").write_text("target: {root: file:///lake}\n")
    with pytest.raises(StackError, match=r"a\.yml has no line .root: \$\{WALDELTA_LAKE\}"):
        store.copy_pipelines(folder)


@pytest.mark.parametrize("store_name, code", [("", 0), ("s3", 0), ("azure", 2), ("s3,azure", 2)])
def test_make_demo_refuses_other_stores_before_setup(store_name, code):
    done = subprocess.run(
        ["make", "-n", "demo", f"STORE={store_name}"],
        cwd=Stack.pipelines.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert ("bootstrap" in done.stdout) == (code == 0)
    if code:
        assert f"STORE={store_name}: the demo has a server of s3 only" in done.stderr


def test_the_connection_opens_the_server(store):
    """By the variable for jobs started by hand, and by what Spark's own process gets."""
    found = read_store_options(store.root, store.conn_id, store.variables)
    assert found["AWS_ENDPOINT_URL"] == "http://127.0.0.1:4321"
    assert found["AWS_SECRET_ACCESS_KEY"] == "the-secret"
    assert store.spark_environment.items() <= found.items()
    assert "timeout" not in store.spark_environment


def test_sparks_key_is_in_its_environment_alone(store, tmp_path, monkeypatch):
    """Spark's settings are in a file and its UI; other accounts' variables would mix in."""
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nenv > environment\necho "$@" > arguments\n')
    program.chmod(0o755)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another account's")
    server = SparkConnectServer(
        tmp_path / "spark", free_port(), token="token", log=tmp_path / "log",
        python=str(program.with_name("python")), store=store.spark_environment,
    )  # fmt: skip
    finish(server.start(os.environ), timeout_s=20)
    variables = (server.folder / "environment").read_text().splitlines()
    assert {f"{name}={value}" for name, value in store.spark_environment.items()} <= {*variables}
    assert not [line for line in variables if line.startswith("AWS_SESSION_TOKEN")]
    settings = (server.folder / "conf/spark-defaults.conf").read_text()
    assert f"spark.hadoop.fs.s3a.endpoint {store.endpoint}\n" in settings
    assert "the-secret" not in settings + (server.folder / "arguments").read_text()


def test_without_sparks_jars_for_s3_the_demo_says_what_to_do(store, tmp_path, monkeypatch):
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "delta.jar").touch()
    monkeypatch.setenv("WALDELTA_JARS", str(tmp_path / "jars"))
    with pytest.raises(StackError, match="WALDELTA_STORES=s3 make setup"):
        store.begin({})


def test_a_stack_stays_where_its_lake_is(tmp_path):
    """A later start finds an earlier one's store; without one, the lake is a folder."""
    assert Stack(tmp_path).lake == (tmp_path / "lake").as_uri()
    assert "AIRFLOW_CONN_DEMO_LAKE" not in Stack(tmp_path).job_environment()
    (tmp_path / "store").mkdir()
    again = Stack(tmp_path)
    assert again.lake.startswith("s3a://")
    assert "AIRFLOW_CONN_DEMO_LAKE" in again.job_environment()
    chosen = Stack(tmp_path, store=False)
    chosen.reset()
    assert not (tmp_path / "store").exists()
