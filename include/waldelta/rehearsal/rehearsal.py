"""A rehearsal: a migration runs statement by statement, while the application writes.

After each statement the pipeline consumes, copies what needs a copy, and is compared with its
source. Within a transaction of the migration, that follows its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.postgres import Connection, TableId
from waldelta.quantities import counted, duration, size
from waldelta.rehearsal.generated_rows import (
    WritableTable,
    changes,
    fill,
    read_tables,
    write_rows,
)
from waldelta.rehearsal.migration import SqlCommand
from waldelta.rehearsal.observation import Effect, observe
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

# PostgreSQL refuses an UPDATE or DELETE of a published table so: it has no replica identity, or
# the filter or column list of its publication uses other columns.
_REFUSALS = (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.InvalidColumnReference)
# What is read in a second, for example by the validation of a constraint.
_READ_PER_SECOND = 200 << 20
_FIRST_ROW = 1_000


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """How a rehearsal runs: the server and role of the migration, and the time for a statement.

    ``changed`` is a pipeline file that setup follows after the migration, with its path.
    """

    scratch_dsn: str | None = None
    role: str | None = None
    statement_timeout_s: float = 60.0
    changed: tuple[Path, PipelineFile] | None = None


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
        with stage, open_runner("waldelta rehearse", stage.pipeline.pipeline.job()) as runner:
            log.info("PostgreSQL %s: loading the schema", scratch.version)
            notes = stage.prepare(production, runner)
            steps = list(stage.run(migration, runner))
            if options.changed is not None and not any(step.verdict == "error" for step in steps):
                steps.append(stage.follow(*options.changed, runner))
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
    number: int = _FIRST_ROW
    failing: set[tuple[str, str]] = field(default_factory=set)

    def __enter__(self) -> _Stage:
        self.admin, self.session = self.scratch.connect(), self.scratch.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.admin.close()

    def prepare(self, production: Production, runner: Runner) -> list[str]:
        """Make schema, rows and targets; returns what the report must say about them."""
        load_schema(self.admin, production)
        role = self.options.role
        if role and not self.admin.execute(_ROLE, [role]).fetchall():
            raise ConfigError(
                f"the schema has no role {role!r}: name one of its owners with --role"
            )
        tables = read_tables(self.admin)
        empty = fill(self.admin, load_rows(self.admin, tables, production))
        log.info("%s: setting the pipeline up", counted(len(tables), "table"))
        self.pipeline.begin(runner)
        published = self._published()
        self._take_role(published)
        # What is refused before the migration is no effect of it.
        self.failing = {(one.table, op) for op, one in self._write(published, kept=())}
        names = {str(table.id) for table in published}
        return [
            f"{name} has no rows, so changes of it aren't rehearsed: {why}"
            for name, why in sorted(empty.items())
            if name in names
        ]

    def run(self, migration: Sequence[SqlCommand], runner: Runner) -> Iterator[StepReport]:
        """Yields a step for each statement, or for each transaction of the migration."""
        pending: list[tuple[SqlCommand, Effect]] = []
        notes: list[Impact] = []
        for number, statement in enumerate(migration, 1):
            log.info("%s of %s, %s", number, len(migration), statement.place)
            start = time.monotonic()
            make_roles(self.admin, statement)
            pending.append((statement, self._observe(statement)))
            notes = [*notes, *self._without_made_up_rows(pending)]
            if pending[-1][1].error is not None:
                if not self.session.closed:
                    self.session.execute("rollback")
                yield self._step(pending, [], time.monotonic() - start)
                return
            if self.session.info.transaction_status is TransactionStatus.IDLE:
                seconds = time.monotonic() - start
                is_last = number == len(migration)
                if emptied := {note.table for note in notes}:
                    tables = read_tables(self.admin)
                    fill(self.admin, [table for table in tables if str(table.id) in emptied])
                impacts = [*self._after(runner, pending, compares_all=is_last), *notes]
                yield self._step(pending, impacts, seconds)
                pending, notes = [], []
        if pending:
            self.session.execute("rollback")
            error = "the migration ends without COMMIT, so PostgreSQL rolls it back"
            yield self._step(pending, [Impact("error", "", error)], 0.0)

    def _observe(self, statement: SqlCommand) -> Effect:
        limit_s = min(self.options.statement_timeout_s, threading.TIMEOUT_MAX)
        return observe(self.session, self.admin, statement.text, limit_s)

    def _without_made_up_rows(self, pending: list[tuple[SqlCommand, Effect]]) -> Iterator[Impact]:
        """Run a statement or an open transaction again, without made-up rows that it fails for.

        Only production knows whether its rows make it fail. Rows that it wrote itself come again.
        """
        statements = [statement for statement, _ in pending]
        tables: set[TableId] = set()
        while further := pending[-1][1].violated_by - tables - self.pipeline.production.rows.keys():
            self.session.execute("rollback")
            try:
                with self.admin.transaction():
                    self.admin.execute("set local session_replication_role = replica")
                    for table in further:
                        self.admin.execute(sql.SQL("delete from {}").format(table.identifier))
            except psycopg.Error:
                return
            tables |= further
            text = f"made-up rows make it fail, production's may as well: {pending[-1][1].error}"
            yield from (Impact("note", str(table), text, _CHECK_ROWS) for table in further)
            pending.clear()
            for statement in statements:
                pending.append((statement, self._observe(statement)))
                if pending[-1][1].error is not None:
                    break

    def follow(self, path: Path, file: PipelineFile, runner: Runner) -> StepReport:
        """Have setup follow a changed pipeline file, and judge the runs after it."""
        log.info("%s", path)
        start, place = time.monotonic(), str(path)
        plan = self.pipeline.follow(file)
        statements = [statement.text() for statement in plan.statements]
        if plan.problems:
            errors = [Impact("error", "", problem) for problem in plan.problems]
            return StepReport(place, statements, errors)
        impacts = list(self.pipeline.judge(runner, None, {}))
        impacts.append(Impact("note", "", f"setup --expect {plan.digest} requires this plan"))
        return StepReport(place, statements, impacts, time.monotonic() - start)

    def _after(
        self,
        runner: Runner,
        effects: Sequence[tuple[SqlCommand, Effect]],
        *,
        compares_all: bool,
    ) -> Iterator[Impact]:
        touched = {
            effect.names[oid]
            for _, effect in effects
            for oid, mode in effect.locks.items()
            if mode not in ("AccessShareLock", "RowShareLock")
        }
        published = self._published()
        is_named = touched and {str(table.id) for table in published} >= touched
        kept = touched if is_named and not compares_all else None
        for operation, impact in self._write(published, kept):
            if (impact.table, operation) not in self.failing:
                self.failing.add((impact.table, operation))
                yield impact
        renamed = {old: new for _, effect in effects for old, new in effect.renamed.items()}
        yield from self.pipeline.judge(runner, None if compares_all else touched, renamed)

    def _write(
        self, tables: Sequence[WritableTable], kept: Collection[str] | None = None
    ) -> Iterator[tuple[str, Impact]]:
        """Write to each table as its owner; yields which operations PostgreSQL refuses.

        What is written to other tables than ``kept`` is rolled back: PostgreSQL refuses it alike,
        and the pipeline has less to apply.
        """
        self.number += 2
        for table in tables:
            is_kept = kept is None or str(table.id) in kept
            with self.admin.transaction(force_rollback=not is_kept):
                # What fails, fails within a statement's savepoint.
                self.admin.execute("set constraints all immediate")
                self.admin.execute(sql.SQL("set role {}").format(sql.Identifier(table.owner)))
                refusal = write_rows(self.admin, table, self.number, self.number + 1)
                if isinstance(refusal, psycopg.errors.InsufficientPrivilege):
                    yield "insert", _refusal(table, "insert", refusal)
                for operation, statement in changes(table):
                    try:
                        with self.admin.transaction():
                            self.admin.execute(statement)
                    except _REFUSALS as err:
                        yield operation, _refusal(table, operation, err)
                    except psycopg.Error:  # For example a foreign key, which is not ours.
                        continue
        self.admin.execute("reset role")

    def _published(self) -> list[WritableTable]:
        names = self.pipeline.file.source.publication_names
        rows = self.admin.execute(_PUBLISHED, [list(names)]).fetchall()
        return read_tables(self.admin, [oid for (oid,) in rows])

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
        for oid in effect.locks:
            who, name, work = (
                effect.blocked_by(oid),
                effect.names[oid],
                _work_on(oid, effect, statement.text),
            )
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


def _refusal(table: WritableTable, operation: str, err: psycopg.Error) -> Impact:
    text = ": ".join(part for part in (err.diag.message_primary, err.diag.message_detail) if part)
    match err:
        case psycopg.errors.ObjectNotInPrerequisiteState():
            way = f"alter table {table.id} replica identity using index … before the old key goes"
        case psycopg.errors.InsufficientPrivilege():
            way = f"create the policies of {table.id} first, in the same transaction"
        case _:
            way = f"cover the columns by the replica identity of {table.id} first"
    return Impact("app-error", str(table.id), f"{operation.upper()} fails: {text}", way)


_ROLE = "select from pg_roles where rolname = %s"
_PUBLISHED = """
select distinct coalesce(pg_partition_root(c.oid), c.oid)::oid
from pg_publication_tables t
join pg_namespace n on n.nspname = t.schemaname
join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
where t.pubname = any(%s)
"""
