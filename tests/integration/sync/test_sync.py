"""Copying published tables into Delta targets, restarts and failures included."""

import json
import logging
import operator
import os
import signal
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark import TaskContext

import waldelta.stages.sync
import waldelta.stages.sync.copy_table as copy_module
import waldelta.stages.sync.sync as sync_module
from tests.oracles.target_rows import read_target
from tests.support.concurrent_work import before_rows, insert_that_goes_on
from tests.support.pipelines import job_of, pipeline_file
from tests.support.waiting import wait_until
from waldelta.errors import (
    ConfigError,
    LockHeld,
    PrivilegeMissing,
    SlotMissing,
    SnapshotLost,
    SyncFailed,
    TargetNotWritable,
    TransactionsStillOpen,
)
from waldelta.lake import local_path, staging_folder, target_uri
from waldelta.lake.ledger import SlotMove, TableState, now
from waldelta.pipeline import Job, target_lock
from waldelta.postgres import TableId
from waldelta.postgres.server_position import read_position
from waldelta.stages.sync.sync import sync

COPIED_COLUMNS = ("_wd_lsn", "_wd_commit_ts", "_wd_raw")


class Scene:
    """A pipeline on the test's database, set up; its targets' rows."""

    def __init__(self, runner, database, root, conninfo=None, **target):
        self.runner, self.database, self.slot = runner, database, f"s_{database.name}"
        publications = [{"name": "p", "manage": False}]
        source = {"conn_id": "test_source", "slot": self.slot, "publications": publications}
        file = pipeline_file(root, self.slot, source=source, target={"root": root} | target)
        self.job = job_of(file, conninfo or database.conninfo, "run-1")

    def set_up(self):
        lsn = self.database.execute(
            "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,)
        )[0][0]
        server = read_position(self.database.connection)
        created = (self.slot, server.system_identifier, server.timeline)
        self.job.ledger.append(SlotMove(now(), "run-0", "created", *created, lsn, 0))
        return self

    def sync(self, *tables, **options):
        return sync(self.runner, self.job, list(tables) or None, **options)

    def table(self, name, schema="public"):
        return DeltaTable(target_uri(self.job.pipeline.target.root, schema, name))

    def nullable(self, name):
        return {field.name: field.nullable for field in self.table(name).schema().fields}

    def rows(self, name, schema="public"):
        table = self.table(name, schema)
        names = [f.name for f in table.schema().fields if f.name not in COPIED_COLUMNS]
        return sorted(map(tuple, read_target(table.table_uri, *names)))

    def states(self):
        return {
            name: (s.status, s.generation) for name, s in self.job.ledger.table_states().items()
        }


@pytest.fixture
def lake_of(runner, database, lake):
    def make(*statements, **options):
        for statement in statements:
            database.execute(statement)
        return Scene(runner, database, lake, **options).set_up()

    return make


def sabotage(monkeypatch, *actions):
    """Before the n-th target is written, its chunks planned, do the n-th of these."""
    calls = iter(actions)

    def act():
        if (action := next(calls, None)) is not None:
            action()

    before_rows(monkeypatch, act)


def test_every_shape_of_table(database, lake_of):
    """Partition root, column list, filter, inheritance, nothing, odd names: each as published."""
    lake = lake_of(
        "create table plain (id int primary key, v text, secret text)",
        "insert into plain select g, 'v' || g, 's' from generate_series(1, 100) g",
        "create table root (k int primary key, v text) partition by range (k)",
        "create table leaf1 partition of root for values from (0) to (10)",
        "create table leaf2 partition of root default",
        "insert into root values (1, 'a'), (2, null), (50, 'b')",
        "create table rootless (k int primary key) partition by range (k)",
        "create table parent (id int primary key)",
        "create table child () inherits (parent)",
        "insert into parent values (1)",
        "insert into child values (2)",
        "create table empty (id bigint primary key, n numeric(5,1))",
        'create table "Odd name.%20" ("id x" int primary key, "a`b" text)',
        """insert into "Odd name.%20" values (1, 'x'), (2, null)""",
        "create publication p with (publish = 'update', publish_via_partition_root)",
        "alter publication p add table plain (id, v) where (id <= 10), root where (k <> 2),"
        ' rootless, only parent, empty, "Odd name.%20"',
    )
    results = {r.table_name: r for r in lake.sync()}
    assert lake.rows("plain") == [(g, f"v{g}") for g in range(1, 11)]
    assert lake.rows("root") == [(1, "a"), (50, "b")]
    assert lake.rows("rootless") == []
    assert lake.rows("parent") == [(1,)]
    assert lake.rows("empty") == []
    # delta-rs reads no column whose name Delta maps.
    uri = lake.table("Odd name.%20").table_uri
    frame = lake.runner.spark().read.format("delta").load(uri).drop(*COPIED_COLUMNS)
    assert sorted(map(tuple, frame.collect())) == [(1, "x"), (2, None)]
    assert {name: r.rows for name, r in results.items()} == {
        "public.plain": 10, "public.root": 2, "public.rootless": 0, "public.parent": 1,
        "public.empty": 0, 'public."Odd name.%20"': 2,
    }  # fmt: skip
    assert set(lake.states().values()) == {("synced", 1)}
    assert lake.sync() == []


