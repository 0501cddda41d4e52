"""The Airflow of this shell: whether there is one, and the connections that it knows."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from waldelta.config.airflow_connection import variable_of

log = logging.getLogger(__name__)

# Loading Airflow takes seconds, on a busy machine many.
_TIMEOUT_S = 60.0
_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"


def is_airflow_installed() -> bool:
    """Return whether this Python has Airflow."""
    return importlib.util.find_spec("airflow") is not None


def is_airflow_configured() -> bool:
    """Return whether an Airflow has been set up here; loading it elsewhere would write files."""
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
        asked = subprocess.run(
            [sys.executable, "-P", "-m", "waldelta_airflow.known_connections", *missing],
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout_s,
        )
        found, refused = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        found, refused = {}, dict.fromkeys(missing, type(err).__name__)
    for conn_id, why in refused.items():
        log.warning("connection=%s can't be taken from Airflow: %s", conn_id, why)
    for conn_id, text in found.items():
        log.info("connection=%s is Airflow's", conn_id)
        os.environ[variable_of(conn_id)] = text
