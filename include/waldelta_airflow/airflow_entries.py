"""What pipelines need in Airflow, the slot's pool and connections: what is missing, and ``waldelta
airflow setup``, which creates the pools.

The command is for an operator's shell that reaches Airflow's database, as the command ``airflow``
needs.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from airflow.configuration import ensure_secrets_loaded
from airflow.models.connection import Connection
from airflow.models.pool import Pool
from airflow.secrets.environment_variables import EnvironmentVariablesBackend
from airflow.secrets.metastore import MetastoreBackend
from airflow.utils.session import create_session
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.config.airflow_connection import (
    SOURCE_CONNECTIONS,
    SPARK_CONNECTIONS,
    variable_of,
)
from waldelta.config.catalog import CATALOG_CONNECTIONS
from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.config.stores import STORES, store_of
from waldelta.errors import ConfigError
from waldelta.monitoring.attention import Attention

log = logging.getLogger(__name__)

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
        return shlex.join(("airflow", "pools", "set", self.pool, str(POOL_SLOTS), self.description))


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
        return f"{shlex.join(words)} {_ARGUMENTS[self.conn_type]}"


# What the command's user fills in, by the type of the connection.
_ARGUMENTS: Final = {
    types.names[0]: types.arguments
    for types in (
        SOURCE_CONNECTIONS,
        SPARK_CONNECTIONS,
        *(store.connections for store in STORES.values()),
        *CATALOG_CONNECTIONS.values(),
    )
}


def read_pools(session: Session, pipelines: Collection[PipelineFile]) -> list[PoolEntry]:
    """Returns the pool of each pipeline's slot."""

    names = {pipeline.pool for pipeline in pipelines}
    existing_names = set(session.scalars(select(Pool.pool).where(Pool.pool.in_(names))))
    return [
        PoolEntry(
            one.pipeline,
            one.pool,
            f"runs on slot {one.source.slot}",
            "exists" if one.pool in existing_names else "missing",
        )
        for one in pipelines
    ]


def read_connections(
    session: Session, pipelines: Collection[PipelineFile]
) -> list[ConnectionEntry]:
    """Returns the connections of each pipeline; raises none of a secrets backend's errors."""

    needed = [(one.pipeline, *need) for one in pipelines for need in _needed_connections(one)]
    ids = {conn_id for _, conn_id, _, _ in needed}
    stored = session.scalars(select(Connection.conn_id).where(Connection.conn_id.in_(ids)))
    states: dict[str, State] = {str(conn_id): "exists" for conn_id in stored}
    for conn_id in ids - states.keys():
        states[conn_id] = _elsewhere(conn_id)[1]
    return [
        ConnectionEntry(name, conn_id, use, conn_type, states[conn_id])
        for name, conn_id, use, conn_type in needed
    ]


def _needed_connections(pipeline: PipelineFile) -> Iterator[tuple[str, str, str]]:
    """Yields each connection's id, what it is for, and its usual type."""
    target = pipeline.target
    for conn_id in pipeline.source.conn_ids:
        yield conn_id, "source", SOURCE_CONNECTIONS.names[0]
    yield pipeline.spark_conn_id, "Spark", SPARK_CONNECTIONS.names[0]
    if target.conn_id is not None and (store := store_of(target.root)) is not None:
        yield target.conn_id, "lake", STORES[store].connections.names[0]
    if (catalog := target.catalog) is not None and catalog.conn_id is not None:
        yield catalog.conn_id, "catalog", CATALOG_CONNECTIONS[catalog.type].names[0]


def find_connection(session: Session, conn_id: str) -> Connection | None:
    """Returns a connection from where Airflow looks for it: secrets backends, variables, and then
    its database.
    """
    return _elsewhere(conn_id)[0] or session.query(Connection).filter_by(conn_id=conn_id).first()


def _elsewhere(conn_id: str) -> tuple[Connection | None, State]:
    """Returns a connection that isn't in Airflow's database, and where Airflow finds it."""

    for backend in ensure_secrets_loaded():
        if isinstance(backend, MetastoreBackend):
            continue
        try:
            connection = backend.get_connection(conn_id)
        except Exception:  # noqa: S112 - Airflow, too, asks the next backend then
            continue
        if connection is not None:
            is_variable = isinstance(backend, EnvironmentVariablesBackend)
            return connection, "in the environment" if is_variable else "in a secrets backend"
    return None, "missing"


