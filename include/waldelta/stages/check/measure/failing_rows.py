"""Failing rows: how many rows of a target don't meet an expectation, and some of their values; and
queries that find them, in SQL that Spark and DataFusion read alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from waldelta.lake import TargetVersion, query
from waldelta.spark_sql import quote

# The most failing values or keys that a report shows.
MOST_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class FailingRows:
    """The number of rows that don't meet an expectation, and values or keys of some of them.

    ``judged`` is the number of rows that the expectation applies to, ``total`` that of all rows
    read; None where they weren't counted.
    """

    rows: int = 0
    examples: tuple[Any, ...] = ()
    judged: int | None = None
    total: int | None = None

    def plus(
        self,
        failing: pa.ChunkedArray,
        judged: pa.ChunkedArray,
        rows: pa.Table,
        most: int | None = MOST_EXAMPLES,
    ) -> FailingRows:
        """Returns the failing rows with those of one more batch, and their values as examples."""
        count, examples = pc.sum(failing).as_py() or 0, self.examples
        if count and (most is None or len(examples) < most):
            examples = (*examples, *values_of(rows.filter(failing)))[:most]
        judged_rows = (self.judged or 0) + (pc.sum(judged).as_py() or 0)
        return FailingRows(
            self.rows + count, examples, judged_rows, (self.total or 0) + len(judged)
        )

    def are_few(self, mostly: float) -> bool:
        """Returns whether enough rows meet the expectation.

        Divides as Great Expectations does, because 0.55 * 100 is more than 55.

        >>> [FailingRows(rows, judged=100).are_few(0.55) for rows in (0, 45, 46)]
        [True, True, False]
        """
        if not self.rows or self.judged is None:
            return not self.rows
        return (self.judged - self.rows) / self.judged >= mostly


def values_of(rows: pa.Table) -> tuple[Any, ...]:
    """Returns the values of a column, or tuples of those of several, as Spark returns them."""
    columns = [
        [v.replace(tzinfo=None) if getattr(v, "tzinfo", None) else v for v in column.to_pylist()]
        for column in rows.columns
    ]
    return tuple(columns[0] if len(columns) == 1 else zip(*columns, strict=True))


# Rows that a query reads: Spark's, or a version that this process reads.
Relation = DataFrame | TargetVersion


def name_of(column: str) -> str:
    """Returns a column's name for the text of rows_of()."""
    return quote(column).replace("{", "{{").replace("}", "}}")


def rows_of(text: str, **relations: Relation) -> list[dict[str, Any]]:
    """Returns the rows of a query that names its relations in braces, by Spark or DataFusion.

    Raises what they raise: a version's query raises what delta-rs and Arrow raise.
    """
    versions = {name: of for name, of in relations.items() if isinstance(of, TargetVersion)}
    if versions:
        rows = query(text.format(**{name: name for name in versions}), versions).read_all()
    else:
        frames: dict[str, Any] = dict(relations)
        rows = next(iter(frames.values())).sparkSession.sql(text, **frames).toArrow()
    found: list[dict[str, Any]] = rows.to_pylist()
    return found
