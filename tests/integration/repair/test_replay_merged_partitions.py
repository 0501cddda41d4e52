"""Replay of targets that gather leaves: damaged rows, and the leaf that each is in."""

import random
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.oracles.random_workload import Workload
from tests.oracles.target_rows import assert_equal, source_rows
from tests.support.pipelines import bare_job
from tests.support.seeds import chosen_seed
from waldelta.jobs.consume import consume
from waldelta.stages.sync.sync import sync

MONTHS = [datetime(2025, month, 1, tzinfo=UTC) for month in (1, 2, 3, 4)]


def job_of(database, lake, roots, wheres=None):
    tables = {f"public.{root}": {"partition_root": True} for root in roots}
    for root, where in (wheres or {}).items():
        tables[f"public.{root}"]["where"] = where
    target = {"root": lake, "tables": tables}
    return bare_job(database, lake, [f"public.{r}" for r in roots], target=target)


def run(runner, job, month, run_id=None, **details):
    """The run of a month, or another one over its interval."""
    interval = {"interval_start": MONTHS[month], "interval_end": MONTHS[month + 1]}
    made = replace(job, run_id=run_id or f"run {month}", run_type="scheduled", **interval)
    return consume(runner, replace(made, **details))


def held(job, root) -> pa.Table:
    """The target's rows."""
    table = DeltaTable(job.lake.target(f"public.{root}").uri)
    return table.to_pyarrow_table()


def rows_of(job, root, *columns):
    rows = held(job, root).select(["_wd_relid", *columns]).to_pylist()
    return sorted((tuple(row.values()) for row in rows), key=repr)


def overwrite(job, root, rows):
    """A foreign commit: the target as these rows."""
    uri = job.lake.target(f"public.{root}").uri
    schema = held(job, root).schema
    write_deltalake(uri, pa.Table.from_pylist(rows, schema=schema), mode="overwrite")


def versions(job, roots):
    return {root: DeltaTable(job.lake.target(f"public.{root}").uri).version() for root in roots}


# --- each kind of change, by name

DDL = """
create table {0}(id int not null, v int{1}) partition by range (id);
create table {0}_1 partition of {0} for values from (0) to (10);
create table {0}_2 partition of {0} for values from (10) to (20);
create table {0}_3 partition of {0} default;
insert into {0} select g, g from generate_series(1, 25) g where g <> 15
"""
CUT = [
    "update {0} set v = 50 where id in (1, 11)",
    "delete from {0} where id = 2",
    "truncate {0}_1",
    "insert into {0} values (3, 33)",
    "update {0} set id = 15, v = 5 where id = 3",
    "insert into {0} values (3, 34), (6, 6)",
    "delete from {0} where id = 6",
    "update {0} set v = 51 where id = 12",
]
# Rows that move to a new leaf under their key.
SPLIT = [
    "update {0} set v = 100 where id = 21",
    "create table kept as select * from {0} where id between 20 and 24",
    "delete from {0} where id between 20 and 24",
    "create table {0}_4 partition of {0} for values from (20) to (25)",
    "insert into {0} select * from kept",
    "update {0} set v = 200 where id = 22",
]
JOIN = [
    "create table {0}_4(id int primary key, v int)",
    "insert into {0}_4 values (40, 1), (41, 1)",
    "alter table {0} attach partition {0}_4 for values from (40) to (50)",
    "update {0} set v = 70 where id in (12, 40)",
]
FULL = [f"alter table {{0}}_{n} replica identity full" for n in (1, 2, 3)]
LEAF_KEYS = [f"alter table {{0}}_{n} add primary key (id)" for n in (1, 2, 3)]
# Each root: its key, what else is done before the copy, in the range and after it; then what is
# damaged, by id: None for a row that is lost, else what it says, with the number of its leaf.
KINDS = {
    "moved": ((", primary key (id)", [], SPLIT, ["update {0} set v = 300 where id = 23"]),
              {20: {"leaf": 3}, 21: None, 22: {"leaf": 0}, 23: {"v": 0}, 24: {"v": 0, "leaf": 3}}),
    "cut": ((", primary key (id)", [], CUT, ["truncate {0}_3", "insert into {0} values (30, 30)"]),
            {1: {"leaf": 2}, 2: {"leaf": 0}, 3: None, 4: {"leaf": 1}, 6: {"leaf": 1},
             15: {"leaf": 1}, 11: {"v": 0}, 21: {"leaf": 3}, 30: None}),
    "own": (("", LEAF_KEYS, CUT,
             ["truncate {0}_3", "insert into {0} values (30, 30)",
              "alter table {0} detach partition {0}_2"]),
            {1: {"leaf": 1}, 3: None, 4: {"leaf": 1}, 6: {"leaf": 1}, 15: None, 11: {"v": 0},
             12: None, 21: {"leaf": 3}, 30: None}),
    "filtered": ((", primary key (id)", FULL,
                  ["update {0} set v = 5 where id = 12", "update {0} set v = 40 where id in (1, 2)",
                   "delete from {0} where id = 13", "update {0} set id = 15, v = 60 where id = 3",
                   "truncate {0}_3"], ["update {0} set v = 41 where id = 2"]),
                 {1: None, 2: {"v": 0}, 12: {"leaf": 2, "v": 12}, 13: {"leaf": 2, "v": 13},
                  15: {"v": 1}, 22: {"leaf": 3, "v": 22}}),
    "joined": ((", primary key (id)", [], JOIN, []), {12: None}),
}  # fmt: skip
WHERE = {"filtered": "v > 10"}


