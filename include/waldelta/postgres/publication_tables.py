"""What pg_publication_tables shows, read from the catalogs alone.

The view opens each table. So one table that a session keeps locked (VACUUM FULL, a rewriting ALTER)
would delay queries about all the others. These queries lock nothing; only reading a row filter's
text takes its table's lock (waldelta.postgres.lock_waits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

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


def filtered_tables(
    connection: psycopg.Connection[Any], publication_names: Sequence[str]
) -> list[str]:
    """Return the tables whose rows these publications filter now."""
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
