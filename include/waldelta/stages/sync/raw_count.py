"""Counts the rows of a target with a raw value: one that its column's type can't store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from waldelta.metadata_columns import RAW
from waldelta.pipeline import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def count_raw_rows(spark: SparkSession, job: Job, table: str, version: int) -> int:
    """Returns the rows of a target's version with a value in ``_wd_raw``.

    It reads only that column, which is nearly always null.
    """
    if not job.pipeline.target.metadata_columns:
        return 0
    frame = (
        spark.read.format("delta").option("versionAsOf", version).load(job.lake.target(table).uri)
    )
    return frame.where(F.col(RAW).isNotNull()).count()
