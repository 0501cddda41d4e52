"""Finds tables whose own UPDATEs and DELETEs PostgreSQL refuses because they are published; checked
by each run.

Preflight checks this before a publication is created. A table created later under FOR ALL TABLES or
TABLES IN SCHEMA, or a key dropped later, breaks the application all the same, and PostgreSQL
reports it only to the application.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.postgres.catalog import TableId
from waldelta.postgres.published_tables import MEMBERS
from waldelta.postgres.type_catalog import fetch
from waldelta.quantities import first_of


def refused_statements(
    connection: psycopg.Connection[Any], publication_names: Sequence[str]
) -> list[str]:
    """Return warnings with the remedy; none without such tables.

    This takes two queries, from PostgreSQL 18 on three.
    """
    causes = [(_TREE + _WITHOUT_IDENTITY, _NO_IDENTITY), (_OUTSIDE_IDENTITY, _SHRUNKEN_IDENTITY)]
    if connection.info.server_version >= 180000:
        causes.append((_TREE + _GENERATED_IDENTITY, _UNPUBLISHED_IDENTITY))
    return [
        f"PostgreSQL refuses the application's UPDATEs or DELETEs of {_named(rows)}: {why}"
        for query, why in causes
        if (rows := fetch(connection, query, {"publications": list(publication_names)}))
    ]


def _named(rows: Sequence[Any]) -> str:
    return first_of([f"{TableId(row.schema, row.name)} ({row.publication})" for row in rows])


_NO_IDENTITY = (
    "the publication publishes them, and the table has no replica identity: add a primary key, or"
    " alter table … replica identity full, or take the table out of the publication"
)
_SHRUNKEN_IDENTITY = (
    "the publication's row filter uses columns outside of the table's replica identity, or its"
    " column list lacks some of these: extend the replica identity, or change the filter or list"
)

_UNPUBLISHED_IDENTITY = (
    "the table's replica identity has a generated column that the publication doesn't publish: use"
    " the primary key, or an index without that column, as replica identity, or, for a stored one,"
    " set publish_generated_columns: stored"
)

# The published tables and their partitions. pg_partition_tree() would lock each of them, and wait
# for sessions that lock one.
_TREE = f"""{MEMBERS},
tree (publication, relid) as (
    select m.publication, m.relid
    from member m
    join pg_publication p on p.oid = m.publication and (p.pubupdate or p.pubdelete)
    union
    select t.publication, i.inhrelid
    from tree t
    join pg_class c on c.oid = t.relid and c.relkind = 'p'
    join pg_inherits i on i.inhparent = t.relid and not i.inhdetachpending
)
"""  # noqa: S608 - no value in it
_WITHOUT_IDENTITY = """
select n.nspname as schema, c.relname as name, string_agg(distinct p.pubname, ', ') as publication
from tree t
join pg_publication p on p.oid = t.publication
join pg_class c on c.oid = t.relid
join pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r'
  and c.relpersistence = 'p'
  and c.relreplident <> 'f'
  and not exists (
      select from pg_index i
      where i.indrelid = c.oid and i.indimmediate and i.indisvalid
        and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident
          else false end
  )
group by n.nspname, c.relname
order by n.nspname, c.relname
"""

# The columns that a filter uses are only in its expression tree. A partition is judged by the
# topmost entry above it, when that is published via its root, under the root's column names
# (pub_rf_contains_invalid_column, pub_collist_contains_invalid_column).
_OUTSIDE_IDENTITY = """
with recursive entry as (
    select p.pubname, r.prrelid, r.prattrs, r.prqual, c.relkind = 'p' as is_root
    from pg_publication p
    join pg_publication_rel r on r.prpubid = p.oid
    join pg_class c on c.oid = r.prrelid
    where p.pubname = any(%(publications)s::name[])
      and (p.pubupdate or p.pubdelete)
      and (r.prqual is not null or r.prattrs is not null)
      and (p.pubviaroot or c.relkind = 'r')
      and not (p.pubviaroot and exists (
          select from pg_partition_ancestors(r.prrelid) a
          join pg_class root on root.oid = a.relid
          where a.relid <> r.prrelid
            and (exists (select from pg_publication_rel m where m.prpubid = p.oid
              and m.prrelid = root.oid)
                 or exists (select from pg_publication_namespace m
                            where m.pnpubid = p.oid and m.pnnspid = root.relnamespace))
      ))
),
tree (root, leaf) as (
    select distinct e.prrelid, e.prrelid from entry e
    union
    select t.root, i.inhrelid
    from tree t
    join pg_class c on c.oid = t.leaf and c.relkind = 'p'
    join pg_inherits i on i.inhparent = t.leaf and not i.inhdetachpending
),
judged as (
    select e.pubname, c.oid, c.relname, c.relnamespace, c.relreplident,
           array(select a.attname from pg_attribute a
                 where a.attrelid = e.prrelid and a.attnum = any(e.prattrs::int2[])) as listed,
           e.prattrs is not null as has_list,
           array(select a.attname from regexp_matches(e.prqual::text, ':varattno ([0-9]+)', 'g')
             as used (numbers)
                 join pg_attribute a on a.attrelid = e.prrelid
                   and a.attnum = used.numbers[1]::int2) as filtered
    from entry e
    join tree l on l.root = e.prrelid
    join pg_class c on c.oid = l.leaf
    where c.relkind = 'r' and c.relpersistence = 'p'
),
identified as (
    select j.*, array(
        select a.attname
        from pg_index i, unnest(i.indkey::int2[]) with ordinality as k (attnum, position)
        join pg_attribute a on a.attrelid = j.oid and a.attnum = k.attnum
        where i.indrelid = j.oid and i.indisvalid and i.indimmediate and k.position <= i.indnkeyatts
          and case j.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident
            else false end
    ) as identity
    from judged j
)
select n.nspname as schema, i.relname as name, string_agg(distinct i.pubname, ', ') as publication
from identified i
join pg_namespace n on n.oid = i.relnamespace
where case when i.relreplident = 'f' then i.has_list
           else i.identity <> '{}' and (not i.filtered <@ i.identity or i.has_list
             and not i.identity <@ i.listed) end
group by n.nspname, i.relname
order by n.nspname, i.relname
"""

# From 18 on (pub_contains_invalid_column): FULL includes every column, and a column named in a
# column list is published, whatever its kind.
_GENERATED_IDENTITY = """
select n.nspname as schema, c.relname as name, string_agg(distinct p.pubname, ', ') as publication
from tree t
join pg_publication p on p.oid = t.publication
join pg_class c on c.oid = t.relid
join pg_namespace n on n.oid = c.relnamespace
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relkind = 'r'
  and c.relpersistence = 'p'
  and (a.attgenerated = 'v' or a.attgenerated = 's' and p.pubgencols <> 's')
  and (
      c.relreplident = 'f'
      or exists (
          select from pg_index i
          where i.indrelid = c.oid and i.indimmediate and i.indisvalid
            and a.attnum = any(i.indkey[0:i.indnkeyatts - 1])
            and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident
              else false end
      ) and not exists (
          select from pg_publication_rel r
          where r.prpubid = p.oid and r.prattrs is not null
            and (r.prrelid = c.oid
                 or p.pubviaroot and r.prrelid in (select relid from pg_partition_ancestors(c.oid)))
      )
  )
group by n.nspname, c.relname
order by n.nspname, c.relname
"""
