"""After every ALTER the target has the source's columns and rows."""

import re
from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.oracles.compare import differing
from tests.oracles.random_workload import BIG
from tests.oracles.target_rows import read_target, source_rows, target_rows
from tests.support.concurrent_work import killed_in
from tests.support.pipelines import (
    bare_job,
    beside_superuser,
    copied_pipeline,
    new_pipeline,
    pipeline_file,
)
from waldelta.errors import ConfigError
from waldelta.jobs.consume import consume
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

# Statements, and whether the table has to be copied again for them.
CASES = {
    "a column without a default": ("alter table t add column x int", False),
    "a column with a constant default":
    ("alter table t add column x numeric(6,2) not null default 1.50", False),
    "a default of an array type": ("alter table t add column x text[] default array['a', 'b,\"c']",
                                   False),
    "a default that only new rows get":
    ("alter table t add column x int; alter table t alter column x set default 5", True),
    "a volatile default": ("alter table t add column x float8 default random()", True),
    "a generated column, which isn't published":
    ("alter table t add column x int generated always as (id * 2) stored", False),
    "a timestamp without a zone": ("alter table t add column x timestamp", False),
    "an array of them, with a default":
    ("alter table t add column x timestamp[] default array['2026-01-31 12:00'::timestamp]", False),
    "a dropped column": ("alter table t drop column v", False),
    "a renamed column": ("alter table t rename column v to w", False),
    "a renamed key": ("alter table t rename column id to key", False),
    "a renamed column and a new one under its old name":
    ("alter table t rename column v to w; alter table t add column v int", True),
    "a column dropped and added again":
    ("alter table t drop column v; alter table t add column v text", True),
    "a longer varchar": ("alter table t alter column s type varchar(20)", False),
    "a longer varchar and a wider numeric":
    (("alter table t alter column s type varchar(20); alter table t alter column n type"
      " numeric(12,2)"), False),
    "a numeric without limits": ("alter table t alter column n type numeric", False),
    "another type": ("alter table t alter column n type text using 'n' || n", True),
    "another scale": ("alter table t alter column n type numeric(10,4)", True),
    "several at once":
    (("alter table t add column x int default 1, add column y date, drop column s; alter"
      " table t rename v to w"), False),
}  # fmt: skip


def write(database, first, table="t"):
    """Rows into whatever columns there are."""
    columns = columns_of(database, table)
    names = [n for n in ("v", "s", "n") if n in columns]
    key = "id" if "id" in columns else "key"
    listed = ", ".join([key, *names, "big"])
    values = {"v": "null", "s": "'s'", "n": "g"}
    chosen = ", ".join(["g", *(values[n] for n in names), BIG.format("g")])
    database.execute(
        f"insert into {table}({listed}) select {chosen} from generate_series({first},"
        f" {first + 4}) g"
    )
    database.execute(
        f"update {table} set {'s' if 's' in columns else key} = {'s' if 's' in columns else key}"
    )
    database.execute(
        f"update {table} set s = 'u' where {key} % 2 = 0" if "s" in columns else "select 1"
    )
    database.execute(f"delete from {table} where {key} = {first}")


def columns_of(database, table="t"):
    return [
        name
        for (name,) in database.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not"
            " attisdropped and attgenerated = '' order by attnum",
            (table,),
        )
    ]


def assert_equal(database, job, table="t", what=""):
    names, uri = columns_of(database, table), job.lake.target(f"public.{table}").uri
    held = {field.name: field.type.type for field in DeltaTable(uri).schema().fields}
    assert (what, sorted(c for c in held if not c.startswith("_wd_"))) == (what, sorted(names))
    found = sorted((tuple(row) for row in read_target(uri, *names)), key=repr)
    listed = ", ".join(f'"{n}"' for n in names)
    rows = [
        tuple(_as_held(held[n], v) for n, v in zip(names, row, strict=True))
        for row in database.execute(f"select {listed} from {table}")
    ]
    assert (what, found) == (what, sorted(rows, key=repr))


