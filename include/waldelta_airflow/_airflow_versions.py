"""What stands elsewhere in some supported versions of Airflow, and which versions these are."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from typing import Any, Final

from waldelta.errors import ConfigError

try:
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
    )
except ImportError:  # Airflow 3.1
    from airflow.exceptions import (  # type: ignore[no-redef,attr-defined]
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
    )

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowSkipException",
    "AirflowTaskTimeout",
    "check_alerts_version",
    "check_version",
    "stats",
]

# With 3.1, plugins got pages of their own in Airflow's UI.
OLDEST: Final = (3, 1)
# With 3.3, tasks got a store for the state of assets, which has the alerts that were sent.
OLDEST_WITH_ALERTS: Final = (3, 3)


def check_version(installed: str | None = None) -> None:
    """Raise ConfigError for a version of Airflow that is too old; by default the installed one."""
    _require_airflow(OLDEST, "waldelta", "whose UI has pages of plugins", installed)


def check_alerts_version(installed: str | None = None) -> None:
    """Raise ConfigError for a version of Airflow without what the DAG of alerts needs."""
    _require_airflow(OLDEST_WITH_ALERTS, "WALDELTA_ALERTS", "which stores what was sent", installed)


def _require_airflow(
    oldest: tuple[int, int], what: str, reason: str, installed: str | None
) -> None:
    installed = installed or version("apache-airflow-core")
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if release < oldest:
        needed = ".".join(map(str, oldest))
        raise ConfigError(
            f"Airflow {installed} is installed, but {what} needs {needed} or later, {reason}:"
            " upgrade Airflow"
        )


def stats() -> Any:
    """Returns Airflow's channel of metrics, which has ``gauge`` and ``incr``."""
    try:
        # A module of functions since 3.3; in 3.2 it only has a class of them.
        module = importlib.import_module("airflow.sdk.observability.stats")
    except ImportError:  # Airflow 3.1
        module = importlib.import_module("airflow.stats")
    return module if hasattr(module, "gauge") else module.Stats
