"""Which tables publications publish, and how: the tables of a subscriber to all of them.

The connection must come from ``connection.connect``: its search_path determines how filters are
printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from waldelta.errors import SourceError
from waldelta.postgres.catalog import (
    CatalogRelation,
    Leaf,
    PublishedRelation,
    PublishedTable,
    TableId,
    read_leaves,
    read_relations,
)
from waldelta.postgres.connection import Connection
from waldelta.postgres.publication_membership import Membership
from waldelta.postgres.type_catalog import fetch

# Members (publication, relid) of the publications %(publications)s, by the rules of
# pg_get_publication_tables(). FOR ALL TABLES includes all tables that can be published. Otherwise
# members are tables listed by name or schema: without partitions of a listed root when the root
# publishes, and as the root's leaves when it doesn't. It begins a statement.
MEMBERS = """
with recursive named as (
    select p.oid, p.puballtables, p.pubviaroot
    from pg_publication p
    where p.pubname = any(%(publications)s::name[])
),
entered (publication, relid) as (
    select r.prpubid, r.prrelid from named p join pg_publication_rel r on r.prpubid = p.oid
    union
    select s.pnpubid, c.oid
    from named p
    join pg_publication_namespace s on s.pnpubid = p.oid
    join pg_class c on c.relnamespace = s.pnnspid
    where c.relkind in ('r', 'p') and pg_relation_is_publishable(c.oid)
),
below (publication, relid) as (
    select e.publication, e.relid from entered e join named p on p.oid = e.publication
      and not p.pubviaroot
    union
    select b.publication, i.inhrelid
    from below b
    join pg_class c on c.oid = b.relid and c.relkind = 'p'
    join pg_inherits i on i.inhparent = b.relid and not i.inhdetachpending
),
member (publication, relid) as (
    select p.oid, c.oid
    from named p
    join pg_class c on case when p.pubviaroot then c.relkind in ('r', 'p') and not c.relispartition
      else c.relkind = 'r' end
    where p.puballtables and pg_relation_is_publishable(c.oid)
    union all
    select e.publication, e.relid
    from named p
    join entered e on e.publication = p.oid
    where p.pubviaroot
      and not exists (
          select from pg_partition_ancestors(e.relid) a
          join entered above on above.publication = e.publication and above.relid = a.relid
          where a.relid <> e.relid
      )
    union all
    select b.publication, b.relid from below b join pg_class c on c.oid = b.relid
      and c.relkind <> 'p'
)"""


def read_published_tables(
    conn: Connection,
    publication_names: Sequence[str],
    *,
    sizes: bool = True,
    locked: Collection[int] = (),
    oids: Collection[int] | None = None,
) -> list[PublishedTable]:
    """Returns the tables that a subscriber to these publications would have, sorted by name.

    With publish_via_partition_root these are partition roots, without it leaves. A partition whose
    ancestor is published via root by any of the publications counts as part of that ancestor, as in
    pgoutput. Raises SourceError when the publications give one table different column lists,
    because decoding would fail permanently. ``sizes``: see read_leaves(). Row filters and sizes are
    read under a lock on their tables, except for those (oids) that are ``locked``. With ``oids``,
    other relations than these and the roots above them aren't read.
    """
    members: dict[int, list[Any]] = {}
    names = {
        "publications": list(publication_names),
        "locked": list(locked),
        "oids": None if oids is None else list(oids),
    }
    for row in fetch(conn, _MEMBERSHIPS, names):
        members.setdefault(row.oid, []).append(row)
    relations = read_relations(conn, list(members))
    roots = [r for r in relations if not members.keys() & set(r.ancestors)]
    for root in roots:
        _check_columns(members[root.oid])
    # A table that publishes no column has no target: a Delta table needs one.
    roots = [root for root in roots if members[root.oid][0].column_names]
    leaves = read_leaves(conn, [r.oid for r in roots], sizes=sizes, locked=locked)
    return sorted(
        (_build_published_table(r, members[r.oid], leaves[r.oid]) for r in roots),
        key=lambda table: table.id,
    )


def read_published_relations(
    conn: Connection, publication_names: Sequence[str]
) -> list[PublishedRelation]:
    """Returns the tables of read_published_tables() in short, with one statement, for every idle
    check.
    """
    rows = fetch(conn, _PUBLISHED, {"publications": list(publication_names)})
    return [
        PublishedRelation(
            TableId(r.schema, r.name), r.oid, r.relkind, tuple(r.ancestors), r.is_late
        )
        for r in rows
    ]


def filtered_tables(connection: Connection, publication_names: Sequence[str]) -> list[str]:
    """Returns the tables whose rows these publications filter now."""
    rows = connection.execute(
        """
        select distinct n.nspname || '.' || c.relname
        from pg_publication p
        join pg_publication_rel r on r.prpubid = p.oid and r.prqual is not null
        join pg_class c on c.oid = r.prrelid
        join pg_namespace n on n.oid = c.relnamespace
        where p.pubname = any(%s::name[])
        order by 1
        """,
        (list(publication_names),),
    )
    return [name for (name,) in rows]


def _check_columns(rows: Sequence[Any]) -> None:
    """Raise SourceError when publications give one table different columns.

    This doesn't matter for a partition that counts as part of its root.
    """
    for number, row in enumerate(rows):
        if set(row.column_names) != set(rows[0].column_names):
            earlier = ", ".join(earlier_row.publication for earlier_row in rows[:number])
            raise SourceError(
                f"publications {earlier} and {row.publication} give"
                f" {TableId(row.schema, row.name)} different column lists, which pgoutput can't"
                " decode: give the table the same columns in all publications of one slot"
            )


def _build_published_table(
    relation: CatalogRelation, rows: Sequence[Any], leaves: tuple[Leaf, ...]
) -> PublishedTable:
    """Returns the table that publications publish as ``rows`` of _MEMBERSHIPS say."""
    entries = (
        Membership(
            row.oid, row.publication_oid, frozenset(row.entries), row.version, row.owner,
            row.options, frozenset(row.publishes), row.row_filter, row.column_list, row.is_apart,
        )
        for row in rows
    )  # fmt: skip
    filters, publishes = [row.row_filter for row in rows], [row.publishes for row in rows]
    return replace(
        published_table(relation, rows[0].column_names, filters, publishes, leaves),
        publications=tuple(row.publication for row in rows),
        entries=frozenset(entries),
        unread=any(row.is_unread for row in rows),
    )


def published_table(
    relation: CatalogRelation,
    names: Collection[str],
    filters: Collection[str | None],
    publishes: Iterable[Collection[str]],
    leaves: tuple[Leaf, ...],
) -> PublishedTable:
    """Returns a relation as publications publish it: these columns, and each publication's filter
    and operations.
    """
    # Old tuples of UPDATE and DELETE contain only the identity index's columns, so with such an
    # index the primary key doesn't help.
    key = relation.identity_columns if relation.replica_identity == "i" else relation.primary_key
    return PublishedTable(
        id=relation.id,
        oid=relation.oid,
        relkind=relation.relkind,
        replica_identity=relation.replica_identity,
        columns=tuple(c for c in relation.columns if c.name in names),
        key_columns=key if set(key) <= set(names) else (),
        primary_key=relation.primary_key,
        identity_columns=relation.identity_columns,
        row_filter=combined_filter(filters),
        leaves=leaves,
        relation_ids=(relation.oid,),
        publishes=frozenset().union(*publishes),
        ancestors=relation.ancestors,
    )


def combined_filter(filters: Collection[str | None]) -> str | None:
    """Returns the filter of a table that several publications have: its rows pass any of theirs.

    None is a publication's entry without a filter.

    >>> combined_filter(["b", "a", "b"]), combined_filter(["a"]), combined_filter(["a", None])
    ('(a) OR (b)', 'a', None)
    """
    return None if None in filters else any_filter(sorted(set(filter(None, filters))))


def any_filter(filters: Sequence[str]) -> str:
    """Returns a filter that is true where one of these is, of which there is at least one."""
    return filters[0] if len(filters) == 1 else " OR ".join(f"({text})" for text in filters)


# Before 18, generated columns are never sent, though 15's view lists them; from 18 on, a column
# list sends whatever it names. A list or filter of a table is ignored when its schema, or FOR ALL
# TABLES, publishes the table, too. See waldelta.postgres.publication_membership for how versions of
# an entry or a publication are distinguished.
#
# A table may also leave an entry that itself stays unchanged: a partition that is detached leaves
# the entry of a table above it, and a table that is moved to another schema leaves its schema's
# entry. When it returns, it has another row of pg_inherits or pg_depend. So an entry's name
# includes those rows through which it applies; for a schema's entry, those of the nearest table.
_SENT_COLUMNS = """
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid
             and a.attnum > 0
             and not a.attisdropped
             and case
                     when said.prattrs is not null then
                         a.attnum = any(said.prattrs::int2[])
                         and (a.attgenerated = '' or current_setting('server_version_num')::int >=
                           180000)
                     else a.attgenerated = '' or (a.attgenerated = 's'
                       and to_jsonb(p) ->> 'pubgencols' = 's')
                 end
       """
_OWN_RULES = """left join pg_publication_rel said
       on said.prpubid = p.oid and said.prrelid = c.oid and not p.puballtables
      and not exists (
          select from pg_publication_namespace s where s.pnpubid = p.oid
            and s.pnnspid = c.relnamespace
      )"""
_MEMBERSHIPS = f"""{MEMBERS}
select p.pubname as publication,
       c.oid,
       n.nspname as schema,
       c.relname as name,
       case when c.oid <> all(%(locked)s::oid[]) then pg_get_expr(said.prqual, c.oid) end
         as row_filter,
       said.prqual is not null and c.oid = any(%(locked)s::oid[]) as is_unread,
       array({_SENT_COLUMNS}) as column_names,
       array_remove(array[
           case when p.pubinsert then 'insert' end,
           case when p.pubupdate then 'update' end,
           case when p.pubdelete then 'delete' end,
           case when p.pubtruncate then 'truncate' end
       ], null) as publishes,
       p.oid::bigint as publication_oid,
       p.xmin::text::bigint as version,
       p.pubowner::bigint as owner,
       concat_ws(' ', p.pubviaroot, to_jsonb(p) ->> 'pubgencols') as options,
       (select r.prattrs::text from pg_publication_rel r where r.prpubid = p.oid
         and r.prrelid = c.oid) as column_list,
       e.entries,
       e.is_apart
