"""Takes connections that the environment lacks from the Airflow of this shell."""

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


def is_airflow_configured() -> bool:
    """Return whether an Airflow has been set up here; loading it elsewhere would write files."""
    home = os.environ.get("AIRFLOW_HOME") or str(Path.home() / "airflow")
    return importlib.util.find_spec("airflow") is not None and (
        Path(home).is_dir() or "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN" in os.environ
    )


def take_from_airflow(conn_ids: Collection[str]) -> None:
    """Set ``AIRFLOW_CONN_<ID>`` of connections that only Airflow's database or secrets backend has.

    A connection that isn't found stays unset: whoever needs it raises the named error.
    """
    missing = [conn_id for conn_id in conn_ids if not os.environ.get(variable_of(conn_id))]
    if not missing or not is_airflow_configured():
        return
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "waldelta_airflow.known_connections", *missing],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        found = json.loads(asked.stdout)
    except (subprocess.SubprocessError, ValueError):
        log.debug("Airflow's database can't be asked for %s", ", ".join(missing), exc_info=True)
        return
    for conn_id, text in found.items():
        log.info("connection=%s is Airflow's", conn_id)
        os.environ[variable_of(conn_id)] = text
