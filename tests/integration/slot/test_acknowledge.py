"""What the slot gives away is what has landed; and what happens where it isn't."""

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

import waldelta.slot.acknowledge as consume_module
from tests.support.landing import land_only, wrongly_counted
from tests.support.pipelines import (
    bare_job,
    bare_slot,
    copied_pipeline,
    new_pipeline,
    pipeline_file,
)
from waldelta.errors import ConsumeMismatch, LateWriter, SlotStuck, SourceUnreachable
from waldelta.jobs.consume import land_stage
from waldelta.pipeline import RunResult, StageResult
from waldelta.pipeline.run_result import RunFailed
from waldelta.slot import acknowledge
from waldelta.slot.acknowledge import confirmed_lsn, consume
from waldelta.slot.recovery import never_compared, slot_move
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    return bare_job(database, lake)


def test_a_mismatch_keeps_a_copy_of_the_slot(runner, database, job):
    """The changes are still there, in the copy, and the run fails."""
    database.execute("insert into t values (1, 'a')")
    change_log = land_only(runner, job, 1)
    landed = change_log.landed(1)
    slot = job.pipeline.source.slot
    wrong = replace(landed.transactions, inserts=2)
    with (
        job.source.connect("test") as connection,
        pytest.raises(ConsumeMismatch, match=f"{slot}_mismatch"),
    ):
        consume(
            connection,
            job.pipeline.source,
            job.ledger,
            slot_move(job.read_identity(), "test", landed.end_lsn, 1),
            wrong,
        )
    kept = database.execute(
        "select count(*) from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version',"
        " '1', 'publication_names', %s)",
        (f"{slot}_mismatch", job.pipeline.source.publications[0].name),
    )
    assert kept == [(4,)]  # Begin, Relation, Insert, Commit


