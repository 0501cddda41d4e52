"""Columns that have another name in the lake, through all that a target goes through."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from tests.oracles.compare import differing
from tests.support.pipelines import new_pipeline

pytestmark = [pytest.mark.pg, pytest.mark.spark]

TABLES = """
create type mood as enum ('good', 'bad');
create domain small as numeric check (value < 1000);
create table parent (id int primary key);
insert into parent values (1), (2);
create table t (
    id int, part int references parent, v text check (v <> 'never'), "V" text, m mood, n small,
    primary key (id, part)
);
alter table t alter v set storage external;
create table k ("A" int, a numeric);
alter table k replica identity full;
insert into t select g, 1 + g % 2, repeat('x', 5000), 'Y' || g, 'good', g
from generate_series(1, 20) g;
insert into k select 1, 1.5 from generate_series(1, 3);
"""
NAMES = {
    "public.t": {
        "where": "id % 10 <> 4 and part > 0",
        "columns": {"id": "key", "V": "v_2", "m": "Mood", "n": "amount"},
    },
    "public.k": {"columns": {"A": "big_a", "a": "small_a"}},
}
STORED = ["key", "part", "v", "v_2", "Mood", "amount"]
CHANGES = [
    """update t set "V" = 'new' where id = 1""",
    """update t set id = id + 100 where id = 2""",
    "delete from t where id = 3",
    "update t set id = 205 where id = 14",  # It enters the filter, without its large value.
    "update t set id = 204 where id = 15",
    """insert into t values (50, 1, 'v', 'V', 'bad', 1.5), (54, 1, 'v', 'V', 'bad', 2)""",
    "delete from k where ctid = '(0,1)'",
    "insert into k values (2, 'NaN'), (null, 3)",
]


def stored(pipeline, table="public.t"):
    """The names of a target's own columns."""
    names = DeltaTable(pipeline.target_path(table)).schema().to_arrow().names
    return [name for name in names if not name.startswith("_wd_")]


def checked(runner, pipeline):
    """Run, and compare with the source by both comparisons."""
    result = pipeline.consume(runner)
    assert differing(runner, pipeline.job()) == {}
    pipeline.reconcile(runner)
    return result


def test_a_target_with_other_names_of_columns(runner, database, lake):
    """Keys, filters, missing values, rows without a key, checks and repairs go by both names."""
    database.execute(TABLES)
    tables = ["public.t", "public.k", "public.parent"]
    settings = {"target": {"root": lake, "tables": NAMES}}
    pipeline = new_pipeline(database, lake, tables, **settings)
    pipeline.setup()
    pipeline.sync(runner)
    assert (stored(pipeline), stored(pipeline, "public.k")) == (STORED, ["big_a", "small_a"])
    for statement in CHANGES:
        database.execute(statement)
    result = checked(runner, pipeline)
    assert not result.tables["public.t"].quarantined
    DeltaTable(pipeline.target_path("public.t")).update({"v_2": "'other'"}, predicate="key = 5")
    DeltaTable(pipeline.target_path("public.t")).delete("key = 6")
    pipeline.reconcile(runner, repair=True)
    assert differing(runner, pipeline.job()) == {}
    pipeline.sync(runner, tables=["public.t"], reason="again")
    assert stored(pipeline) == STORED


def test_a_column_is_renamed_on_the_source_and_in_the_file(runner, database, lake):
    """The file's name counts, whatever the source calls the column."""
    database.execute("create table t (id int primary key, a text, b text)")
    database.execute("insert into t select g, 'a' || g, 'b' || g from generate_series(1, 9) g")

    def pipeline(columns, **target):
        target = {"root": lake, "tables": {"public.t": {"columns": columns}}, **target}
        return new_pipeline(database, lake, ["public.t"], target=target)

    made = pipeline({"a": "x"})
    made.setup()
    made.sync(runner)
    version = DeltaTable(made.target_path("public.t")).version()
    database.execute("alter table t rename a to c; update t set c = 'new' where id = 1")
    checked(runner, made := pipeline({"c": "x"}))
    assert stored(made) == ["id", "x", "b"]
    assert DeltaTable(made.target_path("public.t")).version() <= version + 2
    database.execute("alter table t add d int default 7; update t set b = 'n' where id = 2")
    checked(runner, made := pipeline({"c": "y", "d": "z"}))
    assert stored(made) == ["id", "y", "b", "z"]
    database.execute("alter table t rename b to e; update t set e = 'n' where id = 3")
    checked(runner, made)
    assert stored(made) == ["id", "y", "e", "z"]
    ignoring = pipeline({}, schema_changes="ignore")
    database.execute("update t set e = 'o', c = 'o' where id = 4")
    ignoring.consume(runner)
    assert stored(made) == ["id", "y", "e", "z"]
    rows = (
        DeltaTable(made.target_path("public.t")).to_pyarrow_table(columns=["id", "y"]).to_pylist()
    )
    assert {"id": 4, "y": "o"} in rows


MODES = ("history", "soft_delete", "changelog", "mirror")


@pytest.mark.nightly("modes and sources differ in what their columns become")
def test_each_mode_and_merged_partitions(runner, database, lake):
    """Also targets of other tables; the columns of a mode keep their names."""
    for mode in MODES:
        database.execute(f"create table {mode} (id int primary key, v text)")
        database.execute(f"insert into {mode} select g, 'old' from generate_series(1, 9) g")
    database.execute("""
        create table r (id int, p int, v text, primary key (id, p)) partition by list (p);
        create table r_1 partition of r for values in (1);
        create table r_2 partition of r for values in (2);
        insert into r select g, 1 + g % 2, 'old' from generate_series(1, 9) g
    """)

    def named(**columns):
        entries = {f"public.{mode}": {"mode": mode, "columns": columns} for mode in MODES}
        entries["public.r"] = {"partition_root": True, "columns": columns}
        entries["public.odd"] = {
            "from": "public.mirror",
            "where": "id % 2 = 1",
            "columns": columns,
        }
        tables = [f"public.{name}" for name in (*MODES, "r")]
        return new_pipeline(database, lake, tables, target={"root": lake, "tables": entries})

    pipeline = named(id="key", v="V")
    pipeline.setup()
    pipeline.sync(runner)
    for name in (*MODES, "r"):
        database.execute(f"update {name} set v = 'new' where id = 1")
        database.execute(f"update {name} set id = id + 100 where id in (2, 3)")
        database.execute(f"delete from {name} where id = 4")
    result = checked(runner, pipeline)
    assert len(result.tables) == len(pipeline.file.target.tables)
    for name in (*MODES, "r"):
        database.execute(f"update {name} set v = 'newer'")
    checked(runner, pipeline := named(id="number", v="w"))
    for name in ("history", "changelog"):
        assert stored(pipeline, f"public.{name}") == ["number", "w"]
