"""Schema changes while changes flow: after every ALTER the target has the source's columns and rows."""

from __future__ import annotations

import re

import pytest

from spark_jobs.flow import consume
from spark_jobs.result import RunFailed
from spark_jobs.sync import sync
from tests.integration.test_apply import BIG, source_rows
from tests.pipelines import bare_slot, pipeline_file
from waldelta.watermark import uri_of

pytestmark = [pytest.mark.pg, pytest.mark.spark]

# Statements, and whether the table has to be copied again for them.
CASES = {
    "a column without a default": ("alter table t add column x int", False),
    "a column with a constant default": ("alter table t add column x numeric(6,2) not null default 1.50", False),
    "a default of an array type": ("alter table t add column x text[] default array['a', 'b,\"c']", False),
    "a default that only new rows get": (
        "alter table t add column x int; alter table t alter column x set default 5", True),
    "a volatile default": ("alter table t add column x float8 default random()", True),
    "a generated column, which isn't published": (
        "alter table t add column x int generated always as (id * 2) stored", False),
    "a dropped column": ("alter table t drop column v", False),
    "a renamed column": ("alter table t rename column v to w", False),
    "a renamed key": ("alter table t rename column id to key", False),
    "a renamed column and a new one under its old name": (
        "alter table t rename column v to w; alter table t add column v int", True),
    "a column dropped and added again": ("alter table t drop column v; alter table t add column v text", True),
    "a longer varchar and a wider numeric": (
        "alter table t alter column s type varchar(20); alter table t alter column n type numeric(12,2)", False),
    "a numeric without limits": ("alter table t alter column n type numeric", False),
    "another type": ("alter table t alter column n type text using 'n' || n", True),
    "another scale": ("alter table t alter column n type numeric(10,4)", True),
    "several at once": (
        "alter table t add column x int default 1, add column y date, drop column s; alter table t rename v to w", False),
}  # fmt: skip


def write(database, first, table="t"):
    """Rows into whatever columns there are."""
    columns = columns_of(database, table)
    names = [n for n in ("v", "s", "n") if n in columns]
    key = "id" if "id" in columns else "key"
    listed = ", ".join([key, *names, "big"])
    values = {"v": "null", "s": "'s'", "n": "g"}
    chosen = ", ".join(["g", *(values[n] for n in names), BIG])
    database.execute(f"insert into {table}({listed}) select {chosen} from generate_series({first}, {first + 4}) g")
    database.execute(f"update {table} set {'s' if 's' in columns else key} = {'s' if 's' in columns else key}")
    database.execute(f"update {table} set s = 'u' where {key} % 2 = 0" if "s" in columns else "select 1")
    database.execute(f"delete from {table} where {key} = {first}")


def columns_of(database, table="t"):
    return [
        name
        for (name,) in database.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
            " and attgenerated = '' order by attnum",
            (table,),
        )
    ]


def assert_equal(spark, database, job, table="t", what=""):
    names = columns_of(database, table)
    frame = spark.read.format("delta").load(uri_of(job, f"public.{table}"))
    assert (what, sorted(c for c in frame.columns if not c.startswith("_wd_"))) == (what, sorted(names))
    found = sorted((tuple(row) for row in frame.select(*[f"`{n}`" for n in names]).collect()), key=repr)
    listed = ", ".join(f'"{n}"' for n in names)
    rows = [
        tuple(_as_held(frame, n, v) for n, v in zip(names, row, strict=True))
        for row in database.execute(f"select {listed} from {table}")
    ]
    assert (what, found) == (what, sorted(rows, key=repr))


def _as_held(frame, name, value):
    """A numeric without limits is a string in the lake."""
    return str(value) if value is not None and dict(frame.dtypes)[name] == "string" else value


DDL = "create table {}(id int primary key, v text, s varchar(10), n numeric(10,2), big text storage external)"


@pytest.fixture
def job(database, lake):
    database.execute(DDL.format("t"))
    return bare_slot(database, pipeline_file(lake, f"s_{database.name}"))