def test_target_and_ledger_say_what_was_copied(database, lake_of):
    """Keys are NOT NULL; each row has the snapshot's LSN; ledger and commit name the snapshot."""
    lake = lake_of(
        "create table t (id int primary key, n numeric(12,2), ts timestamptz)",
        "insert into t values (1, 1.50, '2020-01-01 00:00+00'), (2, 'NaN', 'infinity')",
        "create publication p for table t where (id < 9)",
    )
    (result,) = lake.sync(reason="first")
    assert lake.nullable("t") == {
        "id": False, "n": True, "ts": True, "_wd_lsn": True, "_wd_commit_ts": True, "_wd_raw": True,
    }  # fmt: skip
    rows = read_target(lake.table("t").table_uri)
    assert {(row._wd_lsn, row._wd_commit_ts) for row in rows} == {(result.state.snapshot_lsn, None)}
    assert {row.id: row._wd_raw for row in rows} == {1: None, 2: {"n": "NaN", "ts": "infinity"}}
    state = lake.job.ledger.table_states()["public.t"]
    assert (state.status, state.generation, state.rows, state.reason) == ("synced", 1, 2, "first")
    assert state.key_columns == ["id"]
    assert state.row_filter == "(id < 9)"
    assert [(c.name, c.spark_type, c.not_null) for c in state.columns] == [
        ("id", "int", True), ("n", "decimal(12,2)", False), ("ts", "timestamp", False),
    ]  # fmt: skip
    (commit,) = (one for one in lake.table("t").history() if one["version"] == state.version)
    told = json.loads(commit["userMetadata"])["waldelta"]
    assert (told["verb"], told["run_id"], told["snapshot"]) == ("sync", "run-1", state.snapshot)


def test_without_metadata_columns(lake_of):
    """Targets can be plain."""
    lake = lake_of(
        "create table t (id int primary key)",
        "insert into t values (1)",
        "create publication p for table t",
        metadata_columns=False,
    )
    lake.sync()
    assert lake.nullable("t").keys() == {"id"}


def test_resync_replaces_everything_as_a_new_generation(database, lake_of):
    """What was deleted since is gone; other columns come and go; keys stay NOT NULL at first."""
    lake = lake_of(
        "create table t (id int primary key, v text)", "create publication p for table t"
    )
    database.execute("insert into t values (1, 'a'), (2, 'b')")
    lake.sync()
    database.execute("delete from t where id = 1")
    database.execute("alter table t add w int default 7")
    (result,) = lake.sync("public.t", reason="drift")
    assert (result.state.generation, lake.states()) == (2, {"public.t": ("synced", 2)})
    assert lake.rows("t") == [(2, "b", 7)]
    assert not lake.nullable("t")["id"]
    database.execute("alter table t drop v")
    database.execute("alter table t alter w type text")
    lake.sync("public.t")
    assert lake.rows("t") == [(2, "7")]


@pytest.mark.parametrize("statement", ["truncate t", "holder"])
def test_lost_snapshot_starts_the_table_again(database, lake_of, monkeypatch, caplog, statement):
    """A rewrite, or the holder's death, in mid-copy: the next attempt copies what is there now."""
    lake = lake_of(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat('x', 900) from generate_series(1, 100) g",
        "create publication p for table t",
    )
    monkeypatch.setattr(copy_module, "bytes_per_task", lambda _: 4 * 8192)
    if statement == "holder":
        statement = (
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name like 'waldelta snapshot %' and datname = current_database()"
        )
    sabotage(monkeypatch, lambda: database.execute(statement))
    caplog.set_level(logging.WARNING)
    (result,) = lake.sync()
    assert result.attempts == 2
    assert "table=public.t starts again" in caplog.text
    assert lake.rows("t") == sorted(database.execute("select * from t"))
    assert lake.states() == {"public.t": ("synced", 1)}


