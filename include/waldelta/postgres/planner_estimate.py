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


def is_superuser(conn: Connection) -> bool:
    """Return whether the session may do anything, so that it must plan no query for an estimate.

    While PostgreSQL plans a query, it calls functions of the table's owner: those in predicates
    and expressions of indexes, in extended statistics, in constraints.
    """
    return conn.info.parameter_status("is_superuser") == "on"


def planned_rows(conn: Connection, statement: sql.Composable) -> int:
    """Return the planner's estimate of the rows that a SELECT returns.

    The planner takes a table's present size, even if the table was never analyzed. It needs SELECT
    on the table. A superuser must not have it: see is_superuser().
    """
    query = sql.SQL("explain (format json) {}").format(statement)
    ((found,),) = conn.execute(query).fetchall()
    return int(found[0]["Plan"]["Plan Rows"])
