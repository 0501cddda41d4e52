"""Reads which tables a database has: rows, size, key, partitions, and what a pipeline can't
replicate.

Everything is read in one read-only transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from psycopg import sql

from waldelta.errors import NotPrimary
from waldelta.postgres import (
    CatalogRelation,
    Connection,
    Leaf,
    TableId,
    describe,
    fetch,
    is_superuser,
    limited,
    planned_rows,
    read_around,
    read_leaves,
    read_relations,
)
from waldelta.target_modes.column_names import clashes

# A session that keeps a table locked must not stop the survey: such a table counts as empty.
_LOCK_TIMEOUT_S = 2.0
_STATEMENT_TIMEOUT_S = 60.0
# Columns whose values are that wide on average are worth a remark.
_WIDE_BYTES = 1000
# A TOAST table with this share of a table's bytes has most of its big values.
_TOASTED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table that can be replicated: a plain table, or a partition root with its leaves.

    ``rows`` are an estimate, None before the table's first ANALYZE. ``toast_bytes`` are stored out
    of line, in addition to ``size_bytes``. ``wide`` are the columns with big values.
    """

    relation: CatalogRelation
    leaves: tuple[Leaf, ...]
    rows: int | None
    toast_bytes: int
    wide: tuple[str, ...]
    has_row_security: bool

    @property
    def id(self) -> TableId:
        """Returns the table's name."""
        return self.relation.id

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all leaves, without TOAST."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    @property
    def is_root(self) -> bool:
        """Returns whether it is partitioned."""
        return self.relation.relkind == "p"

    @property
    def is_full(self) -> bool:
        """Returns whether its replica identity is full."""
        return self.relation.replica_identity == "f"

    @property
    def identity(self) -> tuple[str, ...]:
        """Returns the columns by which the stream identifies old rows of all leaves.

        Without any, PostgreSQL would refuse the table's own UPDATEs and DELETEs once these are
        published.
        """
        own = self.relation.identity_columns
        stored = [leaf for leaf in self.leaves if leaf.relkind == "r" and leaf.persistence == "p"]
        same = all(
            set(leaf.identity_columns) == set(own)
            and (leaf.replica_identity == "f") == (self.relation.replica_identity == "f")
            for leaf in stored
        )
        return own if same and not self.is_identity_generated else ()

    @property
    def is_identity_generated(self) -> bool:
        """Returns whether a generated column is part of its replica identity."""
        own = self.relation.identity_columns
        return any(c.generated and c.name in own for c in self.relation.columns)