@pytest.mark.usefixtures("on_spark")
def test_only_the_chunk_of_a_killed_worker_is_read_again(database, lake_of, monkeypatch, tmp_path):
    """Not the whole table: a copy of hours has one worker or other that runs out of memory."""
    lake = lake_of(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat('x', 900) from generate_series(1, 100) g",
        "create publication p for table t",
    )
    monkeypatch.setattr(copy_module, "bytes_per_task", lambda _: 4 * 8192)
    original, note = copy_module._reader, tmp_path / "read"

    def reader(*of):
        read = original(*of)

        def killed_once(number):
            attempt = TaskContext.get().attemptNumber()
            for batch in read(number):
                with note.open("a") as file:
                    file.write(f"{number} {attempt}\n")
                yield batch
                if number == 1 and attempt == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return killed_once

    monkeypatch.setattr(copy_module, "_reader", reader)
    (result,) = lake.sync()
    assert (result.attempts, result.rows) == (1, 100)
    assert lake.rows("t") == sorted(database.execute("select * from t"))
    read = [tuple(map(int, line.split())) for line in note.read_text().splitlines()]
    assert {task for task, attempt in read if attempt} == {1}
    assert len({task for task, _ in read}) > 2


def test_what_a_chunk_fails_by_is_met_once(database, lake_of, monkeypatch, tmp_path):
    """Spark tries a failed task again; those attempts raise at once what the first found out."""
    lake = lake_of(
        "create table t (id int primary key)",
        "insert into t values (1)",
        "create publication p for table t",
    )
    note = tmp_path / "read"

    def reader(*_):
        def refused(_):
            with note.open("a") as file:
                file.write("x")
            raise PrivilegeMissing("t can't be read: grant select on it")

        return refused

    monkeypatch.setattr(copy_module, "_reader", reader)
    with pytest.raises(SyncFailed, match="grant select on it") as failed:
        lake.sync()
    assert isinstance(failed.value.failures["public.t"], PrivilegeMissing)
    assert note.read_text() == "x"


def test_a_chunk_that_fails_ends_the_others(database, lake_of, monkeypatch, tmp_path):
    """Most chunks aren't read any more. What a finished one wrote stays for the next copy."""
    lake = lake_of(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat('x', 900) from generate_series(1, 600) g",
        "create publication p for table t",
    )
    monkeypatch.setattr(copy_module, "bytes_per_task", lambda _: 8192)
    original, note = copy_module._reader, tmp_path / "read"

    def reader(*of):
        read = original(*of)

        def refused(number):
            with note.open("a") as file:
                file.write(f"{number}\n")
            if number == 1:
                raise PrivilegeMissing("t can't be read: grant select on it")
            yield from read(number)

        return refused

    monkeypatch.setattr(copy_module, "_reader", reader)
    with pytest.raises(SyncFailed, match="grant select on it") as failed:
        lake.sync()
    assert isinstance(failed.value.failures["public.t"], PrivilegeMissing)
    begun = [int(line) for line in note.read_text().splitlines()]
    assert begun.count(1) == 1
    assert len(begun) < database.execute("select pg_relation_size('t') / 8192")[0][0] / 2
    uri = target_uri(lake.job.pipeline.target.root, "public", "t")
    assert len(list(local_path(uri).glob("*.parquet"))) < len(begun)


def test_alteration_after_the_last_chunk_is_noticed(database, lake_of, monkeypatch):
    """Chunks select by name: two columns that changed names would change places."""
    lake = lake_of(
        "create table t (id int primary key, a text, b text)",
        "insert into t values (1, 'a', 'b')",
        "create publication p for table t",
    )

    def swap():
        for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
            database.execute(f"alter table t rename {old} to {new}")

    sabotage(monkeypatch, swap)
    (result,) = lake.sync()
    assert result.attempts == 2
    row = read_target(lake.table("t").table_uri)[0]
    assert (row.a, row.b) == ("b", "a")


