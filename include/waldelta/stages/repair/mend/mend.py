"""Differences: the net changes that bring a target from the rows that it has to those expected.

The expected rows are those of a snapshot of the source, or states derived from the change log. Only
rows that differ become changes, so that repairing a correct target changes nothing.
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
from waldelta.changes.merge.statements import merged_raw, raw_entries
from waldelta.metadata_columns import PREFIX, RAW
from waldelta.spark_sql import quote
from waldelta.types import TargetType

# Action of a key that the target has more than once, which a MERGE can't correct row by row.
TWICE = "twice"


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows that a target should have, one for each key, in the columns of net changes.

    A row with action ``purge`` is a key that no row should have. ``metadata`` are the metadata
    columns that are compared. ``missing`` is the action of a row that the target lacks, as Spark
    SQL of the row ``s``. ``extra`` is true of the target's row ``t`` when it leaves the target
    unless its key is expected; None: other rows aren't read. In ``t`` the columns are ``t<i>``.
    """

    rows: DataFrame
    columns: Sequence[tuple[str, TargetType]]
    shape: EventShape
    metadata: Sequence[str]
    missing: str = f"'{ACTION_INSERT}'"
    extra: str | None = "true"


def differences(expected: ExpectedRows, target: DataFrame) -> DataFrame:
    """Return the net changes from the target's rows to the expected ones.

    They have the columns of the expected rows, and one of the actions ``delete``, ``update``,
    TWICE, and those of ``missing``.
    """
    shape = expected.shape
    held = target.select(
        *(F.col(quote(name)).alias(f"t{i}") for i, (name, _) in enumerate(expected.columns)),
        *expected.metadata,
        F.lit(True).alias("held"),
    )
    keys = {base: f"t{i}" for base, i in zip(shape.bases, shape.key, strict=True)}
    # Only a join with all rows is worth a sort of all rows.
    copies, join = F.count("*").over(Window.partitionBy(*(f"s.{base}" for base in keys))), "left"
    if expected.extra is not None:
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
    extra, is_held = (
        F.expr(f"coalesce({expected.extra or False}, false)"),
        F.col("t.held").isNotNull(),
    )
    action = (
        F.when(F.col("s.given").isNull() & ~extra, None)
        .when(copies > 1, TWICE)
        .when(F.col("s.given").isNull(), ACTION_DELETE)
        .when(F.col("s.action") == ACTION_PURGE, F.when(is_held, ACTION_DELETE))
        .when(~is_held, F.expr(expected.missing))
        .when(F.expr(" or ".join(_differing(expected))), ACTION_UPDATE)
    )
    bases = [F.coalesce(f"s.{base}", f"t.{at}").alias(base) for base, at in keys.items()]
    rest = [f"s.{name}" for name in expected.rows.columns if name not in {"action", *keys}]
    return joined.select(action.alias("action"), *bases, *rest).where("action is not null")


def _differing(expected: ExpectedRows) -> list[str]:
    """Return a condition per column that is true where two rows of one key differ."""
    toastable, found = expected.shape.toastable, []
    for i, (_, kind) in enumerate(expected.columns):
        sent = kind.stored_sql(f"s.c{i}")
        differs = f"not ({kind.exact_sql(f't.t{i}')} <=> {kind.exact_sql(sent)})"
        found.append(f"(not s.u{i} and {differs})" if i in toastable else differs)
    for name in expected.metadata:
        now, then = f"t.{name}", f"s.{name.removeprefix(PREFIX)}"
        if name == RAW:
            merged = merged_raw([column for column, _ in expected.columns], toastable)
            now, then = raw_entries(now), raw_entries(f"({merged})")
        found.append(f"not ({now} <=> {then})")
    return found
