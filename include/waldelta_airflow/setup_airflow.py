"""``waldelta airflow setup``: creates the pools that pipelines need, and lists connections.

It is for an operator's shell that reaches Airflow's database, as the command ``airflow`` needs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.config.airflow_connection import variable_of
from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.errors import ConfigError
from waldelta_airflow.airflow_entries import (
    POOL_SLOTS,
    ConnectionEntry,
    PoolEntry,
    as_json,
    read_connections,
    read_pools,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger(__name__)


def set_up_airflow(
    place: Path | None, *, dry_run: bool, adds_connections: bool
) -> tuple[dict[str, Any], str]:
    """Create missing pools; returns the entries of all pipelines, as JSON and as text.

    ``place`` is a pipeline file, a folder of them, or None for the folder WALDELTA_PIPELINES. With
    ``adds_connections`` a missing connection is created from ``AIRFLOW_CONN_<CONN_ID>``. Nothing is
    changed with ``dry_run``. Raises ConfigError where Airflow's database can't be used.
    """
    pipelines, refused = _read(place)
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


def _read(place: Path | None) -> tuple[list[PipelineFile], list[dict[str, str]]]:
    """Returns the pipelines of a file or a folder, and the refused files with their errors."""
    if place is not None and not place.is_dir():
        return [load_pipeline_file(place)], []
    found = PipelineFolder.read(existing_folder(place))
    return list(found.pipelines.values()), found.refusals()


@contextmanager
def _session() -> Iterator[Session]:
    """Yields a session on Airflow's database; commits at the end."""
    from airflow.utils.session import create_session
    from sqlalchemy.exc import SQLAlchemyError

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
    from airflow.models.pool import Pool

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
    from airflow.models.connection import Connection

    value = os.environ.get(variable_of(entry.connection))
    if entry.state != "in the environment" or not value:
        return entry
    known = session.query(Connection).filter_by(conn_id=entry.connection).first()
    if known is None:
        is_json = value.lstrip().startswith("{")
        made = (
            Connection.from_json(value, entry.connection)
            if is_json
            else Connection(entry.connection, uri=value)
        )
        session.add(made)
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
