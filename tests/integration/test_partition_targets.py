"""Targets that aren't one published table each: leaves gathered in one target, one table split into several.

The source's own rows are the oracle, with ``tableoid`` for the leaf.
"""

from __future__ import annotations

import re

import pytest

from spark_jobs.compare import compare_target
from spark_jobs.pipeline import Pipeline
from waldelta.errors import PreflightFailed
from waldelta.pipeline_file import PipelineFile

pytestmark = [pytest.mark.pg, pytest.mark.spark]

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"


def pipeline(database, lake, tables, targets, *, via_root=False, listed=None, **target) -> Pipeline:
    """A pipeline that publishes these tables in one publication."""
    slot = f"s_{database.name}"
    entries = listed or [{"name": f"public.{name}"} for name in tables]
    publication = {"name": f"{slot}_pub", "tables": entries, "publish_via_partition_root": via_root}
    source = {"conn_id": "test_source", "slot": slot, "publications": [publication]}
    own = {f"public.{name}": entry for name, entry in targets.items()}
    document = {"pipeline": slot, "source": source, "target": {"root": lake, "tables": own, **target}}
    return Pipeline(PipelineFile.model_validate(document))


def target_rows(spark, made, table, *columns):
    frame = spark.read.format("delta").load(made.target_path(f"public.{table}")).select(*columns)
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def source_rows(database, table, *columns, where="true"):
    return sorted(database.execute(f"select {', '.join(columns)} from {table} where {where}"), key=repr)


def minus(left, right):
    rest = list(right)
    return [row for row in left if not (row in rest and (rest.remove(row) or True))]


def assert_equal(ours, theirs, *what):
    assert ours == theirs, (what, {"only ours": minus(ours, theirs), "only theirs": minus(theirs, ours)})


# --- leaves gathered in one target -----------------------------------------------------------------------------------

# Each root: its columns, its key, what its leaves have. Leaf _2 is partitioned itself, leaf _3 has its columns in another
# order and one that was dropped, leaf _4 is the default.
KINDS = {
    "by_root": ("primary key (id, part)", "", ""),
    "by_leaf": ("", "add primary key (id)", ""),
    "by_full": ("", "", "replica identity full"),
    "full_key": ("primary key (id, part)", "", "replica identity full"),
    "by_index": ("primary key (id, part)", "alter v set not null", "replica identity using index {leaf}_v"),
}
LEAVES = ("1", "2_a", "2_b", "3", "4")


def ddl(root: str) -> str:
    key, leaf_key, identity = KINDS[root]
    keys = f", {key}" if key else ""
    made = f"""
        create table {root}(id int not null, part int not null, v text, big text{keys}) partition by range (part);
        create table {root}_1 partition of {root} for values from (0) to (10);
        create table {root}_2 partition of {root} for values from (10) to (20) partition by list (part);
        create table {root}_2_a partition of {root}_2 for values in (10, 11, 12);
        create table {root}_2_b partition of {root}_2 default;
        create table {root}_3(gone int, big text, v text, part int not null, id int not null{keys});
        alter table {root}_3 drop gone;
        alter table {root} attach partition {root}_3 for values from (20) to (30);
        create table {root}_4 partition of {root} default;"""
    for leaf in LEAVES:
        made += f"alter table {root}_{leaf} alter big set storage external;"
        made += f"alter table {root}_{leaf} {leaf_key};" if leaf_key else ""
        made += f"create unique index {root}_{leaf}_v on {root}_{leaf}(v);" if "index" in identity else ""
        made += f"alter table {root}_{leaf} {identity.format(leaf=f'{root}_{leaf}')};" if identity else ""
    return made