def _as_held(kind, value):
    """A numeric without limits is a string in the lake."""
    return str(value) if value is not None and kind == "string" else value


DDL = (
    "create table {}(id int primary key, v text, s varchar(10), n numeric(10,2), big text storage"
    " external)"
)


@pytest.fixture
def job(database, lake):
    database.execute(DDL.format("t"))
    return bare_job(database, lake)


# One of each kind: added, dropped and renamed, with and without a copy.
SOME = (
    "a column with a constant default",
    "a timestamp without a zone",
    "a renamed key",
    "another type",
    "several at once",
)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, id="some"),
        pytest.param(
            tuple(case for case in CASES if case not in SOME),
            id="others",
            marks=pytest.mark.nightly("further statements of the same kinds"),
        ),
    ],
)
def test_the_targets_follow(runner, database, lake, cases):
    """Changes before and after the ALTER in one batch, then more; a table for each case."""
    tables = {f"t{k}": case for k, case in enumerate(cases)}
    for table in tables:
        database.execute(DDL.format(table))
    job = bare_job(database, lake, [f"public.{t}" for t in tables])
    for table in tables:
        write(database, 1, table)
    sync(runner, job)
    for table, case in tables.items():
        write(database, 11, table)
        database.execute(re.sub(r"\bt\b", table, CASES[case][0]))
        write(database, 21, table)
    result = consume(runner, job)
    for table, case in tables.items():
        assert_equal(database, job, table, case)
    copied_again = {w.split(":")[0] for w in result.warnings}
    assert copied_again == {f"public.{t}" for t, case in tables.items() if CASES[case][1]}
    for table in tables:
        write(database, 31, table)
    assert consume(runner, job).warnings == []
    for table, case in tables.items():
        assert_equal(database, job, table, case)


# What the stream tells nothing of, and whether the table has to be copied again for it.
REWRITES = {
    "other values of the same type": ("alter table t alter s type varchar(10) using upper(s)",
                                      True),
    "other values, then rows":
    ("alter table t alter s type varchar(10) using upper(s); insert into t(id) values (99)", True),
    "another type and back":
    (("alter table t alter n type text; alter table t alter n type numeric(10,2) using"
      " n::numeric + 1"), True),
    "a volatile default that was dropped":
    (("alter table t add x float8 default random(); alter table t alter x drop default;"
      " insert into t(id) values (99)"), True),
    "a default that old rows showed, filled in and dropped":
    (("alter table t add x int default 5; alter table t alter x type int using 6; alter table"
      " t alter x drop default;insert into t(id) values (9)"), True),
    "the same type, written as it was": ("alter table t alter n type numeric(10,2)", False),
    "vacuum full": ("vacuum full t", False),
    "cluster": ("cluster t using t_pkey", False),
    "truncate": ("truncate t; insert into t(id) values (1)", False),
    "rewritten twice over": ("vacuum full t; delete from t where id = 2; vacuum full t", False),
    "changes of columns that write no row":
    (("grant select (v) on t to pg_monitor; alter table t alter s set statistics 500; alter"
      " table t alter n set default 1"), False),
    "storage options":
    ("alter table t set (fillfactor = 50); reindex table t; vacuum freeze t; analyze t", False),
}  # fmt: skip


def run_each(database, table, statements):
    """VACUUM can't run among others."""
    for statement in statements.split(";"):
        database.execute(re.sub(r"\bt(?=\b|_)", table, statement))


@pytest.mark.soak("several rewrites of large tables")
def test_rewrites_are_told_from_the_catalogs(runner, database, lake):
    """VACUUM FULL and its like cost nothing; an ALTER that may change values costs a copy."""
    tables = {f"t{k}": case for k, case in enumerate(REWRITES)}
    for table in tables:
        database.execute(DDL.format(table))
        write(database, 1, table)
    job = bare_job(database, lake, [f"public.{t}" for t in tables])
    sync(runner, job)
    for table, case in tables.items():
        run_each(database, table, REWRITES[case][0])
    result = consume(runner, job)
    copied_again = {tables[w.split(":")[0].removeprefix("public.")] for w in result.warnings}
    assert copied_again == {case for case in tables.values() if REWRITES[case][1]}
    for table, case in tables.items():
        assert_equal(database, job, table, case)
    assert consume(runner, job).warnings == []


