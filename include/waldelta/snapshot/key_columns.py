"""Compares a key's columns with texts, by types that the server describes when it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from waldelta.metadata_columns import RELID
from waldelta.postgres import PgType, PublishedTable
from waldelta.types.base import printed


@dataclass(frozen=True, slots=True)
class KeyAttribute:
    """A column of a table's key, and its type on the server now.

    A type's name is never taken from the lake, where it could be any text.
    """

    name: str
    type: PgType

    def compared(
        self, text: sql.Composable, relation: str = ""
    ) -> tuple[sql.Composable, sql.Composable]:
        """Return the column and a text as SQL that is equal for the same value.

        ``relation`` is what the column's name is written behind, such as ``t.``.
        """
        own = sql.SQL("tableoid::bigint") if self.name == RELID else sql.Identifier(self.name)
        column = sql.SQL(relation) + own
        if (name := self.type.unchecked_name) is None:
            return printed(column), text
        # The server has printed the type's name, quoted where needed.
        return column, sql.SQL("{}::{}").format(text, sql.SQL(name))


def key_columns(table: PublishedTable, names: Sequence[str]) -> tuple[KeyAttribute, ...]:
    """Return these columns of a table as the server describes them."""
    types = {column.name: column.type for column in table.columns}
    return tuple(KeyAttribute(name, types[name]) for name in names)
