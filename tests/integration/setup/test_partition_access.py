"""SELECT on a partitioned table alone: every verb reads rows through it."""

import pytest
from deltalake import DeltaTable

from tests.oracles.target_rows import read_target
from tests.support.pipelines import pipeline_on
from waldelta.jobs import Pipeline
from waldelta.jobs.decide import run_decide
from waldelta.pipeline.run_result import RunFailed

pytestmark = pytest.mark.spark

BIG = "(select string_agg(md5({0}::text || i), '') from generate_series(1, 100) i)"
TABLES = """
create role {owner} nologin;
create schema sales authorization {owner}; create schema parts authorization {owner};
set role {owner};
create table sales.r (id int, k text, v text, primary key (id, k)) partition by range (id);
create table parts.r1 partition of sales.r for values from (0) to (100);
create table parts.r2 partition of sales.r for values from (100) to (200);
create table sales.l (id int primary key, v text) partition by range (id);
create table parts.l1 partition of sales.l for values from (0) to (100);
create table parts.l2 partition of sales.l for values from (100) to (200);
create table sales.g (id int primary key, v text) partition by range (id);
create table parts.g1 partition of sales.g for values from (0) to (100);
create table parts.g2 partition of sales.g for values from (100) to (200);
insert into sales.r select g, 'k', 'v' || g from generate_series(1, 150) g;
insert into sales.l select g, 'v' || g from generate_series(1, 150) g;
insert into sales.g select g, 'v' || g from generate_series(1, 150) g;
reset role;
create publication by_root for table sales.r where (id > 5) with (publish_via_partition_root =
  true);
create publication as_leaves for table sales.l, sales.g;
create role {reader} login replication password 'p';
grant usage on schema sales to {reader};
grant select on sales.r, sales.l, sales.g to {reader};
grant temporary on database {database} to {reader};
"""
NEXT = """
set role {owner};
create table parts.r3 partition of sales.r for values from (200) to (300);
create table parts.l3 partition of sales.l for values from (200) to (300);
create table parts.g3 partition of sales.g for values from (200) to (300);
insert into sales.r select g, 'k', 'v' || g from generate_series(200, 220) g;
insert into sales.l select g, 'v' || g from generate_series(200, 220) g;
insert into sales.g select g, 'v' || g from generate_series(200, 220) g;
reset role
"""


@pytest.fixture
def shop(database, lake, monkeypatch):
    """Three partitioned tables: published via the root, as leaves, and merged leaves."""
    names = {
        "owner": f"owner_{database.name}",
        "reader": f"reader_{database.name}",
        "database": database.name,
    }
    database.execute(TABLES.format(**names))
    uri = database.server.uri(database.name, names["reader"], "p")
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", uri)
    publications = [{"name": name, "manage": False} for name in ("by_root", "as_leaves")]
    tables = {"sales.g": {"partition_root": True}, "parts.l2": {"where": "id <> 101"}}
    target = {"root": lake, "tables": tables}
    yield pipeline_on(database, lake, *publications, target=target), names
    # One after the other: default privileges belong to both, and would be looked for twice.
    database.execute(f"drop owned by {names['reader']} cascade")
    database.execute(f"drop owned by {names['owner']} cascade")
    database.execute(f"drop role {names['owner']}, {names['reader']}")


def held(pipeline, table):
    return {row["id"] for row in (read_target(pipeline.target_path(table), "id"))}


def targets(pipeline, *tables):
    return {table: held(pipeline, table) for table in tables}


