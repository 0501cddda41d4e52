"""The source's side of a reconciliation: sums, rows and values, computed by PostgreSQL from the
rows of one snapshot.

It only reads, in short transactions that import the snapshot. PostgreSQL returns a few numbers per
bucket, then the hashes and keys of rows in differing buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from waldelta.errors import (
    ConfigError,
    PrivilegeMissing,
    SnapshotLost,
    SourceError,
    SourceUnreachable,
    TableBusy,
    raised_as,
    without_values,
)
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.postgres import Connection, check_settings, describe, lacks_room, rows_where
from waldelta.postgres.sessions import PLAIN_SESSIONS
from waldelta.server_errors import sqlstate as codes
from waldelta.snapshot.chunks import Chunk
from waldelta.snapshot.exported_snapshot import reader_name
from waldelta.snapshot.read_selected import KEYS_PER_READ, Choice, other_files
from waldelta.snapshot.read_table import (
    COPY_LOCK_TIMEOUT_MS,
    GONE,
    NO_SNAPSHOT,
    TableCopy,
    chunk_conditions,
    chunk_relation,
    filter_conditions,
    lock_query,
    privilege_remedy,
)
from waldelta.snapshot.source_columns import KeyAttribute, is_one_of
from waldelta.stages.repair.reconcile._checksum import (
    Fingerprint,
    Hashes,
    Sums,
    hash_as,
    source_text,
)
from waldelta.stages.repair.reconcile._row_differences import TEXT_SHOWN, HashedRows, Valued
from waldelta.types import TargetType
from waldelta.types.base import printed

Fetched = list[tuple[Any, ...]]

BYTES_PER_CHUNK = 128 << 20
SESSIONS = 2
# The rows of a table without a key are named by the beginning of their columns.
_COLUMNS_SHOWN = 12
# The probe has a non-ASCII letter where chr() can make one: of the encodings with several bytes a
# letter, only in UTF-8.
_PROBE = """
select text, {hashed}
from (
    select 'waldelta ' || pg_catalog.chr(case when name = 'UTF8' or bytes = 1 then 233 else 97 end)
      as text
    from (select pg_catalog.getdatabaseencoding()::text) as e (name),
         lateral (select pg_catalog.pg_encoding_max_length(pg_catalog.pg_char_to_encoding(name)))
           as l (bytes)
) as probe
"""


@dataclass(frozen=True, slots=True)
class SourceSide:
    """Reads one table of the source for a comparison: sums of hashes, keys, values.

    ``chunks`` divide the table between sessions. ``again`` chooses all its rows at once, for rows
    that are read a second time. ``key`` has the key's columns and types.
    """

    conninfo: str
    plan: Fingerprint
    copy: TableCopy
    chunks: tuple[Chunk, ...]
    again: Choice
    key: tuple[KeyAttribute, ...]
    holder_pid: int

    def sums(self) -> Sums:
        """Returns the sums of all rows that pass the filters.

        Raises ConfigError for a server whose hashes differ from this machine's.
        """
        total = Sums(self.plan.buckets)
        for chunk in self._of_chunks(self._sums_statement):
            if chunk:
                buckets, rows, totals = zip(*chunk, strict=True)
                exact = np.array([int(text) & 0xFFFF_FFFF_FFFF_FFFF for text in totals], np.uint64)
                total.add_sums(np.array(buckets), np.array(rows), exact)
        return total

    def rows(self, buckets: Sequence[int]) -> HashedRows:
        """Returns the rows of these buckets: hashes, and keys as texts."""
        tuples = [
            row
            for part in self._of_chunks(lambda rows: self._rows_statement(rows, buckets))
            for row in part
        ]
        return HashedRows.of(tuples, len(self.shown))

    def hashes(self, texts: Sequence[ArrowArray]) -> tuple[Hashes, Hashes]:
        """Returns the key hashes and row hashes of the rows with these keys (texts by column)."""
        row_hashes = dict(self._of_keys(texts, []))
        return np.array(list(row_hashes), np.int64), np.array(list(row_hashes.values()), np.int64)

    def values(self, texts: Sequence[ArrowArray]) -> dict[int, Valued]:
        """Returns by key hash each column's printed text and canonical text, of the rows with these
        keys.
        """
        columns = self._columns(self.plan.columns)
        printed_columns = [printed(column) for column, _ in columns]
        marks, raw = self.plan.marks, self.plan.raw
        exact = [source_text([column], marks, raw=raw) for column in columns]
        count = len(columns)
        return {
            row[0]: Valued(row[2 : 2 + count], row[2 + count :])
            for row in self._of_keys(texts, [*printed_columns, *exact])
        }

    @property
    def shown(self) -> list[str]:
        """Returns the columns that name rows."""
        return list(self.plan.key) or [name for name, _ in self.plan.columns][:_COLUMNS_SHOWN]

    def _sums_statement(self, rows: sql.Composable) -> sql.Composable:
        hashed = sql.SQL("select {hashes} from {rows}").format(hashes=self._hashes(), rows=rows)
        if not self.plan.key:
            # Without offset 0, PostgreSQL would hash each row twice.
            hashed = sql.SQL("{} offset 0").format(hashed)
        return sql.SQL(
            "select (k & {mask})::int4, count(*), sum(h)::text from ({hashed}) as r group by 1"
        ).format(mask=sql.Literal(self.plan.buckets - 1), hashed=hashed)

    def _rows_statement(self, rows: sql.Composable, buckets: Sequence[int]) -> sql.Composable:
        names = [sql.Identifier(f"t{n}") for n in range(len(self.shown))]
        texts = [printed(self.copy.column(name)) for name in self.shown]
        if not self.plan.key:
            texts = [
                sql.SQL("pg_catalog.left({}, {})").format(text, sql.Literal(TEXT_SHOWN))
                for text in texts
            ]
        listed = [
            sql.SQL("{} as {}").format(text, name) for text, name in zip(texts, names, strict=True)
        ]
        return sql.SQL(
            "select k, h, {names} from (select {hashes}, {texts} from {rows}) as r where (k &"
            " {mask})::int4 = any ({buckets}::int4[])"
        ).format(
            names=sql.SQL(", ").join(names),
            hashes=self._hashes(),
            texts=sql.SQL(", ").join(listed),
            rows=rows,
            mask=sql.Literal(self.plan.buckets - 1),
            buckets=sql.Literal([int(bucket) for bucket in buckets]),
        )

    def _hashes(self) -> sql.Composable:
        row = self._hash(self._columns(self.plan.columns), self.plan.seed)
        if not self.plan.key:
            # Two different expressions of one name would be ambiguous.
            return sql.SQL("{0} as k, {0} as h").format(row)
        keys = self._columns(self.plan.key_columns)
        return sql.SQL("{} as k, {} as h").format(self._hash(keys, self.plan.key_seed), row)

    def _columns(
        self, columns: Iterable[tuple[str, TargetType]]
    ) -> list[tuple[sql.Composable, TargetType]]:
        return [(self.copy.column(name), kind) for name, kind in columns]

    def _hash(self, columns: Sequence[tuple[sql.Composable, Any]], seed: int) -> sql.Composable:
        return self._hash_of(source_text(columns, self.plan.marks, raw=self.plan.raw), seed)

    def _hash_of(self, text: sql.Composable, seed: int) -> sql.Composable:
        """Returns the SQL that hashes a text as ``hash_as`` does."""
        if self.plan.in_hex:
            text = sql.SQL("pg_catalog.encode(pg_catalog.convert_to({}, 'UTF8'), 'hex')").format(
                text
            )
        return sql.SQL('pg_catalog.hashtextextended({} collate "C", {})').format(
            text, sql.Literal(seed)
        )

    def _of_chunks(
        self, statement: Callable[[sql.Composable], sql.Composable]
    ) -> Iterator[Fetched]:
        """Yields a statement's results for each chunk, from several concurrent sessions."""

        def read(number: int) -> list[Fetched]:
            with self._session(number) as connection:
                return [
                    self._of_chunk(connection, chunk, statement)
                    for chunk in self.chunks[number::count]
                ]

        count = min(SESSIONS, len(self.chunks))
        with ThreadPoolExecutor(max(1, count), thread_name_prefix="reconcile") as pool:
            for parts in pool.map(read, range(count)):
                yield from parts

    def _of_chunk(
        self,
        connection: Connection,
        chunk: Chunk,
        statement: Callable[[sql.Composable], sql.Composable],
    ) -> Fetched:
        with self._transaction(connection):
            # A chunk is read as in a copy.
            ((is_other, bounds),) = connection.execute(
                lock_query(self.copy, chunk).encode()
            ).fetchall()
            if is_other:
                raise SnapshotLost(
                    f"{chunk.id} was truncated, rewritten or detached while it was compared: run"
                    " again"
                )
            rows = rows_where(chunk_relation(chunk), chunk_conditions(self.copy, chunk, bounds))
            return connection.execute(statement(rows).as_string(None).encode()).fetchall()

    def _of_keys(
        self, texts: Sequence[ArrowArray], further: Sequence[sql.Composable]
    ) -> Iterator[tuple[Any, ...]]:
        with self._session(0) as connection:
            for first in range(0, len(texts[0]) if texts else 0, KEYS_PER_READ):
                part = [column.slice(first, KEYS_PER_READ) for column in texts]
                conditions = [
                    sql.SQL(f"({self.again.condition})"),
                    *filter_conditions(self.copy),
                    is_one_of(self.key, part),
                ]
                listed = sql.SQL(", ").join([self._hashes(), *further])
                rows = rows_where(sql.SQL(self.again.relation), conditions)
                statement = sql.SQL("select {} from {}").format(listed, rows)
                with self._transaction(connection):
                    yield from connection.execute(statement.as_string(None).encode()).fetchall()
                    if connection.execute(other_files(self.again).encode()).fetchone() != (0,):
                        raise SnapshotLost(
                            f"{self.copy.table} was truncated, rewritten or detached while it was"
                            " compared: run again"
                        )

    @contextmanager
    def _session(self, number: int) -> Iterator[Connection]:
        name = reader_name(self.holder_pid, number, self.copy.table).replace("copy", "reconcile", 1)
        with (
            PLAIN_SESSIONS.session(self.conninfo, name) as connection,
            raised_as(lambda err: _comparison_error(err, self.conninfo, self.copy), psycopg.Error),
        ):
            connection.execute("select set_config('statement_timeout', '0', false)")
            connection.execute(
                "select set_config('lock_timeout', %s, false)", (str(COPY_LOCK_TIMEOUT_MS),)
            )
            self._check_hash(connection)
            yield connection
            check_settings(self.conninfo, connection)

    def _check_hash(self, connection: Connection) -> None:
        query = sql.SQL(_PROBE).format(hashed=self._hash_of(sql.SQL("text"), self.plan.seed))
        ((text, server_hash),) = connection.execute(query).fetchall()
        if server_hash != int(hash_as(pa.array([text]), self.plan, self.plan.seed)[0]):
            raise ConfigError(
                f"{describe(self.conninfo)} hashes texts differently from this machine (another"
                " byte order?): its tables can't be reconciled"
            )

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[None]:
        connection.execute("begin isolation level repeatable read read only")
        connection.execute(
            sql.SQL("set transaction snapshot {}").format(sql.Literal(self.copy.snapshot_id))
        )
        yield
        connection.execute("commit")


def _comparison_error(err: psycopg.Error, conninfo: str, copy: TableCopy) -> SourceError:
    reason = without_values(err)
    if err.sqlstate in GONE | NO_SNAPSHOT:
        return SnapshotLost(
            f"{copy.table} or its snapshot changed while it was compared ({reason}): run again"
        )
    if err.sqlstate == codes.INSUFFICIENT_PRIVILEGE:
        remedy = privilege_remedy(conninfo, copy.table)
        return PrivilegeMissing(f"{copy.table} can't be compared ({reason}): {remedy}")
    if (full := lacks_room(err)) is not None:
        return full
    if isinstance(err, psycopg.errors.LockNotAvailable):
        return TableBusy(
            f"{copy.table} can't be compared now, since another session keeps it locked: run again"
        )
    if isinstance(err, psycopg.OperationalError):
        return SourceUnreachable(
            f"comparing {copy.table} at {describe(conninfo)} broke off ({reason}): run again"
        )
    return SourceError(
        f"{copy.table} can't be compared ({reason}): check its row filter and columns"
    )
