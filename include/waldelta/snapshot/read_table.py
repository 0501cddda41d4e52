"""Reads a table's rows as a snapshot sees them, by chunks, as Arrow record batches (COPY through
ADBC).

This runs in Spark's Python tasks. Errors are named, in one line and without credentials, because a
task's exception reaches the driver as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.arrow import storage
from waldelta.config import TypeOptions
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import (
    ApplyError,
    PrivilegeMissing,
    SnapshotLost,
    SourceError,
    SourceUnreachable,
    TableBusy,
    WaldeltaError,
    raised_as,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.findings import sql_name
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW, RELID_ATTNUM
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.postgres import (
    EXCLUSIVE_MODES,
    PublishedTable,
    TableId,
    check_settings,
    connect,
    describe,
    limit_batches,
    list_lock_holders,
    record_batches,
    rows_where,
)
from waldelta.postgres.connection import adbc_driver
from waldelta.postgres.sessions import ARROW_SESSIONS
from waldelta.row_filter import RowFilter
from waldelta.server_errors import sqlstate as codes
from waldelta.server_errors.sqlstate import ServerError
from waldelta.snapshot.chunks import COPY_ROW_GROUP_BYTES, Chunk
from waldelta.snapshot.source_columns import column_sql, value_expressions
from waldelta.types import TargetType, column_types
from waldelta.types.type_map import unheld_key

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi as adbc

# A reader that waits for a table keeps its snapshot, which holds vacuum back on the whole server.
COPY_LOCK_TIMEOUT_MS = 60_000
RAW_TYPE: Any = pa.map_(pa.string(), pa.string())
METADATA_COLUMNS: dict[str, Any] = {
    LSN: pa.int64(),
    COMMIT_TS: pa.timestamp("us", tz="UTC"),
    RAW: RAW_TYPE,
}

# Errors of a reader when the relation was dropped, renamed or altered since the snapshot, or the
# snapshot's session ended.
GONE = {"3F000", "42P01", "42703", "42804", "42883", codes.OBJECT_NOT_IN_PREREQUISITE_STATE}
NO_SNAPSHOT = {codes.INVALID_PARAMETER_VALUE, codes.UNDEFINED_OBJECT}


@dataclass(frozen=True, slots=True)
class TableCopy:
    """What the readers of one table need to know; it is sent to the tasks.

    ``leaf_column`` names the row's leaf partition. ``relfilenodes`` are the files that the snapshot
    sees, by leaf. ``lsn`` is None for targets without metadata columns. ``where`` is the
    target's own filter, as PostgreSQL prints it. ``source_names`` are the source's names of columns
    that have another one in the lake.
    """

    table: TableId
    columns: tuple[tuple[str, TargetType], ...]
    row_filter: str | None
    snapshot_id: str
    relfilenodes: dict[int, int]
    lsn: int | None
    key_columns: tuple[str, ...] = ()
    where: str | None = None
    leaf_column: str | None = None
    source_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def schema(self) -> pa.Schema:
        """The target's columns."""
        metadata = METADATA_COLUMNS.items() if self.lsn is not None else ()
        return pa.schema([*((name, target.arrow) for name, target in self.columns), *metadata])

    @property
    def expressions(self) -> list[tuple[sql.Composable, sql.Composable | None]]:
        """What to select for each column: its value, and maybe its raw text."""
        return value_expressions(self.columns, self.leaf_column, self.source_names)

    def column(self, name: str) -> sql.Composable:
        """Returns a column of the target as SQL on the source."""
        return column_sql(self.source_names.get(name, name), is_leaf=name == self.leaf_column)


def plan_copy(
    table: PublishedTable,
    snapshot_id: str,
    relfilenodes: dict[int, int],
    lsn: int | None,
    options: TypeOptions = DEFAULT_TYPES,
    where: RowFilter | None = None,
) -> TableCopy:
    """Describe the copy of a published table.

    It has the published columns, the publications' ORed row filter, and the target's own filter.
    """
    types = column_types(
        {column.name: column.type for column in table.columns}, table.key_columns, options
    )
    keys, target_filter = tuple(table.key_columns), None if where is None else where.analysed
    return TableCopy(
        table.id,
        tuple(types.items()),
        table.row_filter,
        snapshot_id,
        relfilenodes,
        lsn,
        keys,
        target_filter,
        next((c.name for c in table.columns if c.attnum == RELID_ATTNUM), None),
        {c.name: c.source_name for c in table.columns if c.source_name is not None},
    )


