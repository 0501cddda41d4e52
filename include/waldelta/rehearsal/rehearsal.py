"""A rehearsal: a migration runs statement by statement, while the application writes.

After each statement the pipeline consumes, copies what needs a copy, and is compared with its
source. Within a transaction of the migration, that follows its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.lake.storage import volatile
from waldelta.postgres import Connection, TableId, read_published_relations
from waldelta.postgres.sessions import ARROW_SESSIONS, PLAIN_SESSIONS
from waldelta.quantities import counted, duration, size
from waldelta.rehearsal.generated_rows import (
    WritableTable,
    execute_one,
    fill,
    read_tables,
    workload,
)
from waldelta.rehearsal.migration import SqlCommand
from waldelta.rehearsal.observation import LOCK_MODES, Effect, TooLong, execute_within, observe
from waldelta.rehearsal.production import (
    COPIED_PER_SECOND,
    Production,
    load_rows,
    load_schema,
    make_roles,
)
from waldelta.rehearsal.rehearsed_pipeline import RehearsedPipeline
from waldelta.rehearsal.report import Impact, Report, StepReport
from waldelta.rehearsal.scratch_server import ScratchDatabase, scratch_database
from waldelta.spark import Runner, open_runner

log = logging.getLogger(__name__)

# How PostgreSQL refuses an UPDATE or DELETE of a published table without a replica identity. It
# raises a ProgrammingError if the publication's filter or column list uses columns outside of it,
# or if a trigger uses what is gone.
_REFUSALS = (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.ProgrammingError, TooLong)
# What is read in a second, for example by the validation of a constraint.
_READ_PER_SECOND = 200 << 20
_FIRST_ROW = 1_000


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """How a rehearsal runs: the server and role of the migration, and the time for a statement.

    ``edited_file`` is the path and content of a pipeline file that setup runs with after the
    migration.
    """

    scratch_dsn: str | None = None
    role: str | None = None
    statement_timeout_s: float = 60.0
    edited_file: tuple[Path, PipelineFile] | None = None


def rehearse(
    file: PipelineFile,
    production: Production,
    migration: Sequence[SqlCommand],
    options: RehearsalOptions = RehearsalOptions(),
) -> Report:
    """Run a migration on a throw-away copy of a schema, with the pipeline behind it.

    Raises ConfigError where the schema can't be made or the pipeline can't be set up on it.
    """
    with scratch_database(production.version, options.scratch_dsn) as scratch:
        stage = _Stage(scratch, RehearsedPipeline(file, scratch, production), options)
        job = stage.pipeline.pipeline.job()
        with (
            stage,
            volatile(job.lake.root),
            PLAIN_SESSIONS.reuse(),
            ARROW_SESSIONS.reuse(),
            open_runner("waldelta rehearse", job) as runner,
        ):
            log.info("PostgreSQL %s: loading the schema", scratch.version)
            notes = stage.prepare(production, runner)
            steps = list(stage.run(migration, runner))
            if options.edited_file is not None and not any(
                step.verdict == "error" for step in steps
            ):
                steps.append(stage.follow(*options.edited_file, runner))
    if production.version not in (None, scratch.version):
        notes.append(f"the source is PostgreSQL {production.version}, the scratch server isn't")
    return Report(file.pipeline, f"PostgreSQL {scratch.version}", steps, notes)


@dataclass(slots=True)
class _Stage:
    scratch: ScratchDatabase
    pipeline: RehearsedPipeline
    options: RehearsalOptions
    admin: Connection = field(init=False)
    session: Connection = field(init=False)
    writer: Connection = field(init=False)
    number: int = _FIRST_ROW
    # What the workload was refused before, by table, operation and kind, and what took too long.
    failing: set[tuple[str, str, str]] = field(default_factory=set)
    slow: set[tuple[str, str]] = field(default_factory=set)
    # The tables with rows of production, by oid, and the transactions before their other rows.
    sampled: set[int] = field(default_factory=set)
    inserted: dict[int, str] = field(default_factory=dict)

    def __enter__(self) -> _Stage:
        self.admin, self.session = self.scratch.connect(), self.scratch.connect()
        self.writer = self.scratch.connect()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self.writer, self.session, self.admin):
            connection.close()

    @property
    def limit_s(self) -> float:
        """The seconds for a statement of the migration or the workload."""
        return min(self.options.statement_timeout_s, threading.TIMEOUT_MAX)

    def prepare(self, production: Production, runner: Runner) -> list[str]:
        """Make schema, rows and targets; returns what the report must say about them."""
        load_schema(self.admin, production)
        role = self.options.role
        if role and not self.admin.execute(_ROLE, [role]).fetchall():
            raise ConfigError(
                f"the schema has no role {role!r}: name one of its owners with --role"
            )
        tables = read_tables(self.admin)
        unsampled = load_rows(self.admin, tables, production)
        self.sampled = {table.oid for table in tables} - {table.oid for table in unsampled}
        empty = fill(self.admin, unsampled)
        log.info("%s: setting the pipeline up", counted(len(tables), "table"))
        self.pipeline.begin(runner)
        published = self._published_tables()
        self._take_role(published)
        # What is refused before the migration is no effect of it.
        refused = list(self._write(published, committed_tables=()))
        self.failing = {(one.table, operation, one.kind) for operation, one in refused}
        names = {str(table.id) for table in published}
        return [
            f"{name} has no rows, so changes of it aren't rehearsed: {why}"
            for name, why in sorted(empty.items())
            if name in names
        ] + [one.description for _, one in refused if one.table not in empty]

    def run(self, migration: Sequence[SqlCommand], runner: Runner) -> Iterator[StepReport]:
        """Yields a step for each statement, or for each transaction of the migration."""
        pending: list[tuple[SqlCommand, Effect]] = []
        notes: list[Impact] = []
        without_rows: set[int] = set()
        for number, statement in enumerate(migration, 1):
            log.info("%s of %s, %s", number, len(migration), statement.place)
            start = time.monotonic()
            make_roles(self.admin, statement)
            pending.append((statement, self._observe(statement)))
            notes = [*notes, *self._without_made_up_rows(pending, without_rows)]
            if pending[-1][1].error is not None:
                if not self.session.closed:
                    self.session.execute("rollback")
                count = len(migration) - number
                text = f"{counted(count, 'statement')} after it {'is' if count == 1 else 'are'} not"
                note = [Impact("note", "", f"{text} rehearsed")] if count else []
                yield self._step(pending, note, time.monotonic() - start)
                return
            if self.session.info.transaction_status is TransactionStatus.IDLE:
                seconds = time.monotonic() - start
                is_last = number == len(migration)
                if without_rows:
                    fill(self.admin, read_tables(self.admin, without_rows))
                impacts = [*self._after(runner, pending, compares_all=is_last), *notes]
                yield self._step(pending, impacts, seconds)
                pending, notes, without_rows = [], [], set()
        if pending:
            self.session.execute("rollback")
            error = "the migration ends without COMMIT, so PostgreSQL rolls it back"
            yield self._step(pending, [Impact("error", "", error)], 0.0)

    def _observe(self, statement: SqlCommand) -> Effect:
        return observe(self.session, self.admin, statement.text, self.limit_s)

    def _without_made_up_rows(
        self, pending: list[tuple[SqlCommand, Effect]], without_rows: set[int]
    ) -> Iterator[Impact]:
        """Run a statement or an open transaction again, without rows that it fails for and that
        production may not have; their tables are added to ``without_rows``.

        Rows that the migration wrote itself come again.
        """
        statements = [statement for statement, _ in pending]
        while tables := self._not_productions(pending[-1][1], without_rows):
            error = pending[-1][1].error
            self.session.execute("rollback")
            try:
                self._delete(
                    sql.SQL("delete from {}").format(table.identifier) for table in tables.values()
                )
            except psycopg.Error:
                return
            for oid, table in tables.items():
                rows = "rows of the sample" if oid in self.sampled else "made-up rows"
                text = f"{rows} make it fail, production's may as well: {error}"
                yield Impact("note", str(table), text, _CHECK_ROWS)
            without_rows |= tables.keys()
            self.sampled -= tables.keys()
            pending.clear()
            for statement in statements:
                pending.append((statement, self._observe(statement)))
                if pending[-1][1].error is not None:
                    break

    def _not_productions(self, effect: Effect, without_rows: set[int]) -> dict[int, TableId]:
        """Returns the tables that a statement fails for with rows that production may not have.

        Rows of a sample are production's, but not all rows that they reference are in the sample.
        """
        rows = self.admin.execute(_ROOTS, [list(effect.violated_by - without_rows)]).fetchall()
        return {
            oid: TableId(schema, name)
            for oid, root, schema, name in rows
            if effect.of_reference or root not in self.sampled
        }

    def follow(self, path: Path, file: PipelineFile, runner: Runner) -> StepReport:
        """Have setup follow a changed pipeline file, and judge the runs after it."""
        log.info("%s", path)
        start, place = time.monotonic(), str(path)
        plan = self.pipeline.follow(file)
        statements = [statement.text() for statement in plan.statements]
        if plan.problems:
            errors = [Impact("error", "", problem) for problem in plan.problems]
            return StepReport(place, statements, errors)
        impacts = list(self.pipeline.judge(runner, None))
        impacts.append(Impact("note", "", f"setup --expect {plan.digest} requires this plan"))
        return StepReport(place, statements, impacts, time.monotonic() - start)

    def _after(
        self,
        runner: Runner,
        effects: Sequence[tuple[SqlCommand, Effect]],
        *,
        compares_all: bool,
    ) -> Iterator[Impact]:
        touched = {name for _, effect in effects for name in effect.touched}
        is_elsewhere = any(effect.is_elsewhere for _, effect in effects)
        tables = None if compares_all or is_elsewhere else touched
        for operation, impact in self._write(self._published_tables(), tables):
            if (key := (impact.table, operation, impact.kind)) not in self.failing:
                self.failing.add(key)
                yield impact
        yield from self.pipeline.judge(runner, None if compares_all else touched)
        self._delete_inserted()

    def _write(
        self, tables: Sequence[WritableTable], committed_tables: Collection[str] | None = None
    ) -> Iterator[tuple[str, Impact]]:
        """Write to each table as its owner; yields which operations PostgreSQL refuses.

        Writes to other tables than ``committed_tables`` are rolled back: PostgreSQL refuses them
        alike, and the pipeline has less to apply. A table with a sample keeps the sample's rows.
        """
        self.number += 2
        for table in tables:
            keeps = committed_tables is None or str(table.id) in committed_tables
            for operation, statements in workload(table, self.number):
                if (key := (str(table.id), operation)) in self.slow:
                    continue
                is_undone = table.oid in self.sampled and operation == "delete"
                execute = partial(self._execute, table, keeps=keeps and not is_undone)
                if keeps and table.oid in self.sampled and operation == "insert":
                    ((self.inserted[table.oid],),) = self.admin.execute(_XID).fetchall()
                refusal = execute_one(execute, statements)
                # Rows that can't be deleted again are not inserted.
                keeps = keeps and not (is_undone and isinstance(refusal, _REFUSALS))
                if isinstance(refusal, TooLong):
                    self.slow.add(key)
                if refusal is not None and (impact := _refusal(table, operation, refusal)):
                    yield operation, impact

    def _execute(
        self, table: WritableTable, statement: sql.Composed, *, keeps: bool
    ) -> psycopg.Cursor[Any]:
        """Execute a statement as the table's owner, in a transaction of its own."""
        if self.writer.closed:
            self.writer = self.scratch.connect()
        with self.writer.transaction(force_rollback=not keeps):
            owner = sql.Identifier(table.owner)
            # What fails, fails with the statement.
            begin = sql.SQL("set constraints all immediate; set local role {}").format(owner)
            self.writer.execute(begin)
            return execute_within(self.limit_s, self.writer, self.admin, statement)

    def _delete_inserted(self) -> None:
        """Delete what the workload inserted beside a sample, so that real rows alone may refuse the
        next statement.
        """
        if not self.inserted:
            return
        delete = sql.SQL("delete from {} where age(xmin) < age({}::xid)")
        self._delete(
            delete.format(table.id.identifier, sql.Literal(self.inserted[table.oid]))
            for table in read_tables(self.admin, self.inserted)
        )
        self.inserted.clear()

    def _delete(self, statements: Iterable[sql.Composed]) -> None:
        """Execute DELETEs in one transaction, which no trigger and no foreign key refuses."""
        with self.admin.transaction():
            self.admin.execute("set local session_replication_role = replica")
            for statement in statements:
                self.admin.execute(statement)

    def _published_tables(self) -> list[WritableTable]:
        published = read_published_relations(
            self.admin, self.pipeline.file.source.publication_names
        )
        return read_tables(self.admin, {oid for of in published for oid in (of.oid, *of.ancestors)})

    def _take_role(self, tables: Sequence[WritableTable]) -> None:
        """Let the migration run as ``--role``, by default as the owner of most published tables."""
        owners = Counter(table.owner for table in tables)
        role = self.options.role or (owners.most_common(1)[0][0] if owners else None)
        if role is None or role == self.admin.info.user:
            return
        identifier = sql.Identifier(role)
        # On production the application's role owns the database, or may create in its schemas.
        alter = sql.SQL("alter database {} owner to {}")
        self.admin.execute(alter.format(sql.Identifier(self.admin.info.dbname), identifier))
        self.session.execute(sql.SQL("set session authorization {}").format(identifier))

    def _step(
        self,
        pending: Sequence[tuple[SqlCommand, Effect]],
        impacts: Sequence[Impact],
        seconds: float,
    ) -> StepReport:
        first = pending[0][0]
        effects = [
            one for statement, effect in pending for one in self._of_effect(statement, effect)
        ]
        return StepReport(
            first.place,
            [s.text for s, _ in pending],
            list(dict.fromkeys([*effects, *impacts])),
            seconds,
        )

    def _of_effect(self, statement: SqlCommand, effect: Effect) -> Iterator[Impact]:
        if effect.error is not None:
            yield Impact("error", "", f"{statement.place}: {effect.error}", effect.way)
            return
        for oid, mode in effect.locks.items():
            who, name = LOCK_MODES[mode], effect.names[oid]
            work = _work_on(oid, effect, statement.text)
            if who and work is not None:
                at = self.pipeline.production.sizes.get(name)
                seconds = 0.0 if at is None else at.bytes / work.bytes_per_second
                time_ = "" if at is None else f" ({size(at.bytes)}, about {duration(seconds)})"
                yield Impact("lock", name, f"{who} wait while it {work.text}{time_}", work.way)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a statement does with all rows of a table, how fast, and the way around it."""

    text: str
    way: str
    bytes_per_second: int = COPIED_PER_SECOND


_CHECK_ROWS = "look for such rows in production first, or rehearse with --sample"
_REWRITE = "writes all its rows again"
_ALTERS = _Work(
    _REWRITE,
    "add a column without a volatile default or of the new type, fill it in batches, and change the"
    " application over to it",
)
_PACKS = _Work(
    _REWRITE, "rewrite it while the application rests, or by an extension such as pg_repack"
)
_MOVES = {"tablespace", "logged", "unlogged", "access"}
_INDEXES = _Work("builds an index", "create index concurrently")
_READS = _Work(
    "reads all its rows",
    "add the constraint NOT VALID, and validate it in a statement of its own",
    _READ_PER_SECOND,
)


def _work_on(oid: int, effect: Effect, text: str) -> _Work | None:
    command = effect.status.split(" ", 1)[0]
    if oid in effect.rewritten and command != "TRUNCATE":
        # Another place or kind of its file, with the same columns.
        is_moved = not _MOVES.isdisjoint(text.lower().split())
        return _ALTERS if command == "ALTER" and not is_moved else _PACKS
    if oid in effect.indexed:
        return _INDEXES
    return _READS if effect.read.get(oid) and command == "ALTER" else None


def _refusal(table: WritableTable, operation: str, err: psycopg.Error) -> Impact | None:
    """Returns what the refusal of an operation means; None where made-up rows explain it."""
    diag = err.diag
    text = ": ".join(
        part for part in (diag.message_primary or str(err), diag.message_detail) if part
    )
    match err:
        case psycopg.errors.ObjectNotInPrerequisiteState():
            way = f"alter table {table.id} replica identity using index … before the old key goes"
        case psycopg.errors.InsufficientPrivilege():
            way = f"create the policies of {table.id} first, in the same transaction"
        case psycopg.errors.InvalidColumnReference():
            way = f"cover the columns by the replica identity of {table.id} first"
        case TooLong():
            way = f"look at the triggers of {table.id}, or allow more time with --statement-timeout"
        case psycopg.ProgrammingError():
            way = f"change the triggers of {table.id} in the same transaction"
        case _ if operation == "insert" or (
            err.sqlstate and not isinstance(err, psycopg.IntegrityError)
        ):
            text = f"{operation.upper()} isn't rehearsed, it fails for made-up rows: {text}"
            return Impact("note", str(table.id), text)
        case _:
            return None
    return Impact("app-error", str(table.id), f"{operation.upper()} fails: {text}", way)


_ROLE = "select from pg_roles where rolname = %s"
_XID = "select pg_current_xact_id()::xid::text"
_ROOTS = """
select c.oid::int8, coalesce(pg_partition_root(c.oid), c.oid)::int8, n.nspname, c.relname
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = any(%s)
"""
