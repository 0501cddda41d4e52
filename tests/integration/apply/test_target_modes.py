"""Targets that keep more than a mirror: what the source has now, and what it had."""

import os
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from tests.oracles.compare import differing
from tests.oracles.mode_rows import as_of, check_intervals, check_mode, replayed
from tests.oracles.random_workload import Workload
from tests.support.pipelines import bare_job, pipeline_file
from tests.support.seeds import chosen_seed
from waldelta.errors import ModeRefused, SyncFailed
from waldelta.jobs.consume import consume
from waldelta.lsn import Lsn
from waldelta.stages.repair.replay_runs import replay
from waldelta.stages.sync.sync import sync

MODES = {"w1": "history", "w2": "soft_delete", "w3": "changelog"}
NAMES = ["id", "part", "a", "b", "big"]


def target(lake, modes=MODES):
    """The pipeline file's target."""
    return {
        "root": lake,
        "tables": {f"public.{name}": {"mode": mode} for name, mode in modes.items()},
    }


def job_of(database, lake, modes=MODES):
    """A pipeline with a table of each mode."""
    return bare_job(database, lake, [f"public.{t}" for t in modes], target=target(lake, modes))


def held(job, name):
    """All rows of a target."""
    return DeltaTable(job.lake.target(f"public.{name}").uri).to_pyarrow_table().to_pylist()


def source(connection, name):
    """What the source has, as sorted tuples."""
    return sorted(
        connection.execute(f"select {', '.join(NAMES)} from {name}".encode()).fetchall(), key=repr
    )


@pytest.fixture
def workload(database):
    """Random transactions on a table of each mode, with the connection that makes them."""
    with database.connect(autocommit=True) as connection:
        yield Workload(connection, chosen_seed(), list(MODES))


def write(workload, transactions):
    """So many transactions."""
    for _ in range(transactions):
        workload.transaction()


def test_every_mode_holds_what_the_source_has_and_had(
    runner, database, lake, decoded_by_tasks, workload
):
    """The seed is printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer."""
    connection = workload.connection
    job = job_of(database, lake)
    write(workload, 20)
    sync(runner, job)
    sampled = {}
    for run in range(int(os.environ.get("WALDELTA_ROUNDS") or 1)):
        for _ in range(4):
            write(workload, 10)
            ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
            sampled[Lsn.parse(lsn).value] = {name: source(connection, name) for name in MODES}
        result = consume(runner, job)
        assert (run, result.warnings) == (run, [])
        for name, mode in MODES.items():
            then = {lsn: rows[name] for lsn, rows in sampled.items()}
            check_mode(mode, held(job, name), NAMES, source(connection, name), then)


@pytest.mark.parametrize(
    "merge",
    [
        pytest.param(merge, marks=pytest.mark.nightly("what the first test does, by other merges"))
        for merge in ("decoded_by_tasks", "merged_by_tasks", "merged_by_spark")
    ],
)
def test_a_truncate_ends_what_no_change_names(runner, database, lake, workload, merge, request):
    """Rows of its range, and of the target, which some changes touch before it and after it."""
    request.getfixturevalue(merge)
    connection, job, then = workload.connection, job_of(database, lake), {}
    for name in MODES:
        database.execute(f"insert into {name} select g, 0, g, 'b' from generate_series(1, 40) g")
    sync(runner, job)
    changes = (
        "update {} set a = 0 where id < 3", "delete from {} where id = 4", "truncate {}",
        "insert into {} select g, 0, 1, 'new' from generate_series(2, 5) g",
        "update {} set id = 50 where id = 5", "delete from {} where id = 3",
    )  # fmt: skip
    for _ in range(2):
        for statement in changes:
            for name in MODES:
                database.execute(statement.format(name))
            lsn = Lsn.parse(connection.execute("select pg_current_wal_insert_lsn()").fetchone()[0])
            then[lsn.value] = {name: source(connection, name) for name in MODES}
        consume(runner, job)
        for name, mode in MODES.items():
            at = {lsn: rows[name] for lsn, rows in then.items()}
            check_mode(mode, held(job, name), NAMES, source(connection, name), at)


@pytest.mark.nightly("a copy in each mode; the first test has one")
def test_a_copy_of_a_target_that_keeps_more(runner, database, lake, workload):
    """Of a source that went on unseen it takes what differs, and changes go on from there."""
    connection = workload.connection
    job = job_of(database, lake)
    write(workload, 10)
    sync(runner, job)
    write(workload, 10)
    sync(runner, job, [f"public.{name}" for name in MODES])
    consume(runner, job)
    check_intervals(held(job, "w1"))
    assert replayed(held(job, "w3"), NAMES) == source(connection, "w3")
    assert differing(runner, job) == {}
    # One of what is there already changes nothing, nor the states before it.
    ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
    then, before = source(connection, "w1"), {name: held(job, name) for name in MODES}
    sync(runner, job, [f"public.{name}" for name in MODES])
    assert {name: sorted(map(repr, held(job, name))) for name in MODES} == {
        name: sorted(map(repr, rows)) for name, rows in before.items()
    }
    # Where nothing was written since the copy before, its snapshot is at this position.
    assert as_of(held(job, "w1"), NAMES, Lsn.parse(lsn).value + 1) == then


