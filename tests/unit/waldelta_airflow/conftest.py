"""What an operator meets: connections, a context, and a job that is a real process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.plugin_app import plugin_app

if TYPE_CHECKING:
    from fastapi.testclient import TestClient
    from sqlalchemy import Engine

PASSWORD = "s3cr3t/of the+source"
TOKEN = "t0ken-of-spark"


@pytest.fixture(autouse=True)
def _connections(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {
        "conn_type": "postgres", "host": "db", "login": "cdc", "password": PASSWORD, "port": 5432,
        "schema": "app",
    }  # fmt: skip
    spark = {"conn_type": "spark_connect", "host": "localhost", "port": 15002, "password": TOKEN}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", json.dumps(source))
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", "postgres://x:unrelated@y/z")
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", json.dumps(spark))
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "")


@pytest.fixture
def airflow_tables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Creates empty tables of Airflow's database, which Airflow's own sessions then have."""

    def create(*models: Any) -> Engine:
        from airflow.models import import_all_models
        from sqlalchemy import create_engine
        from sqlalchemy.orm import sessionmaker
        from sqlalchemy.pool import StaticPool

        engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
        import_all_models()  # which foreign keys name
        for model in models:
            model.__table__.create(engine)

        sessions = sessionmaker(engine, expire_on_commit=False)
        monkeypatch.setattr("airflow.settings.Session", sessions)
        return engine

    return create


@dataclass
class FakeJob:
    """What the job is to do, and what it saw."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    plan: dict[str, Any] = field(default_factory=dict)

    def does(self, **plan: Any) -> None:
        self.plan = {
            "tell": str(self.folder / "seen.json"),
            "started": str(self.folder / "started"),
            **plan,
        }
        self.monkeypatch.setenv("FAKE_JOB", json.dumps(self.plan))

    @property
    def ran(self) -> bool:
        return (self.folder / "seen.json").exists()

    @property
    def seen(self) -> dict[str, Any]:
        return json.loads((self.folder / "seen.json").read_text())

    @property
    def options(self) -> dict[str, str]:
        return dict(a.removeprefix("--").partition("=")[::2] for a in self.seen["argv"][2:])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    """The stand-in for ``python -m waldelta``; ``does()`` says what it does."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_job"))
    fake = FakeJob(tmp_path, monkeypatch)
    fake.does(result={"status": "succeeded"})
    return fake


@pytest.fixture
def spark_submit_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: FakeJob) -> Path:
    """A spark-submit first on PATH that records its arguments and runs the job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "spark-submit"
    program.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\n" "$@" > {tmp_path}/submitted\n'
        f'for file; do case "$file" in *.zip) cp -p "$(dirname "$file")" {tmp_path}/shipped -r;;'
        " esac; done\n"
        'while [ "$1" ]; do case "$1" in */waldelta_job.py) shift; break;; esac; shift; done\n'
        f'exec {sys.executable} -P -m waldelta "$@"\n'
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in (program, python):
        file.chmod(0o755)
    monkeypatch.setattr("waldelta_airflow._connections.sys.executable", str(python))
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "delta.jar").touch()
    monkeypatch.setenv("WALDELTA_JARS", str(jars))
    return tmp_path / "submitted"


@pytest.fixture
def open_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], TestClient]:
    """A client of the plugin's application as a user with an Airflow role, or None.

    The page of all pipelines waits for everything that it shows.
    """
    from fastapi.testclient import TestClient

    from tests.support.plugin_app import wait_for_glances

    wait_for_glances(monkeypatch.setattr)
    return lambda role: TestClient(plugin_app(role))
