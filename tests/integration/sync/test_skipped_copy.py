"""Tables with copy: false: as PostgreSQL's subscriber without copy_data, from the slot's start."""

import shutil

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.oracles.native_subscriber import native_subscriber
from tests.oracles.scenario import Both, Scenario
from tests.oracles.target_rows import target_rows
from tests.support.pipelines import copied_pipeline, pipeline_on
from waldelta.lake.ledger import now
from waldelta.pipeline.run_result import RunFailed

TABLES = """
create table t(id int primary key, v text);
create table f(id int primary key, v text);
alter table f replica identity full;
create table k(id int, v text);
alter table k replica identity full;
create table r(id int primary key, v text) partition by range (id);
create table r_1 partition of r for values from (0) to (100);
create table r_2 partition of r default;
"""
PUBLICATIONS = """
create publication p for table t, f where (v <> 'out'), k;
create publication p_root for table r with (publish_via_partition_root = true);
"""
NAMES = ("t", "f", "k", "r")
BEFORE = [f"insert into {name} select g, 'old' from generate_series(1, 10) g" for name in NAMES]
# Rows that were there before are changed, deleted and moved, which a target without them skips.
EARLY = [
    *(f"insert into {name} select g, 'early' from generate_series(11, 20) g" for name in NAMES),
    *(f"update {name} set v = 'changed' where id in (1, 11)" for name in NAMES),
    "alter table t add column later int default 5",
    *(f"delete from {name} where id in (2, 12)" for name in NAMES),
    *(f"update {name} set id = id + 100 where id in (3, 13)" for name in NAMES),
    *(
        f"begin; delete from {name} where id = 4; insert into {name} values (4, 'again'); commit"
        for name in NAMES
    ),
    "update f set v = 'out' where id in (5, 15)",
    "update f set v = 'back' where id in (5, 15)",
]
LATER = [
    *(f"update {name} set v = v || ' later' where id in (1, 4, 6, 14, 103, 113)" for name in NAMES),
    *(f"delete from {name} where id in (7, 16, 104)" for name in NAMES),
    *(f"insert into {name} values (7, 'anew')" for name in NAMES),
    "truncate t",
    "insert into t values (1, 'after')",
]


def without_copy(database, lake, names=NAMES):
    publications = [{"name": name, "manage": False} for name in ("p", "p_root")]
    target = {"root": lake, "tables": {f"public.{name}": {"copy": False} for name in names}}
    return pipeline_on(database, lake, *publications, target=target)


def rows(pipeline, table):
    return target_rows(pipeline.job(), table, "id", "v")


def remove_target(pipeline, table):
    shutil.rmtree(pipeline.target_path(f"public.{table}").removeprefix("file://"))


def write(database, *statements):
    for statement in statements:
        database.execute(statement)


def test_as_a_subscriber_without_copies(runner, database, postgres, lake):
    """From the slot's start, though columns are added before the sync, which reads no row."""
    write(database, TABLES, PUBLICATIONS, *BEFORE)
    pipeline = without_copy(database, lake)
    pipeline.setup()
    targets = {"public.t": ("id", "v", "later")} | {
        f"public.{name}": ("id", "v") for name in NAMES[1:]
    }
    scenario = Scenario(TABLES, ("p", "p_root"), PUBLICATIONS, targets=targets)
    created = f"{TABLES}; alter table t add column later int default 5"
    with native_subscriber(
        postgres, database, ("p", "p_root"), lambda one: one.execute(created)
    ) as native:
        both = Both(runner, database, scenario, pipeline, native)
        both.write(EARLY[:6])
        assert pipeline.consume(runner).targets.never_copied == [
            "public.f",
            "public.k",
            "public.r",
            "public.t",
        ]
        both.write(EARLY[6:])
        result = pipeline.sync(runner)
        assert sum("was replicated without a copy" in text for text in result.warnings) == len(
            NAMES
        )
        assert [
            (table.rows, rows(pipeline, name.partition(".")[2]))
            for name, table in result.tables.items()
        ] == [(0, [])] * 4
        both.step(what="from the slot's start")
        both.step(*LATER, what="later")
        assert rows(pipeline, "t") == [(1, "after")]


