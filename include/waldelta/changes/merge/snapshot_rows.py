"""Merge rows: staged rows, whole as a snapshot of the source has them, into a target with a key, as
one commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from waldelta.changes.decode.collapse import EventShape
from waldelta.changes.merge.statements import CommitTag, merge_statement, tagged, with_variants
from waldelta.changes.merge.target_table import VARIANT
from waldelta.snapshot import TableCopy
from waldelta.spark_sql import parquet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def staged_names(copy: TableCopy) -> list[str]:
    """What the columns of a copy's rows are called when they are staged: by place, like collapse's
    net changes.
    """
    metadata = ["lsn", "commit_ts", "raw"] if copy.lsn is not None else []
    return [*(f"c{i}" for i in range(len(copy.columns))), *metadata]


def staged_shape(copy: TableCopy, key: Iterable[str]) -> EventShape:
    """Where the columns of ``key`` stand among a copy's rows when they are staged."""
    names = [name for name, _ in copy.columns]
    return EventShape(len(names), tuple(names.index(column) for column in key))


def merge_rows(
    spark: SparkSession,
    target: str,
    copy: TableCopy,
    key: Sequence[str],
    folder: str,
    tag: CommitTag,
) -> None:
    """Merge what is staged in ``folder`` into the table at ``target``: ``action``, ``b<k>`` for the
    key's columns, the staged names.

    Delta's settings are the session's while this runs: nothing else may commit through it.
    """
    names = [name for name, _ in copy.columns]
    variants = [f"c{i}" for i, (_, kind) in enumerate(copy.columns) if kind.spark == VARIANT]
    source = with_variants(parquet(folder), variants)
    statement = merge_statement(
        target, source, names, staged_shape(copy, key), metadata_columns=copy.lsn is not None
    )
    with tagged(spark, tag):
        spark.sql(statement).collect()
