"""What a statement does on the server: its locks, rewrites, scans and new indexes, as seen.

Locks are those of the statement's own transaction (pg_locks), rewrites are new files (relfilenode),
and scans the rows that its transaction read (pg_stat_xact_all_tables).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import sql
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
# The first words of the tags of commands that touch tables, or no object that is there before.
_NOTHING_ELSE = {
    "", "ANALYZE", "BEGIN", "COMMENT", "COMMIT", "CREATE", "DELETE", "INSERT", "MERGE", "SELECT",
    "START", "UPDATE", "VACUUM",
}  # fmt: skip
# They change no table. PostgreSQL refuses SET TRANSACTION after a query of its transaction, so none
# is run around them.
_WITHOUT_TABLES = ("begin", "start", "set", "reset", "savepoint", "release")


@dataclass(frozen=True, slots=True)
class Effect:
    """What one statement did; relations by their oids.

    ``locks`` has the strongest mode on each table, ``read`` how many rows were read of it,
    ``rewritten`` the tables with new files, ``indexed`` those with a new index, and
    ``error`` why PostgreSQL refused the statement; rows of the tables ``violated_by`` may be the
    reason, as they reference rows that are missing if it is
    ``of_reference``, and there may be a ``way`` around. ``names`` has the tables before and after
    it, ``touched`` those that it made, renamed, or locked for changes, with their partitioned
    tables.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    locks: Mapping[int, str] = field(default_factory=dict)
    read: Mapping[int, int] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()
    indexed: frozenset[int] = frozenset()
    status: str = ""
    error: str | None = None
    violated_by: frozenset[int] = frozenset()
    of_reference: bool = False
    way: str = ""
    touched: frozenset[str] = frozenset()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it changed what isn't a table's own, such as a type or a schema's name."""
        return not self.touched and self.status.partition(" ")[0] not in _NOTHING_ELSE


class TooLong(psycopg.Error):
    """The statement ran longer than the rehearsal allows."""


def observe(session: Connection, watcher: Connection, text: str, limit_s: float) -> Effect:
    """Run a statement in ``session``, in a transaction of its own where PostgreSQL allows that.

    ``watcher`` is another session's connection; both are in autocommit. Within a transaction that
    the migration has begun, what the statement adds is seen. No setting of the migration lifts the
    limit of ``limit_s`` seconds.
    """
    is_own, start = False, _NO_RELATIONS
    try:
        if text.split(maxsplit=1)[0].lower() in _WITHOUT_TABLES:
            execute_within(limit_s, session, watcher, text)
            return Effect()
        start, is_own = _Relations.read(session), _is_idle(session)
        if is_own:
            session.execute("begin")
        locks, rows = ({}, {}) if is_own else (_locks(session), _rows_read(session))
        try:
            status = execute_within(limit_s, session, watcher, text).statusmessage or ""
        except (
            psycopg.errors.ActiveSqlTransaction,
            psycopg.errors.InvalidTransactionTermination,
        ):
            if not is_own:
                raise
            session.execute("rollback")
            return _observe_outside(session, watcher, text, limit_s, start)
        if _is_idle(session):  # The statement ended the transaction.
            return _effect_between(status, start, _Relations.read(session))
        modes = _locks(session)
        added = {oid: mode for oid, mode in modes.items() if mode != locks.get(oid)}
        read = {oid: n - rows.get(oid, 0) for oid, n in _rows_read(session).items()}
        end = _Relations.read(session)
        if is_own:
            execute_within(limit_s, session, watcher, "commit")
        return _effect_between(
            status, start, end, added, {oid: n for oid, n in read.items() if n > 0}
        )
    except psycopg.Error as err:
        if is_own and not session.closed:
            session.execute("rollback")
        return _refusal_effect(start, text, err)


def _observe_outside(
    session: Connection, watcher: Connection, text: str, limit_s: float, start: _Relations
) -> Effect:
    """Observe a statement that allows no transaction around it, by samples of its locks."""
    locks: dict[int, str] = {}
    try:
        status = execute_within(limit_s, session, watcher, text, locks).statusmessage or ""
    except psycopg.Error:
        # An index that CREATE INDEX CONCURRENTLY didn't finish would stop a second attempt.
        indexes = [oid for oids in start.indexes.values() for oid in oids]
        for (index,) in watcher.execute(_UNFINISHED, [indexes]).fetchall():
            watcher.execute(f"drop index {index}")
        raise
    effect = _effect_between(status, start, _Relations.read(session), locks)
    # A sample may have missed the lock under which a table gets a new file.
    exclusive = dict.fromkeys(effect.rewritten, "AccessExclusiveLock")
    return replace(effect, locks={**effect.locks, **exclusive})


