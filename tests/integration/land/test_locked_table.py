"""A table that somebody keeps locked: the others go on, and it catches up by itself."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from psycopg.pq import TransactionStatus

from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job, pipeline_file
from waldelta.config.pipeline_file import Quality
from waldelta.errors import SyncFailed, TableBusy
from waldelta.jobs.consume import consume
from waldelta.lake.ledger import COPYING, TableState, now
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets import read_unlocked_sources, target_sources
from waldelta.pipeline.targets.lifecycle import read_table_bytes
from waldelta.postgres import TableId
from waldelta.postgres.lock_waits import read_locked_tables
from waldelta.snapshot.exported_snapshot import SnapshotHolder, read_version, wait_for_version
from waldelta.stages.apply.apply import apply
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.copy_table import Attempt, check_unaltered, source_as_of, sync_table
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.spark

TABLES = ["public.t", "public.free"]
BIG = "(select string_agg(md5(g::text || random()::text), '') from generate_series(1, 200) g)"


@pytest.fixture
def job(database, lake, monkeypatch):
    """Of two tables, ``t`` has a row filter."""
    for table in TABLES:
        database.execute(f"create table {table} (id int primary key, big text)")
        database.execute(f"alter table {table} alter big set storage external")
    job = bare_job(database, lake, TABLES)
    publication = job.pipeline.source.publications[0].name
    database.execute(f"alter publication {publication} set table t where (id > 0), free")
    for where in (
        "waldelta.stages.apply.inspect",
        "waldelta.pipeline.targets.lifecycle",
        "waldelta.stages.check.suite.source_constraints",
        "waldelta.stages.apply._source_values",
    ):
        monkeypatch.setattr(f"{where}.LOCK_TIMEOUT_S", 0.1)
    return job


@contextmanager
def locked(database, *tables):
    with database.connect(
        application_name="vacuum", options="-c idle_in_transaction_session_timeout=30s"
    ) as locker:
        for table in tables:
            locker.execute(f"lock table {table} in access exclusive mode")
        yield
        locker.rollback()


def held(job, table):
    return {r["id"] for r in read_target(job.lake.target(table).uri)}


def test_only_the_locked_table_waits(runner, database, job):
    """Its run fails and names it; the other gets its changes; the next run catches up."""
    sync(runner, job)
    for table in TABLES:
        database.execute(f"insert into {table} values (1, 'a'), (2, 'b')")
    with locked(database, "public.t"):
        with pytest.raises(RunFailed, match=r"pid \d+ \(vacuum\) on .*t") as failed:
            consume(runner, job)
        assert held(job, "public.free") == {1, 2}
        assert held(job, "public.t") == set()
    result = failed.value.result
    assert (
        result.landed.changes,
        result.targets.not_applied,
        result.tables["public.free"].inserted,
    ) == (4, ["public.t"], 2)
    assert job.ledger.batches() == []  # of both tables together there is none
    consume(runner, job)
    assert held(job, "public.t") == {1, 2}
    assert [target.table_name for target in job.ledger.batches()[-1].targets] == sorted(TABLES)


def test_a_table_to_be_copied_again_waits_while_it_is_locked(runner, database, job):
    """No copy of it begins; the run fails and names it, and the next one copies it."""
    database.execute("insert into free values (1, 'a')")
    sync(runner, job)
    database.execute(
        "alter table free add extra serial; insert into free values (3, 'c'); insert into t values"
        " (2, 'b')"
    )
    with locked(database, "public.free"), pytest.raises(RunFailed, match="vacuum") as failed:
        consume(runner, job)
    assert failed.value.result.targets.not_applied == ["public.free"]
    assert (held(job, "public.t"), job.read_states()["public.free"].status) == ({2}, "needs_sync")
    assert consume(runner, job).tables["public.free"].rows == 2


def test_a_table_without_a_filter_needs_no_lock(runner, database, job):
    """What its catalogs and the stream say is all that it takes."""
    sync(runner, job)
    database.execute("insert into free values (1, 'a')")
    drain(runner, job)
    with locked(database, "public.free"):
        assert apply(runner, job).failures == {}
    assert held(job, "public.free") == {1}


def test_a_prepared_transaction_may_hold_the_lock(runner, database, job):
    """For days, with no session that one could wait for."""
    sync(runner, job)
    database.execute("insert into t values (1, 'a'); insert into free values (1, 'a')")
    drain(runner, job)
    with database.connect() as connection:
        connection.execute("lock table t in access exclusive mode")
        connection.execute(f"prepare transaction '{database.name}'")
    try:
        failures = apply(runner, job).failures
    finally:
        database.execute(f"rollback prepared '{database.name}'")
    assert failures.keys() == {"public.t"}
    assert f"prepared transaction '{database.name}' on public.t" in str(failures["public.t"])
    assert apply(runner, job).failures == {}


def test_who_waits_for_the_lock_stands_in_the_way_too(database, job):
    """Readers stand in the queue behind an ALTER that waits for a reader's end; both are named."""
    with (
        database.connect() as reader,
        database.connect(application_name="alter", autocommit=True) as alter,
        job.source.connect("test") as connection,
        ThreadPoolExecutor(1) as pool,
    ):
        pid = reader.info.backend_pid
        reader.execute("select from t")
        altered = pool.submit(alter.execute, "alter table t add extra int")
        try:
            while not (holders := read_locked_tables(connection).holders):
                assert not altered.done()
        finally:
            reader.rollback()
        altered.result()
    assert f"(alter) on public.t (waits for the lock, behind pid {pid})" in holders