@pytest.mark.nightly("a default long before its rows")
def test_a_volatile_default_long_before_the_first_rows_with_it(runner, database, job):
    """Runs in between don't forget that the file was another one when the column came."""
    write(database, 1)
    sync(runner, job)
    run_each(
        database,
        "t",
        "alter table t add x float8 default random(); alter table t alter x drop default",
    )
    assert consume(runner, job).warnings == []
    run_each(database, "t", "grant select (x) on t to pg_monitor; vacuum full t")
    assert consume(runner, job).warnings == []
    write(database, 11)
    assert len(consume(runner, job).warnings) == 1
    assert_equal(database, job)


def test_a_rewritten_partition_root(runner, database, lake):
    """The root's columns and the leaves' files."""
    database.execute("create table t(id int primary key, v text) partition by range (id)")
    for low in (0, 100):
        database.execute(
            f"create table t_{low} partition of t for values from ({low}) to ({low + 100})"
        )
    database.execute("insert into t select g, 'a' from generate_series(1, 199) g")
    job = bare_job(database, lake)
    database.execute(
        f"alter publication s_{database.name}_pub set (publish_via_partition_root = true)"
    )
    sync(runner, job)
    database.execute("vacuum full t_100")
    database.execute("create table t_200 partition of t for values from (200) to (300)")
    database.execute("insert into t values (200, 'b')")
    assert consume(runner, job).warnings == []
    database.execute("alter table t alter v type text using upper(v)")
    assert len(consume(runner, job).warnings) == 1
    assert_equal(database, job)


@pytest.mark.soak("a second kind of catalog change")
def test_types_that_print_otherwise(runner, database, lake):
    """Renamed labels, changed attributes and renamed objects change old rows and send nothing."""
    database.execute("create type mood as enum ('sad', 'ok'); create type pair as (a int, b text)")
    database.execute("create domain feeling as mood; create type span as range (subtype = mood)")
    columns = {"e": "mood", "a": "mood[]", "d": "feeling", "r": "span", "c": "pair", "m": "mood"}
    columns |= {"n": "regclass[]"}
    database.execute("create table named()")
    for name, kind in columns.items():
        database.execute(f"create table t_{name}(id int primary key, v {kind})")
    database.execute("create type outer_pair as (p pair, m mood)")
    database.execute("create table t_o(id int primary key, v outer_pair)")
    values = {
        "e": "'sad'", "a": "'{sad,ok}'", "d": "'sad'", "r": "'[sad,ok]'", "c": "(1, 'x')",
        "m": "null", "n": "'{named}'", "o": "row((1, 'x'), 'sad')",
    }  # fmt: skip
    for name, value in values.items():
        database.execute(f"insert into t_{name} values (1, {value})")
    job = bare_job(database, lake, [f"public.t_{name}" for name in values])
    sync(runner, job)
    for name, value in values.items():
        database.execute(f"insert into t_{name} values (2, {value})")

    def copied_again():
        warnings = consume(runner, job).warnings
        assert all("the catalogs changed the values of column v (" in w for w in warnings)
        assert differing(runner, job) == {}
        return {w.partition(":")[0].removeprefix("public.t_") for w in warnings}

    assert copied_again() == set()
    database.execute("alter type mood add value 'glad' before 'ok'")
    database.execute("alter type mood rename to humour; alter type pair rename attribute a to z")
    assert copied_again() == set()
    database.execute("alter type humour rename value 'sad' to 'blue'")
    assert "rewritten on the source" in check_idle(job).reason
    assert copied_again() == {"e", "a", "d", "r", "o"}
    database.execute("alter type pair add attribute more int")
    assert copied_again() == {"c", "o"}
    database.execute("alter type pair drop attribute b")
    assert copied_again() == {"c", "o"}
    database.execute("create table other()")
    assert copied_again() == set()
    database.execute("alter table named rename to renamed")
    assert copied_again() == {"n"}
    assert not check_idle(job).has_work


