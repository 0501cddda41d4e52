"""Reads selected rows of a table as a snapshot sees them: by a condition, or by given keys.

A repair adds these rows to a target. The queries have no ctid ranges, so that PostgreSQL can use an
index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from psycopg import sql

from waldelta.errors import SnapshotLost
from waldelta.postgres import Leaf, PublishedTable
from waldelta.snapshot.read_table import (
    TableCopy,
    begin_snapshot,
    fetch_rows,
    of_leaves,
    run_statement,
    select_statement,
    snapshot_reader,
)
from waldelta.snapshot.source_columns import KeyAttribute, is_one_of

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi as adbc

# One statement lists this many keys.
KEYS_PER_READ = 5_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of one relation (as written after FROM) that meet a condition.

    ``files`` has the files of its leaves that the snapshot sees. ``root`` is the oid of the
    partitioned table through which the leaves are read; None: the relation is its only leaf.
    """

    relation: str
    condition: str
    files: Mapping[int, int]
    root: int | None = None

    def statement(self, copy: TableCopy, *further: sql.Composable) -> str:
        """Returns the SELECT, with more conditions."""
        # The text was deparsed by PostgreSQL.
        conditions: list[sql.Composable] = [sql.SQL(f"({self.condition})")]
        return select_statement(copy, sql.SQL(self.relation), [*conditions, *further])


def whole_table(table: PublishedTable, condition: str, files: Mapping[int, int]) -> Choice:
    """Select rows of a table and its partitions, but not of tables that inherit from it."""
    if table.relkind == "p":
        return Choice(table.id.identifier.as_string(None), condition, files, table.oid)
    leaves = [leaf for leaf in table.leaves if leaf.oid == table.oid]
    return of_leaves_together(leaves, condition, files)


def of_leaves_together(leaves: Sequence[Leaf], condition: str, files: Mapping[int, int]) -> Choice:
    """Select rows of one leaf, or of leaves that the role may only read through a table above
    them.
    """
    through, oids = leaves[0].through, [leaf.oid for leaf in leaves]
    leaf_files = {oid: files[oid] for oid in oids if oid in files}
    if through is None:
        return Choice(f"only {leaves[0].id.identifier.as_string(None)}", condition, leaf_files)
    these = f"({condition}) and {of_leaves(oids).as_string(None)}"
    return Choice(through.id.identifier.as_string(None), these, leaf_files, through.oid)


def read_choices(
    conninfo: str, copy: TableCopy, choices: Sequence[Choice], application_name: str
) -> Iterator[pa.RecordBatch]:
    """Yields the selected rows as the target's columns.

    Raises SnapshotLost when a leaf has another file than the snapshot sees.
    """
    with snapshot_reader(conninfo, copy, application_name) as connection:
        for choice in choices:
            yield from _read(connection, copy, choice, choice.statement(copy))


def read_keys(
    conninfo: str,
    copy: TableCopy,
    choice: Choice,
    key: Sequence[KeyAttribute],
    batches: Iterable[pa.RecordBatch],
    application_name: str,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows with these keys, as read_choices() does.

    The first columns of each batch are the keys' texts.
    """
    with snapshot_reader(conninfo, copy, application_name) as connection:
        for batch in batches:
            if batch.num_rows:
                statement = choice.statement(copy, is_one_of(key, batch.columns[: len(key)]))
                yield from _read(connection, copy, choice, statement)


def _read(
    connection: adbc.Connection, copy: TableCopy, choice: Choice, statement: str
) -> Iterator[pa.RecordBatch]:
    begin_snapshot(connection, copy)
    yield from fetch_rows(connection, copy, statement)
    # Checked under the locks that the query took: a TRUNCATE or rewrite before it would have shown
    # an empty relation.
    with connection.cursor() as cursor:
        cursor.execute(other_files(choice))
        changed_files = cursor.fetch_arrow_table().column(0)[0].as_py()
    if changed_files:
        raise SnapshotLost(
            f"{copy.table} was truncated, rewritten or detached while its rows were read: run again"
        )
    run_statement(connection, "commit")


def other_files(choice: Choice) -> str:
    """Returns a query of how many leaves have another file than the snapshot sees, or were
    detached.

    It runs under the locks of the statements that read them.
    """
    query = sql.SQL(
        "select count(*) from unnest({}::oid[], {}::oid[]) as f (leaf, node)"
        " where pg_catalog.pg_relation_filenode(leaf) is distinct from node"
    ).format(sql.Literal(list(choice.files)), sql.Literal(list(choice.files.values())))
    if choice.root is not None:
        query += sql.SQL(
            " or not exists (select from pg_catalog.pg_partition_ancestors(leaf) a where a.relid ="
            " {}::oid)"
        ).format(sql.Literal(choice.root))
    return query.as_string(None)
