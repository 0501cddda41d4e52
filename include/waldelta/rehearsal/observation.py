"""What a statement does on the server: its locks, rewrites, scans and new indexes, as seen.

Locks are those of the statement's own transaction (pg_locks), rewrites are new files (relfilenode),
and scans the rows that its transaction read (pg_stat_xact_all_tables).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import psycopg
from psycopg.pq import TransactionStatus

from waldelta.postgres import Connection, TableId

# In the order of their strength, with what waits for a transaction that has one.
LOCK_MODES: Mapping[str, str] = {
    "AccessShareLock": "",
    "RowShareLock": "",
    "RowExclusiveLock": "",
    "ShareUpdateExclusiveLock": "",
    "ShareLock": "writers",
    "ShareRowExclusiveLock": "writers",
    "ExclusiveLock": "writers",
    "AccessExclusiveLock": "readers and writers",
}
_STRENGTH = {mode: number for number, mode in enumerate(LOCK_MODES)}
_SAMPLE_S = 0.005
_BEGIN = ("begin", "start")


@dataclass(frozen=True, slots=True)
class Effect:
    """What one statement did; relations by their oids.

    ``locks`` has the strongest mode on each table, ``read`` how many rows were read of it,
    ``rewritten`` the tables with new files, ``indexed`` those with a new index, ``renamed`` columns
    by table and former name, and ``error`` why PostgreSQL refused the statement; of a table's rows,
    it is ``violated_by`` them, and there may be a ``way`` around. ``names`` has the tables before
    and after it.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    locks: Mapping[int, str] = field(default_factory=dict)
    read: Mapping[int, int] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()
    indexed: frozenset[int] = frozenset()
    renamed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    status: str = ""
    error: str | None = None
    violated_by: TableId | None = None
    way: str = ""

    def blocked_by(self, oid: int) -> str:
        """Returns who waits for the statement's lock on a table; empty if nobody does."""
        return LOCK_MODES.get(self.locks.get(oid, ""), "")


def observe(session: Connection, watcher: Connection, text: str) -> Effect:
    """Run a statement in ``session``, in a transaction of its own where PostgreSQL allows that.

    ``watcher`` is another session's connection; both are in autocommit. Within a transaction that
    the migration has begun, what the statement adds is seen.
    """
    start = _Relations.read(session)
    is_own = _is_idle(session) and text.split(maxsplit=1)[0].lower() not in _BEGIN
    if is_own:
        session.execute("begin")
    locks, rows = ({}, {}) if is_own else (_locks(session), _rows_read(session))
    try:
        cursor = session.execute(text)
    except (
        psycopg.errors.ActiveSqlTransaction,
        psycopg.errors.InvalidTransactionTermination,
    ) as err:
        if not is_own:
            return _refused(start, text, err)
        session.execute("rollback")
        return _observe_outside(session, watcher, text, start)
    except psycopg.Error as err:
        if is_own and not session.closed:
            session.execute("rollback")
        schema, table = err.diag.schema_name, err.diag.table_name
        is_of_rows = is_own and isinstance(err, psycopg.errors.IntegrityError)
        violated = TableId(schema, table) if is_of_rows and schema and table else None
        return _refused(start, text, err, violated)
    status = cursor.statusmessage or ""
    if _is_idle(session):  # The statement ended the transaction.
        return _between(status, start, _Relations.read(session))
    modes = _locks(session)
    added = {oid: mode for oid, mode in modes.items() if mode != locks.get(oid)}
    read = {oid: n - rows.get(oid, 0) for oid, n in _rows_read(session).items()}
    end = _Relations.read(session)
    if is_own:
        try:
            session.execute("commit")
        except psycopg.Error as err:  # A deferred constraint
            return _refused(start, text, err)
    return _between(status, start, end, added, {oid: n for oid, n in read.items() if n > 0})


def _observe_outside(
    session: Connection,
    watcher: Connection,
    text: str,
    start: _Relations,
) -> Effect:
    """Observe a statement that allows no transaction around it, by samples of its locks."""
    locks: dict[int, str] = {}
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            with suppress(psycopg.Error):
                _keep_strongest(locks, _locks(watcher, session.info.backend_pid))
            time.sleep(_SAMPLE_S)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        cursor = session.execute(text)
    except psycopg.Error as err:
        return _refused(start, text, err)
    finally:
        stop.set()
        thread.join()
    return _between(cursor.statusmessage or "", start, _Relations.read(session), locks)