# What becomes of a key in the middle of changes; rows are (id, k, v), id and k unique at first.
IDENTITIES = {
    "for a while": (
        """alter table t replica identity using index t_k; update t set id = id + 50 where id < 3;
        update t set k = k + 500 where id = 4; alter table t replica identity default; update t set
          id = id + 1000"""
    ),
    "full for a while": (
        """alter table t replica identity full; update t set id = id + 50 where id < 3;
        delete from t where id = 4;
        alter table t replica identity default; update t set k = -k"""
    ),
    "dropped under full": (
        """alter table t replica identity full; update t set v = 'x' where id = 2;
        alter table t drop constraint t_pkey; insert into t values (3, 33,
          'again'); update t set v = 'y' where id = 3"""
    ),
    "another one under full": (
        """alter table t replica identity full; alter table t drop constraint t_pkey;
        alter table t add primary key (k); insert into t values (3, 33, 'again'); delete from t
          where k = 3"""
    ),
    "replaced by the same": (
        """alter table t replica identity full; alter table t drop constraint t_pkey;
        alter table t add primary key (id); update t set id = id + 10"""
    ),
    "wider for a while": (
        """alter table t drop constraint t_pkey; alter table t add primary key (id, k);
        insert into t values (3, 33, 'beside'); delete from t where k = 33;
        alter table t drop constraint t_pkey; alter table t add primary key (id)"""
    ),
}


@pytest.mark.soak("every identity in many runs")
def test_keys_that_change_while_the_stream_runs(runner, database, lake):
    """Whatever tells rows apart meanwhile, no row is lost and none stands twice."""
    tables = {f"t{n}": case for n, case in enumerate(IDENTITIES)}
    for table in tables:
        database.execute(f"create table {table}(id int primary key, k int not null, v text)")
        database.execute(f"create unique index {table}_k on {table}(k)")
        database.execute(f"insert into {table} select g, g, 'v' from generate_series(1, 5) g")
    job = bare_job(database, lake, [f"public.{t}" for t in tables])
    sync(runner, job)
    for table, case in tables.items():
        run_each(database, table, IDENTITIES[case])
    copied = {
        tables[w.split(":")[0].removeprefix("public.")] for w in consume(runner, job).warnings
    }
    assert copied == {
        "for a while",
        "dropped under full",
        "another one under full",
        "wider for a while",
    }
    for table, case in tables.items():
        (
            database.execute(f"update {table} set v = 'end' where k % 2 = 0")
            if "dropped" not in case
            else None
        )
    assert consume(runner, job).warnings == []
    assert differing(runner, job) == {}


def test_partitions_attached_and_detached_are_told(runner, database, lake):
    """Their rows neither come nor go, as with a native subscriber."""
    database.execute("create table t(id int primary key, v text) partition by range (id)")
    for low in (0, 10):
        database.execute(
            f"create table t_{low} partition of t for values from ({low}) to ({low + 10})"
        )
    database.execute(
        "create table other(id int primary key, v text); insert into other values (21, 'x')"
    )
    job = bare_job(database, lake)
    database.execute(
        f"alter publication s_{database.name}_pub set (publish_via_partition_root = true)"
    )
    sync(runner, job)
    database.execute(
        "create table t_30 partition of t for values from (30) to (40); insert into t values (1,"
        " 'a'), (31, 'b')"
    )
    assert consume(runner, job).warnings == []
    database.execute(
        "alter table t attach partition other for values from (20) to (30); insert into t values"
        " (22, 'c')"
    )
    database.execute("grant select on t_10 to pg_monitor; alter table t detach partition t_0")
    database.execute("vacuum full t_30")
    (told,) = consume(runner, job).warnings
    assert (
        "partition public.other was added; PostgreSQL did not send the rows that it already had; 1"
        " partition left the table; their rows stay in the target" in told
    )
    assert consume(runner, job).warnings == []
    sync(runner, job, ["public.t"])
    assert_equal(database, job)