def describe_missing(
    pools: Collection[PoolEntry], connections: Collection[ConnectionEntry]
) -> dict[str, list[Attention]]:
    """Returns what each pipeline lacks, with its remedy.

    A missing connection is a warning, because workers may have it in their own environment.
    """
    attention: dict[str, list[Attention]] = {}
    for pool in pools:
        if pool.state == "missing":
            attention.setdefault(pool.pipeline, []).append(
                Attention(
                    "failed",
                    "lacks",
                    f"Airflow has no pool {pool.pool}, so tasks that use the slot never start: run"
                    f" `waldelta airflow setup`, or `{pool.command}`",
                )
            )
    for one in connections:
        if one.state == "missing":
            attention.setdefault(one.pipeline, []).append(
                Attention(
                    "warning",
                    "lacks",
                    f"this process finds no connection {one.connection} ({one.use}): unless the"
                    " workers have it in their own environment, add it by the command that"
                    " `waldelta airflow setup --dry-run` shows",
                )
            )
    return attention


def as_json(entry: PoolEntry | ConnectionEntry) -> dict[str, Any]:
    """Returns an entry's fields and, while it is missing, the command that creates it."""
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    return fields | ({"command": entry.command} if entry.state == "missing" else {})


def set_up_airflow(
    place: Path | None, *, dry_run: bool, adds_connections: bool
) -> tuple[dict[str, Any], str]:
    """Create missing pools; returns the entries of all pipelines, as JSON and as text.

    ``place`` is a pipeline file, a folder of them, or None for the folder WALDELTA_PIPELINES. With
    ``adds_connections`` a missing connection is created from ``AIRFLOW_CONN_<CONN_ID>``. Nothing is
    changed with ``dry_run``. Raises ConfigError where Airflow's database can't be used.
    """
    if place is not None and not place.is_dir():
        pipelines, refused = [load_pipeline_file(place)], []
    else:
        folder = PipelineFolder.read(existing_folder(place))
        pipelines, refused = list(folder.pipelines.values()), folder.refusals()
    with _session() as session:
        pools = read_pools(session, pipelines)
        connections = read_connections(session, pipelines)
        if not dry_run:
            pools = [_create_pool(session, pool) for pool in pools]
            if adds_connections:
                connections = [_create_connection(session, one) for one in connections]
    document = {
        "pools": [as_json(pool) for pool in pools],
        "connections": [as_json(connection) for connection in connections],
        "refused": refused,
    }
    return document, _text(pools, connections, refused)


@contextmanager
def _session() -> Iterator[Session]:
    """Yields a session on Airflow's database; commits at the end."""

    try:
        with create_session() as session:
            yield session
    except SQLAlchemyError as err:
        raise ConfigError(
            f"Airflow's database can't be used from here ({type(err).__name__}): run the command"
            " where `airflow db check` succeeds, with the scheduler's AIRFLOW_HOME and AIRFLOW__…"
            " variables, after `airflow db migrate`"
        ) from None


def _create_pool(session: Session, entry: PoolEntry) -> PoolEntry:

    if entry.state != "missing":
        return entry
    Pool.create_or_update_pool(
        entry.pool, POOL_SLOTS, entry.description, include_deferred=False, session=session
    )
    session.flush()
    log.info("pool=%s slots=%s", entry.pool, POOL_SLOTS)
    return replace(entry, state="created")


def _create_connection(session: Session, entry: ConnectionEntry) -> ConnectionEntry:
    """Store a connection of this process's environment in Airflow's database, encrypted."""

    value = os.environ.get(variable_of(entry.connection))
    if entry.state != "in the environment" or not value:
        return entry
    if session.query(Connection).filter_by(conn_id=entry.connection).first() is None:
        session.add(
            Connection.from_json(value, entry.connection)
            if value.lstrip().startswith("{")
            else Connection(entry.connection, uri=value)
        )
        session.flush()
        log.info("connection=%s is stored", entry.connection)
    return replace(entry, state="created")


def _text(
    pools: list[PoolEntry], connections: list[ConnectionEntry], refused: list[dict[str, str]]
) -> str:
    lines = [f"pool {one.pool} ({one.pipeline}): {one.state}" for one in pools]
    lines += [
        f"connection {one.connection} ({one.pipeline}, {one.use}): {one.state}"
        for one in connections
    ]
    lines += [f"refused: {one['error']}" for one in refused]
    entries: list[PoolEntry | ConnectionEntry] = [*pools, *connections]
    missing = dict.fromkeys(one.command for one in entries if one.state == "missing")
    if missing:
        lines += ["", "To create what is missing:", *(f"    {command}" for command in missing)]
    if any(one.state == "missing" and one.use == "Spark" for one in connections):
        lines.append(
            "Without a Spark Connect server, `--conn-type spark --conn-host 'local[*,4]'` runs"
            " Spark where the task runs."
        )
    if any(one.state == "missing" for one in connections):
        lines.append("Then set each password in Airflow's UI: Admin → Connections.")
    return "\n".join(lines)
