"""Finds names of catalog objects with bytes that UTF-8 can't represent.

PostgreSQL refuses every answer that would include such a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg

from waldelta.errors import NameUnreadable, SourceError
from waldelta.postgres.connection import connect, describe
from waldelta.quantities import first_of
from waldelta.server_errors.sqlstate import ServerError
from waldelta.server_errors.texts import UNTRANSLATABLE_BYTES

# As bytea, a name is sent without conversion.
_NAMES = """
select kind, id, pg_catalog.convert_to(name, pg_catalog.getdatabaseencoding())
from (
    select 'role', oid, rolname::text from pg_catalog.pg_roles
    union all
    select 'schema', oid, nspname::text from pg_catalog.pg_namespace
    union all
    select case relkind when 'i' then 'index' when 'I' then 'index' when 'S' then 'sequence'
             when 'v' then 'view' else 'table' end, oid, relname::text
    from pg_catalog.pg_class
    where relkind <> 'c'
    union all
    select 'column', attrelid, c.relname::text || '.' || a.attname::text
    from pg_catalog.pg_attribute a
    join pg_catalog.pg_class c on c.oid = a.attrelid
    where not a.attisdropped and c.relkind not in ('i', 'I') and a.attname::text ~ %(letters)s
    union all
    select 'type', oid, typname::text
    from pg_catalog.pg_type
    where typelem = 0 and (typrelid = 0 or exists (
        select from pg_catalog.pg_class c where c.oid = typrelid and c.relkind = 'c'))
    union all
    select 'enum label', enumtypid, enumlabel::text from pg_catalog.pg_enum
    union all
    select 'constraint', oid, conname::text from pg_catalog.pg_constraint
    union all
    select 'publication', oid, pubname::text from pg_catalog.pg_publication
) as names (kind, id, name)
where name ~ %(letters)s
"""
# Selects names with characters beyond ASCII.
_LETTERS = r"[^\x01-\x7f]"
_CONVERTS = (
    "select pg_catalog.convert(%s::bytea, pg_catalog.getdatabaseencoding()::name, 'UTF8'::name)"
)


def name_unreadable(conninfo: str, err: psycopg.errors.UntranslatableCharacter) -> SourceError:
    """Return the error for a query whose answer has a text that UTF-8 can't represent.

    It names the objects whose names contain the bytes in PostgreSQL's message.
    """
    said = ServerError.of(err).shown
    lacking = bytes(int(byte, 16) for byte in UNTRANSLATABLE_BYTES.findall(said))
    with connect(conninfo, "waldelta names") as connection:
        rows = connection.execute(_NAMES.encode(), {"letters": _LETTERS}).fetchall()
        names = [(kind, oid, name) for kind, oid, name in rows if lacking in name]
        found = list(_unconverted(connection, names))
    where = f"{describe(conninfo)}: PostgreSQL can't send a text of its catalogs as UTF-8 ({said})"
    if not found:
        return SourceError(
            f"{where}: look for it in constraints, defaults and comments of the published tables,"
            " and replace it there"
        )
    objects = first_of(
        [
            f'{kind} "{name.decode("ascii", "backslashreplace")}" (oid {oid})'
            for kind, oid, name in found
        ]
    )
    it = "it" if len(found) == 1 else "those that published tables need"
    return NameUnreadable(
        f"{where}, found in the name of {objects}: rename {it}, in a session with"
        " the database's encoding as client_encoding"
    )


def _unconverted(
    connection: psycopg.Connection[tuple[object, ...]], names: Sequence[tuple[str, int, bytes]]
) -> Iterator[tuple[str, int, bytes]]:
    """Yield the names that PostgreSQL can't convert.

    It tests halves, since most names can be converted.
    """
    if not names:
        return
    try:
        connection.execute(_CONVERTS, (b" ".join(name for _, _, name in names),))
    except psycopg.errors.UntranslatableCharacter:
        if len(names) == 1:
            yield from names
            return
        middle = len(names) // 2
        yield from _unconverted(connection, names[:middle])
        yield from _unconverted(connection, names[middle:])
