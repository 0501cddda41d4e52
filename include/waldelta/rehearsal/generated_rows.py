"""Rows for the tables of a schema, made from types, constraints and foreign keys.

The value of a column in row ``g`` is an expression of ``g``. A foreign key's column has the
expression of the column that it references, so the rows of both tables with one ``g`` go together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from waldelta.postgres import Connection, TableId, fetch
from waldelta.rehearsal.observation import TooLong

# Each table's first rows. A foreign key finds its row, because all tables have the same ones.
ROWS = 8
# Foreign keys of foreign keys are followed so far.
_DEEPEST = 8
# How many combinations of literals of its constraints a table's rows are tried with.
_ATTEMPTS = 40

_BY_TYPE: Mapping[str, str] = {
    "int2": "(g % 32000)::int2",
    "int4": "g::int4",
    "int8": "g::int8",
    "numeric": "g::numeric",
    "float4": "g::float4",
    "float8": "g::float8",
    "money": "g::numeric::money",
    "bool": "g % 2 = 0",
    "date": "date '2024-01-01' + g::int4",
    "timestamp": "timestamp '2024-01-01' + g * interval '1 minute'",
    "timestamptz": "timestamptz '2024-01-01 00:00+00' + g * interval '1 minute'",
    "time": "time '00:00' + g * interval '1 second'",
    "timetz": "timetz '00:00+00' + g * interval '1 second'",
    "interval": "g * interval '1 minute'",
    "uuid": "md5(g::text)::uuid",
    "json": "json_build_object('n', g)",
    "jsonb": "jsonb_build_object('n', g)",
    "bytea": "decode(md5(g::text), 'hex')",
    "inet": "inet '10.0.0.0' + g",
    "cidr": "(host(inet '10.0.0.0' + g) || '/32')::cidr",
    "macaddr": "('08:00:2b:01:' || to_char(g / 100 % 100, 'FM00') || ':'"
    " || to_char(g % 100, 'FM00'))::macaddr",
    "bit": "g::int4::bit(32)",
    "varbit": "g::int4::bit(32)::varbit",
    "xml": "('<n>' || g || '</n>')::xml",
    "tsvector": "to_tsvector('simple', 'word' || g)",
    "tsquery": "to_tsquery('simple', 'word' || g)",
    "point": "point(g, g)",
    "oid": "g::oid",
    "int4range": "int4range(g::int4, g::int4 + 1)",
    "int8range": "int8range(g, g + 1)",
    "numrange": "numrange(g, g + 1)",
    "daterange": "daterange(date '2024-01-01' + g::int4, date '2024-01-02' + g::int4)",
    "tsrange": "tsrange(timestamp '2024-01-01' + g * interval '1 day', null)",
    "tstzrange": "tstzrange(timestamptz '2024-01-01 00:00+00' + g * interval '1 day', null)",
}
# A text that fits its column keeps its end, which tells rows apart.
_TEXT = "right('value ' || g, {})"
_LITERAL = re.compile(r"'((?:[^']|'')*)'|(?<![\w.'])(-?\d+(?:\.\d+)?)(?![\w.'])")


# All tables have the first rows, so a foreign key of any row finds one of them.
_SHARED_ROW = f"from (select 1 + (g - 1) % {ROWS} as g) as r"


@dataclass(frozen=True, slots=True)
class WritableColumn:
    """A column that an INSERT names; ``values`` are expressions of ``g`` to be tried in turn.

    An UPDATE names no identity column that is ``is_always_generated``.
    """

    name: str
    values: Sequence[str]
    is_key: bool
    is_always_generated: bool


@dataclass(frozen=True, slots=True)
class WritableTable:
    """A table of the schema, not a partition, with the columns that get values."""

    oid: int
    id: TableId
    owner: str
    columns: Sequence[WritableColumn]
    # ON CONFLICT supports no deferrable unique constraint.
    has_deferrable_key: bool

    def inserts(self, first: int, last: int) -> Iterator[sql.Composed]:
        """Yields INSERTs of the rows from ``first`` to ``last``, of which one is to succeed.

        The first one has values by type alone, the second one each column's next value, and each
        other one a choice that is always the same.
        """
        for attempt in range(_ATTEMPTS):
            yield self._insert(attempt, first, last)

    def _insert(self, attempt: int, first: int, last: int) -> sql.Composed:
        choice = random.Random(attempt)  # noqa: S311 - no secret
        if not self.columns:
            return sql.SQL("insert into {} default values").format(self.id.identifier)
        return sql.SQL(
            "insert into {} ({}) overriding system value select {}"
            " from generate_series({}::bigint, {}) as g {}"
        ).format(
            self.id.identifier,
            sql.SQL(", ").join(sql.Identifier(column.name) for column in self.columns),
            sql.SQL(", ").join(
                sql.SQL(
                    choice.choice(column.values)
                    if attempt > 1
                    else column.values[attempt % len(column.values)]
                )
                for column in self.columns
            ),
            first,
            last,
            sql.SQL("" if self.has_deferrable_key else "on conflict do nothing"),
        )


def read_tables(connection: Connection, oids: Iterable[int] | None = None) -> list[WritableTable]:
    """Returns the tables of the user's schemas, or these, partitions under their root."""
    tables = fetch(connection, _TABLES, {"oids": None if oids is None else list(oids)})
    ids = {table.oid: TableId(table.nspname, table.relname) for table in tables}
    columns = fetch(connection, _COLUMNS, {"oids": list(ids)})
    by_column = {(column.relid, column.attnum): column for column in columns}
    keys = fetch(connection, _FOREIGN_KEYS, {})
    referenced = {(key.relid, key.attnum): (key.other, key.other_attnum) for key in keys}
    literals = _read_literals(connection)

    def values(place: tuple[int, int], depth: int = 0) -> list[str]:
        parent = referenced.get(place)
        column = by_column[place]
        if parent is not None and parent != place and parent in by_column and depth < _DEEPEST:
            shared = [
                f"(select {value} {_SHARED_ROW})::{column.type}"
                for value in values(parent, depth + 1)
            ]
            # The rows of a sample are others.
            any_row = sql.SQL("(select {0} from {1} offset g % (select count(*) from {1}) limit 1)")
            name, table = sql.Identifier(by_column[parent].attname), ids[parent[0]].identifier
            return [shared[0], any_row.format(name, table).as_string(), *shared[1:]]
        constants = [f"({text})::{column.type}" for text in dict.fromkeys(literals.get(place, ()))]
        return [*_base(column), *constants]

    return [
        WritableTable(
            table.oid,
            ids[table.oid],
            table.owner,
            [
                WritableColumn(
                    column.attname,
                    values((column.relid, column.attnum)),
                    column.is_key,
                    column.attidentity == "a",
                )
                for column in columns
                if column.relid == table.oid and not column.attgenerated
            ],
            table.has_deferrable_key,
        )
        for table in tables
    ]


