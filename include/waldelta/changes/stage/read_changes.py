"""Reads the change log as a DataFrame: the messages that a range of batches may need, in no
order.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.lake.changelog import ChangeLog
from waldelta.pgoutput import Segments
from waldelta.spark import Runner


def read_changes(runner: Runner, change_log: ChangeLog, segments: Segments) -> DataFrame:
    """Return messages of the range and of the earlier parts that it commits.

    Those parts are transactions that were prepared earlier. Their positions show which of them
    count.
    """
    # Conditions can be made only once the session has started.
    messages = change_log.place.frame(runner.spark())
    chosen = (F.col("batch") > segments.after) & (F.col("batch") <= segments.upto)
    for part in segments.older:
        chosen = chosen | (
            (F.col("batch") == part.batch) & F.col("seq").between(part.first, part.last)
        )
    return messages.where(chosen)
