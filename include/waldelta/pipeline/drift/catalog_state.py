"""Reads from the source's catalogs the current columns of replicated tables, and how their rows are
stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from waldelta.lake.ledger import StorageState, TableState
from waldelta.lake.ledger.records import AttributeState, FileState, LabelState
from waldelta.metadata_columns import RELID, RELID_ATTNUM
from waldelta.postgres import PARTS_OF_TYPE, TableId, fetch


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column as the source's catalogs describe it now.

    ``missing`` is the value shown by rows older than the column (pg_attribute.attmissingval, as
    text). ``unsure`` is True when such rows may hold values that no catalog has: a default or NOT
    NULL without a missing value, or a generated column.
    """

    attnum: int
    missing: str | None
    unsure: bool
    # The highest number, below this column's, of a dropped column.
    last_dropped: int = 0
    # The oid of its type, and its modifier; the type's name.
    type: tuple[int, int] = (0, -1)
    type_name: str = ""


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table as the source's catalogs describe it now: its columns by name, its storage and its
    key.

    ``key`` has the attribute numbers of the key that a new copy would use: the columns of the
    replica identity index, else of the primary key. It is None when the key isn't known.
    ``attached`` has the leaves, by oid, that were tables before they became partitions of this one,
    directly or below another partition. ``truncated`` has the leaves that an unreplicated TRUNCATE
    may have emptied. ``truncated_alone`` has those of them that a TRUNCATE of the whole table
    doesn't explain (see waldelta.pipeline.drift.unsent_changes). ``above`` has the tables between
    each leaf and the root, by oid. ``name`` is the table's current name, and None when the table
    doesn't exist. ``is_replaced`` is True when another table now has the name that this table had
    when it was copied.
    """

    columns: dict[str, CatalogColumn] = field(default_factory=dict)
    storage: StorageState = field(default_factory=StorageState)
    key: frozenset[int] | None = None
    attached: dict[int, str] = field(default_factory=dict)
    truncated: frozenset[int] = frozenset()
    truncated_alone: frozenset[int] = frozenset()
    above: dict[int, frozenset[int]] = field(default_factory=dict)
    name: TableId | None = None
    is_replaced: bool = False


def read_catalog_tables(
    connection: psycopg.Connection[Any], relation_ids: Iterable[int]
) -> dict[int, CatalogTable]:
    """Returns those of these relations that exist, by oid.

    The columns of a partitioned table include what old rows of its leaves show. One statement reads
    everything, because files and columns that are compared with earlier ones must be of the same
    moment.
    """
    rows = fetch(connection, _TABLES, {"oids": list(relation_ids), "most": MOST_OBJECTS})
    return {row.oid: _table(row) for row in rows}


def read_catalog_state(
    connection: psycopg.Connection[Any], states: Sequence[TableState]
) -> dict[str, CatalogTable]:
    """Returns the current catalog state of each target's table, by the target's name.

    One read of the catalogs serves all targets, and is later than everything that was landed.
    """
    if not states:
        return {}
    by_oid = read_catalog_tables(
        connection, {oid for s in states for oid in (*s.relation_ids, s.root_id) if oid}
    )
    tables = {state.table_name: _catalog_table(state, by_oid) for state in states}
    copied_as = {
        state.table_name: TableId.parse(state.source_table or state.table_name) for state in states
    }
    renamed = {
        name: copied_as[name]
        for name, table in tables.items()
        if table.name not in (None, copied_as[name])
    }
    params = {
        "schemas": [table.schema for table in renamed.values()],
        "names": [table.name for table in renamed.values()],
    }
    # A view can't be published in a table's place, and doesn't count.
    names = (
        {TableId(row.schema, row.name) for row in fetch(connection, _NAMED, params)}
        if renamed
        else set()
    )
    return tables | {
        name: replace(tables[name], is_replaced=True)
        for name, table_id in renamed.items()
        if table_id in names
    }


def _catalog_table(state: TableState, by_oid: Mapping[int, CatalogTable]) -> CatalogTable:
    nothing = CatalogTable()
    if state.root_id is None:
        return next((by_oid[oid] for oid in state.relation_ids if oid in by_oid), nothing)
    root = by_oid.get(state.root_id, nothing)
    root = replace(root, storage=stored(root, state.relation_ids))
    leaves = [by_oid[oid] for oid in state.relation_ids if oid in by_oid]
    return merged_table(root, leaves) if RELID in state.key_columns else root


def stored(table: CatalogTable, leaves: Collection[int]) -> StorageState:
    """Returns how a partitioned table's rows are stored, with only the files of these leaves."""
    return replace(
        table.storage, files=[file for file in table.storage.files if file.oid in leaves]
    )