def test_a_column_that_delta_cant_keep_apart(runner, database, job):
    """The error has the remedy; with another name the table goes on by itself."""
    write(database, 1)
    sync(runner, job)
    database.execute("alter table t add column _wd_raw int")
    write(database, 11)
    with pytest.raises(
        RunFailed,
        match=r"public\.t: Delta ignores case and can't keep column .* apart: give it another name",
    ):
        consume(runner, job)
    database.execute("alter table t rename column _wd_raw to other")
    consume(runner, job)
    assert_equal(database, job)


def test_the_policies_on_a_rewrite(runner, database, lake):
    """``fail`` stops the table until it is synced again, ``ignore`` says so once."""
    for table in "fi":
        database.execute(DDL.format(table))
        write(database, 1, table)
    job = with_policies(database, lake)
    sync(runner, job)
    for table in "fi":
        database.execute(f"alter table {table} alter s type varchar(10) using upper(s)")
    with pytest.raises(RunFailed, match=r"public\.f: ALTER TABLE rewrote column s,") as failed:
        consume(runner, job)
    assert ["public.i: ALTER TABLE" in w for w in failed.value.result.warnings] == [True]
    sync(runner, job, ["public.f"])
    assert consume(runner, job).warnings == []
    assert_equal(database, job, "f")


def test_an_added_column_costs_no_rewrite(runner, database, job):
    """Only the changes write anything; the ledger says when which columns came and why."""
    write(database, 1)
    sync(runner, job)
    database.execute("alter table t add column x int")
    write(database, 11)
    consume(runner, job)
    history = DeltaTable(job.lake.target("public.t").uri).history()
    assert [commit["operation"] for commit in history][:2] == ["WRITE", "ADD COLUMNS"]
    state = job.read_states()["public.t"]
    assert (state.generation, state.reason) == (1, "columns changed: added: x")
    assert [c.name for c in state.columns] == columns_of(database)


def test_a_run_killed_after_the_reshape_goes_on(runner, database, job):
    """The next run finds the commit and only records the state."""
    write(database, 1)
    sync(runner, job)
    database.execute("alter table t rename column v to w")
    write(database, 11)
    with killed_in("waldelta.lake.ledger.Ledger.append_state"):
        consume(runner, job)
    write(database, 21)  # so that the next run goes further than the killed one
    assert consume(runner, job).warnings == []
    assert_equal(database, job)


def test_a_rewrite_keeps_an_external_writers_column(runner, database, job):
    """Also where a column has the name of one of ours while the rows are written again."""
    database.execute("alter table t add f0 int default 7")
    write(database, 1)
    sync(runner, job)
    uri = job.lake.target("public.t").uri
    rows = DeltaTable(uri).to_pyarrow_table()
    extra = pa.array([f"of {key}" for key in rows["id"].to_pylist()])
    write_deltalake(
        uri, rows.append_column("extra", extra), mode="overwrite", schema_mode="overwrite"
    )
    database.execute("alter table t rename column v to w; alter table t add x int default 1")
    write(database, 11)
    consume(runner, job)
    expected = [
        (key, 7, 1, None if key > 10 else f"of {key}")
        for (key,) in database.execute("select id from t order by id")
    ]
    assert target_rows(job, "t", "id", "f0", "x", "extra") == sorted(expected, key=repr)
    database.execute("alter table t rename column w to extra")
    write(database, 21)
    with pytest.raises(RunFailed, match=r"column `extra` was added, and the source has a new"):
        consume(runner, job)


def with_policies(database, lake):
    """Two tables: changes of one stop it, those of the other are ignored."""
    own = {"public.f": {"schema_changes": "fail"}, "public.i": {"schema_changes": "ignore"}}
    target = {"root": lake, "tables": own}
    return bare_job(database, lake, ["public.f", "public.i"], target=target)


