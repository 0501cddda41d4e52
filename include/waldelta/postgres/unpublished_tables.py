"""Finds tables that the pipeline file names or whose names its patterns match, and those of them
that their publication lacks; checked by each run.

Setup writes the matching tables into the publication. From then on, the publication says which
tables a pattern stands for.

PostgreSQL removes a table from a publication silently: by DROP COLUMN … CASCADE of a column of its
filter or column list, as its error for a plain DROP COLUMN recommends, and when the table is
dropped and created again. From then on nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from waldelta.config import Publication, Source
from waldelta.config.source import TableEntry
from waldelta.grants import sql_name
from waldelta.postgres.catalog import TableId
from waldelta.postgres.type_catalog import fetch


def listed(source: Source) -> list[tuple[str, TableId]]:
    """Return the publications that setup creates, with each table that the pipeline file names for
    them; for tables of patterns, see waldelta.postgres.unpublished_tables.
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

    ``gone`` are those of the tables that the source doesn't have. ``absent`` has the present name
    of each absent publication, None where none has its mark.
    """

    tables: tuple[str, ...] = ()
    absent: Mapping[str, str | None] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

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
        if self.absent:
            return
        if self.gone:
            yield (
                f"in the pipeline file, but not published: {', '.join(self.gone)}; the source has"
                " no table of this name, and the target stays as it is: correct the name, or"
                " remove the table from the file"
            )
        if others := [name for name in self.tables if name not in self.gone]:
            yield (
                f"in the pipeline file, but not published: {', '.join(others)}; the source has"
                " the table, but its publication doesn't name it, so PostgreSQL sends none of its"
                " changes, and the target stays as it is: run setup, then the initial sync of the"
                " table, or remove it from the file"
            )


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
    renamed = []
    if absent:
        # Publications of other names that setup has marked for this slot.
        mark = f"waldelta %, slot {source.slot}"
        renamed = connection.execute(_MARKED, (source.publication_names, mark)).fetchall()
    return Unpublished(
        tuple(dict.fromkeys(str(TableId(row.schema, row.name)) for row in rows)),
        {name: renamed[0][0] if len(absent) == len(renamed) == 1 else None for name in absent},
        tuple(dict.fromkeys(str(TableId(r.schema, r.name)) for r in rows if r.is_gone)),
    )


_LACKING = """
select distinct w.schema, w.name, w.publication, p.oid is null as is_absent,
  c.oid is null as is_gone
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


@dataclass(frozen=True, slots=True)
class MatchedTable:
    """A table that patterns of a publication match; it has no entry of its own there."""

    publication: Publication
    id: TableId
    entries: tuple[TableEntry, ...]

    @property
    def entry(self) -> TableEntry:
        """The pattern whose row filter the table has."""
        return self.entries[0]

    @property
    def patterns(self) -> str:
        """The patterns' names."""
        return ", ".join(entry.name for entry in self.entries)

    @property
    def problem(self) -> str | None:
        """Why the patterns don't say how to publish the table; None if they do."""
        if len({entry.where for entry in self.entries}) < 2:
            return None
        return (
            f"publication {self.publication.name!r}, table {self.id}: the patterns {self.patterns}"
            " match it and differ in where: exclude it from all but one, or list it by its name"
        )


def matched_tables(
    connection: psycopg.Connection[Any], source: Source, *, is_new: bool = False
) -> list[MatchedTable]:
    """Return the tables that patterns match, in the order of publications and names.

    Ordinary and partitioned tables match. Partitions don't: they are published with the table above
    them. ``is_new``: only tables that their publication, which must exist, doesn't include. One
    query, without locks; none without patterns.
    """
    publications = [entry for entry in source.publications if entry.patterns]
    if not publications:
        return []
    asked = sorted({(p.name, t.parts[0]) for p in publications for t in p.patterns})
    params = {
        "publications": [name for name, _ in asked],
        "schemas": [schema for _, schema in asked],
        "is_new": is_new,
    }
    rows = fetch(connection, _MATCHED, params)
    return [
        MatchedTable(entry, TableId(row.schema, row.name), tuple(matching))
        for entry in publications
        for row in rows
        if row.publication == entry.name
        and (matching := entry.entries_of((row.schema, row.name)))
        and matching[0].is_pattern
    ]


# Oids below 16384 belong to the system.
_MATCHED = """
select a.publication, n.nspname as schema, c.relname as name
from unnest(%(publications)s::text[], %(schemas)s::text[]) as a (publication, schema)
join pg_namespace n on n.nspname = a.schema
join pg_class c on c.relnamespace = n.oid
where c.oid >= 16384
  and c.relkind in ('r', 'p')
  and c.relpersistence = 'p'
  and not c.relispartition
  and (
      not %(is_new)s
      or exists (
          select from pg_publication p
          where p.pubname = a.publication
            and not p.puballtables
            and not exists (select from pg_publication_rel r where r.prpubid = p.oid
              and r.prrelid = c.oid)
            and not exists (
                select from pg_publication_namespace s where s.pnpubid = p.oid
                  and s.pnnspid = n.oid
            )
      )
  )
order by n.nspname, c.relname
"""
