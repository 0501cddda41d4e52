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
    "check_version",
    "stats",
]

# With 3.1, plugins got pages of their own in Airflow's UI.
OLDEST: Final = (3, 1)


def check_version(installed: str | None = None) -> None:
    """Raise ConfigError for a version of Airflow that is too old; by default the installed one."""
    installed = installed or version("apache-airflow-core")
    release = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Airflow {installed} is installed, but waldelta needs {oldest} or later, whose UI has"
            " pages of plugins: upgrade Airflow"
        )


def stats() -> Any:
    """Returns Airflow's channel of metrics, which has ``gauge`` and ``incr``."""
    try:
        # A module of functions since 3.3; in 3.2 it only has a class of them.
        module = importlib.import_module("airflow.sdk.observability.stats")
    except ImportError:  # Airflow 3.1
        module = importlib.import_module("airflow.stats")
    return module if hasattr(module, "gauge") else module.Stats
