"""The columns of a source table as SQL: every statement that selects or compares them asks here.

Copies and repairs select a column's value, completed rows and reconciliations its text. What the
stream sends of a column passes through the same TargetType (see waldelta.changes.decode).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa
from psycopg import sql

from waldelta.metadata_columns import RELID_ATTNUM
from waldelta.postgres import PgType, PublishedTable
from waldelta.types import TargetType
from waldelta.types.base import printed

MOST_EXPRESSIONS = 1664  # MaxTupleAttributeNumber


def column_sql(name: str, *, is_leaf: bool = False, relation: str = "") -> sql.Composable:
    """Returns a column of the target as SQL on the source.

    ``is_leaf``: it names the row's leaf partition, and isn't a column of the table. ``relation`` is
    what the column's name is written behind, such as ``t.``.
    """
    return sql.SQL(relation) + (sql.SQL("tableoid::bigint") if is_leaf else sql.Identifier(name))


def text_sql(name: str, relation: str = "") -> sql.Composable:
    """Returns a column's text, as pgoutput sends it; ``relation`` as in column_sql()."""
    return printed(column_sql(name, relation=relation))


def value_expressions(
    columns: Sequence[tuple[str, TargetType]],
    leaf: str | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[sql.Composable, sql.Composable | None]]:
    """Returns what to select for each column: its value, and its raw text where the type may not
    hold it.

    ``leaf`` is the column that names the row's leaf partition, ``names`` are the source's names of
    columns that have another one in the lake. In a very wide table such columns
    are selected as text only, which costs more to read, because PostgreSQL limits the number of
    expressions.
    """
    pairs = [
        target.copy_expressions(column_sql(names.get(name, name), is_leaf=name == leaf))
        for name, target in columns
    ]
    if sum(1 + (raw is not None) for _, raw in pairs) <= MOST_EXPRESSIONS:
        return pairs
    return [
        (value, None) if raw is None else (text_sql(names.get(name, name)), None)
        for (name, _), (value, raw) in zip(columns, pairs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class KeyAttribute:
    """A column of a table's key, and its type on the server now.

    A type's name is never taken from the lake, where it could be any text.
    """

    name: str
    type: PgType
    is_leaf: bool = False
    source_name: str | None = None

    def compared(
        self, text: sql.Composable, relation: str = ""
    ) -> tuple[sql.Composable, sql.Composable]:
        """Returns the column and a text as SQL that is equal for the same value."""
        name = self.source_name or self.name
        column = column_sql(name, is_leaf=self.is_leaf, relation=relation)
        if (kind := self.type.unchecked_name) is None:
            return printed(column), text
        # The server has printed the type's name, quoted where needed.
        return column, sql.SQL("{}::{}").format(text, sql.SQL(kind))


def key_columns(table: PublishedTable, names: Sequence[str]) -> tuple[KeyAttribute, ...]:
    """Returns these columns of a table as the server describes them."""
    columns = {column.name: column for column in table.columns}
    return tuple(
        KeyAttribute(name, column.type, column.attnum == RELID_ATTNUM, column.source_name)
        for name in names
        for column in [columns[name]]
    )


def is_one_of(key: Sequence[KeyAttribute], texts: Sequence[pa.Array]) -> sql.Composable:
    """Returns the condition that a row has one of these keys, given as texts by column."""
    numbered = [sql.Identifier(f"k{n}") for n in range(len(key))]
    pairs = [
        column.compared(sql.SQL("k.{}").format(number))
        for number, column in zip(numbered, key, strict=True)
    ]
    names, typed = zip(*pairs, strict=True)
    arrays = [sql.SQL("{}::text[]").format(sql.Literal(text.to_pylist())) for text in texts]
    return sql.SQL("({}) in (select {} from unnest({}) as k ({}))").format(
        *(sql.SQL(", ").join(parts) for parts in (names, typed, arrays, numbered))
    )