def test_a_table_that_fails_does_not_stop_the_others(database, lake_of, monkeypatch):
    """All failures are named at the end; the next sync copies only what is missing."""
    lake = lake_of(
        "create table good (id int primary key)",
        "insert into good values (1)",
        "create table moving (id int primary key)",
        "create table bad (id int primary key, v int)",
        "insert into bad values (1, 0)",
        "create publication p for table good, moving, bad where (1 / v > 0) with (publish ="
        " 'insert')",
    )
    real = sync_module.sync_table

    def unlucky(runner, job, table_id, *args):
        if table_id.name == "moving":
            raise SnapshotLost("rewritten again")
        return real(runner, job, table_id, *args)

    monkeypatch.setattr(sync_module, "sync_table", unlucky)
    with pytest.raises(SyncFailed) as caught:
        lake.sync()
    assert sorted(caught.value.failures) == ["public.bad", "public.moving"]
    assert "SQLSTATE 22012" in str(caught.value)
    assert "2 of 3 tables not synced" in str(caught.value)
    assert lake.states() == {
        "public.good": ("synced", 1), "public.moving": ("failed", 1), "public.bad": ("failed", 1),
    }  # fmt: skip
    monkeypatch.setattr(sync_module, "sync_table", real)
    database.execute("update bad set v = 1")
    assert sorted(r.table_name for r in lake.sync()) == ["public.bad", "public.moving"]
    assert lake.states()["public.good"] == ("synced", 1)


def test_another_run_on_the_same_target(database, lake_of):
    """Its lock is respected: the table is left to it, and nothing is recorded."""
    lake = lake_of("create table t (id int primary key)", "create publication p for table t")
    table = TableId("public", "t")
    with (
        target_lock(lake.job, table) as held,
        pytest.raises(SyncFailed, match=f"pid {held.pid}") as caught,
    ):
        lake.sync()
    assert isinstance(caught.value.failures["public.t"], LockHeld)
    assert caught.value.retryable
    assert lake.states() == {}


def test_a_killed_sync_goes_on_with_unfinished_tables(database, lake_of):
    """A table left in 'copying' is copied as a generation of its own."""
    lake = lake_of("create table t (id int primary key)", "create publication p for table t")
    lake.job.ledger.append(TableState(now(), "killed", "public.t", 3, "copying"))
    (result,) = lake.sync()
    assert result.state.generation == 4


def test_open_transaction_holds_up_the_copy(database, lake_of):
    """One older than the publication's last change must end first; nothing is copied before."""
    lake = lake_of("create table t (id int primary key)", "create publication p for table t")
    with database.connect() as writer:
        writer.execute("insert into t values (1)")
        with pytest.raises(TransactionsStillOpen, match=f"pid {writer.info.backend_pid}"):
            lake.sync(old_transactions_timeout_s=0)
        assert lake.states() == {}
    lake.sync()
    assert lake.rows("t") == [(1,)]


def test_refused_before_anything_is_copied(runner, database, lake, tmp_path, monkeypatch):
    """No slot, no such table, no writable folder: each by name, nothing written."""
    database.execute("create table t (id int primary key)")
    database.execute("create publication p for table t")
    with pytest.raises(SlotMissing, match="setup"):
        Scene(runner, database, lake).sync()
    ready = Scene(runner, database, lake).set_up()
    with pytest.raises(
        ConfigError, match=r"the pipeline has no table public\.absent: did you mean public\.t"
    ):
        ready.sync("public.absent")
    with pytest.raises(ConfigError, match=r"the pipeline has no table public\.absent"):
        sync(runner, ready.job, ["public.absent"], only_waiting=True)
    with pytest.raises(ConfigError, match="schema-qualified"):
        ready.sync("t")
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    blocked = Scene(runner, database, (in_the_way / "lake").as_uri())
    identity = ready.job.read_identity()
    monkeypatch.setattr(Job, "read_identity", lambda _: identity)
    monkeypatch.setattr(Job, "ledger", ready.job.ledger)
    with pytest.raises(TargetNotWritable, match=r"target\.root"):
        blocked.sync()
    assert ready.states() == {}


