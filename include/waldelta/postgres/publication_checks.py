"""What each run checks of the published tables: those that their publication lacks, those whose
own UPDATEs and DELETEs PostgreSQL refuses, and partitions that the role may not read.

Setup writes the tables that a pattern matches into the publication. From then on, the publication
says which tables a pattern stands for. PostgreSQL removes a table from a publication silently: by
DROP COLUMN … CASCADE of a column of its filter or column list, as its error for a plain DROP COLUMN
recommends, and when the table is dropped and created again. From then on nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psycopg

from waldelta.config import Publication, Source
from waldelta.config.source import TableEntry
from waldelta.findings import DefaultGrant, Grant, Need, sql_name, statements
from waldelta.postgres.catalog import READ_THROUGH, Leaf, TableId, Through
from waldelta.postgres.published_tables import MEMBERS
from waldelta.postgres.type_catalog import fetch
from waldelta.quantities import MOST_NAMED, first_of


def listed(source: Source) -> list[tuple[str, TableId]]:
    """Returns the publications that setup creates, with each table that the pipeline file names for
    them; for tables of patterns, see waldelta.postgres.publication_checks.
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

    ``gone`` are those of the tables that the source doesn't have. ``marked`` are publications of
    other names that setup has marked for this slot, which may be the ``absent`` ones.
    """

    tables: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()

    def warnings(self) -> Iterator[str]:
        """Yields a warning for each absent publication, and one for tables of all others."""
        for name in self.absent:
            way = "no publication has its mark, so it was dropped:"
            if len(self.absent) == len(self.marked) == 1:
                rename = f"alter publication {sql_name(*self.marked)} rename to {sql_name(name)}"
                way = f"it may be {self.marked[0]!r} now: {rename}, or"
            elif self.marked:
                way = f"it may be one of {', '.join(self.marked)} now: rename that, or"
            yield (
                f"publication {name!r} does not exist, so PostgreSQL sends no changes of its"
                f" tables: {way} run setup; then run the initial sync of its tables"
            )
        if self.absent:
            return
        if self.gone:
            yield (
                f"in the pipeline file, but not published: {', '.join(self.gone)}; the source has"
                " no table of this name, and the target stays as it is: correct the name, or"
                " remove the table from the file"
            )
        if tables := [name for name in self.tables if name not in self.gone]:
            yield (
                f"in the pipeline file, but not published: {', '.join(tables)}; the source has"
                " the table, but its publication doesn't name it, so PostgreSQL sends none of its"
                " changes, and the target stays as it is: run setup, then the initial sync of the"
                " table, or remove it from the file"
            )


def find_unpublished(connection: psycopg.Connection[Any], source: Source) -> Unpublished:
    """Returns listed tables that their publication doesn't include.

    A table may be included itself, by a table above it, or by its schema. This is one query,
    without locks, and another one if a publication is absent.
    """
    tables = listed(source)
    params = {
        "publications": [publication for publication, _ in tables],
        "schemas": [table.schema for _, table in tables],
        "names": [table.name for _, table in tables],
    }
    if not tables or not (rows := fetch(connection, _LACKING, params)):
        return Unpublished()
    absent = sorted({row.publication for row in rows if row.is_absent})
    marked = []
    if absent:
        mark = f"waldelta %, slot {source.slot}"
        marked = connection.execute(_MARKED, (source.publication_names, mark)).fetchall()
    return Unpublished(
        tuple(dict.fromkeys(str(TableId(row.schema, row.name)) for row in rows)),
        tuple(absent),
        tuple(dict.fromkeys(str(TableId(r.schema, r.name)) for r in rows if r.is_gone)),
        tuple(name for (name,) in marked),
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
    """Returns the tables that patterns match, in the order of publications and names.

    Ordinary and partitioned tables match. Partitions don't: they are published with the table above
    them. ``is_new``: only tables that their publication, which must exist, doesn't include. One
    query, without locks; none without patterns.
    """
    publications = [entry for entry in source.publications if entry.patterns]
    if not publications:
        return []
    schemas = sorted({(p.name, t.parts[0]) for p in publications for t in p.patterns})
    params = {
        "publications": [name for name, _ in schemas],
        "schemas": [schema for _, schema in schemas],
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


# --- UPDATEs and DELETEs that PostgreSQL refuses. Preflight looks for them before a publication is
# created. A table created later under FOR ALL TABLES or TABLES IN SCHEMA, or a key dropped later,
# breaks the application all the same, and PostgreSQL reports it only to the application.


def warn_of_refused_writes(
    connection: psycopg.Connection[Any], publication_names: Sequence[str]
) -> list[str]:
    """Returns a warning for each cause by which PostgreSQL refuses the application's UPDATEs or
    DELETEs of published tables, with the tables and the remedy.

    This takes two queries, from PostgreSQL 18 on three.
    """
    causes = [(_TREE + _WITHOUT_IDENTITY, _NO_IDENTITY), (_OUTSIDE_IDENTITY, _SHRUNKEN_IDENTITY)]
    if connection.info.server_version >= 180000:
        causes.append((_TREE + _GENERATED_IDENTITY, _UNPUBLISHED_IDENTITY))
    parameters = {"publications": list(publication_names)}
    return [
        f"PostgreSQL refuses the application's UPDATEs or DELETEs of {first_of(names)}: {why}"
        for query, why in causes
        for rows in [fetch(connection, query, parameters)]
        if (names := [f"{TableId(row.schema, row.name)} ({row.publication})" for row in rows])
    ]


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


# --- partitions that the role may not read. SELECT on a partitioned table covers its partitions
# only when that table itself is read, as copies, repairs and comparisons then do. One that the
# application adds next month won't have today's grants.


def read_unreadable(connection: psycopg.Connection[Any], source: Source) -> list[str]:
    """Returns a warning for each partitioned table with published partitions that the role may not
    read.

    This is one query, without locks.
    """
    rows = fetch(connection, _UNREADABLE, {"publications": list(source.publication_names)})
    warnings = []
    for (role, schema, name), of in groupby(
        rows, lambda row: (row.role, row.root_schema, row.root_name)
    ):
        leaves = [
            Leaf(
                TableId(row.schema, row.name),
                row.oid,
                0,
                0,
                0,
                owner=row.owner,
                readable=row.readable,
                through=Through.of(row.through),
            )
            for row in of
        ]
        warnings.append(f"{TableId(schema, name)}: {describe_unreadable(sql_name(role), leaves)}")
    return warnings


def describe_unreadable(role: str, leaves: Sequence[Leaf]) -> str | None:
    """Returns a warning about those ``leaves`` of a table that ``role`` may not read; None without
    any.

    ``role`` is written as in SQL.
    """
    hidden = [leaf for leaf in leaves if leaf.through is not None or not leaf.readable]
    if not hidden:
        return None
    names = first_of([str(leaf.id) for leaf in hidden])
    unreadable_leaves = [leaf for leaf in hidden if not leaf.readable]
    through = ", ".join(
        sorted({str(leaf.through.id) for leaf in hidden if leaf.through is not None})
    )
    reads = (
        f"copies and repairs read them through {through}"
        if not unreadable_leaves
        else "copies and repairs that need them fail"
    )
    if unreadable_leaves and through:
        reads = (
            f"copies and repairs read them through {through}, and fail for"
            f" {', '.join(str(leaf.id) for leaf in unreadable_leaves[:MOST_NAMED])}"
        )
    listed = "\n".join(f"    {line}" for line in statements(role, needs_of(hidden)))
    return (
        f"role {role} may not read partition {names} directly, so {reads}; to grant it these, and"
        f" future partitions of their owner:\n{listed}"
    )


def needs_of(leaves: Sequence[Leaf]) -> list[Need]:
    """Returns what a role needs to read partitions directly, and future ones of their owners."""
    stored = [leaf for leaf in leaves if leaf.relkind == "r"]
    schemas = dict.fromkeys(sql_name(leaf.id.schema) for leaf in stored)
    return [
        *(Grant("usage on schema", schema) for schema in schemas),
        *(Grant("select on", sql_name(leaf.id.schema, leaf.id.name)) for leaf in stored),
        *dict.fromkeys(
            DefaultGrant(sql_name(leaf.owner), sql_name(leaf.id.schema)) for leaf in stored
        ),
    ]


# Only leaves that the role may not read directly, by the topmost table above them.
_UNREADABLE = f"""{MEMBERS},
tree (oid) as (
    select distinct relid from member
    union
    select i.inhrelid
    from tree t
    join pg_class p on p.oid = t.oid and p.relkind = 'p'
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
)
select current_user::text as role, rn.nspname as root_schema, root.relname as root_name,
       c.oid, n.nspname as schema, c.relname as name, pg_get_userbyid(c.relowner)::text as owner,
       w.through, w.readable is true as readable
from tree t
join pg_class c on c.oid = t.oid and c.relkind = 'r' and c.relispartition
join pg_namespace n on n.oid = c.relnamespace
join pg_class root on root.oid = pg_partition_root(c.oid)
join pg_namespace rn on rn.oid = root.relnamespace
left join lateral ({READ_THROUGH}) w on true
where w.through is not null or w.readable is not true
order by rn.nspname, root.relname, n.nspname, c.relname
"""  # noqa: S608 - no value in it