def _between(
    status: str,
    start: _Relations,
    end: _Relations,
    locks: Mapping[int, str] = MappingProxyType({}),
    read: Mapping[int, int] = MappingProxyType({}),
) -> Effect:
    oids = start.files.keys() & end.files.keys()
    return Effect(
        {**start.names, **end.names},
        {oid: mode for oid, mode in locks.items() if oid in start.names},
        {oid: rows for oid, rows in read.items() if oid in start.names},
        frozenset(oid for oid in oids if start.files[oid] != end.files[oid]),
        frozenset(
            oid
            for oid, indexes in end.indexes.items()
            if oid in start.names and indexes - start.indexes.get(oid, frozenset())
        ),
        {
            (end.names[oid], name): end.columns[oid][number]
            for oid in start.columns.keys() & end.columns.keys()
            for number, name in start.columns[oid].items()
            if end.columns[oid].get(number, name) != name
        },
        status,
    )


# What to do about an error of a statement, besides what PostgreSQL's hint says.
_WAYS: Mapping[type[psycopg.Error], str] = {
    psycopg.errors.QueryCanceled: "allow it more time with --statement-timeout",
    psycopg.errors.ActiveSqlTransaction: "run it outside of BEGIN and COMMIT",
    psycopg.errors.InsufficientPrivilege: "name the role that runs migrations with --role",
}
_EXTENSION = "pass --scratch with the connection of a server that has the extension"


def _refused(
    start: _Relations, text: str, err: psycopg.Error, violated_by: TableId | None = None
) -> Effect:
    parts = (err.diag.message_primary or str(err), err.diag.message_detail, err.diag.message_hint)
    is_extension = [word.lower() for word in text.split()[:2]] == ["create", "extension"]
    way = _EXTENSION if is_extension else _WAYS.get(type(err), "")
    error = "; ".join(part for part in parts if part)
    return Effect(start.names, error=error, violated_by=violated_by, way=way)


def _is_idle(session: Connection) -> bool:
    return session.info.transaction_status is TransactionStatus.IDLE


def _keep_strongest(strongest: dict[int, str], locks: Mapping[int, str]) -> None:
    for oid, mode in locks.items():
        strongest[oid] = max(strongest.get(oid, mode), mode, key=_STRENGTH.__getitem__)


def _locks(connection: Connection, pid: int | None = None) -> dict[int, str]:
    strongest: dict[int, str] = {}
    for oid, mode in connection.execute(_LOCKS, [pid or connection.info.backend_pid]).fetchall():
        _keep_strongest(strongest, {oid: mode})
    return strongest


def _rows_read(session: Connection) -> dict[int, int]:
    return dict(session.execute(_ROWS_READ).fetchall())


@dataclass(frozen=True, slots=True)
class _Relations:
    names: dict[int, str]
    files: dict[int, int]
    indexes: dict[int, frozenset[int]]
    columns: dict[int, dict[int, str]]

    @classmethod
    def read(cls, session: Connection) -> _Relations:
        rows = session.execute(_RELATIONS).fetchall()
        return cls(
            {oid: str(TableId(schema, name)) for oid, schema, name, *_ in rows},
            {oid: file for oid, _, _, file, *_ in rows if file},
            {oid: frozenset(indexes) for oid, _, _, _, indexes, *_ in rows},
            {oid: dict(zip(numbers, names, strict=True)) for oid, *_, numbers, names in rows},
        )


_LOCKS = """
select l.relation, l.mode from pg_locks l join pg_class c on c.oid = l.relation
where l.pid = %s and l.locktype = 'relation' and l.granted and c.relkind in ('r', 'p')
  and l.database = (select oid from pg_database where datname = current_database())
  and c.relnamespace <> 'pg_catalog'::regnamespace
"""
_ROWS_READ = """
select relid, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
from pg_stat_xact_all_tables where schemaname not in ('pg_catalog', 'pg_toast')
"""
_RELATIONS = """
select c.oid::int8, n.nspname, c.relname, c.relfilenode::int8,
       array(select indexrelid::int8 from pg_index where indrelid = c.oid),
       array(select attnum::int4 from pg_attribute
             where attrelid = c.oid and attnum > 0 and not attisdropped order by attnum),
       array(select attname::text from pg_attribute
             where attrelid = c.oid and attnum > 0 and not attisdropped order by attnum)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema')
  and c.relpersistence <> 't'
"""