BEFORE = [
    f"insert into t select g, g % 40, 'v' || g, case when g % 3 = 0 then {BIG} end from generate_series(1, 80) g",
]
CHANGES = [
    f"insert into t values (201, 1, 'a', {BIG}), (202, 11, 'b', {BIG}), (203, 21, 'c', {BIG}), (204, 99, 'd', null)",
    "update t set v = v || '!' where id % 5 = 0",
    "update t set part = part + 10 where id between 201 and 203",  # crosses leaves
    "update t set part = 11, v = 'back' where id = 202",
    "update t set id = id + 1000 where part = 3",  # moves keys
    "update t set part = 25 where id = 6; update t set part = 6 where id = 25",
    "delete from t where id % 7 = 0",
    "truncate t_2_a",
    "insert into t values (301, 10, 'after', 'x'), (302, 11, 'too', null); update t set v = 'then' where id = 301",
    "update t set part = 12 where id = 302; delete from t where id = 301; insert into t values (303, 12, 'new', null)",
    "truncate t_1; insert into t values (401, 1, 'again', null); truncate t_1",
    "update t set part = 2 where id = 203",  # into a leaf that was emptied
    "begin; savepoint s; truncate t_3; insert into t values (500, 20); rollback to s; insert into t values (501, 20, 's'); commit",
]
THEN = [
    "truncate t_3",  # and nothing else
    "truncate t; insert into t values (1, 1, 'r', null), (2, 12, 's', null), (3, 22, 't', null), (4, 40, 'u', null)",
]
WITH_NEW_LEAVES = [
    "create table t_5 partition of t for values from (100) to (110)",
    "insert into t values (600, 100, 'n'), (601, 20, 'o')",
    "alter table t add column more text default 'd'",
    "insert into t values (602, 101, 'p', null, 'm'), (603, 1, 'q', null, 'n'); update t set more = 'x' where id = 1",
]
TIDY = {"by_full": "alter table t_5 replica identity full", "by_leaf": "alter table t_5 add primary key (id)",
        "by_index": "alter table t_5 alter v set not null; create unique index t_5_v on t_5(v); "
                    "alter table t_5 replica identity using index t_5_v",
        "full_key": "alter table t_5 replica identity full"}  # fmt: skip


def of(root, statement):
    """The statement for another table; with an identity by v its values are never null."""
    return re.sub(r"\bt(_\w+)?\b(?!')", rf"{root}\1", statement)


def test_gathered_leaves(spark, database, lake, monkeypatch):
    """Copy and changes, TRUNCATE of one leaf between others, rows that cross leaves, a new leaf, a new column."""
    for root in KINDS:
        database.execute(ddl(root))
        for statement in BEFORE:
            database.execute(of(root, statement))
    made = pipeline(database, lake, KINDS, {root: {"partition_root": True} for root in KINDS})
    plan = made.setup()
    assert "public.by_leaf gathers public.by_leaf_1, public.by_leaf_2_a" in plan.describe()
    made.sync(spark)
    columns = ["_wd_relid", "id", "part", "v", "big"]

    def compare(*what):
        for root in KINDS:
            theirs = source_rows(database, root, *["tableoid::bigint", *columns[1:]])
            assert_equal(target_rows(spark, made, root, *columns), theirs, root, what)

    compare("copied")
    keys = {name: state.key_columns for name, state in made.job().table_states().items()}
    assert keys == {
        "public.by_root": ["id", "part"],
        "public.by_leaf": ["_wd_relid", "id"],
        "public.by_full": [],
        "public.full_key": ["id", "part"],
        "public.by_index": ["_wd_relid", "v"],
    }
    for number, statements in enumerate((CHANGES, THEN[:1], THEN[1:])):
        for root in KINDS:
            for statement in statements:
                database.execute(of(root, statement))
        with monkeypatch.context() as patch:
            if number != 1:
                patch.setattr("spark_jobs.stretch.SMALL_ROWS", 0)  # Spark's tasks decode
            result = made.consume(spark, f"run {number}")
        assert result.warnings == [], number
        compare(statements)
    for root in KINDS:
        for statement in WITH_NEW_LEAVES:
            database.execute(of(root, statement))
            if "t_5 partition" in statement and root in TIDY:
                database.execute(of(root, TIDY[root]))
    assert made.consume(spark, "new leaves").warnings == []
    columns.append("more")
    compare("new leaves")
    for state in made.job().table_states().values():
        assert compare_target(spark, made.job().conninfo, made.file, state).rows == 0
    assert {found["due"] for found in made.status()["targets"].values()} == {"feed"}
