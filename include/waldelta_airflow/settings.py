"""Settings that an installation may want to change: locations and time limits."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path

import waldelta
from waldelta.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent.parent

# Socket of a fork server on this machine (waldelta.cli.fork_server), which starts jobs at once.
FORK_SERVER_VARIABLE = "WALDELTA_FORK_SERVER"
# Seconds before the first retry of a task.
RETRY_DELAY_VARIABLE = "WALDELTA_RETRY_DELAY"
# Ids of Airflow connections, separated by commas, that receive alerts of all pipelines.
ALERTS_VARIABLE = "WALDELTA_ALERTS"
# "true": alerts show keys and values of rows that fail expectations.
ALERT_VALUES_VARIABLE = "WALDELTA_ALERT_VALUES"
ALERTS_DAG = "waldelta_alerts"

# Where Airflow serves the plugin's pages.
URL_PREFIX = "/waldelta"

RETRIES = 3
LONGEST_RETRY_DELAY = timedelta(minutes=10)
IDLE_CHECK_TIMEOUT = timedelta(minutes=5)
ALERTS_TIMEOUT = timedelta(minutes=15)
SETUP_TIMEOUT = timedelta(minutes=15)
STAGE_TIMEOUT = timedelta(hours=2)
SYNC_TIMEOUT = timedelta(hours=24)
# How long a task waits for a run that works on the same slot or target. Airflow then retries it.
LOCK_WAIT = timedelta(minutes=10)
IDLE_CHECK_LOCK_WAIT = timedelta(minutes=2)
# How long a run may wait for its pool and for workers, beyond the limits of its tasks.
QUEUE_TIMEOUT = timedelta(days=1)

# A critical state that lasts is reported again after this time.
NOTIFY_CRITICAL_AGAIN = timedelta(hours=1)
# An alert that lasts is sent again after this time.
ALERT_AGAIN = timedelta(hours=24)

# Airflow kills a task 5 s after asking it to end, so the job gets a little less to end by itself.
KILL_JOB_AFTER_S = 4.0


def retry_delay() -> timedelta:
    """Returns how long a task's first retry waits: WALDELTA_RETRY_DELAY in seconds, default 20.

    Raises ConfigError.
    """
    text = os.environ.get(RETRY_DELAY_VARIABLE) or "20"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_RETRY_DELAY.total_seconds():
        longest = f"{LONGEST_RETRY_DELAY.total_seconds():g}"
        raise ConfigError(
            f"{RETRY_DELAY_VARIABLE} is {text!r}: give a number of seconds above 0 and up to"
            f" {longest}"
        )
    return timedelta(seconds=seconds)


def alert_connections() -> list[str]:
    """Returns the connections that receive alerts; none: alerts aren't configured."""
    return [name.strip() for name in os.environ.get(ALERTS_VARIABLE, "").split(",") if name.strip()]


def alert_values() -> bool:
    """Returns whether alerts show keys and values of rows; a pipeline file may forbid it."""
    return os.environ.get(ALERT_VALUES_VARIABLE, "").lower() == "true"


def land_timeout(longest_call_s: float) -> timedelta:
    """Returns how long landing may take.

    What was read is read once more to consume it, and neither read may time out every time.
    """
    return 2 * timedelta(seconds=longest_call_s) + STAGE_TIMEOUT


def package_folder() -> Path:
    """Returns the folder of the package waldelta, whose code jobs run."""
    return Path(waldelta.__file__).parent