def grants(text):
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.soak("every job with few privileges")
def test_select_on_the_root_alone(runner, database, shop):
    """Copies, repairs, comparisons, values read again, and a partition that comes later."""
    pipeline, names = shop
    plan = pipeline.check()
    assert plan.problems == ()
    warned = [text for text in plan.warnings if "may not read partition" in text]
    assert len(warned) == 3
    assert (
        "parts.r1, parts.r2 directly, so copies and repairs read them through sales.r"
        in warned[0] + warned[1] + warned[2]
    )
    pipeline.setup()
    assert pipeline.sync(runner).status == "succeeded"
    r, low, high = set(range(6, 151)), set(range(1, 100)), set(range(100, 151))
    assert targets(pipeline, "sales.r", "parts.l1", "parts.l2", "sales.g") == {
        "sales.r": r, "parts.l1": low, "parts.l2": high - {101}, "sales.g": low | high,
    }  # fmt: skip

    database.execute(NEXT.format(**names))
    # Values that the stream leaves out are read by key.
    for table in ("sales.r", "sales.l", "sales.g"):
        database.execute(f"update {table} set v = {BIG.format('id')} where id in (20, 101, 210)")
    assert pipeline.consume(runner).status == "succeeded"
    assert held(pipeline, "sales.r") == r | set(range(200, 221))
    assert held(pipeline, "sales.g") == low | high | set(range(200, 221))
    pipeline.sync(runner)  # of the partition that is a target of its own
    database.execute(
        "update sales.r set k = 'moved' where id in (20, 101, 210); update sales.l set id = 151"
        " where id = 101"
    )
    result = pipeline.consume(runner)
    assert (result.status, result.tables["parts.l2"].completed) == ("succeeded", 1)
    assert held(pipeline, "parts.l2") == high - {101} | {151}

    # A filter that lets more rows in is mended by the rows that enter.
    repairing = pipeline.file.model_copy(
        update={"target": pipeline.file.target.model_copy(update={"drift": "repair"})}
    )
    pipeline = Pipeline(repairing)
    database.execute("alter publication by_root set table sales.r where (id > 2)")
    result = pipeline.consume(runner)
    assert result.status == "succeeded"
    r = set(range(3, 151)) | set(range(200, 221))
    assert held(pipeline, "sales.r") == r
    assert run_decide(runner, pipeline.job(), "retry").status == "succeeded"
    assert pipeline.reconcile(runner).status == "succeeded"
    DeltaTable(pipeline.target_path("sales.r")).delete("id in (10, 110)")
    DeltaTable(pipeline.target_path("parts.l1")).update({"v": "'x'"}, predicate="id = 10")
    with pytest.raises(RunFailed, match=r"sales\.r"):
        pipeline.reconcile(runner)
    assert pipeline.reconcile(runner, repair=True).status == "succeeded"
    assert held(pipeline, "sales.r") == r
    lose_slot(database, pipeline)
    result = pipeline.resync(runner)
    assert (result.status, held(pipeline, "sales.r")) == ("succeeded", r)

    # Reported with what can be pasted; then nothing is left to report, of later partitions either.
    listed = pipeline.status()["unreadable_partitions"]
    assert [text.partition(":")[0] for text in listed] == ["sales.g", "sales.l", "sales.r"]
    assert set(listed) <= set(result.warnings)
    assert f"grant select on parts.r1, parts.r2, parts.r3 to {names['reader']};" in grants(
        listed[2]
    )
    default = (
        f"alter default privileges for role {names['owner']} in schema parts grant select on tables"
        f" to {names['reader']};"
    )
    assert any(line.startswith(default) for line in grants(listed[2]))
    for text in listed:
        for statement in grants(text):
            database.execute(statement)
    assert pipeline.status()["unreadable_partitions"] == []
    database.execute(
        f"set role {names['owner']}; create table parts.r4 partition of sales.r default; reset role"
    )
    assert pipeline.status()["unreadable_partitions"] == []
    assert not any("may not read partition" in text for text in pipeline.check().warnings)


def lose_slot(database, pipeline):
    database.execute("select pg_drop_replication_slot(%s)", (pipeline.file.source.slot,))


def test_neither_root_nor_partition(database, shop):
    """Then it is a problem with the grants for it, before anything is made."""
    pipeline, names = shop
    database.execute(f"revoke select on sales.r, sales.l from {names['reader']}")
    (problem,) = pipeline.check().problems
    assert f"grant select on sales.r, sales.l to {names['reader']};" in problem
    database.execute(f"grant usage on schema parts to {names['reader']}")
    database.execute(
        f"grant select on parts.l1, parts.l2 to {names['reader']}; grant select on sales.r to"
        f" {names['reader']}"
    )
    database.execute(
        f"alter default privileges for role {names['owner']} in schema parts grant select on tables"
        f" to {names['reader']}"
    )
    # Partitions that are published as themselves may be read as themselves.
    assert pipeline.check().problems == ()
