"""Schedules in the pipeline file: cron expressions, taken as the DAGs' timetable takes them, where
no Airflow is installed.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator

# A name of Airflow's alone; the others are croniter's too.
_PRESETS = {"@quarterly": "0 0 1 */3 *"}
# croniter draws another time for it whenever the expression is read.
_RANDOM = re.compile(r"(?<![a-z])r(?![a-z])", re.IGNORECASE)
_REMEDY = (
    "write five fields such as '*/10 * * * *', or @hourly, @daily, @weekly, @monthly, @quarterly,"
    " @yearly; null: the DAG is triggered by hand"
)


def check_schedule(text: str) -> str:
    """The schedule as it is written; raises ValueError for one that the DAGs can't run by."""
    # Its import takes as long as the rest of a pipeline file that has no schedule.
    from croniter import croniter

    try:
        times = croniter(_PRESETS.get(text, text), datetime.now(UTC))
    except Exception as err:
        raise ValueError(f"not a cron expression ({err}): {_REMEDY}") from err
    if _RANDOM.search(text):
        raise ValueError(f"a random time, which changes whenever Airflow reads the file: {_REMEDY}")
    try:
        # An interval needs both: Airflow runs at the end of one, which begins at the time before.
        times.get_prev()
        times.get_next()
    except Exception as err:
        raise ValueError(f"times that never come, or never came: {_REMEDY}") from err
    return text


Schedule = Annotated[str, AfterValidator(check_schedule)]
