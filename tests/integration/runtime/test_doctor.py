"""``doctor`` and ``check --json`` on a real server: what is fine, missing or wrong."""

import json
import platform
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import yaml

from tests.support.pipelines import pipeline_file, written
from tests.support.servers.roles import connect_as, new_role, own_everything
from tests.support.servers.s3_server import READER
from waldelta.cli.command_line import main
from waldelta.cli.doctor import check_workers, run_check

pytestmark = pytest.mark.pg


@pytest.fixture
def path(database, lake, tmp_path, monkeypatch):
    """A pipeline file for a table whose owner runs it; there is no Airflow."""
    database.execute("create table t(id int primary key)")
    path = written(pipeline_file(lake, f"s_{database.name}"), tmp_path)
    monkeypatch.setenv("AIRFLOW_HOME", "/nowhere")
    monkeypatch.delenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", raising=False)
    monkeypatch.setattr("waldelta.cli.doctor.installation_checks", dict)
    with new_role(database, "owner") as role:
        own_everything(database, role)
        connect_as(monkeypatch, database, role)
        yield path


@pytest.fixture
def answer(capsys):
    """Runs a verb: the exit code, and the JSON document."""

    def run(*arguments):
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def results(document):
    """The results of doctor by check."""
    found: dict[str, list] = {}
    for one in document["checks"]:
        found.setdefault(one["check"], []).append(one)
    return found


def test_doctor_follows_a_pipeline(path, answer, database, capsys):
    """Before setup, after it, without its slot, and without a server."""
    code, document = answer("doctor", path)
    found = results(document)
    assert [one for one in document["checks"] if one["status"] == "problem"] == []
    assert code == 0
    (slot,) = found["slot"]
    assert slot["status"] == "warning"
    assert slot["remedy"] == f"run `waldelta setup {path}`"
    assert "wal_level logical" in found["source"][0]["text"]
    assert found["preflight"][0]["text"] == "setup would be accepted"

    code, plan = answer("setup", path)
    assert (code, plan["slot"]["create"]) == (0, True)
    code, document = answer("doctor", path)
    slot = results(document)["slot"][0]
    assert (code, slot["status"]) == (0, "ok")
    assert "no run reads it now; keeps" in slot["text"]

    assert main(["doctor", str(path)]) == 0
    assert f"✓ slot: slot s_{database.name}: reserved" in capsys.readouterr().out

    database.execute(f"select pg_drop_replication_slot('s_{database.name}')")
    code, document = answer("doctor", path)
    (slot,) = results(document)["slot"]
    assert (code, slot["status"]) == (1, "problem")
    assert slot["text"].startswith("SlotMissing: ")


def test_doctor_without_a_server(path, answer, monkeypatch):
    """One problem, which the other checks don't repeat, and no password."""
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", "postgres://x:s3cret@127.0.0.1:1/x")
    code, document = answer("doctor", path)
    found = results(document)
    assert (code, document["problems"]) == (1, 1)
    assert found["source"][0]["text"].startswith("SourceUnreachable: ")
    assert "s3cret" not in json.dumps(document)
    assert found.keys() == {"file", "source", "lake", "airflow"}


def test_doctor_names_a_lake_that_cant_be_written(path, answer, tmp_path):
    (tmp_path / "lake").write_text("a file")
    code, document = answer("doctor", path)
    (found,) = results(document)["lake"]
    assert (code, found["status"]) == (1, "problem")
    assert found["text"].startswith("TargetNotWritable: ")


def test_check_as_json(path, answer, database):
    """The plan with its SQL; and with the error, when setup would be refused."""
    code, plan = answer("check", path)
    assert code == 0
    assert plan["pipeline"] == f"s_{database.name}"
    assert plan["slot"] == {"name": f"s_{database.name}", "create": True}
    assert plan["findings"] == []
    assert "create publication" in plan["sql"].lower()
    assert len(plan["statements"]) > 0
    assert "error" not in plan
    assert (plan["estimate"]["tables"], plan["estimate"]["unknown"]) == (1, None)
    database.execute("drop table t")
    code, plan = answer("check", path)
    assert code == 1
    assert plan["error"]["class"] == "PreflightFailed"
    assert plan["error"]["remedy"]
    assert "problem" in {found["severity"] for found in plan["findings"]}


def test_status_and_teardown_as_json(path, answer, database):
    """A status that fails is one document with its error."""
    answer("setup", path)
    database.execute(f"select pg_drop_replication_slot('s_{database.name}')")
    code, status = answer("status", path)
    assert (code, status["slot"]["wal_status"]) == (1, "missing")
    assert status["error"]["class"] == "SlotMissing"
    code, done = answer("teardown", path)
    assert (code, done["pipeline"]) == (0, f"s_{database.name}")
    assert len(done["dropped"]) == 1


def test_a_repair_as_json(path, answer):
    """The run's result; what fails has the error with its remedy as well."""
    answer("setup", path)
    code, result = answer("repair", path, "--run-id=r1")
    assert (code, result["verb"], result["run_id"]) == (0, "reconcile", "r1")
    assert result["status"] == "succeeded"
    code, result = answer("repair", path, "--tables=public.typo")
    assert (code, result["error"]["class"]) == (1, "ConfigError")
    assert "public.typo" in result["error"]["message"]
    assert result["error"]["remedy"]


@pytest.mark.parametrize("identity", [None, READER], ids=["the owner", "read-only"])
def test_doctor_probes_an_object_store(path, answer, bucket, monkeypatch, identity):
    """Without Spark; the probe's table is removed again, and no key is shown."""
    seen = bucket if identity is None else bucket.seen_by(identity)
    for name, value in seen.storage_options.items():
        monkeypatch.setenv(name, value)
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(document | {"target": {"root": bucket.uri("lake")}}))
    _, answered = answer("doctor", path)
    last = results(answered)["lake"][-1]
    assert last["status"] == ("ok" if identity is None else "problem")
    if identity is not None:
        assert "check the credentials" in last["text"]
        assert identity.secret_key not in json.dumps(answered)
    assert bucket.keys() == []


@pytest.mark.nightly("asks Spark's workers; unit tests have what is said of them")
def test_doctor_asks_sparks_workers(runner, monkeypatch):
    (fine,) = run_check("workers", check_workers, 120)
    assert fine.status == "ok"
    assert f"Python {platform.python_version()}" in fine.text
    own = SimpleNamespace(requires=["numpy<1", "absent-one>=1"])
    monkeypatch.setattr("waldelta.cli.doctor._find_distribution", lambda _: own)
    (lacking,) = run_check("workers", check_workers, 120)
    assert lacking.status == "problem"
    assert "lacks absent-one" in lacking.text
    assert f"numpy {version('numpy')} (needs <1)" in lacking.text
    assert "into the Python of Spark's workers" in lacking.remedy
