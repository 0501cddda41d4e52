"""Scenarios run against PostgreSQL's own subscription and against the pipeline: after each step both hold the same rows.

A scenario is SQL alone: tables, publications, rows before the copy, and steps of changes with a sync point after each. The
native subscriber copies and streams from the publications it is told to; the pipeline has the same ones, or others whose
filters stand in its own ``where``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg
import tenacity
from deltalake import DeltaTable
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres
from spark_jobs.pipeline import Pipeline
from tests.native_subscriber import wait_until_caught_up
from waldelta.pipeline_file import PipelineFile


@dataclass(frozen=True)
class Scenario:
    """``targets`` are the tables to compare: columns as both sides have them, by the name that both give the table; by
    default whatever PostgreSQL's subscriber subscribes to (from 16 on), which then are the pipeline's targets too.

    ``wheres`` are the pipeline's own filters; ``pipeline_publications`` default to ``publications``.
    """

    tables: str
    publications: tuple[str, ...]
    create_publications: str
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pipeline_publications: tuple[str, ...] = ()
    wheres: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    # What the subscriber has besides, e.g. other names of schemas; default: the same tables.
    subscriber_tables: str | None = None


class Both:
    """A running scenario: ``step`` writes to the source and compares."""

    def __init__(self, spark, database, scenario: Scenario, pipeline: Pipeline, native: tuple) -> None:
        self.spark, self.database, self.scenario, self.pipeline = spark, database, scenario, pipeline
        self.subscriber, self.slot = native
        self.steps = 0

    def write(self, statements: Iterable[str]) -> None:
        """Run these statements on the source."""
        for statement in statements:
            self.database.execute(statement)

    def step(self, *statements: str, what: object = "") -> None:
        """Run these statements on the source, bring both sides up to date, compare."""
        self.write(statements)
        result = self.pipeline.consume(self.spark, f"step_{self.steps}")
        self.steps += 1
        wait_until_caught_up(self.database, self.slot)
        self.compare((what, statements, result.warnings))

    def compare(self, what: object = "") -> None:
        """Every target equals the subscriber's table, row by row."""
        different = {}
        for table, columns in (self.scenario.targets or self.subscribed()).items():
            ours, theirs = self.ours(table, columns), self.theirs(table, columns)
            if ours != theirs:
                different[table] = {"only ours": _minus(ours, theirs), "only theirs": _minus(theirs, ours)}
        assert not different, (what, different)

    def subscribed(self) -> dict[str, tuple[str, ...]]:
        """What the subscriber copied, with its columns; the pipeline must have copied the same tables."""
        listed = {table: tuple(columns) for table, columns in self.database.execute(_SUBSCRIBED, (list(self.scenario.publications),))}  # fmt: skip
        copied = {name for name, state in self.pipeline.job().table_states().items() if state.status == "synced"}
        assert copied == set(listed), ("only ours", copied - set(listed), "only theirs", set(listed) - copied)
        return listed

    def ours(self, table: str, columns: Sequence[str]) -> list[tuple]:
        """The target's rows."""
        held = DeltaTable(self.pipeline.target_path(table)).to_pyarrow_table(columns=list(columns))
        return sorted(zip(*(column.to_pylist() for column in held.columns), strict=True), key=repr)

    def theirs(self, table: str, columns: Sequence[str]) -> list[tuple]:
        """The native subscriber's rows."""
        query = f"select {', '.join(columns)} from {table}"
        return sorted(self.subscriber.execute(query.encode()).fetchall(), key=repr)


_SUBSCRIBED = """
select n.nspname || '.' || c.relname, array(select a.attname::text from pg_attribute a where a.attrelid = g.relid and a.attnum = any (g.attrs))
from (select distinct relid, attrs::int2[] from pg_get_publication_tables(variadic %s)) g
join pg_class c on c.oid = g.relid join pg_namespace n on n.oid = c.relnamespace
"""


def _minus(left: list[tuple], right: list[tuple]) -> list[tuple]:
    rest = list(right)
    return [row for row in left if not (row in rest and (rest.remove(row) or True))]


@contextmanager
def running(spark, database, postgres: EmbeddedPostgres, lake: str, scenario: Scenario) -> Iterator[Both]:
    """Both sides copied and equal; what the block writes through ``step`` is compared."""
    database.execute(scenario.tables)
    database.execute(scenario.create_publications)
    if scenario.before:
        database.execute(scenario.before)
    pipeline = _pipeline(database, lake, scenario)
    pipeline.setup()
    pipeline.sync(spark)
    with _subscription(postgres, database, scenario) as native:
        both = Both(spark, database, scenario, pipeline, native)
        both.compare("initial copy")
        yield both


def _pipeline(database, lake: str, scenario: Scenario) -> Pipeline:
    slot = f"s_{database.name}"
    names = scenario.pipeline_publications or scenario.publications
    source = {
        "conn_id": "test_source", "slot": slot, "options": dict(scenario.options),
        "publications": [{"name": name, "manage": False} for name in names],
    }  # fmt: skip
    target = {"root": lake, "tables": {table: {"where": where} for table, where in scenario.wheres.items()}}
    document = {"pipeline": slot, "source": source, "target": target, "quality": {"enabled": False}}
    return Pipeline(PipelineFile.model_validate(document))


@contextmanager
def _subscription(postgres: EmbeddedPostgres, database, scenario: Scenario) -> Iterator[tuple[psycopg.Connection, str]]:
    """PostgreSQL's own subscription in a second database of the cluster, when its tables are copied."""
    name = f"{database.name}_native"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
    database.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(postgres.conninfo(name), autocommit=True) as subscriber:
        subscriber.execute((scenario.subscriber_tables or scenario.tables).encode())
        listed = sql.SQL(", ").join(sql.Identifier(publication) for publication in scenario.publications)
        subscriber.execute(
            sql.SQL(
                "create subscription {} connection {} publication {} with (create_slot = false, slot_name = {})"
            ).format(sql.Identifier(name), database.conninfo, listed, sql.Literal(name))
        )
        try:
            _wait_until_copied(subscriber)
            yield subscriber, name
        finally:
            subscriber.execute(sql.SQL("alter subscription {} disable").format(sql.Identifier(name)))
            subscriber.execute(sql.SQL("alter subscription {} set (slot_name = none)").format(sql.Identifier(name)))
            subscriber.execute(sql.SQL("drop subscription {}").format(sql.Identifier(name)))
    database.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@tenacity.retry(
    retry=tenacity.retry_if_result(lambda done: not done),
    stop=tenacity.stop_after_delay(120),
    wait=tenacity.wait_fixed(0.05),
)
def _wait_until_copied(subscriber: psycopg.Connection) -> bool:
    (waiting,) = subscriber.execute("select count(*) from pg_subscription_rel where srsubstate <> 'r'").fetchone()
    return waiting == 0
