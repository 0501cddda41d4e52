"""The embedded PostgreSQL as fixtures: one cluster per session, one database per test."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres
from waldelta.postgres.connection import connect

WHEEL = (18, 16)
DEBIAN = Path("/usr/lib/postgresql")
INSTALLED = sorted(int(folder.name) for folder in DEBIAN.glob("1[5-9]") if (folder / "bin" / "initdb").exists())


class InstalledPostgres(EmbeddedPostgres):
    """A cluster of a version that Debian's packages brought."""

    @property
    def bin(self) -> Path:
        return DEBIAN / str(self.version) / "bin"


def new_postgres(version: int, settings: dict[str, str]) -> EmbeddedPostgres:
    """A cluster of a version at hand, which isn't started yet."""
    # Not in pytest's own folder: it is closed to the user that PostgreSQL runs as when tests are run by root.
    folder = Path(tempfile.mkdtemp(prefix="waldelta-postgres-"))
    kind = EmbeddedPostgres if version in WHEEL else InstalledPostgres
    return kind(folder, version=version, settings=settings)


def chosen_version() -> int:
    """PGSERVER_POSTGRES_VERSION, or the newest that the wheel brings."""
    return int(os.environ.get("PGSERVER_POSTGRES_VERSION", WHEEL[0]))


@contextmanager
def _cluster(version: int) -> Iterator[EmbeddedPostgres]:
    # Hours of tests write much WAL; how long a slot would last is another test's matter. A checkpoint saves slots: one by the clock
    # would keep an immediate stop from taking them back, now and then.
    settings = {"fsync": "off", "max_slot_wal_keep_size": "1TB", "checkpoint_timeout": "1h"}
    server = new_postgres(version, settings)
    try:
        yield server.start()
    finally:
        server.delete()


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A running cluster with wal_level=logical; PGSERVER_POSTGRES_VERSION chooses 16 or 18, or one that is installed."""
    with _cluster(chosen_version()) as server:
        yield server


AT_HAND = [*WHEEL, *(v for v in INSTALLED if v not in WHEEL)]


@pytest.fixture(
    scope="session",
    params=[v if v in (max(AT_HAND), min(AT_HAND)) else pytest.param(v, marks=pytest.mark.soak) for v in AT_HAND],
    ids="PostgreSQL {}".format,
)
def any_postgres(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """The same of each version at hand: 18 and 16 always, others where Debian's packages are installed; those between the
    newest and the oldest in make soak."""  # fmt: skip
    with _cluster(request.param) as server:
        yield server


class Database:
    """A fresh database with a superuser connection; slots in it are dropped at the end."""

    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self.server, self.name = server, name
        self.conninfo = server.conninfo(name)
        self.uri = server.uri(name)
        self.connection = psycopg.connect(self.conninfo, autocommit=True)

    def execute(self, statement: str, params: tuple | None = None) -> list[tuple]:
        """Run SQL and give its rows, if any."""
        cursor = self.connection.execute(statement, params)
        return cursor.fetchall() if cursor.description else []

    def connect(self, **options) -> psycopg.Connection:
        """One more connection."""
        return psycopg.connect(self.conninfo, **options)

    def restart(self, mode: str = "immediate") -> None:
        """Stop the server and start it again, with a new connection of its own."""
        self.connection.close()
        self.server.stop(mode)
        self.server.start()
        self.connection = self.connect(autocommit=True)

    def close(self) -> None:
        for (gid,) in self.execute("select gid from pg_prepared_xacts where database = %s", (self.name,)):
            self.execute(f"rollback prepared '{gid}'")
        every = "select slot_name from pg_replication_slots where not temporary and database = %s"
        for (name,) in self.execute(every, (self.name,)):
            # With a timeout, so that it returns when the backend is gone and the slot is free.
            end = "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = %s"
            self.execute(end, (name,))
            self.execute("select pg_drop_replication_slot(%s)", (name,))
        self.connection.close()


@contextmanager
def new_database(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, options: LiteralString = ""
) -> Iterator[Database]:
    """A fresh database, with CREATE DATABASE's options; AIRFLOW_CONN_TEST_SOURCE points at it."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    # Each statement with a connection of its own: a test may restart the server.
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} {}").format(sql.Identifier(name), sql.SQL(options)))
    made = Database(server, name)
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", made.uri)
    try:
        yield made
    finally:
        made.close()
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    """A connection to the fresh database as waldelta makes it, with its settings."""
    with connect(database.conninfo, "test") as connection:
        yield connection


@pytest.fixture
def database(postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A fresh database; AIRFLOW_CONN_TEST_SOURCE points at it."""
    with new_database(postgres, monkeypatch) as made:
        yield made


@pytest.fixture
def any_database(any_postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The same on each version at hand: for what PostgreSQL itself prints and sends."""
    with new_database(any_postgres, monkeypatch) as made:
        yield made


@pytest.fixture
def lead_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[EmbeddedPostgres], None]:
    """Points AIRFLOW_CONN_TEST_SOURCE at a server, as tests.standby's role, which may do no more than a pipeline needs."""
    return lambda server: monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", server.uri(user="app", password="p"))


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """The URI of an empty lake."""
    return (tmp_path / "lake").as_uri()
