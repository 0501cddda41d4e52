"""What PostgreSQL can't decode: earlier changes arrive, the error names it, a resync helps."""

import re
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.oracles.compare import differing
from tests.oracles.target_rows import read_target
from tests.support.fixtures.postgres import AT_HAND, new_database
from tests.support.pipelines import bare_job, pipeline_file
from waldelta.errors import SlotUnreadable, SyncFailed
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_resync
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.lsn import Lsn
from waldelta.monitoring.overview import read_glance
from waldelta.monitoring.status import read_status
from waldelta.pipeline.job import load_job
from waldelta.pipeline.run_result import RunFailed
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read.peek import peek_error
from waldelta.stages.land import drain as module
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import apply_setup
from waldelta.stages.sync.sync import sync


def ids(job, table):
    return {row["id"] for row in read_target(job.lake.target(table).uri, "id")}


def confirmed(database):
    return Lsn.parse(
        database.execute("select confirmed_flush_lsn::text from pg_replication_slots")[0][0]
    )


def filtered(database, lake):
    """A pipeline with a table whose row filter raises where n is 0, and another table; set up."""
    database.execute(
        "create table f(id int primary key, n int); alter table f replica identity full; create"
        " table g(id int primary key);insert into f values (1, 1); insert into g values (1)"
    )
    tables = [{"name": "public.f", "where": "10 / n > 0"}, "public.g"]
    job = load_job(pipeline_file(lake, f"s_{database.name}", tables), "first")
    with job.source.connect("setup") as connection:
        assert any(
            "10 / n" in text and "division" in text
            for text in apply_setup(connection, job).warnings
        )
    return job


def write_around(database):
    """Writes a row for which the filter raises, among others; returns its xid."""
    database.execute("insert into g values (2)")
    with database.connect() as early, database.connect() as bad:
        early.execute("insert into g values (3)")
        bad.execute("insert into f values (2, 5)")
        ((xid,),) = bad.execute("select pg_current_xact_id()::text").fetchall()
        bad.execute("insert into f values (3, 0)")
        early.commit()
        for number in (4, 5, 6):
            database.execute("insert into g values (%s)", (number,))
    database.execute("insert into g values (7)")
    return xid


def failed(run):
    """What a run failed by, and its result."""
    with pytest.raises(RunFailed) as caught:
        run()
    return type(caught.value.__cause__), caught.value.result


@pytest.mark.nightly("further messages that can't be decoded; a byte without an equivalent is one")
@pytest.mark.parametrize(
    "any_postgres",
    [
        max(AT_HAND),
        pytest.param(min(AT_HAND), marks=pytest.mark.soak("another version of PostgreSQL")),
    ],
    indirect=True,
    ids="PostgreSQL {}".format,
)
def test_a_row_filter_that_raises(runner, any_database, lake):
    """Other tables get what was committed before; every run and page names it."""
    database, job = any_database, filtered(any_database, lake)
    sync(runner, job)
    xid = write_around(database)

    error, result = failed(lambda: consume(runner, job))
    assert (error, result.error["class"], result.error["retryable"]) == (
        SlotUnreadable,
        "SlotUnreadable",
        False,
    )
    assert {name: stage.status for name, stage in result.stages.items()} == {
        "land": "succeeded", "apply": "failed", "check": "succeeded", "report": "succeeded",
    }  # fmt: skip
    text = result.error["message"]
    assert re.search(
        rf"can't be decoded at \w+/\w+ \(transaction {xid}, commit at \w+/\w+, .*public\.f\)", text
    )
    assert "'division by zero' (SQLSTATE 22012)" in text
    assert "run resync" in text
    assert (ids(job, "public.g"), ids(job, "public.f")) == ({1, 2, 3, 4, 5, 6}, {1})
    assert (result.targets.not_applied, result.landed.as_of, result.landed.landed_as_of) == (
        ["public.f", "public.g"],
        None,
        0,
    )
    stuck = confirmed(database)
    (gap,) = read_status(job)["gaps"]
    assert (gap["cause"], gap["detail"], Lsn.parse(gap["from_lsn"])) == (
        "SlotUnreadable",
        text,
        stuck,
    )
    glance = read_glance(job.pipeline, Ledger(Lake(lake)), datetime.now(UTC))
    assert "can't be decoded past a transaction" in glance.attention[0].text
    assert {line.table_name: line.status for line in glance.tables} == {
        "public.f": "behind",
        "public.g": "behind",
    }

    # The WAL is decoded as it was written.
    database.execute("update f set n = 7 where id = 3")
    with pytest.raises(SlotUnreadable, match=rf"transaction {xid}, .*division by zero"):
        check_idle(job)
    assert failed(lambda: consume(runner, replace(job, run_id="second")))[0] is SlotUnreadable
    assert confirmed(database) == stuck

    former = job.read_identity()
    assert run_resync(runner, replace(job, run_id="resync")).status == "succeeded"
    assert job.read_identity() != former
    assert read_status(job)["gaps"] == []
    database.execute("insert into g values (8); insert into f values (4, 2), (5, 20)")
    assert consume(runner, replace(job, run_id="third")).status == "succeeded"
    assert differing(runner, job) == {}

    # A slot that no run has read yet: a resync does, and finds the new row, which no copy can read.
    database.execute("insert into f values (6, 0); insert into g values (9)")
    assert failed(lambda: run_resync(runner, replace(job, run_id="again")))[0] is SyncFailed
    database.execute("delete from f where id = 6")
    assert run_resync(runner, replace(job, run_id="at last")).status == "succeeded"
    assert 9 in ids(job, "public.g")


