"""Protocol versions 2 to 4 end to end: streamed, aborted and prepared transactions."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import count
from threading import Event

import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

import waldelta.stages.apply.logical_messages as messages_module
from tests.oracles.target_rows import read_target
from tests.support.landing import land_only, told
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.errors import ConfigError, TargetNotWritable
from waldelta.jobs.consume import consume
from waldelta.jobs.maintain import run_maintain
from waldelta.lake import MESSAGES
from waldelta.lake.ledger import now
from waldelta.pipeline.job import load_job
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.spark import InProcess
from waldelta.stages.apply.apply import apply
from waldelta.stages.apply.logical_messages import write_messages
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import plan_setup
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.spark

TABLES = ["public.t", "public.u"]
STREAMING = {"streaming": "on"}
PREPARED = {"streaming": "parallel", "two_phase": True}


def make_job(database, lake, options, **overrides):
    """Tables t and u, published; transactions larger than 64 kB are streamed."""
    database.execute("create table if not exists t(id int primary key, v text)")
    database.execute("create table if not exists u(id int primary key, v text)")
    database.execute("create table if not exists unpublished(id int, v text)")
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    return bare_job(database, lake, TABLES, options, **overrides)


def rows(first, last, table="t", text="repeat('x', 100)"):
    return f"insert into {table} select g, {text} from generate_series({first}, {last}) g"


def run(runner, job):
    drained = drain(runner, job)
    applied = apply(runner, job)
    assert applied.failures == {}
    return drained


def assert_same(runner, job, database):
    """Both targets hold what their sources hold."""
    for table in TABLES:
        found = read_target(job.lake.target(table).uri, "id", "v")
        assert sorted(map(tuple, found)) == sorted(
            database.execute(f"select id, v from {table}")
        ), table


def kinds(job, batch):
    """The kinds of messages that a batch of the change log holds."""
    change_log = job.change_log(job.read_identity())
    return set(change_log.timeline(batch - 1, batch)["kind"].to_pylist())


def consume_all(runner, job):
    """Land, write messages, apply: as the stages of a run do."""
    drain(runner, job)
    write_messages(runner, job)
    assert apply(runner, job).failures == {}
    told(job)


def emit(transactional, prefix, content):
    return f"select pg_logical_emit_message({str(transactional).lower()}, '{prefix}', '{content}')"


def messages(job):
    """What the table of messages holds, in its order."""
    rows = sorted(
        read_target(job.lake.bookkeeping(MESSAGES).uri), key=lambda row: (row.batch, row.seq)
    )
    assert all((row.xid8 is None) == (row.commit_ts is None) != row.transactional for row in rows)
    return [(row.prefix, bytes(row.content), row.transactional) for row in rows]


def test_savepoints_rolled_back_in_streamed_transactions(runner, database, lake):
    """At several levels; streams of several sessions mix."""
    job = make_job(database, lake, STREAMING)
    sync(runner, job)
    with database.connect() as a, database.connect() as b, database.connect() as c:
        a.execute(rows(1, 1000))
        b.execute(rows(1, 1500, "u"))
        a.execute("savepoint one")
        a.execute(rows(1001, 2000))
        a.execute("savepoint two")
        a.execute(rows(2001, 3000))
        c.execute(rows(8001, 9000))
        a.execute("rollback to two")
        a.execute("update t set v = 'kept' where id between 1001 and 1010")
        a.execute("savepoint three")
        a.execute("delete from t where id < 1500")
        a.execute(rows(2501, 3500))
        b.execute("savepoint one")
        b.execute("truncate u")
        b.execute(rows(1, 1000, "u"))
        a.execute("rollback to three")
        a.execute("savepoint four")
        a.execute(rows(4001, 5000))
        a.execute("release four")
        b.execute("rollback to one")
        b.execute("update u set v = 'b' where id <= 3")
        database.execute("insert into t values (-1, 'plain')")
        c.rollback()
        b.commit()
        database.execute("update t set v = 'later' where id = -1")
        a.commit()
    (batch,) = (landed.batch for landed in run(runner, job).batches)
    assert {"S", "E", "A", "c"} <= kinds(job, batch)
    assert_same(runner, job, database)


def test_a_transaction_over_several_batches(runner, database, lake):
    """The slot moves over it while it is open; the batch of its commit brings everything."""
    job = make_job(database, lake, STREAMING)
    sync(runner, job)
    slot = job.pipeline.source.slot
    with database.connect() as a:
        for step in range(3):
            a.execute(rows(step * 2000 + 1, step * 2000 + 2000))
            a.execute("savepoint one")
            a.execute(rows(10001, 12000))
            a.execute("rollback to one")
            database.execute(f"insert into u values ({step}, 'u')")
            before = confirmed_lsn(database.connection, slot)
            run(runner, job)
            assert confirmed_lsn(database.connection, slot) > before
            assert kinds(job, step + 1).isdisjoint("SEA")
            assert_same(runner, job, database)
        database.execute("select pg_switch_wal()")
        run(runner, job)
        told(job)
        assert not check_idle(job).has_work
        a.commit()
    run(runner, job)
    assert_same(runner, job, database)
    assert drain(runner, job).batches == []


def test_a_streamed_transaction_of_nothing_published(runner, database, lake):
    """PostgreSQL streams it all the same; verification doesn't stumble over it."""
    job = make_job(database, lake, STREAMING)
    sync(runner, job)
    database.execute(rows(1, 3000, "unpublished"))
    database.execute("insert into t values (1, 'a')")
    with database.connect() as a:
        a.execute("savepoint one")
        a.execute(rows(5001, 7000))
        a.execute("rollback to one")
        a.execute(rows(1, 3000, "unpublished"))
        a.commit()
    run(runner, job)
    assert_same(runner, job, database)


