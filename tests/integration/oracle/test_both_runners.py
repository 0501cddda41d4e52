"""The same landed changes, applied in this process and on Spark: byte for byte the same targets."""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.oracles.random_workload import Workload
from tests.support.pipelines import bare_slot, pipeline_file
from tests.support.seeds import chosen_seed
from waldelta.config import PipelineFile
from waldelta.lake import local_path
from waldelta.lake.ledger import Decisions
from waldelta.pipeline import Job
from waldelta.pipeline.job import load_job
from waldelta.spark import InProcess, OnSpark
from waldelta.stages.apply.apply import apply
from waldelta.stages.land.drain import drain
from waldelta.stages.sync.sync import sync

# A table of each shape and target mode. Those of the workload have a key of two columns.
WORKLOAD = {"w1": {}, "w2": {"where": "part < 3 or part is null"}}
MODES = {"h": "history", "s": "soft_delete", "c": "changelog"}
# Tables without a key, by themselves or in the merged partitions.
KEYLESS = ("keyless", "m_keyless")
MERGED = ("m_key", "m_keyless")
OTHERS = {
    "keyless": {},
    "one_key": {},
    "gated": {},
    **{name: {"mode": mode} for name, mode in MODES.items()},
    **{name: {"partition_root": True} for name in MERGED},
}
DDL = """
create table keyless(id int, part int, a int, b text);
alter table keyless replica identity full;
create table one_key(id int primary key, part int, a int, b text);
create table gated(id int primary key, part int, a int, b text);
create table h(id int primary key, part int, a int, b text);
create table s(id int primary key, part int, a int, b text);
create table c(id int primary key, part int, a int, b text);
alter table h replica identity full; alter table c replica identity full;
create table m_key(id int primary key, part int, a int, b text) partition by range (id);
create table m_key_1 partition of m_key for values from (0) to (20);
create table m_key_2 partition of m_key default;
create table m_keyless(id int, part int, a int, b text) partition by range (id);
create table m_keyless_1 partition of m_keyless for values from (0) to (20);
create table m_keyless_2 partition of m_keyless default;
alter table m_keyless_1 replica identity full; alter table m_keyless_2 replica identity full;
"""
GATES = """
expectations:
  - {type: expect_column_values_to_be_between, kwargs: {column: a, max_value: 600},
     gate: quarantine}
  - {type: expect_column_values_to_match_regex, kwargs: {column: b, regex: "[0-4]$"},
     gate: quarantine}
  - {type: expect_target_rows_to_satisfy, kwargs: {condition: part < 9, meaning: of a part},
     gate: stop}
"""
RUNS = 2


def change(database, rng: random.Random) -> None:
    """A transaction of a few statements on each table that isn't the workload's."""
    with database.connect() as connection:
        for name in OTHERS:
            key, other = rng.randrange(40), rng.randrange(1000)
            taken = "" if name in KEYLESS else " on conflict do nothing"
            connection.execute(
                f"insert into {name} select i, i % 5, {other}, 'ä' || i"
                f" from generate_series({key}, {key + 5}) i{taken}"
            )
            connection.execute(f"update {name} set a = {other}, b = null where id % 7 = {key % 7}")
            connection.execute(f"delete from {name} where id = {rng.randrange(45)}")
        for name in MERGED:
            connection.execute(
                f"update {name} set id = (select max(id) + 1 from {name}) where id = %s",
                [rng.randrange(20)],
            )
            if rng.random() < 0.1:
                connection.execute(f"truncate {name}_1")


def rows_of(job: Job, name: str) -> tuple[pa.Schema, list[dict]]:
    """All columns of a target and its rows, in one order."""
    rows = DeltaTable(job.lake.target(f"public.{name}").uri).to_pyarrow_table()
    return rows.schema, sorted(rows.to_pylist(maps_as_pydicts="strict"), key=repr)


def set_aside(job: Job) -> list[tuple]:
    """What a gate has quarantined, in one order."""
    rows = Decisions(job.lake).rows("public.gated", 1)
    return sorted((row.status, row.key, row.values, row.reason, row.outdated) for row in rows)