def damage(database, job, root, changes):
    """A foreign commit with these rows lost, changed or invented."""
    query = f"select right(relname, 1)::int, oid::bigint from pg_class where relname ~ '^{root}_.$'"
    oids = {0: None} | dict(database.execute(query))
    rows = {row["id"]: row for row in held(job, root).to_pylist()}
    for key, change in changes.items():
        if change is None:
            del rows[key]
            continue
        leaf = {"_wd_relid": oids[change["leaf"]]} if "leaf" in change else {}
        rows[key] = (
            rows.get(key, {"id": key}) | {k: v for k, v in change.items() if k != "leaf"} | leaf
        )
    overwrite(job, root, list(rows.values()))


@pytest.mark.soak("every kind of change, leaf by leaf")
def test_each_kind_of_change(runner, database, lake):
    """Damaged rows are as they were, leaf by leaf, and nothing is written twice."""
    for root, ((key, before, *_), _) in KINDS.items():
        for statement in (*DDL.strip().split(";"), *before):
            database.execute(statement.format(root, key))
    job = job_of(database, lake, KINDS, WHERE)
    sync(runner, job)
    for month in range(2):
        for root, ((*_, first, then), _) in KINDS.items():
            for statement in (first, then)[month]:
                database.execute(statement.format(root))
        run(runner, job, month)
    right = {root: rows_of(job, root, "id", "v") for root in KINDS}
    for root in ("moved", "cut", "filtered"):
        assert_equal(
            right[root],
            source_rows(
                database, root, "tableoid::bigint", "id", "v", where=WHERE.get(root, "true")
            ),
            root,
        )
    for root, (_, changes) in KINDS.items():
        damage(database, job, root, changes)
    done = run(runner, job, 0, "backfill", run_type="backfill")
    # A TRUNCATE touches all rows, and those of a partition that left aren't in the source.
    (told,) = done.warnings
    assert told.startswith("public.own: the range touches all its rows")
    for root in KINDS.keys() - {"own", "joined"}:
        assert_equal(rows_of(job, root, "id", "v"), right[root], root)
    # Touched rows of a partition that was attached with them, too, are as the source has them.
    assert_equal(
        rows_of(job, "joined", "id", "v"),
        source_rows(database, "joined", "tableoid::bigint", "id", "v"),
        "joined",
    )
    before = versions(job, ("moved", "joined"))  # The others were truncated in the range.
    assert run(runner, job, 0, again=True).warnings == [told]
    assert versions(job, ("moved", "joined")) == before


# --- random changes, random damage to whatever they touched

# Each root: its key, what its leaves have, the target's own filter.
ROOTS = {
    "by_root": ("primary key (id, part)", "", None),
    "by_leaf": ("", "add primary key (id, part)", None),
    "by_full": ("", "replica identity full", None),
    "filtered": ("primary key (id, part)", "replica identity full",
                 "v collate \"C\" < '5' or big is null"),
}  # fmt: skip
VALUES = ["id", "part", "v", "big"]
# A row that a filter doesn't let in isn't touched as the target knows it.
TOUCH = """
create table touched(root text, leaf bigint, id int, part int);
create function touch() returns trigger language plpgsql as $$ begin
    if tg_op <> 'INSERT' and (tg_argv[0] <> 'filtered' or old.v collate "C" < '5'
      or old.big is null) then
        insert into touched values (tg_argv[0], tg_relid, old.id, old.part);
    end if;
    if tg_op <> 'DELETE' and (tg_argv[0] <> 'filtered' or new.v collate "C" < '5'
      or new.big is null) then
        insert into touched values (tg_argv[0], tg_relid, new.id, new.part);
    end if;
    return null;
end $$
"""