def test_prepared_transactions_across_batches_and_restarts(runner, database, lake):
    """Changes count at Commit Prepared; rolled back ones never do."""
    job = make_job(database, lake, PREPARED)
    sync(runner, job)
    database.execute("insert into t values (1, 'start'), (2, 'start')")
    with database.connect() as a:
        for gid, change in {
            "keep small": "update t set v = 'prepared' where id = 1",
            "keep large": rows(1, 2000, "u"),
            "drop small": "update t set v = 'never' where id = 2",
            "drop large": rows(3001, 5000, "u"),
            "empty": "insert into unpublished values (1)",
        }.items():
            a.execute(change)
            a.execute(f"prepare transaction '{gid} {database.name}'")
            a.commit()
    run(runner, job)
    found = len(read_target(job.lake.target("public.u").uri))
    assert found == 0
    database.execute("insert into t values (3, 'between')")
    run(runner, job)
    database.restart()
    database.execute(f"rollback prepared 'drop small {database.name}'")
    database.execute(f"commit prepared 'keep small {database.name}'")
    database.execute("update t set v = v || ', then plain' where id = 1")
    run(runner, job)
    assert_same(runner, job, database)
    database.execute(f"rollback prepared 'drop large {database.name}'")
    database.execute("insert into u values (-1, 'before')")
    database.execute(f"commit prepared 'keep large {database.name}'")
    database.execute(f"commit prepared 'empty {database.name}'")
    database.execute("update u set v = 'after' where id = 1000")
    run(runner, job)
    assert_same(runner, job, database)


