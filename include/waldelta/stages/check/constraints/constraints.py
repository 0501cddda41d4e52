"""Constraints of the source that become expectations: CHECK constraints, declared types, labels of
enum columns, and foreign keys.

Every row of a source table meets them, so every row of its target must as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from waldelta.config import split_table_name
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.postgres import (
    BIT_OID,
    BPCHAR_OID,
    NUMERIC_OID,
    VARBIT_OID,
    VARCHAR_OID,
    VARHDRSZ,
    fetch,
)
from waldelta.row_filter import EnumType
from waldelta.types.numeric import precision_and_scale


@dataclass(frozen=True, slots=True)
class CheckConstraint:
    """A constraint's name and its expression as PostgreSQL prints it; empty if it wasn't read.

    A row meets it where the expression is true or null. Until the transaction that made it
    ``has_landed``, the target may have rows from before it.
    """

    name: str
    expression: str
    has_landed: bool = True


def read_check_constraints(
    connection: psycopg.Connection[Any],
    states: Sequence[TableState],
    landed_as_of: int,
    locked: Collection[int] = (),
) -> dict[str, list[CheckConstraint]]:
    """Returns by target the check constraints of its source table.

    Reading an expression takes a lock on the source table, so those of tables (by oid) that are
    ``locked`` aren't read. Changes of transactions from ``landed_as_of`` (xid8) on may not have
    landed. Constraints on columns whose collation treats different texts as equal are left out.
    """
    fed_by = {
        state.table_name: split_table_name(state.source_table or state.table_name)
        for state in states
    }
    schemas, names = ([table[part] for table in fed_by.values()] for part in (0, 1))
    checks: dict[tuple[str, str], list[CheckConstraint]] = {}
    parameters = {"schemas": schemas, "names": names, "locked": list(locked)}
    for schema, table, name, expression, xmin in connection.execute(_CHECKS, parameters):
        check = CheckConstraint(name, expression, is_before(xmin, landed_as_of))
        checks.setdefault((schema, table), []).append(check)
    return {target: checks[table] for target, table in fed_by.items() if table in checks}


def is_before(xmin: int, xid8: int) -> bool:
    """Returns whether a 32-bit xmin is of a transaction before ``xid8``, as PostgreSQL compares
    them.

    >>> is_before(5, 9), is_before(9, 9), is_before(2, 2**31 + 9)
    (True, False, True)
    >>> is_before(2**32 - 3, 2**32 + 9), is_before(12, 2**32 + 9)
    (True, False)
    """
    return xmin <= _FROZEN or 0 < (xid8 - xmin) % (1 << 32) < 1 << 31


_FROZEN = 2
_CHECKS = """
select n.nspname, c.relname, k.conname,
       case when c.oid <> all(%(locked)s::oid[]) then pg_get_expr(k.conbin, k.conrelid)
         else '' end,
       k.xmin::text::bigint
from pg_constraint k
join pg_class c on c.oid = k.conrelid
join pg_namespace n on n.oid = c.relnamespace
where k.contype = 'c'
  and k.convalidated
  and (n.nspname, c.relname) in (select * from unnest(%(schemas)s::text[], %(names)s::text[]))
  and not exists (
      select from pg_attribute a
      join pg_collation l on l.oid = a.attcollation
      where a.attrelid = c.oid
        and a.attnum = any (k.conkey)
        and not l.collisdeterministic
  )
order by 1, 2, 3
"""


_LIMITED = (BPCHAR_OID, VARCHAR_OID, BIT_OID, VARBIT_OID, NUMERIC_OID)


@dataclass(frozen=True, slots=True)
class DeclaredType:
    """What the type of a column guarantees.

    ``base_type`` is as PostgreSQL prints it (of a domain, its base type), with ``base_oid`` and the
    ``typmod`` that limits it (-1: no limit). ``checks`` are the domains' CHECK constraints on
    VALUE, ``not_null`` the domains that are NOT NULL.
    """

    column: str
    base_type: str
    base_oid: int
    typmod: int = -1
    checks: tuple[CheckConstraint, ...] = ()
    not_null: tuple[str, ...] = ()

    @property
    def length(self) -> int | None:
        """Returns the maximum number of characters or bits (of ``bit``: the exact number), or
        None.
        """
        if self.typmod < 0 or self.base_oid not in (BPCHAR_OID, VARCHAR_OID, BIT_OID, VARBIT_OID):
            return None
        return self.typmod - (VARHDRSZ if self.base_oid in (BPCHAR_OID, VARCHAR_OID) else 0)

    @property
    def precision(self) -> tuple[int, int] | None:
        """Returns a numeric's digits and its scale, which may be negative or exceed the digits."""
        return precision_and_scale(self.typmod) if self.base_oid == NUMERIC_OID else None


