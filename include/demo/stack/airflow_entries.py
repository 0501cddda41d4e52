"""Enters the stack's connections and the pool of each slot into Airflow, through the REST API."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.airflow_client import AirflowClient
from waldelta.config import load_pipeline_file
from waldelta.errors import ConfigError

Report = Callable[[str], None]


def set_connection(client: AirflowClient, report: Report, conn_id: str, **fields: Any) -> None:
    """Create the connection, or update it, since ports change with each start.

    A connection that a user has pointed at another host isn't changed.
    """
    known = client.connection(conn_id)
    if known is not None and known["host"] != fields["host"]:
        report(f"connection {conn_id} points at {known['host']}: left as it is")
        return
    client.set_connection(conn_id, **fields)


def create_pools(
    client: AirflowClient, report: Report, pipelines: Path, environment: Mapping[str, str]
) -> None:
    """Create the pool of every pipeline file's slot.

    The UI reports a file that can't be read.
    """
    with environment_of(environment):
        for path in sorted(pipelines.glob("*.yml")):
            try:
                pipeline = load_pipeline_file(path)
            except ConfigError as err:
                report(f"no pool for {path.name}: {err}")
                continue
            client.set_pool(
                pipeline.pool, 1, f"runs that touch the replication slot {pipeline.source.slot}"
            )


@contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for a block.

    They may contain secrets, and child processes inherit them.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