@pytest.mark.soak("random transactions of several sessions")
def test_any_mixture(runner, database, lake):
    """Savepoints and two-phase commits; each message has a row with its content to compare."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    job = make_job(database, lake, PREPARED | {"messages": True})
    sync(runner, job)
    sessions = [database.connect() for _ in range(3)]
    names, waiting, ids = count(), [], count(1)
    try:
        for _ in range(3):
            for _ in range(40):
                waiting = _step(rng, database, sessions, waiting, names, ids)
            run(runner, job)
            assert_same(runner, job, database)
        for session in sessions:
            session.rollback()
        for gid in waiting:
            database.execute(f"commit prepared '{gid}'")
        run(runner, job)
        assert_same(runner, job, database)
        write_messages(runner, job)
        found = [content.decode() for _, content, transactional in messages(job) if transactional]
        written = [v for (v,) in database.execute("select v from t where v like 'message %'")]
        assert (f"seed {seed}", sorted(found)) == (f"seed {seed}", sorted(written))
    finally:
        for session in sessions:
            session.close()


def _step(rng, database, sessions, waiting, names, ids):
    """One random action of one session; gives the prepared transactions that still wait."""
    session, kind = rng.choice(sessions), rng.random()
    if kind < 0.5:
        first, table = next(ids) * 1000, rng.choice("tu")
        session.execute(rows(first, first + rng.choice([0, 5, 900]), table))
        # Only rows of its own: sessions must not wait for each other.
        session.execute(
            f"update {table} set v = 'u' where id between {first} and {first + rng.randrange(6)}"
        )
        session.execute(f"delete from {table} where id = {first + rng.randrange(4)}")
        session.execute(f"update {table} set id = -id where id = {first + 4}")
        session.execute(f"insert into t values ({first + 999}, 'message {first}')")
        session.execute(emit(True, "random", f"message {first}"))
    elif kind < 0.7:
        session.execute(f"savepoint s{next(names)}")
        session.savepoints = [*getattr(session, "savepoints", []), next(names) - 1]
    elif kind < 0.8 and getattr(session, "savepoints", []):
        at = rng.randrange(len(session.savepoints))
        session.execute(f"rollback to s{session.savepoints[at]}")
        session.savepoints = session.savepoints[: at + 1]
    elif kind < 0.9:
        session.savepoints = []
        gid = f"{database.name} {next(names)}"
        if rng.random() < 0.4 and session.info.transaction_status.name == "INTRANS":
            session.execute(f"prepare transaction '{gid}'")
            session.commit()
            return [*waiting, gid]
        (session.commit if rng.random() < 0.8 else session.rollback)()
    elif waiting:
        gid = waiting[0]
        database.execute(f"{rng.choice(['commit', 'commit', 'rollback'])} prepared '{gid}'")
        return waiting[1:]
    return waiting


@pytest.mark.soak("a maintenance after a prepared transaction")
def test_maintenance_keeps_what_a_prepared_transaction_needs(runner, database, lake, monkeypatch):
    """However old, the batch with its changes stays until the decision has expired too."""
    job = make_job(database, lake, PREPARED)
    sync(runner, job)
    with database.connect() as a:
        a.execute("insert into t values (1, 'prepared')")
        a.execute(f"prepare transaction 'old {database.name}'")
        a.commit()
    run(runner, job)
    database.execute("insert into t values (2, 'plain')")
    run(runner, job)
    log = job.change_log(job.read_identity())
    (waiting,) = log.prepared()
    assert (waiting.batch, waiting.decided_in) == (1, None)
    monkeypatch.setattr("waldelta.stages.maintain.maintain.now", lambda: now() + timedelta(days=90))
    monkeypatch.setattr(
        "waldelta.slot.recovery.MOVING", timedelta(seconds=-1)
    )  # a checkpoint is told in whole seconds
    database.execute("checkpoint")
    run_maintain(runner, job)
    assert sorted(log.sizes(0, 100)) == [1, 2]
    database.execute(f"commit prepared 'old {database.name}'")
    run(runner, job)
    assert_same(runner, job, database)
    database.execute("checkpoint")
    run_maintain(runner, job)
    assert sorted(log.sizes(0, 100)) == []


def test_a_slot_that_differs_in_two_phase_is_never_called(runner, database, lake):
    """The option would turn the slot's flag on for good."""
    job = make_job(database, lake, {})
    other = pipeline_file(lake, job.pipeline.source.slot, TABLES, PREPARED)
    with pytest.raises(
        ConfigError, match="created with two_phase off, but the pipeline file says otherwise"
    ):
        check_idle(replace(job, pipeline=other))
    assert database.execute(
        "select two_phase from pg_replication_slots where slot_name = %s",
        (job.pipeline.source.slot,),
    ) == [(False,)]


def test_a_prepare_that_landed_before_a_run_died_counts_once(runner, database, lake):
    """Its commit brings it, and not the whole transaction again."""
    job = make_job(database, lake, PREPARED)
    sync(runner, job)
    with database.connect() as a:
        a.execute(rows(1, 3))
        a.execute(f"prepare transaction 'small {database.name}'")
        a.commit()
        a.execute(rows(1, 2000, "u"))
        a.execute(f"prepare transaction 'large {database.name}'")
        a.commit()
    land_only(runner, job, 1)
    run(runner, job)
    database.execute(f"commit prepared 'large {database.name}'")
    database.execute(f"commit prepared 'small {database.name}'")
    (landed,) = run(runner, job).batches
    assert (
        landed.transactions.prepares,
        landed.transactions.prepared_commits,
        landed.transactions.changes,
    ) == (0, 2, 0)
    assert_same(runner, job, database)