def _read_literals(connection: Connection) -> dict[tuple[int, int], list[str]]:
    """Returns the values that checks compare columns with, and those next to them, by column."""
    literals: dict[tuple[int, int], list[str]] = {}
    for bound in fetch(connection, _LITERALS, {}):
        expressions = literals.setdefault((bound.relid, bound.attnum), [])
        for text, number in _LITERAL.findall(bound.text):
            expressions += [f"{number} + 1", f"{number} - 1", number] if number else [f"'{text}'"]
    return literals


def _base(column: Any) -> list[str]:
    if column.labels:
        listed = ", ".join("'" + label.replace("'", "''") + "'" for label in column.labels)
        value = f"(array[{listed}])[1 + g % {len(column.labels)}]"
    elif column.base in ("varchar", "bpchar", "text", "name", "citext"):
        value = _TEXT.format(column.length or 60)
    elif column.base == "numeric" and column.digits:
        value = f"(g % {10 ** min(column.digits, 18)})::numeric"
    elif column.is_array:
        return ["'{}'" + f"::{column.type}"]
    elif (value := _BY_TYPE.get(column.base, "")) == "":
        value = "null"
    return [f"({value})::{column.type}"]


def fill(connection: Connection, tables: Sequence[WritableTable]) -> dict[str, str]:
    """Write the first rows of each table, with triggers and foreign keys switched off.

    Sequences go on behind them. Returns by name why tables have no rows.
    """
    connection.execute("set session_replication_role = replica")
    refusals = {
        str(table.id): execute_one(connection.execute, table.inserts(1, ROWS)) for table in tables
    }
    connection.execute("reset session_replication_role")
    connection.execute(_SET_SEQUENCES)
    return {
        name: str(err.diag.message_primary or err)
        for name, err in refusals.items()
        if err is not None
    }


def execute_one(
    execute: Callable[[sql.Composed], psycopg.Cursor[Any]], statements: Iterable[sql.Composed]
) -> psycopg.Error | None:
    """Execute the first of the statements that changes a row; returns None, or why none did."""
    refusal = psycopg.Error("no row was written")
    for statement in statements:
        try:
            if execute(statement).rowcount:
                return None
        except TooLong as err:
            return err
        except psycopg.Error as err:
            refusal = err
    return refusal