from member
join pg_publication p on p.oid = member.publication
join pg_class c on c.oid = member.relid
join pg_namespace n on n.oid = c.relnamespace
{_OWN_RULES}
cross join lateral (
    with way as (
        select a.relid, a.place,
               string_agg(i.xmin::text, ' ')
                   over (order by a.place rows between unbounded preceding and 1 preceding)
                     as joined
        from (
            select above.relid::oid, above.place
            from pg_partition_ancestors(c.oid) with ordinality as above (relid, place)
            union
            select c.oid, 1
        ) as a
        left join pg_inherits i on i.inhrelid = a.relid and c.relispartition
    )
    select coalesce(array_agg(distinct i.entry), '{{}}') as entries, coalesce(bool_and(i.cid = 0),
      false) as is_apart
    from (
        select 'all ' || p.oid as entry, p.cmin::text::bigint as cid where p.puballtables
        union all
        select concat_ws(' ', 'table', r.oid, way.joined), r.cmin::text::bigint
        from way
        join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = way.relid
        union all
        (
            select distinct on (s.oid) concat_ws(' ', 'schema', s.oid, (
                       select d.xmin
                       from pg_depend d
                       where d.classid = 'pg_class'::regclass and d.objid = way.relid
                         and d.objsubid = 0
                         and d.refclassid = 'pg_namespace'::regclass and d.refobjid = m.relnamespace
                       limit 1
                   ), way.joined), s.cmin::text::bigint
            from way
            join pg_class m on m.oid = way.relid
            join pg_publication_namespace s on s.pnnspid = m.relnamespace and s.pnpubid = p.oid
            order by s.oid, way.place
        )
    ) as i
) e
where %(oids)s::oid[] is null or exists (
    select from unnest(%(oids)s::oid[]) as w (oid)
    where c.oid = w.oid or c.oid in (select a.relid from pg_partition_ancestors(w.oid) as a)
)
order by p.pubname, c.oid
"""  # noqa: S608 - no value in it

# Of two entries, the one made later has the greater oid. A schema's entry doesn't count from the
# beginning for a table that moved to the schema after the partition was created. Whether a
# partition was attached later is found by its files. For ages, see
# waldelta.pipeline.drift.catalog_state.
_PUBLISHED = f"""{MEMBERS},
published as (
    select distinct c.oid, n.nspname as schema, c.relname as name, c.relkind::text as relkind
    from member
    join pg_publication p on p.oid = member.publication
    join pg_class c on c.oid = member.relid
    join pg_namespace n on n.oid = c.relnamespace
    {_OWN_RULES}
    where exists ({_SENT_COLUMNS})
)
select m.oid, m.schema, m.name, m.relkind, l.above as ancestors,
       l.above <> '{{}}' and not (
           exists (select from named p where p.puballtables and p.oid < m.oid)
           or exists (
               select from pg_publication_rel r join named p on p.oid = r.prpubid
               where r.prrelid = any(l.above || m.oid) and r.oid < m.oid
           )
           or exists (
               select from pg_class c
               join pg_publication_namespace s on s.pnnspid = c.relnamespace
               join named p on p.oid = s.pnpubid
               join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid
                 and d.objsubid = 0
                    and d.refclassid = 'pg_namespace'::regclass and d.refobjid = c.relnamespace
               join pg_attribute a on a.attrelid = m.oid and a.attnum = -1
               where c.oid = any(l.above || m.oid) and s.oid < m.oid
                 and (d.xmin = a.xmin or age(d.xmin) < 0 or (age(a.xmin) >= 0
                   and age(d.xmin) > age(a.xmin)))
           )
       ) as is_late
from published m
cross join lateral (
    select array(select a.relid::oid from pg_partition_ancestors(m.oid) a where a.relid <> m.oid)
      as above
) l
where not exists (
    select from pg_partition_ancestors(m.oid) a
    join published root on root.oid = a.relid and root.oid <> m.oid
)
"""  # noqa: S608 - no value in it
