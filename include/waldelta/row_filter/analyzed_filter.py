"""A filter as PostgreSQL itself analyses it: names, types and casts are its own, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import psycopg
from psycopg import sql

from waldelta.errors import ConfigError, PrivilegeMissing
from waldelta.postgres import Connection, PgType, TableId, allow_views, fetch, read_types
from waldelta.row_filter.parse import (
    column_names,
    functions_of,
    parse_analysed,
    parse_row_filter,
    place,
)

_CONSTRAINT = "waldelta_filter"
_SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})
_C_LOCALES = frozenset({"C", "POSIX"})


class Collation(Enum):
    """What is certain about how texts of a collation compare and change case."""

    # Ordered by code points, case of ASCII letters only: C and POSIX in a UTF-8 database.
    CODE_POINT = "code point"
    # Ordered by code points, but case follows Unicode: C.UTF-8, ucs_basic.
    BINARY_ORDER = "binary order"
    DETERMINISTIC = "deterministic"  # Equal means the same bytes; the order is that of a language.
    NONDETERMINISTIC = "nondeterministic"


@dataclass(frozen=True, slots=True)
class EnumType:
    """An enum by its name as PostgreSQL prints it; ``labels`` in its order, where that is known.

    The lake stores a label as text.
    """

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter, analysed by the server.

    ``analysed`` is pg_get_expr's text: every cast is explicit, and names outside pg_catalog are
    qualified. It is stored and translated; ``text`` is what was written. ``columns`` are those
    used, in order of appearance. ``collations`` has what is certain about each text column,
    ``default_collation`` about texts without a column. A column that isn't listed counts as
    DETERMINISTIC, the least certain kind that PostgreSQL's own row filters allow. ``enums`` are the
    types of columns of an enum, or of a domain over one.
    """

    text: str
    analysed: str
    columns: tuple[str, ...]
    collations: Mapping[str, Collation] = field(default_factory=dict)
    default_collation: Collation = Collation.DETERMINISTIC
    # Lengths in bytes and checksums depend on the server's encoding.
    is_utf8: bool = False
    enums: Mapping[str, EnumType] = field(default_factory=dict)


def enums_of(types: Mapping[str, PgType]) -> dict[str, EnumType]:
    """Returns the enums among the types of columns."""
    bases = {name: kind.base or kind for name, kind in types.items()}
    return {name: EnumType(base.name) for name, base in bases.items() if base.kind == "enum"}


def published_filter(analysed: str, enums: Mapping[str, EnumType] | None = None) -> RowFilter:
    """Returns the filter of a publication, or a constraint, from the text that the catalogs print.

    ``enums`` are those of the table's columns; only constraints and own filters can use them.
    Its columns' collations aren't known, but PostgreSQL allows no user-defined ones in a
    publication, and its own are all deterministic. Raises FilterNotTranslatable for a text that
    can't be read.

    >>> published_filter("((a > 1) AND (b = 'x'::text))").columns
    ('a', 'b')
    """
    enums = enums or {}
    names = column_names(parse_analysed(analysed, {enum.name for enum in enums.values()}))
    return RowFilter(analysed, analysed, names, enums=enums)


def resolve_filter(conn: Connection, table: TableId, text: str) -> RowFilter:
    """Let the server analyse a filter over ``table``'s columns, in a transaction that is rolled
    back.

    The filter becomes the CHECK constraint of an empty temporary table with the same columns. That
    needs SELECT on the table and TEMPORARY on the database, nothing else. The connection must come
    from ``connection.connect``. Raises ConfigError with the position of what PostgreSQL refuses,
    FilterNotTranslatable for text that this project can't read, and PrivilegeMissing.
    waldelta.row_filter.spark.translate.spark_condition decides whether Spark can evaluate it.
    """
    parse_row_filter(text)
    with conn.transaction(force_rollback=True):
        try:
            return _analyse(conn, table, text)
        except psycopg.errors.InsufficientPrivilege as err:
            raise PrivilegeMissing(
                f"filter {text!r} of {table} can't be checked: {err.diag.message_primary}: grant"
                " select on the table and temporary on the database"
            ) from None
        except psycopg.errors.UndefinedTable as err:
            raise ConfigError(
                f"filter {text!r} of {table} can't be checked: {err.diag.message_primary}"
            ) from None


