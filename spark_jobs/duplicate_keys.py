"""Keys that stand in more than one row of a target: the check's dearest question, so it is asked first.

The server works on it while Great Expectations is imported here. Needs no Great Expectations; ``lake_expectations``
makes an expectation of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from spark_jobs.identifier import quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class DuplicateKeys:
    """How many rows share their key with another row, and some of those keys, as text."""

    rows: int
    examples: tuple[str, ...] = ()


def find_duplicate_keys(frame: DataFrame, columns: Sequence[str]) -> DuplicateKeys:
    """Look at every row of the frame; nulls are equal here."""
    keys = [F.col(quote(name)).alias(f"k{i}") for i, name in enumerate(columns)]
    shared = (
        frame.select(*keys).groupBy(*[f"k{i}" for i in range(len(keys))]).agg(F.count("*").alias("n")).where("n > 1")
    )
    rows = shared.agg(F.sum("n")).collect()[0][0] or 0
    if not rows:
        return DuplicateKeys(0)
    texts = [F.coalesce(F.col(f"k{i}").cast("string"), F.lit("null")) for i in range(len(keys))]
    found = shared.orderBy(*[f"k{i}" for i in range(len(keys))]).limit(_EXAMPLES).select(F.concat_ws(", ", *texts))
    return DuplicateKeys(rows, tuple(row[0] for row in found.collect()))
