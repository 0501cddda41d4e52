"""Emptied leaves: partitions of a table published via its root that were truncated, which pgoutput sends to nobody.

The catalogs don't tell TRUNCATE from VACUUM FULL, CLUSTER or SET TABLESPACE: all of them give the leaf a new file. But a
row that is older than the last look at the leaf survives only the others. So a leaf with a new file and no such row was
emptied, as far as anybody can tell: it may also be that each of its rows was written since, which does no harm to a repair.
A TRUNCATE of the root is sent, and empties all leaves; who asks has to know that from the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from waldelta.ledger import StorageState, TableState
from waldelta.present import PresentTable
from waldelta.rewrite import unsent_changes

# A leaf whose first old row is farther away than this takes to read counts as emptied.
SEARCH_TIMEOUT_MS = 2000
_XIDS = 1 << 32


def with_emptied(
    connection: psycopg.Connection[Any], states: Sequence[TableState], present: Mapping[str, PresentTable]
) -> dict[str, PresentTable]:
    """The same tables, with the leaves that were emptied; asks the source only where a leaf's file is another one."""
    return {
        **present,
        **{
            state.table_name: replace(there, emptied=frozenset(_emptied(connection, state, leaves)))
            for state in states
            if (leaves := renewed_files(state, (there := present[state.table_name]).storage))
        },
    }


def renewed_files(state: TableState, now: StorageState | None) -> list[int]:
    """Leaves, by oid, of a table that is published via its root, that have another file than was recorded; pure.

    None where an ALTER explains it, where TRUNCATE isn't published, or where it isn't known when the files were recorded.
    """
    then = state.storage
    if then is None or now is None or not then.as_of or (state.publishes and "truncate" not in state.publishes):
        return []
    if unsent_changes(state, now):
        return []
    files = {file.oid: file.relfilenode for file in then.files}
    own = set(state.relation_ids)
    return [f.oid for f in now.files if f.oid not in own and files.get(f.oid, f.relfilenode) != f.relfilenode]


def _emptied(connection: psycopg.Connection[Any], state: TableState, leaves: Sequence[int]) -> list[int]:
    as_of = state.storage.as_of % _XIDS if state.storage is not None else 0
    return [leaf for leaf in leaves if not _has_older_row(connection, leaf, as_of)]


def _has_older_row(connection: psycopg.Connection[Any], leaf: int, as_of: int) -> bool:
    """Whether a row of the leaf was written by a transaction below ``as_of`` (frozen rows keep that number)."""
    named = connection.execute(
        "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %s", (leaf,)
    ).fetchone()  # fmt: skip
    if named is None:
        return True  # it went meanwhile, which is told as such
    older = sql.SQL("select exists (select from only {} where age(xmin) > age({}::text::xid))").format(
        sql.Identifier(*named), sql.Literal(str(as_of))
    )
    try:
        with connection.transaction():
            connection.execute("select set_config('statement_timeout', %s, true)", (str(SEARCH_TIMEOUT_MS),))
            (found,) = connection.execute(older).fetchall()[0]
    except psycopg.errors.QueryCanceled:
        return False
    except psycopg.errors.UndefinedTable:
        return True
    return bool(found)
