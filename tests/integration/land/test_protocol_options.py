"""Protocol options end to end: logical messages, origins, binary values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

import waldelta.stages.apply.logical_messages as messages_module
from tests.integration.land.test_protocol import (
    TABLES,
    assert_same,
    consume_all,
    emit,
    make_job,
    messages,
    run,
)
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.jobs.consume import consume
from waldelta.pipeline.job import load_job
from waldelta.stages.apply.apply import apply
from waldelta.stages.apply.logical_messages import write_messages
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import plan_setup
from waldelta.stages.sync.sync import sync

pytestmark = [pytest.mark.pg, pytest.mark.spark]


def test_messages_of_every_kind_exactly_once(runner, database, lake):
    """Transactional ones with their transaction, prepared ones too; others always."""
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


@pytest.mark.soak("a race of two runs")
def test_messages_by_two_runs_at_once(runner, database, lake, monkeypatch):
    """The second run leaves what the first wrote meanwhile; tables get their changes."""
    job = make_job(database, lake, {"messages": True})
    sync(runner, job)
    database.execute(emit(True, "beat", "1"))  # commits, and so is flushed
    drain(runner, job)
    planned, written, real, second = Event(), Event(), messages_module._messages, []

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

    monkeypatch.setattr(messages_module, "_messages", at_once)
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
            # Closing tells the backend to end without waiting for it: an origin still in use can't
            # be dropped.
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
