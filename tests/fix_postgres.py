"""The embedded PostgreSQL as fixtures: one cluster per session, one database per test."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres
from waldelta.connection import connect


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A running cluster with wal_level=logical; PGSERVER_POSTGRES_VERSION chooses 16 or 18."""
    version = int(os.environ.get("PGSERVER_POSTGRES_VERSION", "18"))
    # Not in pytest's own folder: it is closed to the user that PostgreSQL runs as when tests are run by root.
    folder = Path(tempfile.mkdtemp(prefix="waldelta-postgres-"))
    server = EmbeddedPostgres(folder, version=version, settings={"fsync": "off"})
    try:
        yield server.start()
    finally:
        server.delete()


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


@pytest.fixture
def database(postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A fresh database; AIRFLOW_CONN_TEST_SOURCE points at it."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    # Each statement with a connection of its own: a test may restart the server.
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    made = Database(postgres, name)
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", made.uri)
    try:
        yield made
    finally:
        made.close()
        with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    """A connection to the fresh database as waldelta makes it, with its settings."""
    with connect(database.conninfo, "test") as connection:
        yield connection


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """The URI of an empty lake."""
    return (tmp_path / "lake").as_uri()
