"""Another program at the slot: moves, readers in between, and dead runs' backends."""

import pytest

from tests.support.pipelines import bare_job
from tests.support.servers.slot_reader import reading_slot
from waldelta.errors import LateWriter, SlotGap, SlotInUse
from waldelta.jobs.consume import land_stage
from waldelta.lake.changelog import Transactions
from waldelta.lsn import Lsn
from waldelta.pipeline import RunResult, StageResult
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow, connect_walsender
from waldelta.postgres.server_position import read_position
from waldelta.slot.acknowledge import check_landed, confirmed_lsn, consume, move_idle_slot
from waldelta.slot.gaps import gaps_recorded, open_gaps
from waldelta.slot.recovery import check_unmoved, slot_move
from waldelta.spark import InProcess
from waldelta.stages.land import idle_check as idle
from waldelta.stages.land.drain import Drained, drain, land
from waldelta.stages.land.idle_check import check_idle


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    return bare_job(database, lake)


def consume_behind_our_back(database, job):
    """What a DBA does by hand: the row is lost to us."""
    database.execute("insert into t select coalesce(max(id), 0) + 1, 'lost' from t")
    database.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())",
        (job.pipeline.source.slot,),
    )


def write(database):
    database.execute("insert into t select coalesce(max(id), 0) + 1, 'kept' from t")


def only_gap(job):
    (gap,) = open_gaps(job.ledger.gaps(job.pipeline.source.slot))
    return gap.cause, gap.from_lsn, gap.to_lsn


@pytest.mark.parametrize("bite", [1, 2], ids=["while Spark starts", "between two bites"])
@pytest.mark.parametrize("acknowledge", ["get", "advance"])
def test_a_move_during_a_run_is_a_gap(runner, database, lake, monkeypatch, bite, acknowledge):
    """What is read behind the hole doesn't land, so nothing hides it."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, options={"acknowledge": acknowledge}, batch={"max_changes": 1})
    slot, identity, bites = job.pipeline.source.slot, job.read_identity(), []
    for _ in range(3):
        write(database)

    def land_late(*args):
        bites.append(confirmed_lsn(database.connection, slot).value)
        if len(bites) == bite:
            database.execute("select pg_replication_slot_advance(%s, %s)", (slot, upto))
        return land(*args)

    upto = database.execute("select pg_current_wal_flush_lsn()")[0][0]
    write(database)
    monkeypatch.setattr("waldelta.stages.land.drain.land", land_late)
    with (
        pytest.raises(SlotGap, match=f"{slot}.*another program consumed changes"),
        gaps_recorded(job),
    ):
        drain(runner, job)
    monkeypatch.undo()
    stands = confirmed_lsn(database.connection, slot).value
    assert only_gap(job) == ("SlotGap", bites[-1], stands)
    assert job.change_log(identity).last_batch() == (bite - 1 or None)
    assert job.ledger.furthest_lsn(slot, identity.incarnation) == bites[-1]
    for again in (check_idle, lambda job: drain(runner, job)):
        with pytest.raises(SlotGap):
            again(job)


def test_a_move_during_a_look_is_a_gap(database, job, monkeypatch):
    """The look's own move would cover the hole."""
    before = confirmed_lsn(database.connection, job.pipeline.source.slot).value
    database.execute("create table unpublished()")
    database.execute("select pg_switch_wal()")
    database.execute("drop table unpublished")

    def slow(*_):
        consume_behind_our_back(database, job)

    monkeypatch.setattr(idle, "_remaining_work", slow)
    with pytest.raises(SlotGap):
        check_idle(job)
    monkeypatch.undo()
    cause, lost_from, _ = only_gap(job)
    assert (cause, lost_from) == ("SlotGap", before)
    with pytest.raises(SlotGap):
        check_idle(job)


def test_a_run_that_wakes_up_behind_another_is_late(database, job):
    """The slot was moved by one of ours: nothing is lost, and no gap recorded."""
    identity, stands = (
        job.read_identity(),
        confirmed_lsn(database.connection, job.pipeline.source.slot),
    )
    write(database)
    upto = read_position(database.connection).flush_lsn
    with job.source.connect("drain") as connection:
        check_unmoved(connection, job, identity, stands)
        move_idle_slot(
            connection, identity.slot, job.ledger, slot_move(identity, "other", upto.value)
        )
        check_unmoved(connection, job, identity, upto)
        with pytest.raises(LateWriter, match="another run has moved slot"):
            check_unmoved(connection, job, identity, stands)


def reading(database, job, application_name):
    source = job.pipeline.source
    return reading_slot(database, source.slot, source.publications[0].name, application_name)


