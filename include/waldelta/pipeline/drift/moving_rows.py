"""Builds SQL that selects the rows a drift is about, for a repair to read or a report to count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import sql

from waldelta import quantities
from waldelta.errors import ConfigError, FilterNotTranslatable, PrivilegeMissing
from waldelta.pipeline.drift.repair_plan import FilterRule, Repair, entering, merges_partitions
from waldelta.pipeline.targets.target_filter import filter_of, read_target_filter
from waldelta.postgres import Leaf, PublishedTable
from waldelta.postgres.lock_waits import limited, within
from waldelta.postgres.planner_estimate import is_superuser, planned_rows
from waldelta.row_filter import RowFilter
from waldelta.row_filter.source_sql import source_sql
from waldelta.snapshot import Choice
from waldelta.snapshot.read_selected import of_leaves_together, whole_table

# Counting may take this long in all; after that the planner's estimate is used.
_COUNT_TIMEOUT_S = 2.0
# Each statement waits at most this long for a lock, because a report isn't worth waiting for a
# session that alters the table.
_LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class MovingRows:
    """A target's filter before and after a drift, and the rows that enter and leave it.

    No row matches two choices of the same side.
    """

    before: FilterRule
    after: FilterRule
    enter: tuple[Choice, ...]
    leave: tuple[Choice, ...]


def moving_rows(
    drifted: Repair, own: RowFilter | None, files: Mapping[int, int] = MappingProxyType({})
) -> MovingRows:
    """Return the rows that this drift moves in and out of the target; pure.

    ``own`` is the pipeline file's current filter for the target. Entering rows are read leaf by
    leaf. ``files`` are the leaves' files as a snapshot sees them. Raises FilterNotTranslatable for
    a stored filter that can't be resolved: only a whole copy is exact then.
    """
    state, table = drifted.state, drifted.table
    was = filter_of(state)
    after = FilterRule(table.row_filter, own.analysed if own else None)
    before = FilterRule(
        _as_source_sql(state.row_filter, after.published, table),
        _as_source_sql(was.analysed if was else None, after.own, table),
    )
    nullable = [column.name for column in table.columns if not column.not_null]
    enters = entering(before, after, nullable)
    # Leaves that are read through one table are read together: otherwise each would need a scan of
    # that whole table.
    together: dict[object, list[Leaf]] = {}
    for leaf in table.leaves:
        if leaf.relkind == "r":
            together.setdefault((leaf.through or leaf, leaf.oid in drifted.attached), []).append(
                leaf
            )
    enter = tuple(
        of_leaves_together(leaves, condition, files)
        for leaves in together.values()
        for condition in ((after.condition,) if leaves[0].oid in drifted.attached else enters)
    )
    leave = tuple(
        whole_table(table, condition, files) for condition in entering(after, before, nullable)
    )
    return MovingRows(before, after, enter, leave)


def _as_source_sql(stored: str | None, current: str | None, table: PublishedTable) -> str | None:
    """Return a filter that the ledger stores as SQL for the source.

    A text that the server has just printed itself is used as it is.
    """
    if stored is None or stored == current:
        return stored
    return source_sql(stored, {column.name: column.type for column in table.columns})


def describe_moving(connection: psycopg.Connection[Any], drifted: Repair) -> str | None:
    """Describe how many rows a repair would add and remove; None when that isn't known.

    The rows are counted on the source, or estimated where counting takes too long. A repair may
    remove more: the source doesn't know rows of the target for which no change was sent.
    """
    name = drifted.state.table_name
    if merges_partitions(drifted) or is_superuser(connection):
        return None
    try:
        with limited(connection, "lock_timeout", _LOCK_TIMEOUT_S):
            own = read_target_filter(connection, name, drifted.where, drifted.table)
            moving = moving_rows(drifted, own)
            wanted = [list(map(_rows, side)) for side in (moving.enter, moving.leave)]
            counted = _count(connection, wanted)
            numbers = counted or [
                sum(planned_rows(connection, rows) for rows in side) for side in wanted
            ]
    except (psycopg.Error, ConfigError, FilterNotTranslatable, PrivilegeMissing):
        return None  # A column of the old filter is gone, or another session has locked the table.
    if not any(numbers):
        return None
    about = "" if counted else "about "
    return (
        f"a repair would add {about}{quantities.counted(numbers[0], 'row')} and remove"
        f" {about}{numbers[1]:,}"
    )


def _count(
    connection: psycopg.Connection[Any], wanted: Sequence[Sequence[sql.Composable]]
) -> list[int] | None:
    """Return the number of rows of each side; None when counting takes too long."""
    counted = sql.SQL("(select count(*) from ({}) as r)")
    sides = [
        sql.SQL(" + ").join([sql.SQL("0"), *map(counted.format, statements)])
        for statements in wanted
    ]
    query = sql.SQL("select {}").format(sql.SQL(", ").join(sides))
    try:
        with limited(connection, "statement_timeout", _COUNT_TIMEOUT_S), within(connection):
            return list(connection.execute(query).fetchall()[0])
    except psycopg.errors.QueryCanceled:
        return None


def _rows(choice: Choice) -> sql.Composable:
    # The texts are either deparsed by PostgreSQL or names that were quoted before.
    return sql.SQL("select from {} where {}").format(
        sql.SQL(choice.relation), sql.SQL(choice.condition)
    )