@pytest.mark.soak("every job after a skipped copy")
def test_nothing_brings_the_missing_rows(runner, database, lake):
    """Neither drift, reconcile, replay nor a sync by name; what a lost slot took is on record."""
    write(database, TABLES, PUBLICATIONS, *BEFORE)
    pipeline = copied_pipeline(runner, without_copy(database, lake, ("t", "f")))
    write(
        database,
        "insert into t values (20, 'new')",
        "update t set v = 'x' where id = 1",
        "insert into f values (20, 'new')",
    )
    began = now()
    pipeline.consume(runner)
    ended = now()
    targets = pipeline.status()["targets"]
    assert [targets[f"public.{name}"]["copy_skipped"] for name in NAMES] == [
        True,
        True,
        False,
        False,
    ]
    assert targets["public.t"]["action"] == "apply"
    assert "replicated without a copy: it gets the changes since" in targets["public.t"]["reason"]

    # A copied target would be repaired, compared, or copied again for these.
    write(
        database,
        "alter publication p set table t, f where (v <> 'no'), k",
        "alter table t alter column v type text using v || '!'",
    )
    result = pipeline.consume(runner)
    assert any("copy: false leaves the target as it is" in text for text in result.warnings)
    assert not pipeline.consume(runner).warnings
    assert pipeline.reconcile(runner).status == "succeeded"
    replayed = pipeline.replay(runner, began, ended)
    assert any(
        "isn't replayed: its existing rows were not copied" in text for text in replayed.warnings
    )
    with pytest.raises(RunFailed, match=r"public\.t has copy: false and gets its changes"):
        pipeline.sync(runner, tables=["public.t"])
    assert rows(pipeline, "t") == rows(pipeline, "f") == [(20, "new")]

    # After a lost slot the others are repaired, and these go on.
    write(
        database,
        f"select pg_drop_replication_slot('{pipeline.file.source.slot}')",
        "insert into t values (30, 'lost')",
        "insert into k values (30, 'lost')",
    )
    result = pipeline.resync(runner)
    assert (30, "lost") in rows(pipeline, "k")
    assert rows(pipeline, "t") == [(20, "new")]
    assert any(
        text.startswith("public.t was replicated without a copy: it continues at")
        for text in result.warnings
    )
    status = pipeline.status()
    assert "lacks earlier changes that weren't applied" in status["targets"]["public.t"]["reason"]
    assert status["gaps"] == []
    write(
        database,
        "alter table t add column w int",
        "insert into t values (40, 'after')",
        "update t set v = 'mine' where id in (20, 30)",
    )
    pipeline.consume(runner)
    assert rows(pipeline, "t") == [(20, "mine"), (40, "after")]


@pytest.mark.soak("two decisions and their copies")
def test_the_operator_decides(runner, database, lake):
    """Where only a copy is exact a table waits: it begins empty again, or is copied."""
    write(database, TABLES, PUBLICATIONS, *BEFORE)
    pipeline = without_copy(database, lake, ("t", "r"))
    pipeline.setup()
    write_deltalake(pipeline.target_path("public.r"), pa.table({"id": [1]}))
    with pytest.raises(
        RunFailed,
        match=r"public\.r has copy: false, but its target .* has rows .* move the folder away",
    ):
        pipeline.sync(runner)
    remove_target(pipeline, "r")
    assert list(pipeline.sync(runner).tables) == ["public.r"]
    write(database, "insert into t values (40, 'new')", "insert into r values (40, 'new')")
    pipeline.consume(runner)
    write(
        database, "alter table t alter column v type int using id", "insert into t values (50, 50)",
        "alter table r alter column v type int using id", "insert into r values (50, 50)",
        "insert into k values (50, 'k')",
    )  # fmt: skip
    waits = (
        r"it has copy: false, so it waits for the operator: remove its target's folder and sync .*"
        r" copy: true"
    )
    with pytest.raises(RunFailed, match=waits):
        pipeline.consume(runner)
    assert (50, "k") in rows(pipeline, "k")
    assert rows(pipeline, "t") == rows(pipeline, "r") == [(40, "new")]

    remove_target(pipeline, "r")
    pipeline.sync(runner, tables=["public.r"])
    write(database, "insert into r values (60, 60)")
    # The file has t copied, and k from now on not.
    other = without_copy(database, lake, ("k", "r"))
    other.consume(runner)
    assert rows(other, "r") == [(60, 60)]
    assert rows(other, "t") == sorted(database.execute("select id, v from t"), key=repr)
    assert rows(other, "k") == sorted(database.execute("select id, v from k"), key=repr)
    targets = other.status()["targets"]
    assert [targets[f"public.{name}"]["copy_skipped"] for name in ("t", "k", "r")] == [
        False,
        True,
        True,
    ]
