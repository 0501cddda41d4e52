"""Conditions on rows as Spark evaluates them, on a session that has started.

Of the library's modules that a run without Spark may need, none imports PySpark: they write Spark
SQL. A condition of an engineer's is a text that Spark has to parse alone, so it becomes a column
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.spark_sql import quote
from waldelta.stages.check.measure.failing_rows import MOST_EXAMPLES, FailingRows
from waldelta.stages.check.suite.expectation import ALL_ROWS, RowCondition

# Examples cost a query for each expectation. So of the failing expectations of a group, only this
# many get examples.
_MOST_SHOWN = 50


def count_rows(
    frame: DataFrame, conditions: Mapping[int, RowCondition], most: int | None = MOST_EXAMPLES
) -> dict[int, FailingRows]:
    """Returns of each condition how many rows fail it, how many it applies to, and at most so many
    examples (None: all).

    One query counts for all conditions. It compiles each of them, so what all rows are judged by
    counts nothing but the rows that fail.
    """
    if not conditions:
        return {}
    counted = {f"f{n}": _fails(c) for n, c in conditions.items()}
    counted |= {f"j{n}": F.expr(c.judged) for n, c in conditions.items() if c.judged != ALL_ROWS}
    counts = [F.count_if(condition).alias(name) for name, condition in counted.items()]
    (row,) = frame.agg(F.count("*").alias("total"), *counts).collect()
    counts_of, total = row.asDict(), row["total"]
    # A condition may name a struct's fields too, which are no columns.
    names = {name.lower() for name in frame.columns}
    columns = {
        n: [c for c in of.example_columns if c.lower() in names] for n, of in conditions.items()
    }
    failing_numbers = [n for n in conditions if counts_of[f"f{n}"] and columns[n]]
    examples = {}
    for n in failing_numbers if most is None else failing_numbers[:_MOST_SHOWN]:
        failing = frame.where(_fails(conditions[n])).select(*map(quote, columns[n]))
        failing = failing if most is None else failing.limit(most)
        examples[n] = tuple(failing.toArrow().to_pylist())
    return {
        n: FailingRows(
            counts_of[f"f{n}"], examples.get(n, ()), counts_of.get(f"j{n}", total), total
        )
        for n in conditions
    }


def _fails(condition: RowCondition) -> Column:
    """Returns whether a row fails; it may be null where it doesn't."""
    met = F.expr(condition.met)
    fails = ~(met if condition.null_meets else F.coalesce(met, F.lit(False)))
    fails = fails if condition.judged == ALL_ROWS else F.expr(condition.judged) & fails
    return reduce(and_, (~F.col(flag) for flag in condition.unsent), fails)
