"""The databases of the embedded PostgreSQL: Airflow's metadata, and one per source, each with its
own role.
"""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres

AIRFLOW = "airflow"  # The name of database and role.
SOURCE_ROLE = "waldelta"


def prepare(server: EmbeddedPostgres, airflow_password: str, source_password: str) -> None:
    """Create the two roles and Airflow's database unless they exist.

    The pipelines' role has only what the preflight requires: LOGIN, REPLICATION and the ownership
    of its databases.
    """
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        _set_role(connection, AIRFLOW, airflow_password, "login")
        _set_role(connection, SOURCE_ROLE, source_password, "login replication")
        _create_databases(connection, [AIRFLOW], AIRFLOW)


def prepare_sources(server: EmbeddedPostgres, databases: Iterable[str]) -> None:
    """Create the source databases, owned by the pipelines' role, unless they exist."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        _create_databases(connection, databases, SOURCE_ROLE)


def _set_role(connection: psycopg.Connection, name: str, password: str, attributes: str) -> None:
    known = connection.execute("select 1 from pg_roles where rolname = %s", (name,)).fetchone()
    verb = "alter" if known else "create"
    # Hashed by the client, so that the password itself is in no statement that the server might
    # log.
    verifier = connection.pgconn.encrypt_password(
        password.encode(), name.encode(), b"scram-sha-256"
    ).decode()
    statement = sql.SQL(f"{verb} role {{}} {attributes} password {{}}")
    connection.execute(statement.format(sql.Identifier(name), sql.Literal(verifier)))


def _create_databases(connection: psycopg.Connection, names: Iterable[str], owner: str) -> None:
    known = {name for (name,) in connection.execute("select datname from pg_database")}
    for name in sorted(set(names) - known):
        statement = sql.SQL("create database {} owner {}").format(
            sql.Identifier(name), sql.Identifier(owner)
        )
        connection.execute(statement)
