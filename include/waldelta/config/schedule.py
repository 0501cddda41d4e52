"""Schedules: cron expressions, validated without Airflow as the DAGs' timetable reads them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator

# A preset of Airflow's alone; croniter knows the others too.
_PRESETS = {"@quarterly": "0 0 1 */3 *"}
# croniter draws a new random time whenever it reads the expression.
_RANDOM = re.compile(r"(?<![a-z])r(?![a-z])", re.IGNORECASE)
_REMEDY = (
    "write five fields such as '*/10 * * * *', or @hourly, @daily, @weekly, @monthly, @quarterly,"
    " @yearly; null: by hand"
)


def check_schedule(text: str) -> str:
    """Returns the schedule as written; raises ValueError for one that the DAGs can't use."""
    # Imported only when needed: the import takes as long as the rest of a pipeline file without a
    # schedule.
    from croniter import croniter

    try:
        times = croniter(_PRESETS.get(text, text), datetime.now(UTC))
    except Exception as err:
        raise ValueError(f"not a cron expression ({err}): {_REMEDY}") from err
    if _RANDOM.search(text):
        raise ValueError(f"a random time, which changes whenever Airflow reads the file: {_REMEDY}")
    try:
        # An interval needs both: Airflow runs at its end, and it begins at the previous time.
        times.get_prev()
        times.get_next()
    except Exception as err:
        raise ValueError(f"times that never come, or never came: {_REMEDY}") from err
    return text


Schedule = Annotated[str, AfterValidator(check_schedule)]


def latest_time(schedule: str, moment: datetime) -> datetime:
    """Returns the latest time of a schedule that is before a time.

    >>> print(latest_time("@daily", datetime(2026, 1, 2, 3, 17, tzinfo=UTC)))
    2026-01-02 00:00:00+00:00
    """
    from croniter import croniter

    latest: datetime = croniter(_PRESETS.get(schedule, schedule), moment).get_prev(datetime)
    return latest