def test_messages_of_every_kind_exactly_once(database, lake):
    """Transactional ones with their transaction, prepared ones too; others always. No Spark."""
    runner = InProcess(pytest.fail)
    job = make_job(database, lake, {"messages": True, "two_phase": True}, batch={"max_changes": 3})
    sync(runner, job)
    with database.connect() as a:
        a.execute(emit(True, "kept", "one"))
        a.execute("savepoint s")
        a.execute(emit(True, "dropped", "savepoint"))
        a.execute(emit(False, "beat", "in a savepoint"))
        a.execute("rollback to s")
        a.execute("insert into t values (1, 'x')")
        a.commit()
        a.execute(emit(True, "dropped", "rolled back"))
        a.rollback()
        a.execute(emit(True, "prepared", "é"))
        a.execute(f"prepare transaction 'm {database.name}'")
        a.commit()
    expected = [("beat", b"in a savepoint", False), ("kept", b"one", True)]
    consume_all(runner, job)
    assert messages(job) == expected
    database.execute(emit(False, "beat", ""))
    database.execute(f"commit prepared 'm {database.name}'")
    assert check_idle(job).has_work
    consume_all(runner, job)
    expected += [("beat", b"", False), ("prepared", "é".encode(), True)]
    assert messages(job) == expected
    consume_all(runner, job)
    assert messages(job) == expected
    assert not check_idle(job).has_work
    assert_same(runner, job, database)


def test_messages_in_a_table_with_other_columns_and_features(database, lake):
    """Columns of others are null. Features that change how files are read stop messages."""
    runner, job = InProcess(pytest.fail), make_job(database, lake, {"messages": True})
    sync(runner, job)
    database.execute(emit(True, "beat", "1"))
    consume_all(runner, job)
    alter = DeltaTable(job.lake.bookkeeping(MESSAGES).uri).alter
    alter.add_columns([Field("note", PrimitiveType("string"))])
    database.execute(emit(True, "beat", "2"))
    consume_all(runner, job)
    expected = [("beat", b"1", True), ("beat", b"2", True)]
    assert messages(job) == expected
    DeltaTable(job.lake.bookkeeping(MESSAGES).uri).alter.add_constraint({"c": "batch > 0"})
    database.execute(emit(True, "beat", "3"))
    drain(runner, job)
    with pytest.raises(TargetNotWritable, match="drop them"):
        write_messages(runner, job)
    assert messages(job) == expected


@pytest.mark.soak("a race of two runs")
def test_messages_by_two_runs_at_once(runner, database, lake, monkeypatch):
    """The second run leaves what the first wrote meanwhile; tables get their changes."""
    job = make_job(database, lake, {"messages": True})
    sync(runner, job)
    database.execute(emit(True, "beat", "1"))  # commits, and so is flushed
    drain(runner, job)
    planned, written, real, second = Event(), Event(), messages_module.read_messages, []

    def at_once(*given):
        if not second:
            database.execute(emit(False, "beat", "2"))
            database.execute("insert into t values (1, 'x')")
            drain(runner, job)
            second.append(pool.submit(consume, runner, replace(job, run_id="second"), ["apply"]))
            second[0].add_done_callback(lambda _: planned.set())
            assert planned.wait(60)
        else:
            planned.set()
            assert written.wait(60)
        return real(*given)

    monkeypatch.setattr(messages_module, "read_messages", at_once)
    with ThreadPoolExecutor(1) as pool:
        write_messages(runner, job)
        written.set()
        failed = second[0].exception()
    monkeypatch.undo()
    write_messages(runner, job)
    assert messages(job) == [("beat", b"1", True), ("beat", b"2", False)]
    assert failed.result.error["class"] == "LockHeld"
    assert_same(runner, job, database)


