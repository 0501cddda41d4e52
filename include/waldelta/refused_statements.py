"""Tables whose own UPDATEs and DELETEs PostgreSQL refuses because they are published: asked by each run.

Preflight looks before a publication is made. A table that is created later under FOR ALL TABLES or TABLES IN SCHEMA, or a key
that is dropped later, breaks the application all the same, and PostgreSQL tells nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.catalog import TableId
from waldelta.type_catalog import fetch

_MOST_NAMED = 5


def refused_statements(connection: psycopg.Connection[Any], publication_names: Sequence[str]) -> list[str]:
    """What to tell of them, with the remedy; nothing when there are none. One query."""
    rows = fetch(connection, _WITHOUT_IDENTITY, {"publications": list(publication_names)})
    if not rows:
        return []
    named = [f"{TableId(row.schema, row.name)} ({row.publication})" for row in rows[:_MOST_NAMED]]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return [
        (
            f"PostgreSQL refuses the application's UPDATEs or DELETEs of {', '.join(named)}{more}: the publication publishes them, "
            "and the table has no replica identity: add a primary key, or alter table … replica identity full, or take the "
            "table out of the publication"
        )
    ]


_WITHOUT_IDENTITY = """
select n.nspname as schema, c.relname as name, string_agg(distinct p.pubname, ', ') as publication
from pg_publication p
cross join lateral pg_get_publication_tables(p.pubname) as t
cross join lateral (
    select t.relid as leaf
    union
    select relid from pg_partition_tree(t.relid)
) l
join pg_class c on c.oid = l.leaf
join pg_namespace n on n.oid = c.relnamespace
where p.pubname = any(%(publications)s::name[])
  and (p.pubupdate or p.pubdelete)
  and c.relkind = 'r'
  and c.relpersistence = 'p'
  and c.relreplident <> 'f'
  and not exists (
      select from pg_index i
      where i.indrelid = c.oid and i.indimmediate and i.indisvalid
        and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident else false end
  )
group by n.nspname, c.relname
order by n.nspname, c.relname
"""
