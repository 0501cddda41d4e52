"""Airflow's connections: read from the environment, where an Airflow task puts them for a job, or
taken from the Airflow of this shell.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from waldelta.errors import ConfigError

log = logging.getLogger(__name__)

# Any other text before the first colon may be a user name.
_TYPE = re.compile(r"[a-z][a-z0-9_+-]{1,30}")
# Loading Airflow takes seconds, on a busy machine many.
_TIMEOUT_S = 60.0
_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"


@dataclass(frozen=True, slots=True)
class AirflowConnection:
    """The fields of an Airflow connection by Airflow's names; ``variable`` is where it was read."""

    variable: str
    conn_type: str
    host: str | None = None
    port: int | None = None
    login: str | None = None
    password: str | None = field(default=None, repr=False)
    schema: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionTypes:
    """Types of Airflow connections that open something; the usual one is the first of ``names``.

    ``example`` is the URI of a connection of the usual type, and ``arguments`` is what
    `airflow connections add` gets for one: its user replaces the words in capitals.
    """

    names: tuple[str, ...]
    example: str
    arguments: str


SOURCE_CONNECTIONS = ConnectionTypes(
    ("postgres", "postgresql"),
    "postgresql://user:password@host:port/database",
    "--conn-host HOST --conn-port 5432 --conn-schema DATABASE --conn-login ROLE",
)
SPARK_CONNECTIONS = ConnectionTypes(
    ("spark_connect", "spark"), "spark-connect://HOST:15002", "--conn-host HOST --conn-port 15002"
)


def variable_of(conn_id: str) -> str:
    """Returns the environment variable that holds a connection, by Airflow's rule."""
    return f"AIRFLOW_CONN_{conn_id.upper()}"


def read_connection(
    conn_id: str, types: ConnectionTypes, place: str, environment: Mapping[str, str] = os.environ
) -> AirflowConnection:
    """Returns the connection in ``AIRFLOW_CONN_<ID>``, as a URI or in its JSON form.

    Raises ConfigError when the variable is missing, can't be read, or holds a connection of a type
    that doesn't open ``place``. The error never contains the variable's value.
    """
    variable = variable_of(conn_id)
    text = environment.get(variable)
    if not text:
        raise ConfigError(
            f"connection {conn_id!r} is not known here: set {variable} to {types.example}; or,"
            " where Airflow has the connection, set AIRFLOW_HOME as its scheduler has it"
        )
    try:
        fields = _from_json(text) if text.lstrip().startswith("{") else _from_uri(text)
    except (ValueError, AttributeError):
        fields = {"conn_type": ""}  # The parser's own message may repeat the value.
    if not _TYPE.fullmatch(fields["conn_type"]):
        raise ConfigError(f"{variable} is neither an Airflow connection URI nor its JSON form")
    if fields["conn_type"] not in types.names:
        raise ConfigError(
            f"{variable} has type {fields['conn_type']!r}, which doesn't open {place}: choose a"
            f" connection of type {' or '.join(types.names)}"
        )
    return AirflowConnection(variable, **fields)


def _from_json(text: str) -> dict[str, Any]:
    document = json.loads(text)
    extra = document.get("extra") or {}
    extra = json.loads(extra) if isinstance(extra, str) else extra
    if not isinstance(extra, dict):
        raise ValueError("extra")
    names = ("host", "port", "login", "password", "schema")
    return {name: document.get(name) for name in names} | {
        "conn_type": str(document.get("conn_type", "")),
        "extra": extra,
    }


def _from_uri(text: str) -> dict[str, Any]:
    parts = urlsplit(text)
    if "@" in parts.path + parts.query + parts.fragment:
        # The password has an unescaped slash or question mark: what follows would be taken for host
        # and database.
        raise ValueError("password")
    query = dict(parse_qsl(parts.query))
    return {
        # Airflow writes a type's underscores as hyphens, which a URI's scheme may have.
        "conn_type": parts.scheme.replace("-", "_") if "://" in text else "",
        "host": query.get("host") or unquote(parts.hostname or ""),
        "port": parts.port,
        "login": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "schema": unquote(parts.path.lstrip("/")),
        "extra": json.loads(query["__extra__"]) if "__extra__" in query else query,
    }


def is_airflow_installed() -> bool:
    """Returns whether this Python has Airflow."""
    return importlib.util.find_spec("airflow") is not None


def is_airflow_configured() -> bool:
    """Returns whether an Airflow has been set up here; loading it elsewhere would write files."""
    if not is_airflow_installed():
        return False
    home = os.environ.get("AIRFLOW_HOME") or str(Path.home() / "airflow")
    variables = (_DATABASE, f"{_DATABASE}_CMD", f"{_DATABASE}_SECRET")
    return (Path(home) / "airflow.cfg").exists() or any(name in os.environ for name in variables)


def take_from_airflow(conn_ids: Collection[str], timeout_s: float = _TIMEOUT_S) -> None:
    """Set ``AIRFLOW_CONN_<ID>`` of connections that only Airflow's database or secrets backend has.

    A connection that isn't found stays unset: read_connection() then raises the named error.
    """
    missing = [conn_id for conn_id in conn_ids if not os.environ.get(variable_of(conn_id))]
    if not missing or not is_airflow_configured():
        return
    try:
        # -P: the folder that a command is run in holds no code of ours.
        process = subprocess.run(
            [sys.executable, "-P", "-m", "waldelta_airflow.known_connections", *missing],
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout_s,
        )
        uris, refused = json.loads(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        uris, refused = {}, dict.fromkeys(missing, type(err).__name__)
    for conn_id, why in refused.items():
        log.warning("connection=%s can't be taken from Airflow: %s", conn_id, why)
    for conn_id, text in uris.items():
        log.info("connection=%s is Airflow's", conn_id)
        os.environ[variable_of(conn_id)] = text