@contextmanager
def undecodable(runner, postgres, monkeypatch, lake, encoding, character):
    """A job whose slot holds a character that UTF-8 lacks, in a table of a database in this
    encoding, and what a drain of it gives. Alone in its transaction the row is found with its
    table; a streamed transaction that is open yet stops nothing.
    """
    with new_database(
        postgres, monkeypatch, f"encoding '{encoding}' locale 'C' template template0"
    ) as database:
        database.execute(
            "create table a(id int primary key, v text); create table b(id int primary key, v text)"
        )
        tables, options = ["public.a", "public.b"], {"streaming": "on"}
        job = load_job(pipeline_file(lake, f"s_{database.name}", tables, options), "first")
        with job.source.connect("setup") as connection:
            apply_setup(connection, job)
        sync(runner, job)
        with database.connect(client_encoding=encoding) as session:
            session.execute("set logical_decoding_work_mem = '64kB'")
            session.execute(b"insert into a values (1, E'" + character + b"')")
            session.execute(
                "insert into a select g, repeat('x', 500) from generate_series(2, 2000) g"
            )
            database.execute("insert into b values (1, 'before')")
            assert drain(runner, job).unreadable is None
        database.execute("insert into b values (2, 'after')")
        yield database, job, drain(runner, job)


@pytest.mark.parametrize(
    ("encoding", "character"),
    [
        pytest.param("WIN1252", b"\\x81", id="one byte"),
        pytest.param("EUC_JP", b"\\xfe\\xfe", id="two bytes",
                     marks=pytest.mark.soak("another text of the same encoding")),
    ],
)  # fmt: skip
def test_a_byte_without_an_equivalent(runner, postgres, monkeypatch, lake, encoding, character):
    """It is named with its bytes, its table and its transaction."""
    with undecodable(runner, postgres, monkeypatch, lake, encoding, character) as (_, _, drained):
        sequence = character.decode().replace("\\", " 0").strip()
        told = str(drained.unreadable)
        assert f"table public.a): PostgreSQL says 'character with byte sequence {sequence}" in told
        assert re.search(r"transaction \d+, commit at", told)
        assert drained.changes == 0


@pytest.mark.nightly("two resyncs; test_partition_access has one in make test")
def test_a_resync_is_the_way_past_it(runner, postgres, monkeypatch, lake):
    """A copy can't read such a row either; once it is corrected, a resync goes on behind it."""
    with undecodable(runner, postgres, monkeypatch, lake, "WIN1252", b"\\x81") as (
        database,
        job,
        _,
    ):
        error, _ = failed(lambda: run_resync(runner, replace(job, run_id="resync")))
        assert error is SyncFailed
        database.execute("update a set v = 'z' where id = 1")
        assert run_resync(runner, replace(job, run_id="corrected")).status == "succeeded"
        assert ids(job, "public.a") == {*range(1, 2001)}
        assert ids(job, "public.b") == {1, 2}


def test_an_answer_that_a_dba_cancels_is_no_such_thing(runner, database, lake, monkeypatch):
    """The run ends with an error that the next one may not meet."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake)
    context = 'slot "s", output plugin "pgoutput", in the change callback, associated LSN 0/1715780'
    for code in ("57014", "55P03"):
        err = peek_error("s", ServerError(code, "canceling statement", context), timed_out=False)
        assert (type(err).__name__, err.retryable) == ("SourceUnreachable", True)
    # An error that is gone when the transaction is asked for again.
    database.execute("insert into t values (1, 'x')")
    landed, said = module.land, []

    def once(runner, conninfo, source, bound, *rest):
        if not said:
            said.append(bound)
            words = "could not open relation with OID 5"
            raise peek_error(source.slot, ServerError("XX000", words, context))
        return landed(runner, conninfo, source, bound, *rest)

    monkeypatch.setattr(module, "land", once)
    drained = drain(runner, job)
    assert (drained.unreadable, drained.changes, len(said)) == (None, 1, 1)


@pytest.mark.soak("a row of half a gigabyte")
def test_a_row_that_is_too_large_to_print(runner, any_database, lake):
    """Half a gigabyte of bytes is a gigabyte of text, more than PostgreSQL holds in one value."""
    database = any_database
    database.execute(
        "create table t(id int primary key, v text); create table blob(id int primary key, b bytea)"
    )
    database.execute("alter table blob alter b set storage external")
    database.execute("insert into blob values (3, decode(repeat('ab', 400000000), 'hex'))")
    job = bare_job(database, lake, ["public.t", "public.blob"])
    database.execute("insert into t values (1, 'before')")
    database.execute("update blob set b = b || decode(repeat('ab', 150000000), 'hex')")
    database.execute("insert into t values (2, 'after')")
    drained = drain(runner, job)
    assert "table public.blob): PostgreSQL says 'invalid memory alloc request size" in str(
        drained.unreadable
    )
    assert drained.changes == 1