def read_declared_types(
    connection: psycopg.Connection[Any], states: Sequence[TableState], landed_as_of: int
) -> dict[str, tuple[DeclaredType, ...]]:
    """Returns by target what the declared types of its columns guarantee; other columns are left
    out.

    Only validated constraints of transactions that have landed count (all below this xid8 have). Of
    a changed length limit the wider one counts, because the target follows with the next change.
    """
    sources = {
        state.table_name: state.root_id or next(iter(state.relation_ids), 0) for state in states
    }
    rows = fetch(
        connection, _TYPES, {"oids": sorted({*sources.values()} - {0}), "limited": list(_LIMITED)}
    )
    by_relation: dict[int, list[Any]] = {}
    for row in rows:
        by_relation.setdefault(row.relation_id, []).append(row)
    declared = {
        state.table_name: tuple(
            one
            for row in by_relation.get(sources[state.table_name], ())
            if (one := _declared_type(state, row, landed_as_of)) is not None
        )
        for state in states
    }
    return {name: of for name, of in declared.items() if of}


def _declared_type(state: TableState, row: Any, landed_as_of: int) -> DeclaredType | None:
    # Number and type are compared too: another column may have the name by now, and the target
    # follows a change of type with the next change.
    column = next((c for c in state.columns if c.name_on_source == row.name), None)
    if column is None or column.attnum not in (0, row.attnum) or column.type_oid != row.type_oid:
        return None
    domains = [domain for domain in row.domains or () if is_before(domain["xmin"], landed_as_of)]
    checks = [
        CheckConstraint(check["name"], check["expression"])
        for domain in row.domains or ()
        for check in domain["checks"] or ()
        if not row.is_loose and is_before(check["xmin"], landed_as_of)
    ]
    not_null = tuple(domain["name"] for domain in domains if domain["not_null"])
    typmod = row.typmod if row.domains else _wider(column, row)
    if typmod < 0 and not checks and not not_null:
        return None
    return DeclaredType(row.name, row.base_type, row.base_oid, typmod, tuple(checks), not_null)


def _wider(column: ColumnState, row: Any) -> int:
    if column.typmod < 0 or row.typmod < 0:
        return -1
    if row.base_oid in (NUMERIC_OID, BIT_OID):  # Another scale or length changes the values.
        return column.typmod if column.typmod == row.typmod else -1
    return max(column.typmod, int(row.typmod))


def base_columns(state: TableState, declared: Collection[DeclaredType]) -> list[ColumnState]:
    """Returns the target's columns with the base type's name for domains, as expressions see
    them.
    """
    bases = {one.column: one.base_type for one in declared}
    return [
        replace(column, type_name=bases.get(column.name_on_source, column.type_name))
        for column in state.columns
    ]


