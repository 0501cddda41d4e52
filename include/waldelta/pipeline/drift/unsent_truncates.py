"""Emptied leaves: partitions of a table published via its root that were truncated, which pgoutput
sends to nobody.

The catalogs don't tell TRUNCATE from VACUUM FULL, CLUSTER or SET TABLESPACE: all of them give the
leaf a new file. But a row that is older than the last look at the leaf survives only the others. So
a leaf with a new file and no such row was emptied, as far as anybody can tell: it may also be that
each of its rows was written since, which does no harm to a repair. A TRUNCATE of the root is sent,
and empties all leaves; who asks has to know that from the stream. All leaves get new files from it,
so that one whose file is from a later transaction than another's, and has no row older than that,
was emptied once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import StorageState
from waldelta.pipeline.drift.catalog_state import CatalogTable
from waldelta.pipeline.drift.rewrites import rewritten

log = logging.getLogger(__name__)

# A leaf whose first old row is farther away than this takes to read counts as emptied.
SEARCH_TIMEOUT_MS = 2000
_XIDS = 1 << 32


def with_truncated(
    connection: psycopg.Connection[Any],
    states: Sequence[TableState],
    catalog_tables: Mapping[str, CatalogTable],
    landed_as_of: int | None = None,
) -> dict[str, CatalogTable]:
    """The same tables, with the leaves that were emptied; asks the source only where a leaf's file
    is another one.

    A leaf of which that can't be told now keeps the file that was recorded, so that it is asked of
    again. So does, with ``landed_as_of``, one that a transaction which isn't below that (xid8)
    wrote the file of: of those below it everything has landed, a TRUNCATE of the root too; 0 where
    nobody knows. None: whatever there is.
    """
    return {
        **catalog_tables,
        **{
            state.table_name: _judged(connection, state, there, leaves, landed_as_of)
            for state in states
            if (
                leaves := replaced_files(state, (there := catalog_tables[state.table_name]).storage)
            )
        },
    }


def _judged(
    connection: psycopg.Connection[Any],
    state: TableState,
    there: CatalogTable,
    leaves: Sequence[int],
    landed_as_of: int | None,
) -> CatalogTable:
    then, now = state.storage, there.storage
    if then is None or now is None:
        return there
    written = {leaf: _written(connection, leaf) for leaf in leaves} if landed_as_of != 0 else {}
    found = {
        leaf: _is_truncated(connection, there_now, then.as_of, landed_as_of)
        for leaf, there_now in written.items()
    }
    held = {
        file.oid: file for file in then.files if file.oid in leaves and found.get(file.oid) is None
    }
    files = [
        replace(file, relfilenode=held[file.oid].relfilenode) if file.oid in held else file
        for file in now.files
    ]
    truncated = frozenset(leaf for leaf, is_truncated in found.items() if is_truncated)
    first = min(
        (there_now.xid for there_now in written.values() if there_now is not None), default=0
    )
    later = {
        leaf: there_now
        for leaf in truncated
        if (there_now := written[leaf]) is not None and there_now.xid > first
    }
    return replace(
        there,
        storage=replace(now, files=files),
        truncated=truncated,
        truncated_alone=frozenset(
            leaf for leaf in later if _is_truncated(connection, later[leaf], later[leaf].xid, None)
        ),
    )


def replaced_files(state: TableState, now: StorageState | None) -> list[int]:
    """Leaves, by oid, of a table that is published via its root, that have another file than was
    recorded; pure.

    None where an ALTER explains it, where TRUNCATE isn't published, or where it isn't known when
    the files were recorded.
    """
    then = state.storage
    if (
        then is None
        or now is None
        or not then.as_of
        or (state.publishes and "truncate" not in state.publishes)
    ):
        return []
    if rewritten(then, now):
        return []
    files = {file.oid: file.relfilenode for file in then.files}
    own = set(state.relation_ids)
    return [
        f.oid
        for f in now.files
        if f.oid not in own and files.get(f.oid, f.relfilenode) != f.relfilenode
    ]


@dataclass(frozen=True, slots=True)
class _Written:
    """A leaf, the transaction (xid8) that wrote its row of pg_class, of which TRUNCATE is one, and
    how long ago that is.
    """

    schema: str
    name: str
    age: int
    xid: int


def _written(connection: psycopg.Connection[Any], leaf: int) -> _Written | None:
    row = connection.execute(_WRITTEN, (leaf,)).fetchone()
    return _Written(row[0], row[1], row[2], row[3] - row[2]) if row is not None else None


def _is_truncated(
    connection: psycopg.Connection[Any], leaf: _Written | None, as_of: int, landed_as_of: int | None
) -> bool | None:
    """Whether no row of the leaf was written by a transaction below ``as_of`` (frozen rows keep
    that number); None: unknown.
    """
    if leaf is None:
        return False  # it went meanwhile, which is told as such
    if landed_as_of is not None and leaf.age >= 0 and leaf.xid >= landed_as_of:
        return None
    # Of what is farther away than an age can tell, it is negative.
    older = sql.SQL(
        "select exists (select from only {} where age(xmin) > age({}::text::xid) or age(xmin) < 0)"
    ).format(sql.Identifier(leaf.schema, leaf.name), sql.Literal(str(as_of % _XIDS)))
    try:
        with connection.transaction():
            connection.execute(
                "select set_config('statement_timeout', %s, true)", (str(SEARCH_TIMEOUT_MS),)
            )
            connection.execute(
                "select set_config('lock_timeout', %s, true)", (str(SEARCH_TIMEOUT_MS // 2),)
            )
            ((found,),) = connection.execute(older).fetchall()
    except psycopg.errors.QueryCanceled:
        return True
    except psycopg.errors.UndefinedTable:
        return False
    except psycopg.Error as err:  # a lock, no grant, an access method whose rows have no xmin
        if connection.broken:
            raise
        log.warning(
            "partition %s.%s has another file; whether it was truncated can't be told now (%s)",
            leaf.schema, leaf.name, err.diag.message_primary or err,
        )  # fmt: skip
        return None
    return not found


# How many transactions ago the leaf's row of pg_class was written, of which TRUNCATE is one; and
# the next one.
_WRITTEN = """
select n.nspname, c.relname, age(c.xmin)::bigint,
  pg_snapshot_xmax(pg_current_snapshot())::text::bigint
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.oid = %s
"""
