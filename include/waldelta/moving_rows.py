"""Moving rows: what a drift is about, in SQL over the source; to be read by a repair, or to be counted for a report."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from waldelta.copy_where import whole_relation
from waldelta.errors import ConfigError, FilterNotTranslatable
from waldelta.repair import Repair, Rule, entering, gathers
from waldelta.row_filter import RowFilter
from waldelta.target_filter import filter_of, read_target_filter

# Counting may take so long in all; after that the planner's estimate has to do.
COUNT_TIMEOUT_MS = 2000
# Each statement waits so long for a lock at most.
LOCK_TIMEOUT_MS = 1000


@dataclass(frozen=True, slots=True)
class MovingRows:
    """What a target took and takes, and the rows that enter and leave: pairs of what stands behind FROM and WHERE.

    No row is among two of them. Those that enter are read leaf by leaf: the leaf's oid stands third.
    """

    before: Rule
    after: Rule
    enter: tuple[tuple[str, str, int], ...]
    leave: tuple[tuple[str, str], ...]


def moving_rows(drifted: Repair, own: RowFilter | None) -> MovingRows:
    """Which rows move by this drift, where the pipeline file's filter for the target is ``own`` now; pure."""
    state, table = drifted.state, drifted.table
    was = filter_of(state)
    before = Rule(state.row_filter, was.analysed if was else None)
    after = Rule(table.row_filter, own.analysed if own else None)
    nullable = [column.name for column in table.columns if not column.not_null]
    enters = entering(before, after, nullable)
    enter = tuple(
        (f"only {leaf.id.identifier.as_string(None)}", condition, leaf.oid)
        for leaf in table.leaves
        if leaf.relkind == "r"
        for condition in ((after.condition,) if leaf.oid in drifted.attached else enters)
    )
    leave = tuple((whole_relation(table), condition) for condition in entering(after, before, nullable))
    return MovingRows(before, after, enter, leave)


def describe_moving(connection: psycopg.Connection[Any], drifted: Repair) -> str | None:
    """How many rows a repair would add and take away, in words; None when nothing tells.

    Counted on the source, or estimated where that takes too long: what the target itself would lose can be more, as rows
    that the stream left behind aren't known there.
    """
    name = drifted.state.table_name
    if gathers(drifted):
        return None
    try:
        # A notice isn't worth waiting for whoever alters the table.
        connection.execute("select set_config('lock_timeout', %s, false)", (str(LOCK_TIMEOUT_MS),))
        own = read_target_filter(connection, name, drifted.where, drifted.table)
        moving = moving_rows(drifted, own)
        wanted = [tuple(pair[:2] for pair in moving.enter), moving.leave]
        counted = _count(connection, wanted)
        numbers = counted or [sum(_estimate(connection, *pair) for pair in pairs) for pairs in wanted]
    except (psycopg.Error, ConfigError, FilterNotTranslatable):
        return None  # a column of the old filter is gone, or somebody has the table locked
    finally:
        with suppress(psycopg.Error):
            connection.execute("select set_config('lock_timeout', '0', false)")
    if not any(numbers):
        return None
    about = "" if counted else "about "
    return f"to mend it, {about}{numbers[0]:,} rows would enter and {about}{numbers[1]:,} leave"


def _count(connection: psycopg.Connection[Any], wanted: list[tuple[tuple[str, str], ...]]) -> list[int] | None:
    """The rows of each side; None when that takes too long."""
    counted = sql.SQL("(select count(*) from {} where {})")
    sides = [
        sql.SQL(" + ").join([sql.SQL("0"), *(counted.format(*map(_text, pair)) for pair in pairs)]) for pairs in wanted
    ]
    try:
        with connection.transaction():
            connection.execute("select set_config('statement_timeout', %s, true)", (str(COUNT_TIMEOUT_MS),))
            return list(connection.execute(sql.SQL("select {}").format(sql.SQL(", ").join(sides))).fetchall()[0])
    except psycopg.errors.QueryCanceled:
        return None


def _estimate(connection: psycopg.Connection[Any], relation: str, condition: str) -> int:
    statement = sql.SQL("explain (format json) select from {} where {}").format(_text(relation), _text(condition))
    ((plan,),) = connection.execute(statement).fetchall()
    return int(plan[0]["Plan"]["Plan Rows"])


def _text(text: str) -> sql.Composable:
    # PostgreSQL's own deparsed texts, and names that were quoted before.
    return sql.SQL(text)