@contextmanager
def counted(monkeypatch, worth_it=1):
    """From so few changes on it is worth it; yields by which options the slot is consumed."""
    asked, real = [], acknowledge.call

    def call(verb, source, *rest):
        if verb == "get":
            asked.append("binary" if source.options.binary else "text")
        return real(verb, source, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(consume_module, "BINARY_COUNT_FROM", worth_it)
        patched.setattr(acknowledge, "call", call)
        yield asked


PLAIN = (
    "create type mood as enum ('sad'); create domain money_like as numeric(9, 2) check (value > 0);"
)


# Types of a column, and how it is counted.
COUNTED = {
    "numeric": "binary",
    "mood": "binary",
    "money_like": "binary",
    "aclitem": "binary",  # has no binary form, and is sent as text
    "int[]": "text",
    "aclitem[]": "text",
    "int4range": "text",
    "composite": "text",
    "vector(3)": "text",  # an extension's
}


def test_what_is_consumed_is_counted_in_binary_where_all_types_are_plain(
    runner, database, lake, monkeypatch
):
    """The same sums at less cost; the catalogs name types that may refuse it."""
    database.execute(
        f"create extension vector; {PLAIN} create type composite as (a int, b aclitem);"
        " create table unpublished(v aclitem[])"
    )
    for n, (column, how) in enumerate(COUNTED.items()):
        database.execute(f"create table t{n}(id int primary key, v {column})")
        file = pipeline_file(f"{lake}/{n}", f"s{n}_{database.name}", [f"public.t{n}"])
        job = bare_slot(database, file)
        database.execute(f"insert into t{n} select g from generate_series(1, 100) g")
        with counted(monkeypatch) as asked:
            assert drain(runner, job).changes == 100, column
        assert asked == [how], column


def test_a_column_that_was_dropped_since_may_refuse_its_binary_form(
    runner, database, lake, monkeypatch, caplog
):
    """Its texts are counted then, in another session; the copy of the slot stays."""
    caplog.set_level("INFO", "waldelta.slot.acknowledge")
    database.execute("create table t(id int primary key, acls aclitem[])")
    job = bare_job(database, lake)
    database.execute(
        "insert into t select g, '{postgres=r/postgres}' from generate_series(1, 100) g"
    )
    database.execute("alter table t drop column acls")
    slot, copies = job.pipeline.source.slot, []

    def looked(name):
        if name == "consume.got":
            copies.extend(
                database.execute("select slot_name from pg_replication_slots where temporary")
            )

    with counted(monkeypatch) as asked:
        monkeypatch.setattr(consume_module, "fault_point", looked)
        assert drain(runner, job).changes == 100
    assert asked == ["binary", "text"]
    assert "no binary output function available for type aclitem" in caplog.text
    assert copies == [(f"{slot}_before_get",)]
    assert database.execute(
        "select slot_name from pg_replication_slots where slot_name like %s", (f"{slot}%",)
    ) == [(slot,)]
    database.execute("insert into t values (101)")
    with counted(monkeypatch, worth_it=2) as asked:
        assert drain(runner, job).changes == 1
    assert asked == ["text"]


def end_session_of(database, copy):
    """Whoever holds a temporary slot."""
    database.execute(
        "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where slot_name"
        " = %s",
        (copy,),
    )


def test_without_the_way_back_nothing_is_consumed(runner, database, job, monkeypatch):
    """Without the copy's session the changes stay with the slot."""
    database.execute("insert into t values (1, 'a')")
    slot, real = job.pipeline.source.slot, consume_module.is_plain
    before = confirmed_lsn(database.connection, slot)

    def lost(*args):
        end_session_of(database, f"{slot}_before_get")
        return real(*args)

    with counted(monkeypatch) as asked, monkeypatch.context() as patched:
        patched.setattr(consume_module, "is_plain", lost)
        with pytest.raises(
            SourceUnreachable, match=r"the slot copy .* was lost before anything was consumed"
        ):
            drain(runner, job)
    assert asked == []
    assert confirmed_lsn(database.connection, slot) == before
    assert drain(runner, job).changes == 0  # they have landed
    assert confirmed_lsn(database.connection, slot) > before


def test_what_was_found_equal_stands_though_the_copys_session_is_lost(
    runner, database, job, monkeypatch
):
    """No later run tells of a batch that nobody has compared."""
    database.execute("insert into t values (1, 'a')")
    slot = job.pipeline.source.slot

    def lost(name):
        if name == "consume.got":
            end_session_of(database, f"{slot}_before_get")

    with counted(monkeypatch) as asked, monkeypatch.context() as patched:
        patched.setattr(consume_module, "fault_point", lost)
        with pytest.raises(SourceUnreachable):
            drain(runner, job)
    assert asked == ["binary"]
    assert job.ledger.last_move().event == "compared"
    assert never_compared(database.connection, job, job.read_identity()) == []


def test_another_run_that_moves_the_slot_between_two_tries_is_no_mismatch(
    runner, database, lake, monkeypatch
):
    """A process that slept there would get nothing, and keep a copy that stops all later runs."""
    database.execute("create table t(id int primary key, acls aclitem[])")
    job = bare_job(database, lake)
    database.execute("insert into t values (1, '{postgres=r/postgres}')")
    database.execute("alter table t drop column acls")
    slot, real = job.pipeline.source.slot, consume_module._get_in_binary

    def slept(*args):
        assert real(*args) is None
        database.execute(
            "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (slot,)
        )

    with counted(monkeypatch), monkeypatch.context() as patched:
        patched.setattr(consume_module, "_get_in_binary", slept)
        with pytest.raises(LateWriter, match="another run has moved slot"):
            drain(runner, job)
    # The temporary copy goes with its session; a permanent one would stop all later runs.
    kept = "select count(*) from pg_replication_slots where slot_name like %s and not temporary"
    assert database.execute(kept, (f"{slot}%",)) == [(1,)]


@pytest.mark.parametrize("acknowledge", ["get", "peek", "advance"])
def test_a_slot_that_does_not_move_is_an_error(runner, database, lake, monkeypatch, acknowledge):
    """A run that had something to consume fails when the slot stands where it stood."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, options={"acknowledge": acknowledge})
    database.execute("insert into t values (1, 'a')")
    monkeypatch.setattr("waldelta.slot.acknowledge._advance", lambda *_: None)
    monkeypatch.setattr("waldelta.slot.acknowledge._get_verified", lambda *_: None)
    with pytest.raises(SlotStuck, match="should have moved to"):
        drain(runner, job)


def test_a_run_that_wakes_up_behind_another_consumes_nothing(runner, database, job):
    """Nothing to consume is no mismatch, so no copy of the slot stays."""
    database.execute("insert into t values (1, 'a')")
    landed = land_only(runner, job, 1).landed(1)
    late = slot_move(job.read_identity(), "late", landed.end_lsn, 1)
    drain(runner, job)
    with (
        job.source.connect("test") as connection,
        pytest.raises(LateWriter, match="another run has moved slot"),
    ):
        consume(connection, job.pipeline.source, job.ledger, late, landed.transactions)
    drain(runner, job)


@pytest.mark.parametrize("differs", [False, True], ids=["agrees", "differs"])
def test_a_batch_whose_comparison_was_lost_is_told(runner, database, job, monkeypatch, differs):
    """Backend and copy are gone with the changes: the next runs report it."""
    copy = (
        "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where temporary"
        " and database = %s"
    )

    def lose_backend(step):
        if step == "consume.got":
            database.execute(copy, (database.name,))

    database.execute("insert into t values (1, 'a')")
    with monkeypatch.context() as patched:
        patched.setattr("waldelta.slot.acknowledge.fault_point", lose_backend)
        if differs:
            wrongly_counted(patched)
        lost = (
            r"consumed .* but landed .* in batch 1; .* could not be kept"
            if differs
            else "ended a connection in use"
        )
        with pytest.raises(ConsumeMismatch if differs else SourceUnreachable, match=lost):
            drain(runner, job)
    told = []
    for number in (None, 2, 3):
        if number:
            database.execute("insert into t values (%s, 'b')", (number,))
        result = RunResult("consume", "r")
        land_stage(runner, job, result, StageResult("running", 0.0))
        told.append(result.warnings)
    if differs:
        assert told[0][0].startswith("batch 1 was consumed, but the run ended before it recorded")
    assert told == ([told[0], told[0], []] if differs else [[], [], []])


@pytest.mark.soak("the steps of a whole runbook")
def test_the_runbook_of_a_mismatch(runner, database, lake, monkeypatch):
    """docs/how-to/recover-a-slot.md: runs and resync stop until the copy is dropped."""
    page = (DOCS / "how-to/recover-a-slot.md").read_text()
    chapter = page.split("## ConsumeMismatch")[1].split("\n## ")[0]
    steps = [
        step.replace("flights_cdc", f"s_{database.name}")
        for step in re.split(r"^\d\. ", chapter, flags=re.M)
    ]
    database.execute("create table t(id int primary key, v text); insert into t values (1, 'a')")
    pipeline = copied_pipeline(runner, new_pipeline(database, lake))
    database.execute("insert into t values (2, 'b')")
    with monkeypatch.context() as patched:
        wrongly_counted(patched)
        with pytest.raises(RunFailed, match="_mismatch"):
            pipeline.consume(runner, "first")
    (peek,) = re.findall(r"```sql\n(.*?)```", steps[2], re.DOTALL)
    kinds = dict(database.execute(peek.replace("flights_pub", f"s_{database.name}_pub")))
    assert (kinds[73], kinds[67]) == (1, 1)
    with pytest.raises(RunFailed, match="of an earlier mismatch still exists"):
        pipeline.resync(runner)
    (drop,) = re.findall(r"`(select [^`]*)`", steps[4])
    database.execute(drop)
    verbs = {
        "teardown": pipeline.teardown,
        "setup": pipeline.setup,
        "resync": partial(pipeline.resync, runner),
    }
    told = [verb for verb in re.findall(r"`(\w+)`", steps[5]) if verb in verbs]
    assert told == list(verbs)
    for verb in told:
        verbs[verb]()
    database.execute("insert into t values (3, 'c')")
    pipeline.consume(runner, "after")
    held = (
        DeltaTable(pipeline.target_path("public.t"))
        .to_pyarrow_table(columns=["id", "v"])
        .to_pylist()
    )
    assert sorted(row["id"] for row in held) == [1, 2, 3]


@pytest.mark.parametrize("acknowledge", ["get", "peek"])
def test_what_a_dead_run_landed_is_compared_before_the_slot_moves(
    runner, database, lake, monkeypatch, acknowledge
):
    """The slot still has it all, so a mismatch needs no copy."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, options={"acknowledge": acknowledge})
    database.execute("insert into t values (1, 'a')")
    land_only(runner, job, 1)
    slot = job.pipeline.source.slot
    before = confirmed_lsn(database.connection, slot)
    wrongly_counted(monkeypatch)
    for verb in (check_idle, partial(drain, runner)):
        with pytest.raises(
            ConsumeMismatch, match=r"landed .* in batch 1; nothing of that was consumed"
        ):
            verb(job)
    assert confirmed_lsn(database.connection, slot) == before
    monkeypatch.undo()
    drain(runner, job)
    assert confirmed_lsn(database.connection, slot) > before


def test_a_slot_that_is_verified_by_a_peek_is_never_copied(runner, database, lake, monkeypatch):
    """It moves only over what was compared, so there is nothing to go back to."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, options={"acknowledge": "peek"})
    slot = job.pipeline.source.slot
    monkeypatch.setattr("waldelta.slot.acknowledge._copy_slot", None)
    database.execute("insert into t select g, 'x' from generate_series(1, 500) g")
    (landed,) = drain(runner, job).batches
    assert confirmed_lsn(database.connection, slot).value >= landed.end_lsn
    before = confirmed_lsn(database.connection, slot)
    database.execute("insert into t values (501, 'y')")
    wrongly_counted(monkeypatch)
    for _ in range(2):
        with pytest.raises(ConsumeMismatch, match="nothing of that was consumed"):
            drain(runner, job)
    assert confirmed_lsn(database.connection, slot) == before
    slots = database.execute(
        "select slot_name from pg_replication_slots where database = %s", (database.name,)
    )
    assert slots == [(slot,)]


def test_a_kept_copy_stops_every_later_run(runner, database, job):
    """A mismatch isn't forgotten: the copy holds WAL until somebody has looked at it."""
    slot = job.pipeline.source.slot
    database.execute("select pg_copy_logical_replication_slot(%s, %s)", (slot, f"{slot}_mismatch"))
    with pytest.raises(ConsumeMismatch):
        check_idle(job)
    with pytest.raises(ConsumeMismatch):  # also with nothing to land
        drain(runner, job)
    database.execute("insert into t values (1, 'a')")
    with pytest.raises(ConsumeMismatch, match=f"pg_drop_replication_slot\\('{slot}_mismatch'\\)"):
        drain(runner, job)
    database.execute("select pg_drop_replication_slot(%s)", (f"{slot}_mismatch",))
    drain(runner, job)
