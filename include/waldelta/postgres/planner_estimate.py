"""A relation's rows that meet conditions: as SQL, and how many there are by the planner's estimate,
which reads none.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from waldelta.postgres.connection import Connection


def rows_where(relation: sql.Composable, conditions: Sequence[sql.Composable]) -> sql.Composable:
    """Return a relation's rows that meet all conditions, as SQL to write after FROM."""
    if not conditions:
        return relation
    return sql.SQL("{} where {}").format(relation, sql.SQL(" and ").join(conditions))


def planned_rows(
    conn: Connection, relation: sql.Composable, conditions: Sequence[sql.Composable] = ()
) -> int:
    """Return the planner's estimate of a relation's rows that meet all conditions.

    The relation is written as after FROM. The planner takes the table's present size, even if the
    table was never analyzed. It needs SELECT on the table.
    """
    rows = rows_where(relation, conditions)
    query = sql.SQL("explain (format json) select 1 from {}").format(rows)
    ((found,),) = conn.execute(query).fetchall()
    return int(found[0]["Plan"]["Plan Rows"])