@dataclass
class Shapes:
    """A pipeline of all shapes and modes, and what writes to its tables."""

    database: object
    folder: Path
    seed: int
    workload: Workload
    rng: random.Random
    file: PipelineFile
    job: Job
    copies: int = 0

    def write(self, transactions: int) -> None:
        """Write random transactions to all tables."""
        for _ in range(transactions):
            self.workload.transaction()
            change(self.database, self.rng)

    def copy(self) -> Job:
        """The job with ``runner: spark`` on a copy of the lake as it is now."""
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        shutil.copytree(local_path(self.file.target.root), copy)
        target = self.file.target.model_copy(update={"root": copy.as_uri()})
        file = self.file.model_copy(update={"target": target, "runner": "spark"})
        job = replace(load_job(file, self.job.run_id), source=self.job.source)
        assert job.lake.on_spark
        return job

    def check_equal(self, other: Job, when: object) -> None:
        """Both lakes have the same rows, and the same rows in quarantine."""
        what = f"WALDELTA_SEED={self.seed}", when
        assert (what, set_aside(self.job)) == (what, set_aside(other))
        assert set_aside(self.job)
        for name in WORKLOAD | OTHERS:
            assert (what, name, *rows_of(self.job, name)) == (what, name, *rows_of(other, name))
            assert name in WORKLOAD or rows_of(self.job, name)[1], (what, name)


@pytest.fixture
def shapes(runner, database, lake, tmp_path) -> Iterator[Shapes]:
    """All shapes and modes, copied with a few rows."""
    seed = chosen_seed()
    database.execute(DDL)
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, [*WORKLOAD])
        tables = {f"public.{name}": options for name, options in (WORKLOAD | OTHERS).items()}
        target = {"root": lake, "tables": {name: o for name, o in tables.items() if o}}
        suites = tmp_path / "suites"
        suites.mkdir()
        suites.joinpath("public.gated.yml").write_text(GATES)
        quality = {"enabled": False, "suites": str(suites)}
        file = pipeline_file(lake, f"s_{database.name}", [*tables], target=target, quality=quality)
        job = bare_slot(database, file)
        assert not job.lake.on_spark
        made = Shapes(database, tmp_path, seed, workload, random.Random(seed), file, job)
        made.write(5)
        sync(runner, job)
        yield made


@pytest.mark.nightly("each shape and mode on both runners, which the unit tests have apart")
def test_targets_are_equal_on_both_runners(runner, spark_jvm, shapes):
    """What landed once is applied to two copies of the lake: first to new targets, then again."""
    for run in range(int(os.environ.get("WALDELTA_ROUNDS") or RUNS)):
        shapes.write(10)
        drain(runner, shapes.job)
        here, there, other = InProcess(spark_jvm), OnSpark(spark_jvm()), shapes.copy()
        assert apply(there, other).failures == {}
        assert apply(here, shapes.job).failures == {}
        shapes.check_equal(other, run)


# What follows without a copy, and what needs one.
ALTERS = (
    "add column n{k} int",
    "add column n{k} numeric(6,2) not null default 1.50",
    "add column n{k} numeric(6,2) default 'NaN'",
    "add column n{k} text[] default array['a', 'b,\"c']",
    "add column n{k} timestamptz default '2026-01-31 12:00+00'",
    "add column n{k} timestamp default '2026-01-31 12:00'",
    "add column n{k} timestamp[]",
    "add column n{k} float8 default '-0'",
    "add column n{k} bytea default '\\x00ff'",
    "add column n{k} int default 7, drop column b, add column b int",
    "drop column b",
    "drop column part, add column part int default 7",
    "rename column b to r{k}",
    "rename column id to key{k}",
    "alter column small type numeric(30,9)",
    "alter column small type numeric",
    "alter column v type varchar(99)",
)
COPIES = (
    "alter column a type bigint",
    "alter column small type text using small::text || '!'",
    "add column n{k} uuid default gen_random_uuid()",
)
SHAPES = {
    "plain": {},
    "parts": {"partition_by": ["part"], "statistics": ["id", "b", "part"]},
    "shown": {"change_data_feed": True},
    "soft": {"mode": "soft_delete"},
    "kept": {"mode": "history"},
    "log": {"mode": "changelog"},
}
SHAPE = (
    "create table {}(id int primary key, part int, a int, b text, v varchar(9),"
    " small numeric(12,9));"
)