@dataclass(frozen=True, slots=True)
class ExcludedTable:
    """A table that a pipeline can't replicate, and why."""

    id: TableId
    reason: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tables of a database, the role that read them, and the names that are taken.

    ``is_superuser``: the role may do what setup needs. ``publications`` are those of the database,
    ``slots`` and ``roles`` those of the server.
    """

    database: str
    role: str
    is_superuser: bool
    tables: tuple[FoundTable, ...]
    excluded: tuple[ExcludedTable, ...]
    publications: frozenset[str] = frozenset()
    slots: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()

    @property
    def schemas(self) -> tuple[str, ...]:
        """Returns the schemas that have tables to replicate."""
        return tuple(sorted({table.id.schema for table in self.tables}))


def read_inventory(conn: Connection, conninfo: str) -> Inventory:
    """Query the database about its tables; changes nothing, and waits for no locked table.

    Raises NotPrimary on a standby.
    """
    conn.read_only = True
    with limited(conn, "statement_timeout", _STATEMENT_TIMEOUT_S):
        found, _ = read_around(conn, _LOCK_TIMEOUT_S, partial(_read, conn, conninfo))
    return found


def _read(conn: Connection, conninfo: str, locked: frozenset[int]) -> Inventory:
    with conn.transaction():
        (server,) = fetch(conn, _SERVER, {})
        if server.in_recovery:
            raise NotPrimary(f"{describe(conninfo)} is a standby: name the primary's connection")
        facts = {row.oid: row for row in fetch(conn, _TABLES, {"locked": list(locked)})}
        relations = read_relations(conn, list(facts))
        fit, excluded = [], []
        for relation in relations:
            reason = next(_reasons(relation), None)
            if reason is None:
                fit.append(relation)
            else:
                excluded.append(ExcludedTable(relation.id, reason))
        leaves = read_leaves(conn, [relation.oid for relation in fit], locked=locked)
        tables = [
            _found(conn, relation, leaves[relation.oid], facts[relation.oid], locked)
            for relation in fit
        ]
        return Inventory(
            server.database,
            server.role,
            server.is_superuser,
            tuple(sorted(tables, key=attrgetter("id"))),
            tuple(sorted(excluded, key=attrgetter("id"))),
            frozenset(server.publications),
            frozenset(server.slots),
            frozenset(server.roles),
        )


def _found(
    conn: Connection,
    relation: CatalogRelation,
    leaves: tuple[Leaf, ...],
    facts: Any,
    locked: frozenset[int],
) -> FoundTable:
    oids = {relation.oid, *(leaf.oid for leaf in leaves)}
    rows = None if facts.rows < 0 else facts.rows
    main = sum(leaf.size_bytes for leaf in leaves)
    # The planner would wait for a table's lock, and may query the server of a foreign partition. It
    # calls functions of the table's owner, which must not run as a superuser.
    is_local = all(leaf.relkind == "r" for leaf in leaves)
    if is_local and not main and locked.isdisjoint(oids):
        rows = 0  # Of an empty table the planner assumes that rows are being added.
    elif (
        rows is not None
        and facts.readable
        and is_local
        and locked.isdisjoint(oids)
        and not is_superuser(conn)
    ):
        only = "select from only {}" if relation.relkind == "r" else "select from {}"
        rows = planned_rows(conn, sql.SQL(only).format(relation.id.identifier))
    wide = facts.wide if facts.is_analyzed else ()
    if not wide and facts.toast_bytes > _TOASTED_SHARE * (main + facts.toast_bytes):
        wide = facts.toastable
    return FoundTable(
        relation, leaves, rows, facts.toast_bytes, tuple(wide), facts.has_row_security
    )


def _reasons(relation: CatalogRelation) -> Iterator[str]:
    if relation.relkind == "f":
        yield "a foreign table, whose changes aren't in this server's WAL"
    if relation.relkind == "m":
        yield "a materialized view, which can't be published: replicate its tables"
    if relation.persistence == "u":
        yield "unlogged, so its changes aren't in the WAL: alter table … set logged"
    if relation.extension_owned:
        yield "it belongs to an extension"
    if all(column.generated for column in relation.columns):
        yield "it publishes no column, and a Delta table needs one"
    yield from clashes(relation.column_names, metadata_columns=True)


_SERVER = """
select current_database()::text as database,
       current_user::text as role,
       pg_is_in_recovery() as in_recovery,
       (select rolsuper from pg_roles where rolname = current_user) as is_superuser,
       array(select pubname::text from pg_publication) as publications,
       array(select slot_name::text from pg_replication_slots) as slots,
       array(select rolname::text from pg_roles) as roles
"""

# Oids below 16384 belong to the system. A partition is listed as its root, unless that is foreign
# to publications. pg_stats shows only what the role may read.
_TABLES = f"""
with recursive tree (root, oid) as (
    select c.oid, c.oid
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where c.oid >= 16384
      and c.relkind in ('r', 'p', 'f', 'm')
      and c.relpersistence <> 't'
      and not c.relispartition
      and n.nspname !~ '^pg_'
      and n.nspname <> 'information_schema'
    union all
    select t.root, i.inhrelid
    from tree t
    join pg_class p on p.oid = t.oid and p.relkind = 'p'
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
)
select c.oid,
       c.relrowsecurity as has_row_security,
       has_schema_privilege(c.relnamespace, 'usage') and has_table_privilege(c.oid, 'select')
         and not row_security_active(c.oid) as readable,
       s.rows::bigint as rows,
       s.toast_bytes::bigint as toast_bytes,
       exists (select from pg_stats p where p.schemaname = n.nspname and p.tablename = c.relname)
         as is_analyzed,
       array(
           select distinct p.attname::text
           from pg_stats p
           where p.schemaname = n.nspname and p.tablename = c.relname
             and p.avg_width >= {_WIDE_BYTES}
       ) as wide,
       array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             and a.attstorage in ('x', 'e')
           order by a.attnum
       ) as toastable
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
cross join lateral (
    select case when bool_or(l.reltuples < 0) then -1 else coalesce(sum(l.reltuples), 0) end
             as rows,
           coalesce(sum(pg_relation_size(x.oid)), 0) as toast_bytes
    from tree t
    join pg_class l on l.oid = t.oid and l.relkind <> 'p'
    left join pg_class x on x.oid = l.reltoastrelid and x.oid <> all(%(locked)s::oid[])
    where t.root = c.oid
) s
where c.oid in (select root from tree)
order by n.nspname, c.relname
"""  # noqa: S608 - no value in it
