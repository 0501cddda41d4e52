"""Finds tables that setup must publish by the pipeline file but that their publication lacks;
checked by each run.

PostgreSQL removes a table from a publication silently: by DROP COLUMN … CASCADE of a column of its
filter or column list, as its error for a plain DROP COLUMN recommends, and when the table is
dropped and created again. From then on nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.grants import sql_name
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


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Listed tables that their publication doesn't include, and publications that don't exist.

    ``absent`` has the present name of each absent publication, None where none has its mark.
    """

    tables: tuple[str, ...] = ()
    absent: Mapping[str, str | None] = field(default_factory=dict)

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each absent publication, and one for tables of all others."""
        for name, present in self.absent.items():
            way = (
                f"it may be {present!r} now: alter publication {sql_name(present)} rename to"
                f" {sql_name(name)}"
                if present is not None
                else "it was renamed or dropped: rename it back"
            )
            yield (
                f"publication {name!r} does not exist, so PostgreSQL sends no changes of its"
                " tables:"
                f" {way}, or run setup; then run the initial sync of its tables"
            )
        if self.tables and not self.absent:
            yield not_published(self.tables)


def unpublished(connection: psycopg.Connection[Any], source: Source) -> Unpublished:
    """Return listed tables that their publication doesn't include.

    A table may be included itself, by a table above it, or by its schema. This is one query,
    without locks, and another one if a publication is absent.
    """
    wanted = listed(source)
    asked = {
        "publications": [publication for publication, _ in wanted],
        "schemas": [table.schema for _, table in wanted],
        "names": [table.name for _, table in wanted],
    }
    if not wanted or not (rows := fetch(connection, _LACKING, asked)):
        return Unpublished()
    absent = sorted({row.publication for row in rows if row.is_absent})
    renamed = _marked(connection, source) if absent else []
    return Unpublished(
        tuple(dict.fromkeys(str(TableId(row.schema, row.name)) for row in rows)),
        {name: renamed[0] if len(absent) == len(renamed) == 1 else None for name in absent},
    )


def _marked(connection: psycopg.Connection[Any], source: Source) -> list[str]:
    """Return publications of other names that setup has marked for this slot."""
    rows = connection.execute(
        _MARKED, (source.publication_names, f"waldelta %, slot {source.slot}")
    )
    return [name for (name,) in rows.fetchall()]


def not_published(tables: Sequence[str]) -> str:
    """Return the warning about them."""
    return (
        f"in the pipeline file, but not published: {', '.join(tables)}; PostgreSQL sends"
        " none of their changes, and the targets stay as they are. Either setup never ran for"
        " them, or they were dropped, renamed, or removed from the publication (also by DROP"
        " COLUMN … CASCADE): run setup, then the initial sync with these tables, or remove them"
        " from the file"
    )


_LACKING = """
select distinct w.schema, w.name, w.publication, p.oid is null as is_absent
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
order by w.schema, w.name, w.publication
"""
_MARKED = """
select pubname::text
from pg_publication
where pubname <> all(%s::text[]) and obj_description(oid, 'pg_publication') like %s
order by pubname
"""