# A domain may be based on another domain; only the innermost can have a type modifier.
_TYPES = """
with recursive part (relation_id, attnum, attname, type_oid, oid, typmod, kind, below,
                     below_typmod, depth) as (
    select a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypid, a.atttypmod, t.typtype,
      t.typbasetype, t.typtypmod, 0
    from pg_attribute a
    join pg_type t on t.oid = a.atttypid
    where a.attrelid = any(%(oids)s::oid[])
      and a.attnum > 0
      and not a.attisdropped
      and (t.typtype = 'd' or (a.atttypid = any(%(limited)s::oid[]) and a.atttypmod >= 0))
    union all
    select p.relation_id, p.attnum, p.attname, p.type_oid, t.oid, p.below_typmod, t.typtype,
      t.typbasetype, t.typtypmod, p.depth + 1
    from part p
    join pg_type t on t.oid = p.below
    where p.kind = 'd'
)
select b.relation_id::bigint,
       b.attnum::int,
       b.attname as name,
       b.type_oid::bigint,
       b.oid::bigint as base_oid,
       b.typmod,
       format_type(b.oid, b.typmod) as base_type,
       exists (
           select from pg_attribute a
           join pg_collation l on l.oid = a.attcollation
           where a.attrelid = b.relation_id and a.attnum = b.attnum and not l.collisdeterministic
       ) as is_loose,
       (
           select json_agg(json_build_object(
               'name', format_type(d.oid, null),
               'not_null', t.typnotnull,
               'xmin', t.xmin::text::bigint,
               'checks', (
                   select json_agg(json_build_object(
                       'name', k.conname, 'expression', pg_get_expr(k.conbin, 0), 'xmin',
                         k.xmin::text::bigint
                   ) order by k.conname)
                   from pg_constraint k
                   where k.contypid = d.oid and k.contype = 'c' and k.convalidated
               )
           ) order by d.depth)
           from part d
           join pg_type t on t.oid = d.oid
           where d.relation_id = b.relation_id and d.attnum = b.attnum and d.kind = 'd'
       ) as domains
from part b
where b.kind <> 'd'
order by 1, 2
"""


def read_enums(
    connection: psycopg.Connection[Any], states: Sequence[TableState]
) -> dict[str, dict[str, EnumType]]:
    """Returns by target and column of the source the enums, with their current labels, of which
    columns or their domains are.

    A label added later does no harm; a renamed label requires a resync of the table.
    """
    types = {column.type_oid for state in states for column in state.columns}
    if not types:
        return {}
    rows = connection.execute(_LABELS, (sorted(types),))
    enums = {oid: EnumType(name, tuple(labels)) for oid, name, labels in rows}
    return {
        state.table_name: enums_of_columns
        for state in states
        if (
            enums_of_columns := {
                c.name_on_source: enums[c.type_oid] for c in state.columns if c.type_oid in enums
            }
        )
    }


# A domain may be based on another domain.
_LABELS = """
with recursive base as (
    select t.oid as asked, t.oid, t.typtype, t.typbasetype from pg_type t
      where t.oid = any (%s::oid[])
    union all
    select b.asked, t.oid, t.typtype, t.typbasetype from base b join pg_type t
      on t.oid = b.typbasetype where b.typtype = 'd'
)
select b.asked::bigint, format_type(b.oid, null),
       array_agg(e.enumlabel::text order by e.enumsortorder)
from base b
join pg_enum e on e.enumtypid = b.oid
where b.typtype = 'e'
group by 1, 2
"""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column on one side of a foreign key: number, name, and type oid (of a domain, its base
    type).
    """

    attnum: int
    name: str
    base_oid: int


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A validated foreign key: ``referring`` columns of one table refer to ``referenced`` columns.

    The referenced table may be the same one; if it is partitioned, ``leaves`` are the oids of its
    leaf partitions. ``obstacle`` is the reason why Spark can't judge the key as PostgreSQL does, or
    None.
    """

    name: str
    table_id: int
    table_name: str
    referenced_id: int
    referenced_name: str
    referring: tuple[KeyColumn, ...]
    referenced: tuple[KeyColumn, ...]
    is_full: bool = False
    leaves: frozenset[int] = field(default_factory=frozenset)
    obstacle: str | None = None


def read_foreign_keys(
    connection: psycopg.Connection[Any], relation_ids: Collection[int], landed_as_of: int
) -> list[ForeignKey]:
    """Returns the validated foreign keys from or to these relations, by table and name.

    Keys are left out when a transaction that hasn't landed (xid8 from ``landed_as_of`` on) created
    them or changed one of their columns. A partition's own row for the key of its parent table
    counts; the rows that a key needs for each partition it refers to don't.
    """
    rows = fetch(connection, _KEYS, {"oids": sorted(relation_ids)})
    return [
        ForeignKey(
            row.name,
            row.table_id,
            row.table_name,
            row.referenced_id,
            row.referenced_name,
            tuple(KeyColumn(**column) for column in row.referring),
            tuple(KeyColumn(**column) for column in row.referenced),
            row.is_full,
            frozenset(row.leaves),
            row.obstacle,
        )
        for row in rows
        if all(is_before(xmin, landed_as_of) for xmin in row.xmins)
    ]