def test_a_size_waits_for_a_lock_of_a_moment(database, job, monkeypatch):
    """A longer lock is reported by target, while the others' sizes are read."""
    monkeypatch.setattr("waldelta.pipeline.targets.lifecycle.LOCK_TIMEOUT_S", 0.1)
    with locked(database, "public.t"):
        sizes, busy = read_table_bytes(job)
    assert (set(sizes), set(busy)) == ({"public.free"}, {"public.t"})
    assert "(vacuum) on public.t" in str(busy["public.t"])
    monkeypatch.setattr("waldelta.pipeline.targets.lifecycle.LOCK_TIMEOUT_S", 30.0)
    with ThreadPoolExecutor(1) as pool, job.source.connect("test") as connection:
        with locked(database, "public.t"):
            reading = pool.submit(read_table_bytes, job)
            while not connection.execute("select from pg_locks where not granted").fetchall():
                assert not reading.done(), reading.result()
        sizes, busy = reading.result()
    assert (set(sizes), busy) == ({"public.free", "public.t"}, {})


def test_a_look_starts_no_run_for_a_lock(runner, database, job):
    sync(runner, job)
    with locked(database, *TABLES):
        assert not check_idle(job).has_work


@pytest.mark.nightly("a lock beside an incomplete row")
def test_a_row_to_be_completed_waits_for_its_table_alone(runner, database, job, lake):
    """Its TOASTed value can't be read while the table is locked."""
    database.execute(
        f"alter publication {job.pipeline.source.publications[0].name} set table t, free"
    )
    target = {"root": lake, "tables": {"public.t": {"where": "id > 0"}}}
    job = replace(
        job, pipeline=pipeline_file(lake, job.pipeline.source.slot, TABLES, target=target)
    )
    database.execute(f"insert into t values (-1, {BIG})")
    sync(runner, job)
    database.execute("update t set id = 1; insert into free values (1, 'a')")
    drain(runner, job)
    with locked(database, "public.t"):
        failures = apply(runner, job).failures
        assert failures.keys() == {"public.t"}
        assert isinstance(failures["public.t"], TableBusy)
        assert "missing TOAST values of public.t" in str(failures["public.t"])
        assert held(job, "public.free") == {1}
    assert apply(runner, job).failures == {}
    assert held(job, "public.t") == {1}


@contextmanager
def locked_meanwhile(database, monkeypatch, *tables):
    """Locks these tables, one each time that a snapshot has just read which are locked."""
    left = list(tables)
    with database.connect(
        application_name="vacuum", options="-c idle_in_transaction_session_timeout=30s"
    ) as locker:

        def look(connection):
            found = read_locked_tables(connection)
            if left and connection.info.transaction_status == TransactionStatus.INTRANS:
                locker.execute(f"lock table {left.pop(0)} in access exclusive mode")
            return found

        monkeypatch.setattr("waldelta.pipeline.targets.target_sources.read_locked_tables", look)
        monkeypatch.setattr("waldelta.pipeline.targets.target_sources.LOCK_TIMEOUT_S", 0.1)
        yield
        locker.rollback()
    assert not left


