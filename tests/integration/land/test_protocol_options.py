"""What the protocol carries on request, end to end on a real server: logical messages, origins,
binary values.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

import waldelta.stages.apply.logical_messages as messages_module
from tests.integration.land.test_protocol import (
    STREAMING,
    TABLES,
    assert_same,
    consume_all,
    emit,
    kinds,
    make_job,
    messages,
    rows,
    run,
)
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_slot, pipeline_file
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
    """Transactional ones when, and if, their transaction commits, prepared ones too; others
    whatever happens.
    """
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
    """A second run that has read which messages are written, before a first one wrote them, leaves
    them; tables get their changes.
    """
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


@pytest.mark.soak("a second kind of streamed message")
def test_messages_within_streamed_transactions(runner, database, lake):
    """Those of savepoints rolled back, at any level, and of transactions rolled back, don't count,
    though they are streamed.
    """
    job = make_job(database, lake, STREAMING | {"messages": True})
    sync(runner, job)
    with database.connect() as a, database.connect() as b, database.connect() as c:
        a.execute(emit(True, "kept", "1"))
        a.execute(rows(1, 1500))
        a.execute("savepoint one")
        a.execute(emit(True, "dropped", "savepoint"))
        a.execute("savepoint two")
        a.execute(rows(2001, 3500))
        a.execute(emit(True, "dropped", "savepoint in a savepoint"))
        a.execute(emit(False, "beat", "in a savepoint"))
        a.execute("release two")
        b.execute(rows(1, 1500, "u"))
        b.execute(emit(True, "dropped", "rolled back"))
        b.execute(rows(2001, 3500, "u"))
        b.execute(emit(False, "beat", "in a transaction rolled back"))
        c.execute(rows(7001, 8500))
        c.execute(emit(True, "later", "still open"))
        c.execute(emit(False, "beat", "in an open transaction"))
        a.execute("rollback to one")
        a.execute("savepoint three")
        a.execute(rows(4001, 5500))
        a.execute(emit(True, "kept", "2"))
        a.execute("release three")
        b.rollback()
        database.execute(emit(True, "plain", ""))
        a.commit()
        landed = run(runner, job).batches
        assert {"S", "A", "c"} <= kinds(job, landed[0].batch)
        write_messages(runner, job)
        beats = [
            ("beat", f"in a {where}".encode(), False)
            for where in ("savepoint", "transaction rolled back")
        ]
        beats.append(("beat", b"in an open transaction", False))
        expected = [*beats, ("plain", b"", True), ("kept", b"1", True), ("kept", b"2", True)]
        assert messages(job) == expected
        c.commit()
    run(runner, job)
    write_messages(runner, job)
    assert messages(job) == [*expected, ("later", b"still open", True)]
    assert_same(runner, job, database)


@pytest.mark.nightly("a kill, which the mode faults have")
def test_messages_that_landed_before_a_run_died_are_written_by_the_next(
    runner, database, lake, monkeypatch
):
    """A look sees that they wait, though the slot has nothing new. So are those that land until it
    has their lock.
    """
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
    """With origin 'none' changes that carry an origin are left out; with 'any' their Origin
    messages are read over.
    """
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


ALL_TYPES = """
create type mood as enum ('sad', 'ok');
create domain price as numeric(12, 2);
create table b(
    id uuid primary key, n int, s smallint, l bigint, f float8, r float4, p price, x numeric,
      t text, v varchar(9), c char(4),
    k bytea, d date, ts timestamp, tz timestamptz, j jsonb, m mood, ok bool,
    i interval, h time, a int[], w text[], o mood[], g price[], fa float8[], ta timestamp[],
      e tstzrange, u inet, y point, q money, z varbit
)
"""


@pytest.mark.nightly("both formats of each type; test_wire_format has the types")
def test_binary_and_text_make_the_same_targets(runner, database, lake):
    """Every value, those that stand verbatim in _wd_raw too; keys, old rows and unchanged TOAST as
    well.
    """
    database.execute(ALL_TYPES)
    database.execute("alter table b alter t set storage external")
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    made = {}
    for binary in (False, True):
        options = {"binary": binary, "streaming": "on"}
        name = f"s_{binary}_{database.name}".lower()
        made[binary] = bare_slot(
            database, pipeline_file(f"{lake}_{binary}", name, ["public.b"], options)
        )
        sync(runner, made[binary])
    database.execute("""
        insert into b select gen_random_uuid(), g, -g, g::int8 * g * g, g / 7.0, g / 3.0, g / 8.0,
          g ^ 5 / 1000.0, repeat('é', g * 20),
               g, g, decode(repeat('0aff', g), 'hex'), date '2000-01-01' + g,
               timestamp '2000-01-01' + g * interval '1.5 hours',
               timestamptz '2000-01-01+00' - g * interval '1.000001 hours',
               jsonb_build_object('a', g),
               'ok', g % 2 = 0,
               make_interval(months => g - 200, secs => g / 7.0),
               time '00:00' + g * interval '1.23 s',
               array[g, null, -g],
               array['a', null, '', repeat('"', g)],
               array['sad', null]::mood[], array[g / 8.0, 'NaN'], array[g / 3.0, 'Infinity'],
               array[now()::timestamp, '-infinity'],
               tstzrange('2000-01-01+00', case when g % 3 > 0
                 then timestamptz '2000-01-01+00' + g * interval '1.5 s' end),
                 ('::' || g % 9999)::inet, point(g / 3.0, g),
               g * 1.01, repeat('10', g)::varbit
        from generate_series(1, 400) g
    """)
    database.execute("""
        insert into b(id, n, f, r, p, x, d, ts, tz) values
            ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 1, 'NaN', '-Infinity', 'NaN', 'NaN',
             'infinity', '-infinity', 'infinity'),
            ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 2, '-0', 'Infinity', -0.05, '-Infinity',
             '0044-03-15 BC', '0044-03-15 01:02:03.5 BC',
             '0044-03-15 01:02:03.5+00 BC'),
            ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a13', 3, 1e300, 1e30, 0, 1e-20,
             '12345-01-01', '12345-01-01 10:00', '12345-01-01 10:00+00')
    """)
    database.execute(
        "update b set fa = array[[n, 1e-7], [1e15, 2]], a = '[0:1]={1,2}', w = '{{a},{NULL}}' where"
        " n between 1 and 3"
    )
    database.execute("update b set n = n + 1 where n % 3 = 0")
    database.execute("update b set id = gen_random_uuid() where n % 5 = 0")
    database.execute("alter table b replica identity full")
    database.execute("update b set m = 'sad', t = null where n % 7 = 0")
    database.execute("delete from b where n % 11 = 0")
    found = {}
    for binary, job in made.items():
        run(runner, job)
        held = sorted(read_target(job.lake.target("public.b").uri), key=lambda row: row["id"])
        names = held[0].asDict().keys() - {"_wd_lsn", "_wd_commit_ts"}
        found[binary] = {name: [repr(row[name]) for row in held] for name in names}
    assert len(found[True]["id"]) == database.execute("select count(*) from b")[0][0]
    for name, texts in found[False].items():
        assert (name, found[True][name]) == (name, texts)
    assert sum("infinity" in text for text in found[True]["_wd_raw"]) >= 1


@pytest.mark.nightly("both formats in one run")
def test_batches_of_both_formats_are_applied_together(runner, database, lake):
    """Whatever waited while the option was switched; equal rows are equal in either format."""
    database.execute(
        "create table t(id int primary key, v text); create table u(f float8, at timestamp, e"
        " real[])"
    )
    database.execute("alter table u replica identity full")
    value = "(1e15 / 3, timestamp '2000-01-01 10:00', '{0.1,1e-7}')"
    job = bare_slot(database, pipeline_file(lake, f"s_{database.name}", TABLES))
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