@pytest.mark.nightly("further moments of the modes that the first test walks")
def test_what_is_kept_is_never_taken_away(runner, database, lake):
    """A copy turns a mirror into a history, and nothing into a mirror."""
    for name in MODES:
        database.execute(f"create table {name} (id int primary key, v text)")
        database.execute(f"insert into {name} values (1, 'x'), (2, 'y')")
    database.execute("create table k (v text)")
    database.execute("alter table k replica identity full")
    database.execute("insert into k values ('x'), ('x')")
    modes = {"w1": "mirror", "w2": "soft_delete", "w3": "changelog", "k": "changelog"}
    job = job_of(database, lake, modes)
    sync(runner, job)
    database.execute("update k set v = 'z' where ctid = '(0,1)'")
    database.execute("delete from k where v = 'x'")
    database.execute("alter table w3 add column n int default 5")
    database.execute("update w3 set id = 9 where id = 1")
    database.execute("truncate w2")

    def by(**changed):
        tables = [f"public.{t}" for t in modes]
        file = pipeline_file(
            lake, job.pipeline.source.slot, tables, target=target(lake, modes | changed)
        )
        return replace(job, pipeline=file)

    result = consume(runner, by(w1="history"))
    assert any("w1" in warning and "mode history" in warning for warning in result.warnings)
    assert [r["_wd_valid_to_lsn"] for r in held(job, "w1")] == [None, None]
    assert sorted(r["_wd_deleted"] for r in held(job, "w2")) == [True, True]
    assert sorted((r["_wd_op"], r["v"]) for r in held(job, "k")) == [
        ("delete", "x"), ("snapshot", "x"), ("snapshot", "x"), ("update", "z"),
    ]  # fmt: skip
    assert ("update", 9, {"id": 1}) in [
        (r["_wd_op"], r["id"], r["_wd_before"]) for r in held(job, "w3")
    ]
    before = held(job, "w2")
    with pytest.raises(ModeRefused, match="has mode soft_delete in the lake"):
        sync(runner, by(w1="history", w2="mirror"), ["public.w2"])
    assert held(job, "w2") == before
    assert job.read_states()["public.w2"].status == "synced"
    with pytest.raises(ModeRefused, match="no key"):
        sync(runner, by(w1="history", k="history"), ["public.k"])
    with pytest.raises(ModeRefused, match="a replay would overwrite"):
        replay(runner, by(w1="history"), None, None, ["public.w1"])


@pytest.mark.soak("several refused copies")
def test_a_copy_that_is_refused_leaves_the_target_fed(runner, database, lake):
    """Positions that restart, other columns, no key: nothing is lost, and changes go on."""
    for name in MODES:
        database.execute(f"create table {name} (id int primary key, v text)")
        database.execute(f"insert into {name} values (1, 'x'), (2, 'y')")
    database.execute("create table k (v text); alter table k replica identity full")
    job = job_of(database, lake, MODES | {"k": "changelog"})
    sync(runner, job)
    consume(runner, job)
    ahead = str(1 << 60)
    DeltaTable(job.lake.target("public.w1").uri).update(
        {"_wd_valid_from_lsn": ahead}, predicate="id = 2"
    )
    for name in ("w2", "w3"):
        DeltaTable(job.lake.target(f"public.{name}").uri).update(
            {"_wd_lsn": ahead}, predicate="id = 2"
        )
    for name in MODES:
        database.execute(f"delete from {name} where id = 2")
    before = {name: held(job, name) for name in MODES}
    for name in [*MODES, "k"]:
        with pytest.raises(
            SyncFailed, match="positions restarted" if name in MODES else "has no key"
        ):
            sync(runner, replace(job, run_id=f"again {name}"), [f"public.{name}"])
    assert {name: held(job, name) for name in MODES} == before
    assert {state.status for state in job.read_states().values()} == {"synced"}
    database.execute("insert into w1 values (3, 'z'); insert into k values ('z')")
    consume(runner, replace(job, run_id="goes on"))
    assert (3, True) in [(row["id"], row["_wd_valid_to_lsn"] is None) for row in held(job, "w1")]
    assert [row["v"] for row in held(job, "k")] == ["z"]
    database.execute("alter table k add primary key (v), replica identity default")
    with pytest.raises(SyncFailed, match="has changed from none to v"):
        sync(runner, replace(job, run_id="again with a key"), ["public.k"])


def test_one_table_that_is_refused_does_not_stop_the_copies_of_others(runner, database, lake):
    """Unless it was asked for by its name: then it is refused at once."""
    database.execute(
        "create table n (v text); create table w1 (id int primary key); insert into w1 values (1)"
    )
    job = job_of(database, lake, {"n": "history", "w1": "history"})
    with pytest.raises(ModeRefused, match="no key"):
        sync(runner, job, ["public.n", "public.w1"])
    with pytest.raises(SyncFailed, match="1 of 2 tables not synced") as failed:
        sync(runner, job)
    assert [(name, type(err)) for name, err in failed.value.failures.items()] == [
        ("public.n", ModeRefused)
    ]
    assert [row["id"] for row in held(job, "w1")] == [1]


def test_a_file_of_another_writer_may_have_no_rows(runner, database, lake):
    database.execute("create table w1 (id int primary key)")
    job = job_of(database, lake, {"w1": "history"})
    sync(runner, job)
    place = job.lake.target("public.w1")
    table = DeltaTable(place.uri)
    with place.files.open_output_stream("empty.parquet") as file:
        pq.write_table(table.to_pyarrow_table(), file)
    size = place.files.get_file_info("empty.parquet").size
    added = AddAction("empty.parquet", size, {}, 0, True, '{"numRecords": 0}')
    table.create_write_transaction([added], "append", table.schema(), [])
    database.execute("insert into w1 values (1)")
    consume(runner, job)
    assert [row["id"] for row in held(job, "w1")] == [1]