def chunk_query(copy: TableCopy, chunk: Chunk, bounds: str | None = None) -> str:
    """Returns the SELECT of one chunk; ``bounds`` as returned by lock_query().

    It uses ONLY, since a table from which others inherit is published without them. The filter is
    PostgreSQL's own deparsed text, read and evaluated with the same search_path.
    """
    return select_statement(copy, chunk_relation(chunk), chunk_conditions(copy, chunk, bounds))


def chunk_relation(chunk: Chunk) -> sql.Composable:
    """Returns the relation to write after FROM."""
    return sql.SQL("only {}" if chunk.through is None else "{}").format(chunk.id.identifier)


def chunk_conditions(
    copy: TableCopy, chunk: Chunk, bounds: str | None = None
) -> list[sql.Composable]:
    """Returns which rows of its leaves belong to the chunk and pass the filter."""
    conditions: list[sql.Composable] = []
    if chunk.through is not None:
        conditions.append(of_leaves([leaf.oid for leaf in chunk.leaves]))
    if bounds is not None:
        # The text was deparsed by PostgreSQL.
        conditions.append(sql.SQL(f"({bounds})"))
    if chunk.first_block > 0 or chunk.last_block is not None:
        conditions.append(
            sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({chunk.first_block},0)"))
        )
    if chunk.last_block is not None:
        conditions.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({chunk.last_block},0)")))
    return [*conditions, *filter_conditions(copy)]


def of_leaves(oids: Sequence[int]) -> sql.Composable:
    """Returns the condition that rows of a partitioned table belong to these leaves."""
    return sql.SQL("tableoid = any ({}::oid[])").format(sql.Literal(list(oids)))


def filter_conditions(copy: TableCopy) -> list[sql.Composable]:
    """Returns the publications' filter combined with the target's own, if there is any.

    The latter is evaluated only for rows that pass the first, as in the stream.
    """
    row_filter = copy.where or copy.row_filter
    if copy.row_filter is not None and copy.where is not None:
        row_filter = f"case when ({copy.row_filter}) then ({copy.where}) else false end"
    return [] if row_filter is None else [sql.SQL(f"({row_filter})")]


def select_statement(
    copy: TableCopy, relation: sql.Composable, conditions: Sequence[sql.Composable]
) -> str:
    """Returns the SELECT of a relation's rows that meet all ``conditions``, for fetch_rows()."""
    selected = [e for pair in copy.expressions for e in pair if e is not None]
    return sql.Composed(
        [
            sql.SQL("select "),
            # Numbered, since a column may have any name, and values and raw texts are next to each
            # other.
            sql.SQL(", ").join(e + sql.SQL(f" as c{n}") for n, e in enumerate(selected)),
            sql.SQL(" from "),
            rows_where(relation, conditions),
        ]
    ).as_string(None)


