"""Live rows: the rows that the source has now, from a target that keeps more than a mirror does.

Comparisons with the source, a table's suite, and lookups by changes all use this view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from waldelta.config import TargetMode
from waldelta.config.target_mode import CHANGELOG, HISTORY, SOFT_DELETE
from waldelta.metadata_columns import BEFORE, DELETED, LSN, OF_MODES, OP, SEQ, VALID_TO_LSN
from waldelta.spark_sql import quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Operations in a changelog; ``snapshot`` marks the rows of the initial copy.
SNAPSHOT, TRUNCATE = "snapshot", "truncate"
_GONE = ("delete", "gone")


def live_rows(frame: DataFrame, mode: TargetMode, key: Sequence[str]) -> DataFrame:
    """Return the rows of ``frame`` that the source has now, without the columns of the mode.

    For a changelog without a key, it returns all rows: the changelog doesn't show which of two
    equal rows was deleted.
    """
    if mode == HISTORY:
        frame = frame.where(F.col(VALID_TO_LSN).isNull())
    elif mode == SOFT_DELETE:
        frame = frame.where(~F.col(DELETED))
    elif mode == CHANGELOG and key:
        frame = _latest(frame, key)
    return frame.drop(*OF_MODES)


def _latest(frame: DataFrame, key: Sequence[str]) -> DataFrame:
    """Return the last change of each key, where that left a row.

    A change that moved a row ends its old key, too.
    """
    keys = [f"_wd_key{k}" for k in range(len(key))]
    changes = frame.where(F.col(OP) != TRUNCATE).withColumns(
        {name: F.col(quote(of)) for name, of in zip(keys, key, strict=True)}
    )
    # Fields are read by position, since a key's column may have been renamed since.
    fields = frame.schema[BEFORE].dataType.fieldNames()  # type: ignore[attr-defined]
    before = {name: F.col(BEFORE).getField(field) for name, field in zip(keys, fields, strict=True)}
    ended = (
        changes.where(F.col(BEFORE).isNotNull()).withColumns(before).withColumn(OP, F.lit("gone"))
    )
    emptied = frame.where(F.col(OP) == TRUNCATE).agg(F.max(F.struct(LSN, SEQ)).alias("_wd_emptied"))
    # Of one change, the row that it left comes after the one that it ended.
    newest = Window.partitionBy(*keys).orderBy(
        F.col(LSN).desc(), F.col(SEQ).desc(), F.col(OP) == "gone"
    )
    return (
        changes.unionByName(ended)
        .crossJoin(F.broadcast(emptied))
        .where("_wd_emptied is null or struct(_wd_lsn, _wd_seq) > _wd_emptied")
        .withColumn("_wd_rank", F.row_number().over(newest))
        .where((F.col("_wd_rank") == 1) & ~F.col(OP).isin(*_GONE))
        .drop(*keys, "_wd_rank", "_wd_emptied")
    )
