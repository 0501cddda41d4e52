"""Differences: the net changes that bring a target from the rows that it has to those expected.

The expected rows are those of a snapshot of the source. Only rows that differ become changes, so
that repairing a correct target changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    EventShape,
)
from waldelta.changes.merge.statements import raw_entries
from waldelta.metadata_columns import RAW
from waldelta.spark_sql import quote
from waldelta.types import TargetType

# Action of a key that the target has more than once, which a MERGE can't correct row by row.
TWICE = "twice"


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows that a target should have, one for each key, in the columns of net changes.

    A row with action ``purge`` is a key that no row should have. ``has_raw``: raw values are
    compared, too. ``is_whole``: the target should have no other rows; else rows of other keys
    aren't read.
    """

    rows: DataFrame
    columns: Sequence[tuple[str, TargetType]]
    shape: EventShape
    has_raw: bool
    is_whole: bool = True


def differences(expected: ExpectedRows, target: DataFrame) -> DataFrame:
    """Return the net changes from the target's rows to the expected ones.

    They have the columns of the expected rows, and one of the actions ``delete``, ``update``,
    ``insert`` and TWICE.
    """
    shape = expected.shape
    held = target.select(
        *(F.col(quote(name)).alias(f"t{i}") for i, (name, _) in enumerate(expected.columns)),
        *([RAW] if expected.has_raw else []),
        F.lit(True).alias("held"),
    )
    keys = {base: f"t{i}" for base, i in zip(shape.bases, shape.key, strict=True)}
    # Only a join with all rows is worth a sort of all rows.
    copies, join = F.count("*").over(Window.partitionBy(*(f"s.{base}" for base in keys))), "left"
    if expected.is_whole:
        held = held.withColumn("copies", F.count("*").over(Window.partitionBy(*keys.values())))
        copies, join = F.col("t.copies"), "full_outer"
    joined = (
        expected.rows.withColumn("given", F.lit(True))
        .alias("s")
        .join(
            held.alias("t"),
            [F.col(f"s.{base}") == F.col(f"t.{at}") for base, at in keys.items()],
            join,
        )
    )
    is_held = F.col("t.held").isNotNull()
    action = (
        F.when(copies > 1, TWICE)
        .when(F.col("s.given").isNull(), ACTION_DELETE)
        .when(F.col("s.action") == ACTION_PURGE, F.when(is_held, ACTION_DELETE))
        .when(~is_held, ACTION_INSERT)
        .when(F.expr(" or ".join(_differing(expected))), ACTION_UPDATE)
    )
    bases = [F.coalesce(f"s.{base}", f"t.{at}").alias(base) for base, at in keys.items()]
    rest = [f"s.{name}" for name in expected.rows.columns if name not in {"action", *keys}]
    return joined.select(action.alias("action"), *bases, *rest).where("action is not null")


def _differing(expected: ExpectedRows) -> list[str]:
    """Return a condition per column that is true where two rows of one key differ."""
    pairs = [
        (kind.exact_sql(f"t.t{i}"), kind.exact_sql(kind.stored_sql(f"s.c{i}")))
        for i, (_, kind) in enumerate(expected.columns)
    ]
    if expected.has_raw:
        pairs.append((raw_entries(f"t.{RAW}"), raw_entries("s.raw")))
    return [f"not ({now} <=> {then})" for now, then in pairs]