def merged_table(root: CatalogTable, leaves: Sequence[CatalogTable]) -> CatalogTable:
    """Returns the root with the key of a target that merges its leaves: leaf, and leaf's key.

    It has no key where the leaves' keys differ.
    """
    keys = {
        frozenset(
            root.columns[name].attnum
            for name, c in leaf.columns.items()
            if c.attnum in (leaf.key or ())
        )
        for leaf in leaves
    }
    key = keys.pop() if len(keys) == 1 else frozenset()
    return replace(root, key=key | {RELID_ATTNUM} if key else key)


def _table(row: Any) -> CatalogTable:
    columns = {
        c["name"]: CatalogColumn(
            c["attnum"],
            c["missing"][0] if c["missing"] else None,
            len(c["missing"]) > 1
            if c["missing"] is not None
            else bool(c["has_default"] or c["not_null"] or c["is_generated"]),
            c["last_dropped"] or 0,
            (c["type_oid"], c["typmod"]),
            c["type_name"],
        )
        for c in row.columns
    }
    attributes = [
        AttributeState(
            c["attnum"], c["xmin"], c["has_missing"], c["default_oid"], c["name"], c["comment"]
        )
        for c in row.columns
    ]
    labels = [LabelState(*label) for label in row.labels or ()]
    storage = StorageState(
        [FileState(*file[:3]) for file in row.files], attributes, labels, row.as_of
    )
    attached = {file[0]: file[3] for file in row.files if file[4]}
    above = {file[0]: frozenset(file[5]) for file in row.files}
    name = TableId(row.schema, row.name)
    return CatalogTable(
        columns, storage, frozenset(row.key_numbers), attached, above=above, name=name
    )


# With more objects of a kind, what is recorded is a digest for each schema; with more schemas than
# that, one for all.
MOST_OBJECTS = 1000
# PostgreSQL prints an enum's values, a composite type's attributes and the objects that a value
# names as the catalogs have them at that moment. That holds within arrays, domains, ranges and
# other composite types, too. Built-in types that name objects are regclass and its kind, and
# aclitem, which names roles. The system's own objects can't be renamed, except for schema public
# and the first role; temporary ones come and go.
#
# A table that was created as a partition got its row of pg_inherits from the transaction that wrote
# its system columns. Detaching and attaching a table, or a table between it and the root, replaces
# that row. So a leaf counts as attached when it, or a table above it, was attached after the leaf
# was created. age() is negative for a transaction that is too old for it.
#
# pg_partition_tree() would lock each partition, and wait for sessions that lock one. A partitioned
# table has no rows, so its leaves have the values that old rows show. pg_relation_filenode() would
# show another moment than the rows of pg_attribute.
_NAMED = """
select n.nspname::text as schema, c.relname::text as name
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join unnest(%(schemas)s::text[], %(names)s::text[]) as w (schema, name)
  on n.nspname = w.schema and c.relname = w.name
where c.relkind in ('r', 'p')
"""

