"""Finds the tables that the patterns of the pipeline file match, and those of them that aren't
published yet.

Setup writes the matching tables into the publication. From then on, the publication says which
tables a pattern stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.config import Publication, Source
from waldelta.config.source import TableEntry
from waldelta.postgres.catalog import TableId
from waldelta.postgres.type_catalog import fetch


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


def matched_tables(connection: psycopg.Connection[Any], source: Source) -> list[MatchedTable]:
    """Return the tables that patterns match, in the order of publications and names.

    Ordinary and partitioned tables match. Partitions don't: they are published with the table above
    them. One query, without locks; none without patterns.
    """
    return _matched(connection, source, is_new=False)


def new_tables(connection: psycopg.Connection[Any], source: Source) -> list[MatchedTable]:
    """Return the matched tables that their publication doesn't include, as matched_tables() does.

    A publication that doesn't exist yet has none.
    """
    return _matched(connection, source, is_new=True)


def _matched(
    connection: psycopg.Connection[Any], source: Source, *, is_new: bool
) -> list[MatchedTable]:
    publications = [entry for entry in source.publications if entry.patterns]
    if not publications:
        return []
    asked = sorted({(p.name, t.parts[0]) for p in publications for t in p.patterns})
    params = {
        "publications": [name for name, _ in asked],
        "schemas": [schema for _, schema in asked],
        "is_new": is_new,
    }
    rows = fetch(connection, _TABLES, params)
    return [
        MatchedTable(entry, TableId(row.schema, row.name), tuple(matching))
        for entry in publications
        for row in rows
        if row.publication == entry.name
        and (matching := entry.entries_of((row.schema, row.name)))
        and matching[0].is_pattern
    ]


# Oids below 16384 belong to the system.
_TABLES = """
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