KEY = """
select attname::text from pg_attribute
where attrelid = %s::regclass and attname ~ '^(id|key.*)$' and not attisdropped
"""


def definition_of(job, name: str) -> tuple:
    """A target's columns, partitions and columns with statistics by its log."""
    table = DeltaTable(job.lake.target(f"public.{name}").uri)
    metadata = table.metadata()
    listed = metadata.configuration.get("delta.dataSkippingStatsColumns")
    return table.schema().to_json(), metadata.partition_columns, listed


@pytest.mark.nightly("random statements on each shape; unit tests have the columns of a copy")
@pytest.mark.parametrize(
    ("statements", "names"),
    [
        (ALTERS, ("plain", "parts", "shown")),
        (COPIES, ("plain", "parts", "shown")),
        (ALTERS, ("soft", "kept", "log")),
    ],
    ids=["follow", "copy", "modes"],
)
def test_columns_are_equal_on_both_runners(
    runner, spark_jvm, database, lake, tmp_path, statements, names
):
    """Random ALTER TABLEs, and what the same rows become with them: definitions and values."""
    seed = chosen_seed()
    rng, folder = random.Random(seed), local_path(lake)
    tables = {name: SHAPES[name] for name in names}
    for name in tables:
        database.execute(SHAPE.format(name) + f"alter table {name} replica identity full")
    target = {"root": lake, "tables": {f"public.{n}": s for n, s in tables.items() if s}}
    file = pipeline_file(
        lake, f"s_{database.name}", [f"public.{name}" for name in tables], target=target
    )
    job = bare_slot(database, file)
    for name in tables:
        database.execute(
            f"insert into {name} select g, g % 3, g, 'é' || g, null,"
            " case when g % 4 = 0 then 'NaN' else g / 1e9 end from generate_series(1, 20) g"
        )
    sync(runner, job)
    for number in range(int(os.environ.get("WALDELTA_ROUNDS") or 3)):
        done = {}
        for name in tables:
            done[name] = rng.choice(statements).format(k=number)
            with suppress(psycopg.Error):  # The column may be gone.
                database.execute(f"alter table {name} {done[name]}")
            ((key,),) = database.execute(KEY, [name])
            database.execute(f"insert into {name}({key}, part) values ({100 + number}, 1)")
        drain(runner, job)
        here, there = InProcess(spark_jvm), OnSpark(spark_jvm())
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy)
        root = file.target.model_copy(update={"root": copy.as_uri()})
        moved = file.model_copy(update={"target": root, "runner": "spark"})
        other = replace(load_job(moved, job.run_id), source=job.source)
        stopped = [apply(one, of).failures for one, of in ((there, other), (here, job))]
        assert [*stopped[0]] == [*stopped[1]]
        if stopped[0]:
            sync(there, other, [*stopped[0]])
            sync(here, job, [*stopped[0]])
        assert here.uses == 0 or "plain" not in names
        for name in tables:
            seen = (f"WALDELTA_SEED={seed}", number, name, done[name])
            assert (seen, definition_of(job, name)) == (seen, definition_of(other, name))
            ours, theirs = (rows_of(of, name)[1] for of in (job, other))
            if f"public.{name}" in stopped[0]:  # The snapshots are not the same.
                ours, theirs = (
                    [{k: v for k, v in row.items() if k != "_wd_lsn"} for row in rows]
                    for rows in (ours, theirs)
                )
            assert (seen, repr(ours)) == (seen, repr(theirs))