def read_chunks(
    conninfo: str,
    copy: TableCopy,
    chunks: Iterable[Chunk],
    application_name: str,
    timeouts_ms: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of these chunks as the target's columns.

    This uses one connection, and one short transaction per chunk, with these timeouts. Raises
    SnapshotLost when the snapshot can't be imported any more or a leaf has another file than it
    sees, ApplyError for a key that its type in the lake can't hold.
    """
    with snapshot_reader(conninfo, copy, application_name) as connection:
        for chunk in chunks:
            yield from _read_chunk(connection, copy, chunk, timeouts_ms)


def _read_chunk(
    connection: adbc.Connection, copy: TableCopy, chunk: Chunk, timeouts_ms: Mapping[str, int]
) -> Iterator[pa.RecordBatch]:
    begin_snapshot(connection, copy, timeouts_ms)
    # Under the lock that reading takes anyway, the files can't change until the transaction ends.
    # Without the comparison, a TRUNCATE or rewriting ALTER would silently show an older snapshot an
    # empty table.
    with connection.cursor() as cursor:
        cursor.execute(lock_query(copy, chunk))
        ((is_other, bounds),) = cursor.fetchall()
    if is_other:
        raise SnapshotLost(
            f"{chunk.id} was truncated, rewritten or detached while its rows were read (VACUUM"
            " FULL, CLUSTER, TRUNCATE or ALTER TABLE): run again"
        )
    yield from fetch_rows(connection, copy, chunk_query(copy, chunk, bounds))
    run_statement(connection, "commit")


def row_groups(batches: Iterable[pa.RecordBatch], most_rows: int) -> Iterator[pa.Table]:
    """Yields the batches merged or cut to row groups that fit in memory, of this many rows at
    most.
    """
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if (
            sum(part.nbytes for part in group) < COPY_ROW_GROUP_BYTES
            and sum(map(len, group)) < most_rows
        ):
            continue
        table = pa.Table.from_batches(group)
        yield table.slice(0, most_rows)
        group = table.slice(most_rows).to_batches()
    if group:
        table = pa.Table.from_batches(group)
        for begin in range(0, len(table), most_rows):
            yield table.slice(begin, most_rows)


def fetch_rows(
    connection: adbc.Connection, copy: TableCopy, query: str
) -> Iterator[pa.RecordBatch]:
    """Yields what a select_statement() finds, as the target's columns."""
    with connection.cursor() as cursor:
        limit_batches(cursor)
        cursor.execute(query)
        has_raw = [raw_sql is not None for _, raw_sql in copy.expressions]
        for batch in record_batches(cursor):
            if batch.num_rows:
                yield _convert_columns(copy, has_raw, batch)
                fault_point("sync.reading")


def begin_snapshot(
    connection: adbc.Connection,
    copy: TableCopy,
    timeouts_ms: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Begin a transaction that sees what the copy's snapshot sees."""
    run_statement(connection, "begin isolation level repeatable read read only")
    run_statement(
        connection,
        sql.SQL("set transaction snapshot {}")
        .format(sql.Literal(copy.snapshot_id))
        .as_string(None),
    )
    timeouts_ms = {"lock_timeout": COPY_LOCK_TIMEOUT_MS, **timeouts_ms}
    for setting, limit in timeouts_ms.items():
        run_statement(connection, f"set local {setting} = {limit}")


def lock_query(copy: TableCopy, chunk: Chunk) -> str:
    """Returns the query that locks a chunk's leaves as reading does, and checks their files.

    It returns whether any leaf differs from what the snapshot sees, and the bounds of the leaves'
    rows. The bounds are for a leaf that is read through a table above it: by them PostgreSQL skips
    that table's other partitions. Reading a partition's bounds locks it, and needs no privilege.
    """
    if chunk.through is None:
        (leaf,) = chunk.leaves
        query = sql.SQL(
            "select pg_relation_filenode({oid}::oid)::bigint is distinct from {file}::bigint,"
            " null::text where not exists (select from only {leaf} where false)"
        )
        file = copy.relfilenodes.get(leaf.oid)
        return query.format(
            oid=sql.Literal(leaf.oid), file=sql.Literal(file), leaf=leaf.id.identifier
        ).as_string(None)  # fmt: skip
    oids = [leaf.oid for leaf in chunk.leaves]
    return sql.SQL(_LOCK_THROUGH).format(
        leaves=sql.Literal(oids),
        files=sql.Literal([copy.relfilenodes.get(oid) for oid in oids]),
        through=sql.Literal(chunk.through.oid),
    ).as_string(None)  # fmt: skip


# The bounds of a hash partition exclude none of its siblings, and are expensive to evaluate. Those
# of a key with an expression would run functions of the table's owner as the role that reads.
_LOCK_THROUGH = """
with locked as materialized (
    select leaf, file, pg_get_partition_constraintdef(leaf) as bounds
    from unnest({leaves}::oid[], {files}::bigint[]) as l (leaf, file)
)
select bool_or(
           pg_relation_filenode(leaf)::bigint is distinct from file
           or not exists (select from pg_partition_ancestors(leaf) a where a.relid = {through}::oid)
       ),
       case when count(*) = 1 and strpos(max(bounds), 'satisfies_hash_partition(') = 0
         and not bool_or(exists (
           select
           from pg_partition_ancestors(leaf) a
           join pg_partitioned_table k on k.partrelid = a.relid
           where k.partexprs is not null
       )) then max(bounds) end
from locked
"""


def _convert_columns(
    copy: TableCopy, has_raw: Sequence[bool], batch: pa.RecordBatch
) -> pa.RecordBatch:
    """Convert the selected columns to the target's types; texts are read as those of the stream."""
    columns = iter(batch.columns)
    values: list[ArrowArray] = []
    raws: dict[str, ArrowArray] = {}
    for (name, target), raw_follows in zip(copy.columns, has_raw, strict=True):
        value = storage(next(columns))
        raw = storage(next(columns)) if raw_follows else None
        if value.type != target.arrow or pa.types.is_string(value.type):
            value, unheld = target.from_text(value)
            raw = unheld if raw is None else raw
        values.append(value)
        if raw is not None and raw.null_count < len(raw):
            if name in copy.key_columns:
                raise ApplyError(f"{copy.table}: {unheld_key(name, target)}")
            raws[name] = raw
    if copy.lsn is not None:
        commit_ts = METADATA_COLUMNS[COMMIT_TS]
        values += [
            pa.repeat(pa.scalar(copy.lsn, pa.int64()), batch.num_rows),
            pa.nulls(batch.num_rows, commit_ts),
            raw_map(raws, batch.num_rows),
        ]
    return pa.RecordBatch.from_arrays(values, schema=copy.schema)


def raw_map(raws: dict[str, ArrowArray], row_count: int) -> ArrowArray:
    """Returns one map per row from column name to PostgreSQL's text, for columns that have one.

    It is null for rows without any.
    """
    if not raws:
        return pa.nulls(row_count, RAW_TYPE)
    present = [np.flatnonzero(np.asarray(pc.is_valid(raw))) for raw in raws.values()]
    rows = np.concatenate(present)
    order = np.argsort(rows, kind="stable")
    names = np.repeat(np.arange(len(raws)), [len(p) for p in present])[order]
    texts: ArrowArray = pa.concat_arrays(
        [
            raw.take(pa.array(p)).cast(pa.string())
            for raw, p in zip(raws.values(), present, strict=True)
        ]
    )
    counts = np.bincount(rows, minlength=row_count)
    offsets = pa.array(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
    keys: ArrowArray = pa.array(list(raws), pa.string()).take(pa.array(names))
    # A null slot still needs an offset, so nulls are set by mask.
    result: ArrowArray = pa.MapArray.from_arrays(
        offsets, keys, texts.take(pa.array(order)), mask=pa.array(counts == 0)
    )
    return result


def run_statement(connection: adbc.Connection, statement: str) -> None:
    """Run a statement without a result."""
    with connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def snapshot_reader(
    conninfo: str, copy: TableCopy, application_name: str
) -> Iterator[adbc.Connection]:
    """Yields a connection; raises the driver's errors as named ones, in one line and without
    credentials.

    Raises SessionAltered after use, when a function of the database has changed how the session
    prints values.
    """
    with (
        ARROW_SESSIONS.session(conninfo, application_name) as connection,
        raised_as(lambda err: _copy_error(err, conninfo, copy), adbc_driver().Error),
    ):
        yield connection
        check_settings(conninfo, connection)


def _copy_error(err: adbc.Error, conninfo: str, copy: TableCopy) -> SourceError:
    error = ServerError.of(err)
    state, without = error.sqlstate, without_values(err)
    reason = without if without.startswith("SQLSTATE") else error.shown
    if state in GONE:
        return SnapshotLost(
            f"{copy.table} was altered, renamed or dropped while it was read ({reason}): run again"
        )
    if state in NO_SNAPSHOT:
        return SnapshotLost(f"the snapshot of {copy.table} is gone ({reason}): run again")
    if state == codes.INSUFFICIENT_PRIVILEGE:
        remedy = privilege_remedy(conninfo, copy.table)
        return PrivilegeMissing(f"{copy.table} can't be copied ({reason}): {remedy}")
    if state == codes.LOCK_NOT_AVAILABLE:
        return TableBusy(
            f"{copy.table} can't be copied now: it stayed locked for"
            f" {COPY_LOCK_TIMEOUT_MS / 1000:g} s{_holders(conninfo)}: run again"
        )
    if error.is_lost_connection:
        return SourceUnreachable(
            f"reading {copy.table} from {describe(conninfo)} broke off ({reason}): run again"
        )
    return SourceError(f"{copy.table} can't be copied ({reason}): check its row filter and columns")


def privilege_remedy(conninfo: str, table: TableId | str) -> str:
    """Returns what lets the connection's role read a table that it was refused.

    A missing grant and a policy that hides rows have the same SQLSTATE, so the server is asked.
    """
    name = TableId.parse(str(table))
    with (
        suppress(WaldeltaError, psycopg.Error),
        connect(conninfo, "waldelta privileges") as connection,
    ):
        hides = connection.execute(_HIDES_ROWS, (name.schema, name.name)).fetchone()
        if hides == (True,):
            return (
                "a row-level security policy would hide rows: let a superuser run alter role"
                f" {sql_name(connection.info.user)} bypassrls"
            )
    return "grant select on it"


_HIDES_ROWS = """
select row_security_active(c.oid)
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %s and c.relname = %s
"""


def _holders(conninfo: str) -> str:
    """Returns which sessions keep tables locked against readers, if that can be read, in one
    line.
    """
    with (
        suppress(WaldeltaError, psycopg.Error),
        connect(conninfo, "waldelta copy locks") as connection,
    ):
        return (
            " (locks against readers in this database now:"
            f" {'; '.join(list_lock_holders(connection, EXCLUSIVE_MODES, waiting=True))})"
        )
    return ""
