"""What pipelines need in Airflow, and what is missing: the slot's pool, and connections."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from waldelta.config import PipelineFile
from waldelta.lake.store_connection import store_of
from waldelta.monitoring.attention import Attention

if TYPE_CHECKING:
    from airflow.models.connection import Connection
    from sqlalchemy.orm import Session

# A slot has one reader.
POOL_SLOTS = 1
State = Literal["exists", "in the environment", "in a secrets backend", "created", "missing"]


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """The pool of a slot; ``state`` is whether Airflow has it."""

    pipeline: str
    pool: str
    description: str
    state: State

    @property
    def command(self) -> str:
        """Returns the command that creates the pool."""
        words = ("airflow", "pools", "set", self.pool, str(POOL_SLOTS), self.description)
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class ConnectionEntry:
    """A connection that a pipeline names, and where Airflow finds it."""

    pipeline: str
    connection: str
    use: str
    conn_type: str
    state: State

    @property
    def command(self) -> str:
        """Returns the command that creates the connection, without a password.

        A password among the arguments would be visible to every user of the machine.
        """
        words = ["airflow", "connections", "add", self.connection, "--conn-type", self.conn_type]
        return f"{shlex.join(words)} {_FIELDS[self.conn_type]}"


# The usual type of a connection to a store.
_TYPES = {"azure": "wasb", "google": "google_cloud_platform"}
# What the command's user fills in.
_FIELDS = {
    "postgres": "--conn-host HOST --conn-port 5432 --conn-schema DATABASE --conn-login ROLE",
    "spark_connect": "--conn-host HOST --conn-port 15002",
    "aws": "--conn-login ACCESS_KEY_ID",
    "wasb": "--conn-login ACCOUNT",
    "google_cloud_platform": """--conn-extra '{"key_path": "PATH"}'""",
}


def read_pools(session: Session, pipelines: Collection[PipelineFile]) -> list[PoolEntry]:
    """Returns the pool of each pipeline's slot."""
    from airflow.models.pool import Pool
    from sqlalchemy import select

    wanted = {pipeline.pool for pipeline in pipelines}
    known = set(session.scalars(select(Pool.pool).where(Pool.pool.in_(wanted))))
    return [
        PoolEntry(
            one.pipeline,
            one.pool,
            f"runs on slot {one.source.slot}",
            "exists" if one.pool in known else "missing",
        )
        for one in pipelines
    ]


def read_connections(
    session: Session, pipelines: Collection[PipelineFile]
) -> list[ConnectionEntry]:
    """Returns the connections of each pipeline; raises none of a secrets backend's errors."""
    from airflow.models.connection import Connection
    from sqlalchemy import select

    needed = [(one.pipeline, *need) for one in pipelines for need in _needed(one)]
    ids = {conn_id for _, conn_id, _, _ in needed}
    stored = session.scalars(select(Connection.conn_id).where(Connection.conn_id.in_(ids)))
    found: dict[str, State] = {str(conn_id): "exists" for conn_id in stored}
    for conn_id in ids - found.keys():
        found[conn_id] = _elsewhere(conn_id)[1]
    return [
        ConnectionEntry(name, conn_id, use, conn_type, found[conn_id])
        for name, conn_id, use, conn_type in needed
    ]


def _needed(pipeline: PipelineFile) -> Iterator[tuple[str, str, str]]:
    """Yields each connection's id, what it is for, and its usual type."""
    for conn_id in pipeline.source.conn_ids:
        yield conn_id, "source", "postgres"
    yield pipeline.spark_conn_id, "Spark", "spark_connect"
    if (store := pipeline.target.conn_id) is not None:
        yield store, "lake", _TYPES.get(store_of(pipeline.target.root) or "", "aws")


def find_connection(session: Session, conn_id: str) -> Connection | None:
    """Returns a connection from where Airflow looks for it: secrets backends, variables, and then
    its database.
    """
    from airflow.models.connection import Connection

    if (found := _elsewhere(conn_id)[0]) is not None:
        return found
    return session.query(Connection).filter_by(conn_id=conn_id).first()


def _elsewhere(conn_id: str) -> tuple[Connection | None, State]:
    """Returns a connection that isn't in Airflow's database, and where Airflow finds it."""
    from airflow.configuration import ensure_secrets_loaded
    from airflow.secrets.environment_variables import EnvironmentVariablesBackend
    from airflow.secrets.metastore import MetastoreBackend

    for backend in ensure_secrets_loaded():
        if isinstance(backend, MetastoreBackend):
            continue
        try:
            found = backend.get_connection(conn_id)
        except Exception:  # noqa: S112 - Airflow, too, asks the next backend then
            continue
        if found is not None:
            is_variable = isinstance(backend, EnvironmentVariablesBackend)
            return found, "in the environment" if is_variable else "in a secrets backend"
    return None, "missing"


def describe_missing(
    pools: Collection[PoolEntry], connections: Collection[ConnectionEntry]
) -> dict[str, list[Attention]]:
    """Returns what each pipeline lacks, with its remedy.

    A missing connection is a warning, because workers may have it in their own environment.
    """
    found: dict[str, list[Attention]] = {}
    for pool in pools:
        if pool.state == "missing":
            lacking = Attention(
                "failed",
                "lacks",
                f"Airflow has no pool {pool.pool}, so tasks that use the slot never start: run"
                f" `waldelta airflow setup`, or `{pool.command}`",
            )
            found.setdefault(pool.pipeline, []).append(lacking)
    for one in connections:
        if one.state == "missing":
            lacking = Attention(
                "warning",
                "lacks",
                f"this process finds no connection {one.connection} ({one.use}): unless the workers"
                " have it in their own environment, add it by the command that `waldelta airflow"
                " setup --dry-run` shows",
            )
            found.setdefault(one.pipeline, []).append(lacking)
    return found


def as_json(entry: PoolEntry | ConnectionEntry) -> dict[str, Any]:
    """Returns an entry's fields and, while it is missing, the command that creates it."""
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    return fields | ({"command": entry.command} if entry.state == "missing" else {})