def execute_within(
    limit_s: float,
    session: Connection,
    watcher: Connection,
    query: str | sql.Composed,
    locks: dict[int, str] | None = None,
) -> psycopg.Cursor[Any]:
    """Execute SQL in a session; raises TooLong after ``limit_s`` seconds.

    The watcher cancels it then, and ends the session after that time again. It adds samples of the
    statement's locks to ``locks``.
    """
    has_ended, is_over = threading.Event(), threading.Event()
    pid = session.info.backend_pid

    def watch() -> None:
        for function in ("pg_cancel_backend", "pg_terminate_backend"):
            limit = time.monotonic() + limit_s
            while time.monotonic() < limit:
                if locks is not None:
                    _keep_strongest(locks, _locks(watcher, pid))
                if has_ended.wait(limit_s if locks is None else _SAMPLE_S):
                    return
            is_over.set()
            watcher.execute(f"select {function}(%s)", [pid])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return session.execute(query)
    except psycopg.Error as err:
        if is_over.is_set():
            raise TooLong(f"it runs longer than {limit_s:g} s") from err
        raise
    finally:
        has_ended.set()
        thread.join()


def _effect_between(
    status: str,
    start: _Relations,
    end: _Relations,
    locks: Mapping[int, str] = MappingProxyType({}),
    read: Mapping[int, int] = MappingProxyType({}),
) -> Effect:
    oids = start.files.keys() & end.files.keys()
    rewritten = frozenset(oid for oid in oids if start.files[oid] != end.files[oid])
    indexed = frozenset(
        oid
        for oid, indexes in end.indexes.items()
        if oid in start.tables and indexes - start.indexes.get(oid, frozenset())
    )
    tables = {**start.tables, **end.tables}
    touched = {oid for oid, mode in locks.items() if _STRENGTH[mode] > _STRENGTH["RowShareLock"]}
    touched |= {oid for oid in tables if start.tables.get(oid) != end.tables.get(oid)}
    touched |= rewritten | indexed
    touched |= {one.roots.get(oid, oid) for oid in touched for one in (start, end)}
    return Effect(
        {oid: str(table) for oid, table in tables.items()},
        {oid: mode for oid, mode in locks.items() if oid in start.tables},
        {oid: rows for oid, rows in read.items() if oid in start.tables},
        rewritten,
        indexed,
        status,
        touched=frozenset(
            str(one.tables[oid]) for oid in touched for one in (start, end) if oid in one.tables
        ),
    )


# What to do about an error of a statement, besides what PostgreSQL's hint says.
_WAYS: Mapping[type[psycopg.Error], str] = {
    TooLong: "allow it more time with --statement-timeout",
    psycopg.errors.ActiveSqlTransaction: "run it outside of BEGIN and COMMIT",
    psycopg.errors.InsufficientPrivilege: "name the role that runs migrations with --role",
}
_EXTENSION = "pass --scratch with the connection of a server that has the extension"


def _refusal_effect(start: _Relations, text: str, err: psycopg.Error) -> Effect:
    diag, violated = err.diag, frozenset[int]()
    if isinstance(err, psycopg.IntegrityError):
        violated = frozenset(
            oid
            for oid, table in start.tables.items()
            if (table.schema, table.name) == (diag.schema_name, diag.table_name)
        )
    elif isinstance(err, psycopg.DataError):  # It names no table.
        violated = frozenset(
            oid
            for oid, table in start.tables.items()
            if re.search(rf"(?<!\w){re.escape(table.name)}(?!\w)", text, re.IGNORECASE)
        )
    parts = (diag.message_primary or str(err), diag.message_detail, diag.message_hint)
    is_extension = [word.lower() for word in text.split()[:2]] == ["create", "extension"]
    way = _EXTENSION if is_extension else _WAYS.get(type(err), "")
    error = "; ".join(part for part in parts if part)
    of_reference = isinstance(err, psycopg.errors.ForeignKeyViolation)
    return Effect(error=error, violated_by=violated, of_reference=of_reference, way=way)


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
    tables: dict[int, TableId]
    files: dict[int, int]
    indexes: dict[int, frozenset[int]]
    roots: dict[int, int]

    @classmethod
    def read(cls, session: Connection) -> _Relations:
        rows = session.execute(_RELATIONS).fetchall()
        return cls(
            {oid: TableId(schema, name) for oid, schema, name, *_ in rows},
            {oid: file for oid, _, _, file, *_ in rows if file},
            {oid: frozenset(indexes) for oid, _, _, _, indexes, *_ in rows},
            {oid: root for oid, *_, root in rows if root},
        )


_NO_RELATIONS = _Relations({}, {}, {}, {})
_UNFINISHED = """
select indexrelid::regclass::text from pg_index where not indisvalid and indexrelid <> all(%s)
"""
_LOCKS = """
select l.relation, l.mode from pg_locks l join pg_class c on c.oid = l.relation
where l.pid = %s and l.locktype = 'relation' and l.granted and l.mode <> 'SIReadLock'
  and c.relkind in ('r', 'p')
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
       pg_partition_root(c.oid)::oid::int8
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema')
  and c.relpersistence <> 't'
"""