def test_target_folder_with_something_else_in_it(database, lake_of, tmp_path, caplog):
    """Foreign files are left alone, and the source isn't asked for another snapshot."""
    lake = lake_of(
        "create table t (id int primary key)",
        "insert into t values (1)",
        "create publication p for table t",
    )
    folder = tmp_path / "lake" / "public" / "t"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("not ours")
    with pytest.raises(SyncFailed) as caught:
        lake.sync()
    assert isinstance(caught.value.failures["public.t"], TargetNotWritable)
    assert not caught.value.retryable
    assert "starts again" not in caplog.text
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_names_that_differ_in_case_only(lake_of):
    """Delta can't keep them apart, so the table is refused with a remedy."""
    lake = lake_of(
        'create table t (id int primary key, "ID" int)', "create publication p for table t"
    )
    with pytest.raises(SyncFailed, match=r"'ID' and column 'id' apart.*column list"):
        lake.sync()


def test_copies_leave_nothing_behind_on_the_source(database, lake_of):
    """No session, no lock, no transaction of ours outlives the sync."""
    lake = lake_of("create table t (id int primary key)", "create publication p for table t")
    lake.sync()
    ours = (
        "select count(*) from pg_stat_activity where application_name like 'waldelta%%' and datname"
        " = %s"
    )
    with psycopg.connect(database.server.conninfo(), autocommit=True) as admin:
        assert admin.execute(ours, (database.name,)).fetchone() == (0,)


@pytest.mark.parametrize("kind", ["files", "diff", "kept", "equal"])
@pytest.mark.soak("another way to write a copy")
def test_a_snapshot_is_held_no_longer_than_rows_are_read(
    runner, database, lake_of, monkeypatch, kind
):
    """Whatever comes behind needs none; what begins on the source meanwhile isn't in the load."""
    lake = lake_of(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'a'), (2, 'b')",
        "create publication p for table t",
        tables={"public.t": {"mode": "soft_delete" if kind == "kept" else "mirror"}},
    )
    if kind != "files":
        lake.sync()
        if kind != "equal":
            database.execute("update t set v = 'c' where id = 2")
    where = {
        "files": "_write_files._commit",
        "diff": "_write.merge_differences",
        "kept": "_write.merge_differences",
        "equal": "_write.commit_equal",
    }[kind]
    holders = (
        f"select pid from pg_stat_activity where application_name = 'waldelta snapshot {lake.slot}"
        " public.t' and datname = current_database()"
    )
    commits, real = [], operator.attrgetter(where)(waldelta.stages.sync)

    def commit(*given, **options):
        wait_until(lambda: not database.execute(holders), timeout_s=20)
        for number in range(100, 150):
            database.execute(f"insert into t values ({number}, 'x')")
        commits.append(where)
        return real(*given, **options)

    monkeypatch.setattr(f"waldelta.stages.sync.{where}", commit)
    (result,) = lake.sync("public.t", by_diff=kind in ("diff", "equal"))
    assert (commits, result.attempts, result.rows) == ([where], 1, 2)
    assert 0 < result.load.snapshot_seconds < result.state.seconds
    assert result.load.xmin_age < 50


@pytest.mark.nightly("a damaged target")
def test_a_target_with_a_key_twice_is_read_again_as_a_whole(database, lake_of):
    """By the same snapshot, which a comparison must not have let go of by then."""
    lake = lake_of(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'a'), (2, 'b')",
        "create publication p for table t",
    )
    lake.sync()
    uri = lake.job.lake.target("public.t").uri
    write_deltalake(uri, DeltaTable(uri).to_pyarrow_table().slice(0, 1), mode="append")
    (result,) = lake.sync("public.t", by_diff=True)
    assert (result.copy.full_rewrite_reason, result.attempts) == (
        "its target has rows with the same key",
        1,
    )
    assert lake.rows("t") == [(1, "a"), (2, "b")]


UNTRACED = pytest.param(False, marks=pytest.mark.soak("the same rows without their trace"))


@pytest.mark.parametrize("traced", [True, UNTRACED])
def test_an_insert_that_goes_on_can_not_commit_behind_a_copy(runner, lake_of, tmp_path, traced):
    """Whoever was killed left its folder, or somebody removed that before."""
    lake = lake_of(
        "create table t (id int)",
        "insert into t values (1)",
        "create publication p for table t with (publish = 'insert')",
    )
    lake.sync()
    if traced:
        Path(local_path(staging_folder(lake.job.lake, "public.t", 1, 1, "run-0"))).mkdir(
            parents=True
        )
    with insert_that_goes_on(runner.spark(), lake.job.lake.target("public.t").uri, tmp_path):
        lake.sync("public.t")
    assert lake.rows("t") == [(1,)]
