"""Protocol versions 2 to 4 end to end: streamed, aborted and prepared transactions."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from itertools import count

import pytest

from tests.oracles.target_rows import read_target
from tests.support.landing import land_only, told
from tests.support.pipelines import bare_job, pipeline_file
from waldelta.errors import ConfigError
from waldelta.jobs.maintain import run_maintain
from waldelta.lake import MESSAGES
from waldelta.lake.ledger import now
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.stages.apply.apply import apply
from waldelta.stages.apply.logical_messages import write_messages
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

pytestmark = [pytest.mark.pg, pytest.mark.spark]

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