@pytest.mark.nightly("a kill, which the mode faults have")
def test_messages_that_landed_before_a_run_died_are_written_by_the_next(
    runner, database, lake, monkeypatch
):
    """So are those that land until it has their lock."""
    job = make_job(database, lake, {"messages": True})
    database.execute(emit(False, "beat", "1"))
    database.execute(emit(True, "in", "2"))
    drain(runner, job)
    assert check_idle(job).reason == "landed changes wait for the table of logical messages"

    def landed_meanwhile(job, real=messages_module.messages_lock):
        database.execute(emit(True, "in", "3"))
        drain(runner, job)
        return real(job)

    monkeypatch.setattr(messages_module, "messages_lock", landed_meanwhile)
    assert write_messages(runner, job) == 2
    assert messages(job) == [("beat", b"1", False), ("in", b"2", True), ("in", b"3", True)]
    monkeypatch.undo()
    assert drain(runner, job).batches == []
    write_messages(runner, job)
    assert len(messages(job)) == 3


def test_only_what_did_not_arrive_by_replication(runner, database, lake):
    """Origin 'none' leaves out changes with an origin; 'any' reads over Origin messages."""
    for origin, expected in (("none", [(1,)]), ("any", [(1,), (2,)])):
        database.execute("drop table if exists t, u, unpublished; drop publication if exists p")
        name = f"o_{origin}_{database.name}"
        database.execute(
            "create table t(id int primary key, v text); create table u(id int primary key, v text)"
        )
        job = bare_slot(
            database, pipeline_file(f"{lake}_{origin}", name, TABLES, {"origin": origin})
        )
        sync(runner, job)
        database.execute("insert into t values (1, 'here')")
        database.execute("select pg_replication_origin_create(%s)", (name,))
        with database.connect() as a:
            a.execute("select pg_replication_origin_session_setup(%s)", (name,))
            a.execute("insert into t values (2, 'from elsewhere')")
            # Closing tells the backend to end without waiting: an origin in use can't be dropped.
            a.execute("select pg_replication_origin_session_reset()")
            a.commit()
        database.execute("select pg_replication_origin_drop(%s)", (name,))
        run(runner, job)
        found = read_target(job.lake.target("public.t").uri, "id")
        assert sorted(map(tuple, found)) == expected
        database.execute("select pg_drop_replication_slot(%s)", (name,))
        database.execute(f"drop publication {name}_pub")


@pytest.mark.nightly("both formats in one run")
def test_batches_of_both_formats_are_applied_together(runner, database, lake):
    """Whatever waited while the option was switched; equal rows are equal in either format."""
    database.execute(
        "create table t(id int primary key, v text); create table u(f float8, at timestamp, e"
        " real[])"
    )
    database.execute("alter table u replica identity full")
    value = "(1e15 / 3, timestamp '2000-01-01 10:00', '{0.1,1e-7}')"
    job = bare_job(database, lake, TABLES)
    sync(runner, job)
    for binary, statement in (
        (False, f"insert into t values (1, 'a'), (2, 'b'); insert into u values {value}, {value}"),
        (True, f"update t set v = 'c' where id = 1; insert into u values {value}"),
        (False, "delete from t where id = 2; delete from u where ctid = '(0,1)'"),
        (True, "insert into t values (3, null); delete from u where ctid = '(0,2)'"),
    ):
        database.execute(statement)
        drain(
            runner,
            replace(
                job,
                pipeline=pipeline_file(lake, job.pipeline.source.slot, TABLES, {"binary": binary}),
            ),
        )
    assert apply(runner, job).failures == {}
    found = [read_target(job.lake.target(table).uri) for table in TABLES]
    assert sorted((row.id, row.v) for row in found[0]) == database.execute(
        "select * from t order by id"
    )
    assert [(row.f, row.at, row.e) for row in found[1]] == [
        (f, at, pytest.approx(e)) for f, at, e in database.execute("select * from u")
    ]


def test_types_without_a_binary_reader_are_refused_at_setup(database, lake):
    """By name, before anything is changed."""
    database.execute("create type pair as (a int, b int)")
    database.execute(
        "create table t(id int primary key, i interval, a int[], p pair, q pair[], v tsvector)"
    )
    job = load_job(
        pipeline_file(lake, f"s_{database.name}", ["public.t"], {"binary": True}), "test"
    )
    with job.source.connect("test") as connection:
        problems = "\n".join(plan_setup(connection, job).problems)
    assert "column p is of type public.pair, which can't be read in binary format" in problems
    assert "column q is of type public.pair[]" in problems
    assert "column v is of type tsvector" in problems
    assert not [name for name in ("id", "i", "a") if f"column {name} " in problems]
