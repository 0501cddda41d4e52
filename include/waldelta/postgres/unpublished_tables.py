"""Finds tables that setup must publish by the pipeline file but that their publication lacks;
checked by each run.

PostgreSQL removes a table from a publication silently: by DROP COLUMN … CASCADE of a column of its
filter or column list, as its error for a plain DROP COLUMN recommends, and when the table is
dropped and created again. From then on nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.postgres.catalog import TableId
from waldelta.postgres.type_catalog import fetch


def listed(source: Source) -> list[tuple[str, TableId]]:
    """Return the publications that setup creates, with each table that the pipeline file names for
    them; for tables of patterns, see waldelta.postgres.table_patterns.
    """
    return [
        (entry.name, TableId(*t.parts))
        for entry in source.publications
        if entry.manage
        for t in entry.tables
        if not t.is_pattern
    ]


def unpublished(connection: psycopg.Connection[Any], source: Source) -> list[str]:
    """Return listed tables that their publication doesn't include.

    A table may be included itself, by a table above it, or by its schema. This is one query,
    without locks.
    """
    wanted = listed(source)
    asked = {
        "publications": [publication for publication, _ in wanted],
        "schemas": [table.schema for _, table in wanted],
        "names": [table.name for _, table in wanted],
    }
    return (
        [str(TableId(row.schema, row.name)) for row in fetch(connection, _LACKING, asked)]
        if wanted
        else []
    )


def not_published(tables: Sequence[str]) -> str:
    """Return the warning about them."""
    return (
        f"in the pipeline file, but not in its publication: {', '.join(tables)}; PostgreSQL sends"
        " none of their changes, and the targets stay as they are. Either setup never ran for"
        " them, or they were dropped, renamed, or removed from the publication (also by DROP"
        " COLUMN … CASCADE): run setup, then the initial sync with these tables, or remove them"
        " from the file"
    )


_LACKING = """
select distinct w.schema, w.name
from unnest(%(publications)s::text[], %(schemas)s::text[], %(names)s::text[]) as w (publication,
  schema, name)
left join pg_publication p on p.pubname = w.publication
left join (pg_namespace n join pg_class c on c.relnamespace = n.oid) on n.nspname = w.schema
  and c.relname = w.name
where p.puballtables is not true
  and not exists (
      select from pg_class way
      where way.oid in (select c.oid union all select a.relid from pg_partition_ancestors(c.oid) a)
        and (
            exists (select from pg_publication_rel r where r.prpubid = p.oid
              and r.prrelid = way.oid)
            or exists (
                select from pg_publication_namespace s where s.pnpubid = p.oid
                  and s.pnnspid = way.relnamespace
            )
        )
  )
order by w.schema, w.name
"""