def landing(job):
    """The stage without what needs Spark."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("waldelta.stages.land.drain.drain", lambda *_: Drained(Lsn(0), Lsn(0)))
        land_stage(
            InProcess(pytest.fail), job, RunResult("consume", "r"), StageResult("running", 0.0)
        )


@pytest.mark.parametrize("verb", [check_idle, landing])
@pytest.mark.parametrize("purpose", ["drain", "look", "read"])
def test_what_a_dead_run_left_at_the_slot_is_ended(database, job, verb, purpose):
    """Killed within `get`, say: its backend goes on until it has to send something."""
    with reading(database, job, f"waldelta {purpose} {job.pipeline.source.slot}") as reader:
        verb(job)
        assert reader.wait(timeout=30) != 0


@pytest.mark.parametrize("name", ["debezium", "waldelta drain another", "waldelta"])
def test_a_reader_that_isnt_ours_is_left_alone(database, job, name):
    with reading(database, job, name) as reader:
        with pytest.raises(SlotInUse, match=rf"\({name}\)"):
            check_idle(job)
        assert reader.poll() is None


def holding_a_copy(database, job, name, **options):
    slot = job.pipeline.source.slot
    holder = database.connect(application_name=name, autocommit=True, **options)
    holder.execute(
        "select pg_copy_logical_replication_slot(%s, %s, true)", (slot, f"{slot}_before_get")
    )
    return holder


@pytest.mark.parametrize("verb", [check_idle, landing])
def test_the_copy_that_a_dead_run_holds_goes_with_it(database, job, verb):
    """Nothing tells its backend that the run's host vanished from the network."""
    slot = job.pipeline.source.slot
    with holding_a_copy(database, job, f"waldelta drain {slot}"):
        verb(job)
        assert database.execute(
            "select slot_name from pg_replication_slots where database = %s", (database.name,)
        ) == [(slot,)]


def consume_all(connection, database, job, **options):
    """Consume without having landed, up to the present end."""
    source = job.pipeline.source
    source = source.model_copy(update={"options": source.options.model_copy(update=options)})
    move = slot_move(
        job.read_identity(), "test", read_position(database.connection).flush_lsn.value, 1
    )
    return consume(connection, source, job.ledger, move, Transactions())


def test_a_copy_of_somebody_elses_is_waited_for(database, job):
    """It may be gone with the next attempt; nothing was consumed."""
    write(database)
    before = confirmed_lsn(database.connection, job.pipeline.source.slot)
    with (
        holding_a_copy(database, job, "somebody"),
        job.source.connect("drain") as connection,
        pytest.raises(SlotInUse, match=r"_before_get.*somebody") as caught,
    ):
        consume_all(connection, database, job)
    assert caught.value.retryable
    assert confirmed_lsn(database.connection, job.pipeline.source.slot) == before


def test_a_reader_between_our_statements_has_a_name(database, job):
    """Whatever the server says then can be tried again."""
    write(database)
    source, identity = job.pipeline.source, job.read_identity()
    move = slot_move(identity, "test", read_position(database.connection).flush_lsn.value, 1)
    with job.source.connect("drain") as connection, reading(database, job, "debezium"):
        for act in (
            lambda: consume_all(connection, database, job),
            lambda: consume_all(connection, database, job, acknowledge="advance"),
            lambda: check_landed(connection, source, move, Transactions()),
            lambda: move_idle_slot(connection, source.slot, job.ledger, move),
            lambda: idle._reason_to_run(
                connection,
                job,
                confirmed_lsn(connection, source.slot),
                read_position(connection).flush_lsn,
                60,
            ),
        ):
            with pytest.raises(SlotInUse, match="is active for PID") as caught:
                act()
            assert caught.value.retryable


def test_the_server_notices_a_client_that_is_gone(postgres, monkeypatch):
    """A backend doesn't hold slot or snapshot for hours; a client's own choice counts."""
    kept = (
        "tcp_keepalives_idle",
        "tcp_keepalives_interval",
        "tcp_keepalives_count",
        "tcp_user_timeout",
        "client_connection_check_interval",
        "idle_session_timeout",
    )
    chosen = f"{postgres.conninfo()} options='-c tcp_keepalives_idle=7'"
    for conninfo, idle_s in ((postgres.conninfo(), "30"), (chosen, "7")):
        with connect(conninfo, "test") as connection:
            shown = [connection.execute(f"show {name}").fetchone()[0] for name in kept]
        assert shown == [
            idle_s,
            "10",
            "3",
            "60000",
            "10s",
            "0",
        ]  # tcp_user_timeout in ms, as the system has it
    with connect_arrow(postgres.conninfo(), "test") as arrow, arrow.cursor() as cursor:
        # Whoever takes rows slowly isn't gone.
        cursor.execute(
            "select current_setting('tcp_user_timeout'), current_setting('tcp_keepalives_idle')"
        )
        assert cursor.fetchone() == ("0", "30")
    # As a server says on a platform that can't look.
    monkeypatch.setattr(
        "waldelta.postgres.connection._CHECKS_CLIENT", {"client_connection_check_interval": "-1"}
    )
    for open_connection in (connect, connect_arrow, connect_walsender):
        open_connection(postgres.conninfo(), "test").close()
