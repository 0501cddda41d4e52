"""Kept rows: checks whether the rows that a target keeps besides its live rows are consistent.

It reads all rows, while a table's suite judges the live ones. This module doesn't need Great
Expectations, like ``duplicate_keys``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from waldelta.changes.merge.live_rows import SNAPSHOT, TRUNCATE
from waldelta.config import TargetMode
from waldelta.config.target_mode import CHANGELOG, HISTORY, SOFT_DELETE
from waldelta.metadata_columns import (
    DELETED,
    DELETED_AT,
    LSN,
    OP,
    SEQ,
    UNCHANGED,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_LSN,
)
from waldelta.spark_sql import quote
from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Takes the place of column names as the key of the prefetched result.
KEPT_ROWS = "_wd_kept_rows"
MEANINGS: dict[TargetMode, str] = {
    HISTORY: (
        "row versions of a key don't overlap, end after they begin, and only the last one is open"
    ),
    SOFT_DELETE: (
        "each key has one row, and a row is marked as deleted exactly when it has a deletion time"
    ),
    CHANGELOG: "each change has a known operation and its own position in the stream",
}
_OPERATIONS = ("insert", "update", "delete", TRUNCATE, SNAPSHOT)


def find_broken_rows(
    frame: DataFrame, mode: TargetMode, key: Sequence[str]
) -> tuple[DuplicateKeys, DuplicateKeys]:
    """Returns how many of a target's kept rows contradict its mode.

    The second result is, for a changelog, how many changes have columns whose value is unknown.
    """
    lacking = F.lit(False)
    keys = [F.col(quote(name)) for name in key]
    if mode == HISTORY:
        following = F.lead(VALID_FROM_LSN).over(Window.partitionBy(*keys).orderBy(VALID_FROM_LSN))
        frame = frame.select(
            *(c.alias(f"k{i}") for i, c in enumerate(keys)),
            VALID_FROM,
            VALID_TO,
            VALID_FROM_LSN,
            VALID_TO_LSN,
            following.alias("following"),
        )
        broken = (
            f"{VALID_FROM_LSN} is null or {VALID_TO_LSN} <= {VALID_FROM_LSN} or {VALID_TO} <"
            f" {VALID_FROM} or ({VALID_TO} is null) <> ({VALID_TO_LSN} is null) or (following is"
            f" not null and coalesce({VALID_TO_LSN} > following, true))"
        )
    elif mode == SOFT_DELETE:
        frame = frame.select(
            DELETED, DELETED_AT, F.count("*").over(Window.partitionBy(*keys)).alias("rows")
        )
        broken = f"{DELETED} is null or {DELETED} <> ({DELETED_AT} is not null) or rows > 1"
    else:
        of_place = F.count("*").over(Window.partitionBy(LSN, SEQ))
        lacking = F.col("lacks")
        lacks = F.col(UNCHANGED).isNotNull().alias("lacks")
        frame = frame.select(OP, LSN, SEQ, of_place.alias("rows"), lacks)
        known = ", ".join(f"'{operation}'" for operation in _OPERATIONS)
        broken = (
            f"coalesce({OP} not in ({known}), true) or ({OP} <> '{SNAPSHOT}' and (rows > 1 or {SEQ}"
            " is null))"
        )
    (counts,) = frame.agg(F.count_if(F.expr(broken)), F.count_if(lacking)).collect()
    return DuplicateKeys(counts[0]), DuplicateKeys(counts[1])