_TABLES = f"""
with recursive printing (oid) as (
    select n.oid
    from pg_type t
    cross join lateral (values (t.oid), (t.typarray)) as n (oid)
    where t.typnamespace = 'pg_catalog'::regnamespace
      and t.typname in (
          'regclass', 'regtype', 'regproc', 'regprocedure', 'regoper', 'regoperator',
          'regcollation', 'regconfig', 'regdictionary', 'regnamespace', 'regrole', 'aclitem'
      )
),
relation as (
    select c.oid, n.nspname::text as schema, c.relname::text as name, c.relkind, c.relreplident
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where c.oid = any(%(oids)s::oid[])
),
tree (root, oid, is_leaf, inherits, above, made, attached) as (
    select r.oid, r.oid, false, null::text, '{{}}'::bigint[], 0, null::int from relation r
      where r.relkind = 'p'
    union all
    select t.root, i.inhrelid, c.relkind <> 'p', concat_ws(' ', i.xmin, t.inherits),
           case when t.oid = t.root then t.above else t.oid::bigint || t.above end,
           age(a.xmin),
           least(t.attached, case when i.xmin <> a.xmin and age(i.xmin) >= 0 then age(i.xmin) end)
    from tree t
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
    join pg_class c on c.oid = i.inhrelid
    join pg_attribute a on a.attrelid = i.inhrelid and a.attnum = -1
    where not t.is_leaf
),
leaf as (
    select r.oid as root, l.oid, l.relfilenode, l.oid::regclass::text as name, t.inherits,
      coalesce(t.above, '{{}}') as above,
           t.attached is not null and (t.made < 0 or t.made >= t.attached) as is_attached
    from relation r
    left join tree t on t.root = r.oid and t.is_leaf
    join pg_class l on l.oid = coalesce(t.oid, r.oid)
),
attribute as (
    select leaf.root,
           a.attname as name,
           min(a.attnum)::int as attnum,
           min(a.atttypid::oid::bigint) as type_oid,
           min(a.atttypmod) as typmod,
           min(format_type(a.atttypid, a.atttypmod)) as type_name,
           min(a.xmin::text::bigint) as xmin,
           bool_or(a.atthasmissing) as has_missing,
           min(d.oid::bigint) as default_oid,
           min(said.description) as comment,
           bool_or(a.atthasdef or coalesce(l.atthasdef, false)) as has_default,
           bool_or(a.attnotnull) as not_null,
           max((select max(d.attnum) from pg_attribute d
                where d.attrelid = a.attrelid and d.attisdropped and d.attnum < a.attnum))
                  as last_dropped,
           bool_or(a.attgenerated <> '' or a.attidentity <> '') as is_generated,
           array_agg(distinct (l.attmissingval::text::text[])[1]) filter (where l.atthasmissing)
             as missing
    from leaf
    join pg_attribute a on a.attrelid = leaf.root and a.attnum > 0 and not a.attisdropped
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    left join pg_attribute l on l.attrelid = leaf.oid and l.attname = a.attname
      and not l.attisdropped
    left join pg_description said on said.objoid = a.attrelid and said.objsubid = a.attnum
      and said.classoid = 'pg_class'::regclass
    group by leaf.root, a.attname
),
part (root, attnum, oid) as (
    select r.oid, a.attnum, a.atttypid
    from relation r
    join pg_attribute a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
      and (a.atttypid >= 16384 or a.atttypid in (select oid from printing))
    union
    select p.root, p.attnum, inner_type.oid
    from part p
    join pg_type t on t.oid = p.oid
    cross join lateral (
        {PARTS_OF_TYPE}
    ) as inner_type (oid)
    where inner_type.oid >= 16384 or inner_type.oid in (select oid from printing)
),
named (root, attnum, kind, oid, schema, label) as (
    select p.root, p.attnum, p.oid, o.oid, o.schema, o.name
    from part p
    cross join lateral (
        select c.oid, c.relnamespace, c.oid::regclass::text
        from pg_class c where p.oid = 'regclass'::regtype and c.oid >= 16384
        union all
        select t.oid, t.typnamespace, t.oid::regtype::text
        from pg_type t where p.oid = 'regtype'::regtype and t.oid >= 16384
        union all
        select f.oid, f.pronamespace, f.oid::regproc::text
        from pg_proc f where p.oid = 'regproc'::regtype and f.oid >= 16384
        union all
        select f.oid, f.pronamespace, f.oid::regprocedure::text
        from pg_proc f where p.oid = 'regprocedure'::regtype and f.oid >= 16384
        union all
        select o.oid, o.oprnamespace, o.oid::regoper::text
        from pg_operator o where p.oid = 'regoper'::regtype and o.oid >= 16384
        union all
        select o.oid, o.oprnamespace, o.oid::regoperator::text
        from pg_operator o where p.oid = 'regoperator'::regtype and o.oid >= 16384
        union all
        select c.oid, c.collnamespace, c.oid::regcollation::text
        from pg_collation c where p.oid = 'regcollation'::regtype and c.oid >= 16384
        union all
        select c.oid, c.cfgnamespace, c.oid::regconfig::text
        from pg_ts_config c where p.oid = 'regconfig'::regtype and c.oid >= 16384
        union all
        select d.oid, d.dictnamespace, d.oid::regdictionary::text
        from pg_ts_dict d where p.oid = 'regdictionary'::regtype and d.oid >= 16384
        union all
        select n.oid, n.oid, n.nspname::text
        from pg_namespace n where p.oid = 'regnamespace'::regtype
        union all
        select r.oid, 'pg_catalog'::regnamespace, r.rolname::text
        from pg_roles r where p.oid in ('regrole'::regtype, 'aclitem'::regtype)
    ) as o (oid, schema, name)
    where o.schema not in ('pg_toast'::regnamespace, pg_my_temp_schema())
      and not pg_is_other_temp_schema(o.schema)
),
counted as (
    select *,
           count(*) over (partition by root, attnum, kind) <= %(most)s as are_few,
           dense_rank() over (partition by root, attnum, kind order by schema) as rank
    from named
),
grouped as (
    select *, max(rank) over (partition by root, attnum, kind) <= %(most)s as by_schema
    from counted
    where not are_few
),
label (root, attnum, oid, label) as (
    select p.root, p.attnum, e.oid, e.enumlabel::text from part p join pg_enum e
      on e.enumtypid = p.oid
    union all
    select p.root, p.attnum, t.oid, string_agg(c.attnum::text, ' ' order by c.attnum)
    from part p
    join pg_type t on t.oid = p.oid and t.typtype = 'c'
    left join pg_attribute c on c.attrelid = t.typrelid and c.attnum > 0 and not c.attisdropped
    group by p.root, p.attnum, t.oid
    union all
    select root, attnum, oid, label from counted where are_few
    union all
    select root, attnum, schema,
           case when schema <> 'pg_catalog'::regnamespace then schema::regnamespace || '.' else ''
             end || '* ' || md5(string_agg(oid || ' ' || label, ',' order by oid))
    from grouped
    where by_schema
    group by root, attnum, kind, schema
    union all
    select root, attnum, kind, '* ' || md5(string_agg(oid || ' ' || label, ',' order by oid))
    from grouped
    where not by_schema
    group by root, attnum, kind
)
select r.oid,
       r.schema,
       r.name,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as as_of,
       (select json_agg(json_build_array(l.oid::bigint, l.relfilenode::bigint, l.inherits, l.name,
         l.is_attached, l.above) order by l.oid)
        from leaf l where l.root = r.oid) as files,
       (select json_agg(json_build_array(l.attnum, l.oid::bigint, coalesce(l.label, ''))
         order by l.attnum, l.oid, l.label)
        from label l where l.root = r.oid) as labels,
       array(select k.attnum::int
             from pg_index i, unnest(i.indkey::int2[]) with ordinality as k (attnum, position)
             where i.indrelid = r.oid and i.indisvalid and i.indimmediate
               and k.position <= i.indnkeyatts
               and case r.relreplident when 'i' then i.indisreplident else i.indisprimary end)
                 as key_numbers,
       (select json_agg(row_to_json(a) order by a.attnum) from attribute a where a.root = r.oid)
         as columns
from relation r
where exists (select from attribute a where a.root = r.oid)
"""  # noqa: S608 - no value in it
