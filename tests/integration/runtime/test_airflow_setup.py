"""``waldelta airflow setup`` in a real metadata database: makes pools, lists connections."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from waldelta.cli.doctor import entries_of

PASSWORD = "s3cr3t-of-source"


@pytest.fixture
def airflow(tmp_path, monkeypatch):
    """An AIRFLOW_HOME with a database in SQLite, and what waldelta and airflow answer there."""
    home = tmp_path / "airflow"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")
    } | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
    }

    def run(*command, **more):
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300,
            env=environment | more,
        )  # fmt: skip

    return run


def setup(airflow, *arguments, **more):
    """The exit code and the JSON of the command."""
    command = (sys.executable, "-m", "waldelta", "airflow", "setup", "--json")
    done = airflow(*command, *map(str, arguments), **more)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout), done


def states(document):
    entries = (*document["pools"], *document["connections"])
    return {one.get("pool") or one["connection"]: one["state"] for one in entries}


def select(home, query):
    """Rows of Airflow's database."""
    with closing(sqlite3.connect(home / "airflow.db")) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.nightly("Airflow's own commands; the demo's stack makes pools and connections")
def test_pools_and_connections(airflow, write_pipeline, pipelines, tmp_path):
    write_pipeline("shop")
    home = tmp_path / "airflow"
    code, document, _ = setup(airflow, pipelines)
    assert code == 1
    assert "after `airflow db migrate`" in document["error"]["message"]

    program = str(Path(sys.executable).with_name("airflow"))
    migrated = airflow(program, "db", "migrate")
    assert migrated.returncode == 0, migrated.stderr
    missing = dict.fromkeys(("waldelta_shop_cdc", "shop_source", "waldelta_spark"), "missing")
    code, document, _ = setup(airflow, pipelines, "--dry-run")
    assert (code, states(document)) == (1, missing)
    checked = list(entries_of(document))  # what doctor says of it
    assert {one.status for one in checked} == {"problem"}
    assert checked[0].remedy.startswith("run `airflow pools set waldelta_shop_cdc 1 ")
    assert select(home, "select count(*) from slot_pool") == [(1,)]  # Airflow's own

    given = {
        "AIRFLOW_CONN_SHOP_SOURCE": f"postgres://cdc:{PASSWORD}@db/app",
        "AIRFLOW_CONN_WALDELTA_SPARK": '{"conn_type": "spark_connect", "host": "spark"}',
    }
    code, document, done = setup(airflow, pipelines / "shop.yml", "--add-connections", **given)
    assert (code, states(document)) == (0, dict.fromkeys(missing, "created"))
    assert PASSWORD not in done.stdout + done.stderr
    pools = select(home, "select pool, slots, description from slot_pool where slots = 1")
    assert pools == [("waldelta_shop_cdc", 1, "runs on slot shop_cdc")]

    code, document, _ = setup(airflow, pipelines)
    assert (code, set(states(document).values())) == (0, {"exists"})
    query = "select login, is_encrypted, password from connection where conn_id = 'shop_source'"
    ((login, is_encrypted, stored),) = select(home, query)
    assert (login, is_encrypted) == ("cdc", 1)
    assert PASSWORD not in stored


@pytest.mark.nightly("Airflow's own commands; the demo's run has its connections")
def test_commands_know_airflows_connections(airflow, write_pipeline, tmp_path):
    """``init`` and the verbs take them from where Airflow does; the environment goes first."""
    path = write_pipeline("shop")
    program = str(Path(sys.executable).with_name("airflow"))
    assert airflow(program, "db", "migrate").returncode == 0
    init = (sys.executable, "-m", "waldelta", "init", "shop_source", "--yes", "--json")
    unknown = json.loads(airflow(*init).stdout)
    assert "is not known here" in unknown["error"]["message"]

    nowhere = f"postgresql://app:{PASSWORD}@127.0.0.1:1/airflows"
    added = airflow(program, "connections", "add", "shop_source", "--conn-uri", nowhere)
    assert added.returncode == 0, added.stderr
    for command in (init, (sys.executable, "-m", "waldelta", "check", str(path), "--json")):
        done = airflow(*command)
        error = json.loads(done.stdout)["error"]
        assert error["class"] == "SourceUnreachable"
        assert "127.0.0.1:1/airflows" in error["message"]
        assert PASSWORD not in done.stdout + done.stderr

    def backend(uri):
        secrets = tmp_path / "secrets.json"
        secrets.write_text(json.dumps({"shop_source": uri}))
        return {
            "AIRFLOW__SECRETS__BACKEND": "airflow.secrets.local_filesystem.LocalFilesystemBackend",
            "AIRFLOW__SECRETS__BACKEND_KWARGS": json.dumps({"connections_file_path": str(secrets)}),
        }

    error = json.loads(airflow(*init, **backend(nowhere.replace("airflows", "secrets"))).stdout)[
        "error"
    ]
    assert "127.0.0.1:1/secrets" in error["message"]  # as Airflow, which asks it first
    own = nowhere.replace("airflows", "own")
    error = json.loads(airflow(*init, AIRFLOW_CONN_SHOP_SOURCE=own).stdout)["error"]
    assert "127.0.0.1:1/own" in error["message"]

    # Only Airflow's tasks get a token of IAM.
    done = airflow(*init[:-1], **backend("postgresql://app@127.0.0.1:1/shop?iam=true"))
    assert done.returncode == 1
    assert "connection=shop_source can't be taken from Airflow: its extra has iam" in done.stderr
    assert "set AIRFLOW_CONN_SHOP_SOURCE to" in done.stderr
