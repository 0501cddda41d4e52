"""Kept rows: checks whether the rows that a target keeps besides its live rows are consistent.

It reads all rows, while a table's suite judges the live ones. This module doesn't need Great
Expectations, like ``duplicate_keys``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from waldelta.spark_sql import quote
from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys
from waldelta.target_modes import TargetMode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Takes the place of column names as the key of the prefetched result.
KEPT_ROWS = "_wd_kept_rows"


def find_broken_rows(
    frame: DataFrame, mode: TargetMode, key: Sequence[str]
) -> dict[str, DuplicateKeys]:
    """Returns how many rows of a target break each invariant of its mode, by its label."""
    # Windows must be computed before their results can be counted.
    names, rules = ", ".join(map(quote, key)), mode.rules(key)
    columns = [f"{rule.broken.format(key=names)} as broken{n}" for n, rule in enumerate(rules)]
    counts = [F.count_if(f"broken{n}") for n in range(len(rules))]
    (row,) = mode.judged_rows(frame, key).selectExpr(*columns).agg(*counts).collect()
    return {rule.label: DuplicateKeys(count) for rule, count in zip(rules, row, strict=True)}
