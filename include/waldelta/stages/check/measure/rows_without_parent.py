"""Finds rows of a target whose foreign key has no matching row in the referenced target, by Spark
or, for small targets, in the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, or_

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import codes_of_both
from waldelta.lake import READ_FAILURES, TargetVersion
from waldelta.metadata_columns import LSN
from waldelta.spark import Runner
from waldelta.spark_sql import quote
from waldelta.stages.check.measure.duplicate_keys import MOST_EXAMPLES, DuplicateKeys
from waldelta.stages.check.measure.references import Reference, Side
from waldelta.types.base import Comparison

log = logging.getLogger(__name__)


def find_rows_without_parent(runner: Runner, reference: Reference) -> DuplicateKeys:
    """Returns the rows without a parent row, found by Spark's anti-join.

    Rows with a null in their key refer to nothing.
    """
    rows = reference.referring.frame(runner)
    if reference.since is not None:
        rows = rows.where(F.col(LSN) >= reference.since)
    padded = _padded(reference)
    own = rows.select(*_key_columns("r", reference.referring.columns, padded[0]))
    there = reference.referenced.frame(runner).select(
        *_key_columns("p", reference.referenced.columns, padded[1])
    )
    places = range(len(reference.comparisons))
    present = [F.col(f"r{k}").isNotNull() for k in places]
    partners = [F.col(f"r{k}") == F.col(f"p{k}") for k in places]
    orphans = own.where(reduce(and_, present)).join(there, reduce(and_, partners), "left_anti")
    if reference.whole and len(present) > 1:
        orphans = orphans.unionByName(own.where(~reduce(and_, present) & reduce(or_, present)))
    count = orphans.count()
    if not count:
        return DuplicateKeys(0)
    texts = [F.coalesce(F.col(f"r{k}").cast("string"), F.lit("null")) for k in places]
    found = orphans.select(F.concat_ws(", ", *texts)).distinct().limit(MOST_EXAMPLES).collect()
    return DuplicateKeys(count, tuple(sorted(row[0] for row in found)))


def _padded(reference: Reference) -> tuple[list[bool], list[bool]]:
    """Returns for both sides which columns are compared without trailing blanks (only spaces)."""
    comparisons = reference.comparisons
    return [one in ("padded", "own padded") for one in comparisons], [
        one == "padded" for one in comparisons
    ]


def _key_columns(letter: str, names: Sequence[str], padded: Sequence[bool]) -> list[Column]:
    columns = [F.col(quote(name)) for name in names]
    return [
        (F.rtrim(column) if is_padded else column).alias(f"{letter}{k}")
        for k, (column, is_padded) in enumerate(zip(columns, padded, strict=True))
    ]


def count_rows_without_parent(runner: Runner, reference: Reference) -> DuplicateKeys:
    """Returns the rows without a parent row.

    If both targets are small and every row has a parent, the driver finds out by itself; otherwise
    Spark counts. In small targets all rows are judged, whatever has changed.
    """
    try:
        found = rows_without_parent_in_driver(reference)
        if found == 0:
            return DuplicateKeys(0)
        reference = reference if found is None else replace(reference, since=None)
    except (*READ_FAILURES, KeyError) as err:
        log.info(
            "foreign key %s can't be checked on the driver: %s", reference.name, type(err).__name__
        )
    return find_rows_without_parent(runner, reference)


def rows_without_parent_in_driver(reference: Reference) -> int | None:
    """Returns the number of rows without a parent in two small mirrors, by Arrow.

    Returns None when Spark is needed. Raises what delta-rs and Arrow raise.
    """
    sides = reference.referring, reference.referenced
    if any(side.mode.keeps_rows for side in sides) or "number" in reference.comparisons:
        return None
    tables = [side.open() for side in sides]
    if not all(table.is_small for table in tables):
        return None
    sought = zip(tables, sides, _padded(reference), strict=True)
    own, there = (
        _read(table, side, reference.comparisons, padded) for table, side, padded in sought
    )
    complete = reduce(pc.and_, [pc.is_valid(column) for column in own.columns])
    rows = own.filter(complete)
    orphans = int(np.count_nonzero(~np.isin(*codes_of_both(rows.columns, there.columns))))
    if reference.whole and len(own.columns) > 1:
        begun = reduce(pc.or_, [pc.is_valid(column) for column in own.columns])
        orphans += int(pc.sum(pc.and_not(begun, complete)).as_py() or 0)
    return orphans


def _read(
    table: TargetVersion, side: Side, comparisons: Sequence[Comparison], padded: Sequence[bool]
) -> pa.Table:
    dataset = table.dataset()
    rows = dataset.to_table(columns=sorted(set(side.columns)))
    columns = []
    for name, comparison, is_padded in zip(side.columns, comparisons, padded, strict=True):
        column = rows[name]
        if comparison == "integer":
            column = column.cast(pa.int64())
        elif is_padded:
            column = pc.utf8_rtrim(column, " ")
        columns.append(column)
    return pa.table(columns, names=[f"k{k}" for k in range(len(columns))])