def test_a_lock_that_is_taken_within_the_snapshot(database, job, monkeypatch):
    """Another table's isn't waited for; the table's own is reported; the snapshot stays."""
    database.execute("insert into free values (1, 'a')")
    with SnapshotHolder(job.source.conninfo) as holder:
        database.execute("insert into free values (2, 'b')")
        with locked_meanwhile(database, monkeypatch, "t"):
            fed, _ = source_as_of(holder, job, TableId("public", "free"))
        assert (fed.id.name, fed.is_unread) == ("free", False)
        with locked_meanwhile(database, monkeypatch, "t"):
            _, targets, barred = read_unlocked_sources(holder.connection, job.pipeline)
        assert {target.id.name: target.is_unread for target in targets} == {
            "free": False,
            "t": True,
        }
        assert "(vacuum) on " in barred.holders
        # Locked before, so that it is known whose lock it is, or only then.
        for table in ("free", "t"):
            with (
                locked_meanwhile(database, monkeypatch, "t", table),
                pytest.raises(TableBusy, match=r"\(vacuum\) on "),
            ):
                source_as_of(holder, job, TableId("public", "t"))
        assert holder.connection.execute("select count(*) from public.free").fetchone() == (1,)
        assert holder.connection.execute("show lock_timeout").fetchone() == ("0",)


def test_a_copy_of_another_table_goes_on(runner, database, job, monkeypatch):
    """From its snapshot to its last look at the catalogs, also of the table itself."""
    database.execute("insert into free values (1, 'a')")
    settled = wait_for_version(database.connection, job.pipeline.source.publication_names, 10)
    table = TableId("public", "free")
    target = target_sources.read_target(database.connection, job.pipeline, table)
    attempt = Attempt(TableState(now(), job.run_id, str(table), 1, COPYING), 1)
    with locked_meanwhile(database, monkeypatch, "t"):
        done = sync_table(runner, job, table, attempt, settled)
        assert done.rows == 1
    with locked(database, *TABLES):
        check_unaltered(
            job,
            target,
            read_version(
                database.connection,
                job.pipeline.source.publication_names,
                target.table.relation_ids,
            ),
        )


def test_a_table_whose_copy_meets_a_lock_is_told(runner, database, job, monkeypatch):
    """As any other locked table: by name, while the others are copied."""
    monkeypatch.setattr("waldelta.stages.sync.sync.ATTEMPTS", 1)
    database.execute("insert into free values (1, 'a'); insert into t values (1, 'a')")
    # Before the snapshot, the sync waits for every older transaction, whatever that has locked.
    with (
        locked_meanwhile(database, monkeypatch, "t"),
        pytest.raises(SyncFailed, match=r"public\.t.* can't be read(.|\n)*\(vacuum\) on .*t"),
    ):
        sync(runner, job)
    assert held(job, "public.free") == {1}
    assert {name: state.status for name, state in job.read_states().items()} == {
        "public.free": "synced",
        "public.t": "failed",
    }
    sync(runner, job, ["public.t"])
    assert held(job, "public.t") == {1}


@pytest.mark.usefixtures("compiled")
def test_what_is_checked_waits_for_nobody(runner, database, job):
    """PostgreSQL locks a table to print its CHECK; the run goes on without, and says so."""
    database.execute("alter table free add check (id > 0)")
    job = replace(job, pipeline=job.pipeline.model_copy(update={"quality": Quality(enabled=True)}))
    sync(runner, job)
    database.execute("insert into free values (1, 'a')")
    with locked(database, "public.free"):
        result = consume(runner, job)
    assert result.checked.passed == sorted(TABLES)
    (warning,) = [text for text in result.warnings if "CHECK" in text]
    assert "public.free" in warning
    assert "(vacuum) on public.free" in warning
