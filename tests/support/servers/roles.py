"""Roles of a test's database that may do no more than they need."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql

# Grants for role_on.
READS = "grant select on all tables in schema public to {role}"
OWNS = "grant create on database {database} to {{role}}; create schema app authorization {{role}}"


@contextmanager
def role_on(conn, *grants):
    """A role that may log in and replicate, with these grants; dropped afterwards."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    conn.execute(f"create role {role} login replication password 'p'")
    try:
        for grant in grants:
            for statement in grant.format(role=role).split(";"):
                conn.execute(statement)
        yield role
    finally:
        conn.execute(f"drop owned by {role} cascade")
        conn.execute(f"drop role {role}")


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
