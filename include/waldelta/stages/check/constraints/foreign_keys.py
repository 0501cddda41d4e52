"""Foreign keys of source tables: which rows of a target must have a matching row in this or another
target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from waldelta.postgres.type_catalog import fetch
from waldelta.stages.check.constraints.check_constraints import is_before


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
    return [_key(row) for row in rows if all(is_before(xmin, landed_as_of) for xmin in row.xmins)]


def _key(row: Any) -> ForeignKey:
    obstacle = None
    if row.is_temporal:
        obstacle = "it is a temporal key"
    elif not row.is_builtin:
        obstacle = "it compares by an operator that isn't built into PostgreSQL"
    elif row.is_loose:
        obstacle = "a column's collation treats different texts as equal"
    return ForeignKey(
        row.name,
        row.table_id,
        row.table_name,
        row.referenced_id,
        row.referenced_name,
        _columns(row.referring),
        _columns(row.referenced),
        row.is_full,
        frozenset(row.leaves),
        obstacle,
    )


def _columns(described: Iterable[dict[str, Any]]) -> tuple[KeyColumn, ...]:
    return tuple(
        KeyColumn(column["attnum"], column["name"], column["base"]) for column in described
    )


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
       coalesce((to_jsonb(k) ->> 'conperiod')::boolean, false) as is_temporal,
       (select bool_and(o.oprnamespace = 'pg_catalog'::regnamespace) from pg_operator o
         where o.oid = any(k.conpfeqop)) as is_builtin,
       exists (
           select from pg_attribute a
           join pg_collation l on l.oid = a.attcollation
           where not l.collisdeterministic
             and ((a.attrelid = k.conrelid and a.attnum = any(k.conkey))
               or (a.attrelid = k.confrelid and a.attnum = any(k.confkey)))
       ) as is_loose,
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
    select json_agg(json_build_object('attnum', a.attnum, 'name', a.attname, 'base', b.oid::bigint)
      order by p.place) as columns,
           array_agg(a.xmin::text::bigint) as xmins
    from unnest(k.conkey) with ordinality as p (attnum, place)
    join pg_attribute a on a.attrelid = k.conrelid and a.attnum = p.attnum
    join base b on b.asked = a.atttypid and b.kind <> 'd'
) as own
cross join lateral (
    select json_agg(json_build_object('attnum', a.attnum, 'name', a.attname, 'base', b.oid::bigint)
      order by p.place) as columns,
           array_agg(a.xmin::text::bigint) as xmins
    from unnest(k.confkey) with ordinality as p (attnum, place)
    join pg_attribute a on a.attrelid = k.confrelid and a.attnum = p.attnum
    join base b on b.asked = a.atttypid and b.kind <> 'd'
) as other
where key.parent = 0
order by 3, 1
"""
