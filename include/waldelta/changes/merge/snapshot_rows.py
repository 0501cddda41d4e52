"""Merges staged rows, complete as in a snapshot of the source, into a target with a key in one
commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waldelta.changes.decode.collapse import EventShape
from waldelta.changes.merge.statements import (
    CommitTag,
    as_stored,
    commit_statement,
    merge_statement,
)
from waldelta.lake import DeltaTarget
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.spark_sql import parquet


def staged_names(copy: TableCopy) -> list[str]:
    """Return the names of a copy's staged columns: by position, like collapse's net changes."""
    metadata = ["lsn", "commit_ts", "raw"] if copy.lsn is not None else []
    return [*(f"c{i}" for i in range(len(copy.columns))), *metadata]


def staged_shape(copy: TableCopy, key: Iterable[str]) -> EventShape:
    """Return the positions of the key columns among a copy's staged columns."""
    names = [name for name, _ in copy.columns]
    return EventShape(len(names), tuple(names.index(column) for column in key))


def merge_rows(
    runner: Runner,
    target: DeltaTarget,
    copy: TableCopy,
    key: Sequence[str],
    folder: str,
    tag: CommitTag,
) -> CommitTag:
    """Merge the rows staged in ``folder`` into ``target``, and return ``tag``.

    The columns are ``action``, ``b<k>`` for the key, and the staged names. Delta's settings apply
    to the whole session while this runs: nothing else may commit through it.
    """
    names = [name for name, _ in copy.columns]
    source = as_stored(parquet(folder), [kind for _, kind in copy.columns])
    statement = merge_statement(
        target.relation,
        source,
        names,
        staged_shape(copy, key),
        metadata_columns=copy.lsn is not None,
    )
    return commit_statement(runner, tag, statement)