def refused_filter(conn: Connection, table: TableId, text: str) -> str | None:
    """Returns why PostgreSQL would refuse a publication's filter, for a role that may not publish
    the table.

    It needs no privilege on the table, only on its schema. The server analyses the filter, and the
    catalogs show which functions are immutable and what users defined. Reasons that only CREATE
    PUBLICATION can find aren't returned.
    """
    columns = parse_row_filter(text)
    statement = sql.SQL("prepare {} as select from only {} where (").format(
        sql.Identifier(_CONSTRAINT), table.identifier
    )
    with conn.transaction(force_rollback=True):
        try:
            _run(conn, statement, text, sql.SQL("\n)"))
            conn.execute(sql.SQL("deallocate {}").format(sql.Identifier(_CONSTRAINT)))
        except ConfigError as err:
            return str(err)
        except psycopg.errors.InsufficientPrivilege:
            return None
    if system := sorted(_SYSTEM_COLUMNS.intersection(columns)):
        return f"filter {text!r}: PostgreSQL rejects system columns in it: {', '.join(system)}"
    params = {
        "schema": table.schema,
        "name": table.name,
        "columns": list(columns),
        "functions": functions_of(text),
    }
    refused = [f"{row.what} {row.name}" for row in fetch(conn, _REFUSED, params)]
    if not refused:
        return None
    return (
        f"filter {text!r}: PostgreSQL rejects {', '.join(refused)} in it: only immutable functions"
        " and types of its own are allowed in a publication"
    )


def _analyse(conn: Connection, table: TableId, text: str) -> RowFilter:
    allow_views(conn)
    copy = sql.Identifier("pg_temp", table.name)
    conn.execute(
        sql.SQL("create temporary table {} (like {})").format(
            sql.Identifier(table.name), table.identifier
        )
    )
    # Filters are expressions, not values, and parse_row_filter has read this one. The line break
    # ends a comment. Validating the constraint would call functions that have constant arguments.
    alter = sql.SQL("alter table {} add constraint {} check (").format(
        copy, sql.Identifier(_CONSTRAINT)
    )
    _run(conn, alter, text, sql.SQL("\n) not valid"))
    analysed = fetch(conn, _ANALYSED, {"name": _CONSTRAINT})[0].analysed
    params = {"name": f"pg_temp.{sql.Identifier(table.name).as_string(conn)}"}
    rows = fetch(conn, _COLUMN_TYPES, params)
    types = read_types(conn, [(row.oid, row.typmod) for row in rows])
    enums = enums_of({row.name: types[row.oid, row.typmod] for row in rows})
    # This refuses what isn't PostgreSQL's own: a user's functions, operators, and types but enums.
    columns = column_names(parse_analysed(analysed, {enum.name for enum in enums.values()}))
    # Planning evaluates constant parts, as decoding would: 1 / 0 fails in it, whatever the rows.
    _run(conn, sql.SQL("explain select from {} where (").format(copy), text, sql.SQL("\n)"))
    facts = fetch(conn, _DATABASE, {})[0]
    default = _collation(facts.database, facts.is_utf8)
    rows = fetch(conn, _COLLATIONS, params)
    collations = {
        r.name: default if r.is_default else _collation(r.collation, facts.is_utf8) for r in rows
    }
    used = {name: enum for name, enum in enums.items() if name in columns}
    return RowFilter(text, analysed, columns, collations, default, facts.is_utf8, used)


