"""What Airflow must know of the stack: its connections and the pool of each slot, entered through
the REST API.
"""

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
    """Create the connection, or bring it up to date: ports change from start to start.

    One that somebody has pointed at another host is theirs and stays as it is.
    """
    known = client.connection(conn_id)
    if known is not None and known["host"] != fields["host"]:
        report(f"connection {conn_id} points at {known['host']}: left as it is")
        return
    client.set_connection(conn_id, **fields)


def create_pools(
    client: AirflowClient, report: Report, pipelines: Path, environment: Mapping[str, str]
) -> None:
    """Create the pool of every pipeline file's slot; a file that can't be read has its say in the
    UI.
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
    """These variables for the time of a block; they may hold secrets, and child processes inherit
    them.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