# For each partition that refers or is referred to, pg_constraint has a row below the key's own
# (conparentid). Columns that older releases lack are read through jsonb.
_KEYS = """
with recursive key (oid, top, parent) as (
    select k.oid, k.oid, k.conparentid
    from pg_constraint k
    where k.contype = 'f'
      and k.convalidated
      and coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
      and (k.conrelid = any(%(oids)s::oid[]) or k.confrelid = any(%(oids)s::oid[]))
    union all
    select key.oid, up.oid, up.conparentid
    from key
    join pg_constraint up on up.oid = key.parent
),
base (asked, oid, kind, below) as (
    select t.oid, t.oid, t.typtype, t.typbasetype
    from pg_type t
    where t.oid in (
        select a.atttypid
        from pg_constraint k
        join pg_attribute a on a.attrelid in (k.conrelid, k.confrelid)
        where k.oid in (select oid from key)
    )
    union all
    select b.asked, t.oid, t.typtype, t.typbasetype
    from base b
    join pg_type t on t.oid = b.below
    where b.kind = 'd'
),
tree (root, oid) as (
    select distinct k.confrelid, i.inhrelid
    from pg_constraint k
    join pg_class c on c.oid = k.confrelid and c.relkind = 'p'
    join pg_inherits i on i.inhparent = c.oid
    where k.oid in (select oid from key)
    union all
    select tree.root, i.inhrelid
    from tree
    join pg_inherits i on i.inhparent = tree.oid
)
select k.conname as name,
       k.conrelid::bigint as table_id,
       concat(quote_ident(n.nspname), '.', quote_ident(c.relname)) as table_name,
       k.confrelid::bigint as referenced_id,
       concat(quote_ident(rn.nspname), '.', quote_ident(r.relname)) as referenced_name,
       k.confmatchtype = 'f' as is_full,
       case
         when (to_jsonb(k) ->> 'conperiod')::boolean then 'it is a temporal key'
         when (select bool_and(o.oprnamespace = 'pg_catalog'::regnamespace) from pg_operator o
           where o.oid = any(k.conpfeqop)) is not true
         then 'it compares by an operator that isn''t built into PostgreSQL'
         when exists (
           select from pg_attribute a
           join pg_collation l on l.oid = a.attcollation
           where not l.collisdeterministic
             and ((a.attrelid = k.conrelid and a.attnum = any(k.conkey))
               or (a.attrelid = k.confrelid and a.attnum = any(k.confkey)))
         ) then 'a column''s collation treats different texts as equal'
       end as obstacle,
       own.columns as referring,
       other.columns as referenced,
       k.xmin::text::bigint || own.xmins || other.xmins as xmins,
       array(
           select tree.oid::bigint
           from tree
           join pg_class leaf on leaf.oid = tree.oid and leaf.relkind <> 'p'
           where tree.root = k.confrelid
       ) as leaves
from key
join pg_constraint k on k.oid = key.oid
join pg_constraint top on top.oid = key.top and top.confrelid = k.confrelid
join pg_class c on c.oid = k.conrelid
join pg_namespace n on n.oid = c.relnamespace
join pg_class r on r.oid = k.confrelid
join pg_namespace rn on rn.oid = r.relnamespace
cross join lateral (
    select json_agg(json_build_object(
             'attnum', a.attnum, 'name', a.attname, 'base_oid', b.oid::bigint
           ) order by p.place) as columns,
           array_agg(a.xmin::text::bigint) as xmins
    from unnest(k.conkey) with ordinality as p (attnum, place)
    join pg_attribute a on a.attrelid = k.conrelid and a.attnum = p.attnum
    join base b on b.asked = a.atttypid and b.kind <> 'd'
) as own
cross join lateral (
    select json_agg(json_build_object(
             'attnum', a.attnum, 'name', a.attname, 'base_oid', b.oid::bigint
           ) order by p.place) as columns,
           array_agg(a.xmin::text::bigint) as xmins
    from unnest(k.confkey) with ordinality as p (attnum, place)
    join pg_attribute a on a.attrelid = k.confrelid and a.attnum = p.attnum
    join base b on b.asked = a.atttypid and b.kind <> 'd'
) as other
where key.parent = 0
order by 3, 1
"""