def _run(conn: Connection, head: sql.Composed, text: str, tail: sql.SQL) -> None:
    prefix = head.as_string(conn)
    try:
        conn.execute((prefix + text + tail.as_string(conn)).encode(), prepare=False)
    except psycopg.Error as err:
        if isinstance(err, psycopg.errors.InsufficientPrivilege | psycopg.OperationalError):
            raise
        position = int(err.diag.statement_position or 0) - 1 - len(prefix)
        where = f" at {place(text, position)}" if 0 <= position <= len(text) else ""
        raise ConfigError(
            f"filter {text!r}: PostgreSQL rejects it{where}: {err.diag.message_primary}"
        ) from None


def _collation(locale: Mapping[str, Any], is_utf8: bool) -> Collation:
    """Returns what is certain about a collation, from its provider and locale."""
    if not locale["deterministic"]:
        return Collation.NONDETERMINISTIC
    collate, ctype = locale["collate"], locale["ctype"]
    if not is_utf8 or locale["provider"] == "i":
        return Collation.DETERMINISTIC
    if collate in _C_LOCALES:
        return Collation.CODE_POINT if ctype in _C_LOCALES else Collation.BINARY_ORDER
    # The builtin provider's other locales also sort by code points; libc's C.UTF-8 depends on the C
    # library.
    return Collation.BINARY_ORDER if locale["provider"] == "b" else Collation.DETERMINISTIC


# Objects with smaller oids are PostgreSQL's own (FirstNormalObjectId). A name that isn't one of its
# immutable functions may be a function that a publication refuses. The type and collation of a used
# column count as used, too.
_REFUSED = """
select 'function' as what, w.name
from unnest(%(functions)s::text[]) as w (name)
where exists (select from pg_proc p where p.proname = w.name)
  and not exists (select from pg_proc p where p.proname = w.name and p.oid < 16384
    and p.provolatile = 'i')
union all
select case when a.atttypid >= 16384 then 'the user-defined type of column'
  else 'the user-defined collation of column' end, a.attname
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where n.nspname = %(schema)s and c.relname = %(name)s and a.attname = any(%(columns)s::text[])
  and (a.atttypid >= 16384 or a.attcollation >= 16384)
order by 1, 2
"""

_ANALYSED = """
select pg_get_expr(conbin, conrelid) as analysed
from pg_constraint
where conname = %(name)s and conrelid in (select oid from pg_class
  where relnamespace = pg_my_temp_schema())
"""

# The columns with a locale's name differ between versions: daticulocale and colliculocale before
# 17.
_DATABASE = """
select current_setting('server_encoding') = 'UTF8' as is_utf8,
       jsonb_build_object(
           'deterministic', true, 'provider', d.datlocprovider,
           'collate', case d.datlocprovider when 'b' then to_jsonb(d) ->> 'datlocale'
             else d.datcollate end,
           'ctype', case d.datlocprovider when 'b' then to_jsonb(d) ->> 'datlocale'
             else d.datctype end
       ) as database
from pg_database d
where d.datname = current_database()
"""

# Includes columns of a domain, because a domain may be over an enum.
_COLUMN_TYPES = """
select a.attname as name, a.atttypid::bigint as oid, a.atttypmod as typmod
from pg_attribute a
join pg_type t on t.oid = a.atttypid and t.typtype in ('d', 'e')
where a.attrelid = %(name)s::regclass and a.attnum > 0 and not a.attisdropped
"""

_COLLATIONS = """
select a.attname as name,
       c.collprovider = 'd' as is_default,
       jsonb_build_object(
           'deterministic', c.collisdeterministic, 'provider', c.collprovider,
           'collate', case c.collprovider when 'b' then to_jsonb(c) ->> 'colllocale'
             else c.collcollate end,
           'ctype', case c.collprovider when 'b' then to_jsonb(c) ->> 'colllocale'
             else c.collctype end
       ) as collation
from pg_attribute a
join pg_collation c on c.oid = a.attcollation
where a.attrelid = %(name)s::regclass and a.attnum > 0 and not a.attisdropped
"""