def test_the_policies_on_other_columns(runner, database, lake):
    """With ``ignore`` a new column is left out, and a dropped one comes as NULL."""
    for table in "fi":
        database.execute(f"create table {table}(id int primary key, v text, w text)")
        database.execute(f"insert into {table} values (1, 'a', 'b')")
    job = with_policies(database, lake)
    sync(runner, job)
    for table in "fi":
        database.execute(f"alter table {table} add column x int; alter table {table} drop column w")
        database.execute(f"insert into {table} values (2, 'c', 3)")
    with pytest.raises(RunFailed, match=r"public\.f: its columns changed \(added: x; dropped: w\)"):
        consume(runner, job)
    assert target_rows(job, "i", "id", "v", "w") == [(1, "a", "b"), (2, "c", None)]
    sync(runner, job, ["public.f"])
    consume(runner, job)
    assert target_rows(job, "f", "id", "v", "x") == source_rows(database, "f")


def test_a_renamed_table_is_named(runner, database, job):
    """A subscriber looks for the new name too; what to do is said."""
    write(database, 1)
    sync(runner, job)
    database.execute("alter table t rename to u; insert into u(id) values (100)")
    with pytest.raises(RunFailed, match=r"is called public\.u on the source now"):
        consume(runner, job)
    file = pipeline_file(job.pipeline.target.root, job.pipeline.source.slot, ["public.u"])
    job = replace(job, pipeline=file, run_id="renamed")
    sync(runner, job)
    database.execute("insert into u(id) values (101)")
    assert consume(runner, job).status == "succeeded"
    assert_equal(database, job, "u")
    assert {name: one.status for name, one in job.read_states().items()} == {
        "public.t": "removed",
        "public.u": "synced",
    }


def test_a_table_that_another_replaces(runner, database, lake):
    """As in a blue-green deployment: setup publishes the new table, and a run copies it."""
    database.execute("create table t(id int primary key, v text); insert into t values (1, 'old')")
    pipeline = copied_pipeline(runner, new_pipeline(database, lake))
    assert beside_superuser(pipeline.check().warnings) == []
    database.execute(
        "create table t_new(id int primary key, v text, w int);"
        " begin; alter table t rename to t_old; alter table t_new rename to t; commit;"
        " insert into t values (2, 'new', 3); insert into t_old values (4, 'old')"
    )
    with pytest.raises(RunFailed, match=r"called public\.t_old on .* another .*: run setup") as err:
        pipeline.consume(runner)
    assert "remove" not in str(err.value)
    (warned,) = beside_superuser(pipeline.check().warnings)
    assert warned.startswith(
        "public.t isn't the table that its target was copied from, which is public.t_old now"
    )
    pipeline.setup()
    (warned,) = pipeline.consume(runner).warnings
    assert "it was copied again, 1 row" in warned
    assert_equal(database, pipeline.job())


def test_a_table_renamed_for_a_while_stays_the_same(runner, database, job):
    """It is the table of its name by the time its changes are applied."""
    write(database, 1)
    sync(runner, job)
    database.execute(
        "begin; alter table t rename to u; insert into u(id) values (100); alter table u rename to"
        " t; commit"
    )
    assert consume(runner, job).warnings == []
    assert_equal(database, job)


def test_the_last_column_goes_away(runner, database, lake):
    """The target stays as it is, and those of others go on."""
    database.execute(
        "create table t(v text); alter table t replica identity full; create table u(id int primary"
        " key); insert into t values ('a')"
    )
    job = bare_job(database, lake, ["public.t", "public.u"])
    sync(runner, job)
    database.execute(
        "alter table t drop column v; insert into t default values; insert into u values (1)"
    )
    (warned,) = consume(runner, job).warnings
    assert warned.startswith("public.t is no longer published, or has no published column")
    database.execute("delete from t; insert into t default values; insert into u values (2)")
    assert consume(runner, replace(job, run_id="goes on")).warnings == []
    assert_equal(database, job, "u")
    assert target_rows(job, "t", "v") == [("a",)]
    with pytest.raises(ConfigError, match=r"public\.t .* has no published column"):
        sync(runner, replace(job, run_id="too early"), ["public.t"])