def test_the_targets_follow(spark, database, lake):
    """Changes before and after the ALTER in one batch, then more in the next one; a table for each case."""
    tables = {f"t{k}": case for k, case in enumerate(CASES)}
    for table in tables:
        database.execute(DDL.format(table))
    job = bare_slot(database, pipeline_file(lake, f"s_{database.name}", [f"public.{t}" for t in tables]))
    for table in tables:
        write(database, 1, table)
    sync(spark, job)
    for table, case in tables.items():
        write(database, 11, table)
        database.execute(re.sub(r"\bt\b", table, CASES[case][0]))
        write(database, 21, table)
    result = consume(spark, job)
    for table, case in tables.items():
        assert_equal(spark, database, job, table, case)
    copied_again = {w.split(":")[0] for w in result.warnings}
    assert copied_again == {f"public.{t}" for t, case in tables.items() if CASES[case][1]}
    for table in tables:
        write(database, 31, table)
    assert consume(spark, job).warnings == []
    for table, case in tables.items():
        assert_equal(spark, database, job, table, case)


def test_an_added_column_costs_no_rewrite(spark, database, job):
    """Existing files stay; only the changed rows are written."""
    write(database, 1)
    sync(spark, job)
    database.execute("alter table t add column x int")
    write(database, 11)
    consume(spark, job)
    history = spark.sql(f"describe history delta.`{uri_of(job, 'public.t')}`").collect()
    assert [h["operation"] for h in history][:2] == ["MERGE", "ADD COLUMNS"]


def test_a_run_killed_after_the_reshape_goes_on(spark, database, job, monkeypatch):
    """The old columns are gone when the next run comes; it finds the commit and only records the state."""
    write(database, 1)
    sync(spark, job)
    database.execute("alter table t rename column v to w")
    write(database, 11)
    real = job.ledger.__class__.append

    def killed(ledger, row):
        if getattr(row, "table_name", None):
            raise KeyboardInterrupt
        real(ledger, row)

    monkeypatch.setattr(job.ledger.__class__, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        consume(spark, job)
    monkeypatch.undo()
    write(database, 21)  # so that the next run goes further than the killed one
    assert consume(spark, job).warnings == []
    assert_equal(spark, database, job)


def test_the_history_of_the_schema_is_kept(spark, database, job):
    """The ledger says when which columns came and why."""
    write(database, 1)
    sync(spark, job)
    database.execute("alter table t add column x int")
    write(database, 11)
    consume(spark, job)
    state = job.table_states()["public.t"]
    assert (state.generation, state.reason) == (1, "columns changed: added: x")
    assert [c.name for c in state.columns] == columns_of(database)


def policy(database, lake, value):
    return bare_slot(
        database, pipeline_file(lake, f"s_{database.name}", target={"root": lake, "schema_changes": value})
    )


def test_fail_stops_the_table(spark, database, lake):
    """Its changes wait, and a new sync brings it on."""
    database.execute("create table t(id int primary key, v text)")
    job = policy(database, lake, "fail")
    sync(spark, job)
    database.execute("alter table t add column x int; insert into t values (1, 'a', 2)")
    with pytest.raises(RunFailed, match=r"columns changed \(added: x\)"):
        consume(spark, job)
    sync(spark, job, ["public.t"])
    consume(spark, job)
    assert source_rows(database) == [
        tuple(r) for r in spark.read.format("delta").load(uri_of(job, "public.t")).select("id", "v", "x").collect()
    ]


def test_ignore_keeps_the_columns(spark, database, lake):
    """A new column is left out, one that is gone comes as NULL."""
    database.execute("create table t(id int primary key, v text, w text); insert into t values (1, 'a', 'b')")
    job = policy(database, lake, "ignore")
    sync(spark, job)
    database.execute("alter table t add column x int; alter table t drop column w; insert into t values (2, 'c', 3)")
    consume(spark, job)
    frame = spark.read.format("delta").load(uri_of(job, "public.t")).select("id", "v", "w")
    assert sorted(map(tuple, frame.collect())) == [(1, "a", "b"), (2, "c", None)]


def test_a_renamed_table_is_named(spark, database, job):
    """A subscriber looks for the new name too; what to do is said."""
    write(database, 1)
    sync(spark, job)
    database.execute("alter table t rename to u; insert into u(id) values (100)")
    with pytest.raises(RunFailed, match=r"is called public\.u on the source now"):
        consume(spark, job)
