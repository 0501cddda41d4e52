"""Roles of a test's database that may do no more than they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql


@contextmanager
def new_role(database, name: str, attributes: str = "login replication") -> Iterator[str]:
    """A role of this test's own; it and all that it owns are dropped at the end."""
    full = f"{name}_{database.name}"
    role = sql.Identifier(full).as_string()
    database.execute(f"create role {role} {attributes} password 'p'")
    try:
        yield full
    finally:
        database.execute(
            f"reset role; alter database {database.name} owner to current_user;"
            f" drop owned by {role} cascade; drop role {role}"
        )


def connect_as(monkeypatch: pytest.MonkeyPatch, database, role: str) -> None:
    """Lead AIRFLOW_CONN_TEST_SOURCE to the database as this role."""
    uri = database.server.uri(database.name, role, "p")
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", uri)


def own_everything(database, role: str) -> None:
    """Make the role the owner of the database and of its tables in public."""
    database.execute(
        f"alter database {database.name} owner to {role}; alter schema public owner to {role}"
    )
    tables = database.execute(
        "select oid::regclass::text from pg_class where relnamespace = 'public'::regnamespace and"
        " relkind in ('r', 'p')"
    )
    for (table,) in tables:
        database.execute(f"alter table {table} owner to {role}")
