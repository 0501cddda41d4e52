"""Converts Airflow connections at execute time into what a job and the library take: environments
and conninfos.

A password goes from Airflow into the environment of one child process, or into this process's
memory. It is registered for masking first, so that a log that repeats it shows asterisks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from waldelta.config import PipelineFile
from waldelta.config.airflow_connection import (
    SOURCE_CONNECTIONS,
    SPARK_CONNECTIONS,
    variable_of,
)
from waldelta.errors import ConfigError
from waldelta.lake import REQUEST_LIMITS, is_store_variable, read_store_options
from waldelta.spark.settings import WITHOUT_SPARK_VARIABLE
from waldelta_airflow._airflow_versions import AirflowNotFoundException

if TYPE_CHECKING:
    from waldelta.lake import Lake

# Airflow's own environment is not for the job: its database, keys and other connections.
_AIRFLOW_ONLY = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW_")


def source_environment(*conn_ids: str) -> dict[str, str]:
    """Returns the source's connections, each as the environment variable that a job reads."""
    from airflow.providers.postgres.hooks.postgres import PostgresHook

    variables = {}
    for conn_id in conn_ids:
        hook = PostgresHook(postgres_conn_id=conn_id)
        connection = hook.get_connection(conn_id)
        if connection.conn_type not in SOURCE_CONNECTIONS.names:
            raise ConfigError(
                f"connection {conn_id!r} has type {connection.conn_type!r}: choose a connection of"
                " type postgres for the source"
            )
        if connection.extra_dejson.get("iam"):
            connection.login, connection.password, connection.port = hook.get_iam_token(connection)
        _mask(connection.password)
        # The JSON form, because a URI's host loses upper case, which a socket folder may have.
        variables[variable_of(conn_id)] = connection.as_json()
    return variables


def store_environment(root: str, conn_id: str | None) -> dict[str, str]:
    """Returns the connection of the lake's object store as the environment variables that a job,
    and the JVM that it is started in, read; empty without one.

    Raises ConfigError when Airflow doesn't have it, or when it opens another kind of store.
    """
    variables = _connection_variables(conn_id, "target.conn_id")
    if conn_id is None:
        return variables
    options = read_store_options(root, conn_id, variables)
    for name, value in options.items():
        if name.endswith(("_KEY", "_SECRET", "_TOKEN")):
            _mask(value)
    return variables | {k: v for k, v in options.items() if k not in REQUEST_LIMITS}


def catalog_environment(conn_id: str | None) -> dict[str, str]:
    """Returns the connection of the catalog as the environment variable that a job reads.

    Raises ConfigError when Airflow doesn't have it.
    """
    return _connection_variables(conn_id, "target.catalog.conn_id")


def _connection_variables(conn_id: str | None, key: str) -> dict[str, str]:
    if conn_id is None:
        return {}
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise ConfigError(
            f"Airflow has no connection {conn_id!r} for {key}: add it, or correct that key"
        ) from None
    _mask(connection.password)
    return {variable_of(conn_id): connection.as_json()}


def pipeline_lake(pipeline: PipelineFile) -> Lake:
    """Returns a pipeline's lake, for code that runs in Airflow's own processes."""
    from waldelta.pipeline.job import lake_of

    target = pipeline.target
    return lake_of(pipeline, os.environ | store_environment(target.root, target.conn_id))


def source_conninfo(conn_id: str) -> str:
    """Returns the source's libpq connection string, for code that runs in the task itself."""
    from waldelta.postgres import conninfo_from_environment

    return conninfo_from_environment(conn_id, source_environment(conn_id))


def spark_connection(conn_id: str) -> Connection:
    """Returns the Spark connection; raises ConfigError for a type that jobs can't use."""
    connection = BaseHook.get_connection(conn_id)
    if connection.conn_type not in SPARK_CONNECTIONS.names:
        raise ConfigError(
            f"connection {conn_id!r} has type {connection.conn_type!r}: give spark_conn_id a"
            f" connection of type {' or '.join(SPARK_CONNECTIONS.names)}"
        )
    return connection


def connect_environment(conn_id: str) -> dict[str, str]:
    """Returns the environment from which pyspark reads a Spark Connect server's address and
    token.
    """
    from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook

    hook = SparkConnectHook(conn_id)
    _mask(hook.get_connection(conn_id).password)
    return {"SPARK_REMOTE": hook.get_connection_url()}


def job_environment(*parts: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without Airflow's own variables, plus the given parts."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_AIRFLOW_ONLY)
    }
    for name in ("SPARK_REMOTE", WITHOUT_SPARK_VARIABLE):
        environment.pop(name, None)
    # spark-submit and the workers' Python are those installed with this interpreter.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environment["PYTHONUNBUFFERED"] = "1"
    if any(is_store_variable(name) for part in parts for name in part):
        # The worker's own store variables would mix with the connection's: another token, or
        # another endpoint.
        environment = {
            name: value for name, value in environment.items() if not is_store_variable(name)
        }
    for part in parts:
        environment.update(part)
    return environment


def _mask(secret: str | None) -> None:
    if secret:
        mask_secret(secret)
        mask_secret(quote(secret))
        mask_secret(quote(secret, safe=""))