def workload(table: WritableTable, first: int) -> Iterator[tuple[str, Iterable[sql.Composed]]]:
    """Yields an UPDATE of one row, a DELETE of another and an INSERT of two, by the operation's
    name, each as statements of which one is to change a row.
    """
    # An UPDATE makes its row the newest one, so both concern rows that the lake has.
    row = sql.SQL(
        "(tableoid, ctid) = (select tableoid, ctid from {} order by age(xmin) {}, tableoid, ctid"
        " limit 1)"
    )
    oldest, newest = (
        row.format(table.id.identifier, sql.SQL(direction)) for direction in ("desc", "asc")
    )
    columns = [column for column in table.columns if not column.is_always_generated]
    if columns:
        name = sql.Identifier(max(columns, key=lambda column: not column.is_key).name)
        update = sql.SQL("update {} set {} = {} where {}")
        yield "update", [update.format(table.id.identifier, name, name, oldest)]
    delete = sql.SQL("delete from {} where {}")
    # A foreign key may refuse to delete the oldest row.
    yield "delete", [delete.format(table.id.identifier, which) for which in (oldest, newest)]
    yield "insert", table.inserts(first, first + 1)


_TABLES = """
select c.oid, n.nspname, c.relname, pg_get_userbyid(c.relowner) as owner,
       exists (select from pg_index i where i.indrelid = c.oid and i.indisunique
               and not i.indimmediate) as has_deferrable_key
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
  and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
  and not exists (select from pg_depend d where d.objid = c.oid and d.deptype = 'e')
  and (%(oids)s::oid[] is null or c.oid = any(%(oids)s::oid[]))
order by n.nspname, c.relname
"""
_COLUMNS = """
with recursive bases as (
  select t.oid, t.oid as base, t.typtypmod as typmod from pg_type t where t.typtype <> 'd'
  union all
  select t.oid, b.base, case when t.typtypmod >= 0 then t.typtypmod else b.typmod end
  from pg_type t join bases b on b.oid = t.typbasetype where t.typtype = 'd'
)
select a.attrelid as relid, a.attnum, a.attname, a.attgenerated, a.attidentity,
       format_type(a.atttypid, a.atttypmod) as type, t.typname as base,
       t.typcategory = 'A' as is_array,
       case when m.typmod > 4 and t.typname in ('varchar', 'bpchar')
            then m.typmod - 4 end as length,
       case when m.typmod > 4 and t.typname = 'numeric'
            then ((m.typmod - 4) >> 16) - ((m.typmod - 4) & 65535) end as digits,
       (select array_agg(e.enumlabel::text order by e.enumsortorder)
        from pg_enum e where e.enumtypid = t.oid) as labels,
       exists (select from pg_index i where i.indrelid = a.attrelid and i.indisunique
               and a.attnum = any(i.indkey)) or exists (
         select from pg_constraint k where k.conrelid = a.attrelid and k.contype = 'f'
         and a.attnum = any(k.conkey)) as is_key
from pg_attribute a
join bases b on b.oid = a.atttypid
join pg_type t on t.oid = b.base
cross join lateral (
  select case when a.atttypmod >= 0 then a.atttypmod else b.typmod end as typmod
) m
where a.attnum > 0 and not a.attisdropped and a.attrelid = any(%(oids)s)
order by a.attrelid, a.attnum
"""
_FOREIGN_KEYS = """
select k.conrelid as relid, k.conkey[i] as attnum,
       k.confrelid as other, k.confkey[i] as other_attnum
from pg_constraint k cross join lateral generate_subscripts(k.conkey, 1) as i
where k.contype = 'f' and k.conparentid = 0
"""
# The text of each constraint that a column is part of: checks, also those of its domain, and the
# bounds of partitions.
_LITERALS = """
select k.conrelid as relid, a.attnum, pg_get_constraintdef(k.oid) as text
from pg_constraint k join pg_attribute a on a.attrelid = k.conrelid and a.attnum = any(k.conkey)
where k.contype = 'c'
union all
select a.attrelid, a.attnum, pg_get_constraintdef(k.oid)
from pg_constraint k join pg_attribute a on a.atttypid = k.contypid
where k.contype = 'c' and k.contypid <> 0 and a.attnum > 0
union all
select p.partrelid, a, pg_get_expr(c.relpartbound, c.oid)
from pg_partitioned_table p
cross join lateral unnest(p.partattrs::int2[]) as a
cross join lateral pg_partition_tree(p.partrelid) as part
join pg_class c on c.oid = part.relid
where part.level > 0
"""
# Those that the migration has used since stay.
_SET_SEQUENCES = """
select setval(c.oid::regclass, start)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
join pg_sequence s on s.seqrelid = c.oid
cross join lateral (select greatest(seqmin, least(1000000, seqmax / 2)) as start) as b
where seqincrement > 0 and n.nspname not in ('pg_catalog', 'information_schema')
  and coalesce(pg_sequence_last_value(c.oid), seqmin) < start
"""
