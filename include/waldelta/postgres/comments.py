"""The comments of source tables and of their columns."""

from __future__ import annotations

from collections.abc import Mapping

from waldelta.config import split_table_name
from waldelta.postgres.connection import Connection

# By target and column; a table's own by the column None.
Comments = Mapping[tuple[str, str | None], str]
_COMMENTS = """
select t.name, a.attname, d.description
from unnest(%(targets)s::text[], %(schemas)s::text[], %(tables)s::text[]) as t (name, schema, rel)
join pg_catalog.pg_namespace n on n.nspname = t.schema
join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.rel
join pg_catalog.pg_description d
     on d.objoid = c.oid and d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass
left join pg_catalog.pg_attribute a
     on d.objsubid > 0 and a.attrelid = c.oid and a.attnum = d.objsubid
where d.objsubid = 0 or not a.attisdropped
"""


def read_comments(connection: Connection, tables: Mapping[str, str]) -> Comments:
    """Returns the comments of source tables, given by the targets' names."""
    sources = [(name, *split_table_name(table)) for name, table in tables.items()]
    targets, schemas, names = (list(part) for part in zip(*sources, strict=True))
    parameters = {"targets": targets, "schemas": schemas, "tables": names}
    rows = connection.execute(_COMMENTS.encode(), parameters)
    return {(name, column): comment for name, column, comment in rows if comment}
