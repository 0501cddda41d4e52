"""Scenarios run against PostgreSQL's own subscription and against the pipeline: after each step
both hold the same rows.

A scenario is SQL alone: tables, publications, rows before the copy, and steps of changes with a
sync point after each. The native subscriber copies and streams from the publications it is told to;
the pipeline has the same ones, or others whose filters stand in its own ``where``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deltalake import DeltaTable

from tests.oracles.native_subscriber import native_subscriber, wait_until_caught_up
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.pipeline import RunResult
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres


@dataclass(frozen=True)
class Scenario:
    """``targets`` are the tables to compare: columns as both sides have them, by the name that both
    give the table; by default whatever PostgreSQL's subscriber subscribes to (from 16 on), which
    then are the pipeline's targets too.

    ``wheres`` are the pipeline's own filters; ``pipeline_publications`` default to
    ``publications``. ``gathered`` are partitioned tables whose leaves are one target of the
    pipeline's, and tables of their own at the subscriber.
    """

    tables: str
    publications: tuple[str, ...]
    create_publications: str
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pipeline_publications: tuple[str, ...] = ()
    wheres: Mapping[str, str] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    before: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    # Bounds of a bite; small ones have steps applied while others land.
    batch: Mapping[str, object] = field(default_factory=dict)
    # What the subscriber has besides, e.g. other names of schemas; default: the same tables.
    subscriber_tables: str | None = None


class Both:
    """A running scenario: ``step`` writes to the source and compares."""

    def __init__(
        self, runner, database, scenario: Scenario, pipeline: Pipeline, native: tuple
    ) -> None:
        self.runner, self.database, self.scenario, self.pipeline = (
            runner,
            database,
            scenario,
            pipeline,
        )
        self.subscriber, self.slot = native
        self.steps = 0

    def write(self, statements: Iterable[str]) -> None:
        """Run these statements on the source."""
        for statement in statements:
            self.database.execute(statement)

    def step(self, *statements: str, what: object = "") -> None:
        """Run these statements on the source, bring both sides up to date, compare."""
        self.write(statements)
        result = self.catch_up()
        self.compare((what, statements, result.warnings))

    def catch_up(self) -> RunResult:
        """Bring both sides up to date."""
        result = self.pipeline.consume(self.runner, f"step_{self.steps}")
        self.steps += 1
        wait_until_caught_up(self.database, self.slot)
        return result

    def compare(self, what: object = "") -> None:
        """Every target equals the subscriber's table, row by row."""
        different = {}
        for table, columns in (self.scenario.targets or self.subscribed()).items():
            ours, theirs = self.ours(table, columns), self.theirs(table, columns)
            if ours != theirs:
                different[table] = {
                    "only ours": _minus(ours, theirs),
                    "only theirs": _minus(theirs, ours),
                }
        assert not different, (what, different)

    def subscribed(self) -> dict[str, tuple[str, ...]]:
        """What the subscriber copied, with its columns; the pipeline must have the same."""
        publications, gathered = list(self.scenario.publications), list(self.scenario.gathered)
        listed = {
            table: tuple(columns)
            for table, columns in self.database.execute(_SUBSCRIBED, (gathered, publications))
        }
        copied = {
            name
            for name, state in self.pipeline.job().read_states().items()
            if state.status == "synced"
        }
        assert copied == set(listed), (
            "only ours",
            copied - set(listed),
            "only theirs",
            set(listed) - copied,
        )
        return listed

    def ours(self, table: str, columns: Sequence[str]) -> list[tuple]:
        """The target's rows."""
        held = DeltaTable(self.pipeline.target_path(table)).to_pyarrow_table(columns=list(columns))
        return sorted(zip(*(column.to_pylist() for column in held.columns), strict=True), key=repr)

    def theirs(self, table: str, columns: Sequence[str]) -> list[tuple]:
        """The native subscriber's rows."""
        query = f"select {', '.join(columns)} from {table}"
        return sorted(self.subscriber.execute(query.encode()).fetchall(), key=repr)


# Leaves that are gathered have their columns in the same places as the root.
_SUBSCRIBED = """
with gathered as (
    select root::regclass::oid as root, t.relid::oid from unnest(%s::text[]) root,
      pg_partition_tree(root::regclass) t
)
select n.nspname || '.' || c.relname, array(select a.attname::text from pg_attribute a
  where a.attrelid = g.relid and a.attnum = any (g.attrs))
from (
    select distinct coalesce(r.root, p.relid) as relid, p.attrs::int2[] as attrs
    from pg_get_publication_tables(variadic %s) p
    left join gathered r on r.relid = p.relid
) g
join pg_class c on c.oid = g.relid join pg_namespace n on n.oid = c.relnamespace
"""


def _minus(left: list[tuple], right: list[tuple]) -> list[tuple]:
    rest = list(right)
    return [row for row in left if not (row in rest and (rest.remove(row) or True))]


@contextmanager
def running(
    runner,
    database,
    postgres: EmbeddedPostgres,
    lake: str,
    scenario: Scenario,
    *,
    compare: bool = True,
) -> Iterator[Both]:
    """Both sides copied and equal; each ``step`` of the block is compared, by ``compare``."""
    database.execute(scenario.tables)
    database.execute(scenario.create_publications)
    if scenario.before:
        database.execute(scenario.before)
    pipeline = _pipeline(database, lake, scenario)
    pipeline.setup()
    pipeline.sync(runner)
    tables = (scenario.subscriber_tables or scenario.tables).encode()
    with native_subscriber(
        postgres,
        database,
        scenario.publications,
        lambda subscriber: subscriber.execute(tables),
        copy_data=True,
    ) as native:
        both = Both(runner, database, scenario, pipeline, native)
        if compare:
            both.compare("initial copy")
        yield both


def _pipeline(database, lake: str, scenario: Scenario) -> Pipeline:
    slot = f"s_{database.name}"
    names = scenario.pipeline_publications or scenario.publications
    source = {
        "conn_id": "test_source", "slot": slot, "options": dict(scenario.options),
        "publications": [{"name": name, "manage": False} for name in names],
    }  # fmt: skip
    tables: dict[str, dict[str, object]] = {
        table: {"where": where} for table, where in scenario.wheres.items()
    }
    for table in scenario.gathered:
        tables.setdefault(table, {})["partition_root"] = True
    target = {"root": lake, "tables": tables}
    document = {
        "pipeline": slot,
        "source": source,
        "target": target,
        "quality": {"enabled": False},
        "batch": dict(scenario.batch),
    }
    return Pipeline(PipelineFile.model_validate(document))
