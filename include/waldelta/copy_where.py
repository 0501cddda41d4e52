"""Reads chosen rows of a table as a snapshot sees them: those that meet a condition, or those of given keys.

What a repair adds to a target. Without ranges of ctid, so that PostgreSQL finds the rows by an index where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa
from psycopg import sql

from waldelta.catalog import PublishedTable
from waldelta.column_names import RELID
from waldelta.connection import connect_arrow
from waldelta.copy import TableCopy, begin_snapshot, fetch_rows, named_errors, run_statement, select_statement
from waldelta.errors import SnapshotLost


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of one relation (as it stands behind FROM) that meet a condition; ``files``: what the snapshot sees of its leaves."""

    relation: str
    condition: str
    files: Mapping[int, int]

    def statement(self, copy: TableCopy, *further: sql.Composable) -> str:
        """The SELECT, with more conditions."""
        # PostgreSQL's own deparsed texts.
        conditions: list[sql.Composable] = [sql.SQL(f"({self.condition})")]
        return select_statement(copy, sql.SQL(self.relation), [*conditions, *further])


def whole_relation(table: PublishedTable) -> str:
    """A table with all that is published as its rows: its partitions, but not what inherits from it."""
    return ("" if table.relkind == "p" else "only ") + table.id.identifier.as_string(None)


def read_choices(
    conninfo: str, copy: TableCopy, choices: Sequence[Choice], application_name: str
) -> Iterator[pa.RecordBatch]:
    """Yield the chosen rows as the target's columns. Raises SnapshotLost when a leaf isn't the file that the snapshot sees."""
    with closing(connect_arrow(conninfo, application_name)) as connection, named_errors(connection, conninfo, copy):
        for choice in choices:
            yield from _read(connection, copy, choice, choice.statement(copy))


def read_keys(
    conninfo: str,
    copy: TableCopy,
    choice: Choice,
    key: Sequence[tuple[str, str]],
    batches: Iterable[pa.RecordBatch],
    application_name: str,
) -> Iterator[pa.RecordBatch]:
    """As read_choices(), of the rows with these keys: ``key`` names columns and types, each batch has their texts first."""
    with closing(connect_arrow(conninfo, application_name)) as connection, named_errors(connection, conninfo, copy):
        for batch in batches:
            if batch.num_rows:
                statement = choice.statement(copy, is_one_of(key, batch.columns[: len(key)]))
                yield from _read(connection, copy, choice, statement)


def _read(connection: adbc.Connection, copy: TableCopy, choice: Choice, statement: str) -> Iterator[pa.RecordBatch]:
    begin_snapshot(connection, copy)
    yield from fetch_rows(connection, copy, statement)
    # Under the locks that the query has taken: a TRUNCATE or a rewrite before it would have shown it an empty relation.
    with connection.cursor() as cursor:
        cursor.execute(other_files(choice.files))
        others = cursor.fetch_arrow_table().column(0)[0].as_py()
    if others:
        raise SnapshotLost(f"{copy.table} was truncated or rewritten while rows of it were read")
    run_statement(connection, "commit")


def other_files(files: Mapping[int, int]) -> str:
    """How many of these leaves have another file by now than the snapshot sees; under the locks of what read them."""
    return sql.SQL(
        "select count(*) from unnest({}::oid[], {}::oid[]) as f (leaf, node)"
        " where pg_catalog.pg_relation_filenode(leaf) is distinct from node"
    ).format(sql.Literal(list(files)), sql.Literal(list(files.values()))).as_string(None)  # fmt: skip


def is_one_of(key: Sequence[tuple[str, str]], texts: Sequence[pa.Array]) -> sql.Composable:
    """The condition that a row has one of these keys, given as texts by column; ``key`` names columns and types."""
    names = [sql.SQL("tableoid::bigint") if name == RELID else sql.Identifier(name) for name, _ in key]
    numbered = [sql.Identifier(f"k{n}") for n in range(len(key))]
    # A type's name is PostgreSQL's own, quoted where it must be.
    typed = [sql.SQL("k.{}::{}").format(number, sql.SQL(kind)) for number, (_, kind) in zip(numbered, key, strict=True)]
    arrays = [sql.SQL("{}::text[]").format(sql.Literal(text.to_pylist())) for text in texts]
    return sql.SQL("({}) in (select {} from unnest({}) as k ({}))").format(
        *(sql.SQL(", ").join(parts) for parts in (names, typed, arrays, numbered))
    )