def create_roots(connection, names):
    """Partitioned tables whose rows go from leaf to leaf by ``part``, and to ``touched``."""
    connection.execute(TOUCH)
    for root in names:
        key, of_leaves, _ = ROOTS[root]
        listed = f", {key}" if key else ""
        connection.execute(
            f"create table {root}(id int not null, part int not null, v text, big text{listed})"
            f" partition by list (part);create table {root}_1 partition of {root} for values in (0,"
            f" 1);create table {root}_2 partition of {root} for values in (2, 4) partition by list"
            f" (part);create table {root}_2_a partition of {root}_2 for values in (2);create table"
            f" {root}_2_b partition of {root}_2 default;create table {root}_3 partition of {root}"
            f" default;create trigger touch after insert or update or delete on {root} for each row"
            f" execute function touch({root})".encode()
        )
        for leaf in leaves_of(root):
            connection.execute(f"alter table {leaf} alter big set storage external".encode())
            if of_leaves:
                connection.execute(f"alter table {leaf} {of_leaves}".encode())


def in_source(database, root):
    return source_rows(database, root, "tableoid::bigint", *VALUES, where=ROOTS[root][2] or "true")


def leaves_of(root):
    return tuple(f"{root}_{leaf}" for leaf in ("1", "2_a", "2_b", "3"))


def spoil(random_, rows, touched, leaves, *, of_leaf):
    """Rows with those at touched keys lost or changed, and new ones where there are none."""
    names = ["_wd_relid", "id", "part"] if of_leaf else ["id", "part"]
    keys = {
        tuple(dict(zip(["_wd_relid", "id", "part"], key, strict=True))[n] for n in names)
        for key in touched
    }
    spoilt = []
    for row in rows:
        key = tuple(row[name] for name in names)
        kind = random_.choice(["lost", "value", "leaf", "right"]) if key in keys else "right"
        keys.discard(key)
        if kind == "value":
            row |= {"v": "damaged", "_wd_lsn": 1}
        elif kind == "leaf" and not of_leaf:
            row |= {"_wd_relid": random_.choice([None, *leaves])}
        if kind != "lost":
            spoilt.append(row)
    for key in sorted(keys):
        if random_.random() < 0.5:
            leaf = {} if of_leaf else {"_wd_relid": random_.choice([None, *leaves])}
            spoilt.append(leaf | dict(zip(names, key, strict=True)) | {"v": "invented"})
    return spoilt


@pytest.mark.soak("many moves between leaves")
def test_whatever_was_touched_is_mended(runner, database, lake):
    """Moves between leaves, of keys, TRUNCATEs; rows lost, changed, invented."""
    random_ = random.Random(seed := chosen_seed())
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, list(ROOTS), create=create_roots)
        workload.truncate_share = 0.5
        for table in workload.tables:
            table.columns, table.leaves = ["v"], (*leaves_of(table.name), table.name)
        job = job_of(
            database, lake, ROOTS, {root: where for root, (*_, where) in ROOTS.items() if where}
        )
        for _ in range(20):
            workload.transaction()
        sync(runner, job)
        touched = []
        for month in range(3):
            database.execute("truncate touched")
            for _ in range(25):
                workload.transaction()
            touched.append(database.execute("select root, leaf, id, part from touched"))
            run(runner, job, month)
    leaves = {
        root: [
            oid
            for (oid,) in database.execute(
                "select oid::bigint from pg_class where relname ="
                f" any('{{{', '.join(leaves_of(root))}}}')"
            )
        ]
        for root in ROOTS
    }
    right = {root: held(job, root).to_pylist() for root in ROOTS}
    month = 1  # with a run before it, and one behind it
    for root, rows in right.items():
        assert_equal(rows_of(job, root, *VALUES), in_source(database, root), seed, root)
        keys = [key for of, *key in touched[month] if of == root]
        if root == "by_full":
            spoilt = random_.sample(rows, len(rows) // 2)
        else:
            spoilt = spoil(
                random_, [dict(row) for row in rows], keys, leaves[root], of_leaf=root == "by_leaf"
            )
        overwrite(job, root, spoilt)
    done = run(runner, job, month, "backfill", run_type="backfill")
    assert (done.verb, done.warnings) == ("replay", []), seed
    for root in ROOTS:
        assert_equal(rows_of(job, root, *VALUES), in_source(database, root), seed, root)
