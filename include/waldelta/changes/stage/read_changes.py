"""Reads the change log as a DataFrame: the messages that a range of batches may need, in no
order.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.changelog.row_messages import ROW_KINDS
from waldelta.pgoutput import Segments
from waldelta.spark import Runner


def read_row_changes(
    runner: Runner, change_log: ChangeLog, plan: DecodePlan, relation_ids: Sequence[int]
) -> DataFrame:
    """Return row messages of these relations that a target's copy may lack, in decode()'s
    columns.
    """
    return (
        read_changes(runner, change_log, plan.segments)
        .where(F.col("relation_id").isin(*relation_ids) & F.col("kind").isin(*ROW_KINDS))
        .where(F.col("xid8") >= plan.snapshot.xmin)
        .select(*CHANGE_COLUMNS)
    )


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
