"""An idle slot is moved when that frees WAL; the ledger, lag and summary meanwhile."""

import os
import signal
import threading

import psycopg
import pytest
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import TimeoutPosix

from tests.support.pipelines import bare_job
from tests.support.waiting import wait_until
from waldelta.errors import PeekTooLarge
from waldelta.jobs._stages import report_stage
from waldelta.lsn import Lsn
from waldelta.pipeline import RunResult, StageResult
from waldelta.pipeline.run_result import LandedChanges
from waldelta.postgres.server_position import ServerPosition, read_position
from waldelta.slot.acknowledge import confirmed_lsn, named_use
from waldelta.slot.health import oldest_unread
from waldelta.slot.slot import read_slot
from waldelta.stages.land import idle_check as idle
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle

pytestmark = pytest.mark.pg

SEGMENT = 16 << 20


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    return bare_job(database, lake)


def write_wal(database, *, segments: int = 0) -> None:
    """Some unpublished WAL, in so many files."""
    database.execute("create table if not exists unpublished(v text)")
    database.execute(
        "insert into unpublished select repeat('x', 100) from generate_series(1, 1000)"
    )
    for _ in range(segments):
        database.execute("insert into unpublished values ('y')")
        database.execute("select pg_switch_wal()")
    database.execute("insert into unpublished values ('z')")


def begin_segment(database) -> None:
    """Begins a file, so that what a test writes doesn't reach its end by chance."""
    database.execute("create table if not exists filler(v text); insert into filler values ('x')")
    database.execute("select pg_switch_wal()")
    _log_running_transactions(database)


# In MB: restart_lsn, confirmed_flush_lsn, what was read, the end of WAL.
def _log_running_transactions(database) -> None:
    """As the background writer does; decoding may begin at one when it has seen the next."""
    for _ in range(2):
        database.execute("select pg_log_standby_snapshot()")
    database.execute("insert into filler values ('committed, so that the records are flushed')")


MUST_MOVE = {
    "within a file": (1, 1, 15, 15, False),
    "into the next file": (1, 1, 17, 17, True),
    "within a file, with more to read behind": (1, 1, 2, 15, True),
    "nowhere": (3, 3, 3, 9, False),
    "back": (3, 5, 3, 3, False),
    "within a file, decoding begins in an earlier one": (1, 17, 18, 18, True),
    "nowhere, decoding begins in an earlier file": (1, 17, 17, 17, False),
}


@pytest.mark.parametrize(
    "restart, confirmed, upto, flushed, moves", MUST_MOVE.values(), ids=MUST_MOVE
)
def test_when_a_slot_must_move(restart, confirmed, upto, flushed, moves):
    server = ServerPosition("1", 1, Lsn(flushed << 20), 1, SEGMENT, "postgres")
    assert server.must_move(Lsn(confirmed << 20), Lsn(upto << 20), Lsn(restart << 20)) is moves


def test_the_server_says_how_large_its_files_are(database):
    assert read_position(database.connection).wal_segment_size == SEGMENT


def test_a_look_that_frees_nothing_moves_nothing_and_records_nothing(database, job):
    """The ledger stays as it is, and the next idle check reads it all again."""
    begin_segment(database)
    check_idle(job)
    before, moves = (
        confirmed_lsn(database.connection, job.pipeline.source.slot),
        job.ledger.slot_moves(),
    )
    for _ in range(3):
        write_wal(database)
        found = check_idle(job)
        assert (found.has_work, found.moved_to) == (False, None)
        assert 0 < found.lag_bytes < SEGMENT
    assert confirmed_lsn(database.connection, job.pipeline.source.slot) == before
    assert job.ledger.slot_moves() == moves


def test_an_idle_slot_never_holds_back_more_than_a_file(database, job):
    """Unpublished WAL is released without Spark; a published change is work."""
    slot = job.pipeline.source.slot
    for _ in range(3):
        write_wal(database, segments=3)
        before = confirmed_lsn(database.connection, slot)
        found = check_idle(job)
        after = confirmed_lsn(database.connection, slot)
        assert not found.has_work
        assert found.moved_to == str(after)
        assert after > before
        assert found.lag_bytes < SEGMENT
    database.execute("insert into t values (1, 'a')")
    flushed = [read_position(database.connection).flush_lsn]
    seen = check_idle(job)
    flushed.append(read_position(database.connection).flush_lsn)  # the server writes WAL of its own
    assert seen.has_work
    assert seen.reason.startswith("changes between")
    least, most = (lsn - confirmed_lsn(database.connection, slot) for lsn in flushed)
    assert 0 < least <= seen.lag_bytes <= most


def test_files_held_by_a_finished_transaction_are_let_go_without_new_wal(database, job):
    """restart_lsn follows once a move passes records of running transactions."""
    slot = job.pipeline.source.slot
    begin_segment(database)
    write_wal(database, segments=5)
    check_idle(job)  # moves the slot; no such record has been read yet
    assert read_slot(database.connection, slot).retained_bytes > 4 * SEGMENT
    _log_running_transactions(database)
    check_idle(job)
    assert read_slot(database.connection, slot).retained_bytes < SEGMENT


def test_a_landed_batch_is_one_move(runner, database, job):
    """What follows it in the same file isn't worth another; the lag says what was read."""
    begin_segment(database)
    check_idle(job)
    database.execute("insert into t select g, 'x' from generate_series(1, 10) g")
    write_wal(database)
    before = len(job.ledger.slot_moves())
    drained = drain(runner, job)
    (landed,) = drained.batches
    move, compared = job.ledger.slot_moves()[before:]
    assert (compared.event, compared.lsn) == ("compared", move.lsn)
    assert (move.event, move.batch, move.lsn) == ("intent", landed.batch, landed.end_lsn)
    confirmed = confirmed_lsn(database.connection, job.pipeline.source.slot)
    assert confirmed.value == landed.end_lsn
    assert drained.end > confirmed
    result = RunResult("consume", "r", landed=LandedChanges(end_lsn=str(drained.end)))
    report_stage(runner, job, result, StageResult("running", 0.0))
    assert result.reported.lag_bytes == read_position(database.connection).flush_lsn - drained.end
    again = drain(runner, job)
    assert (again.batches, job.ledger.slot_moves()[before:]) == ([], [move, compared])
    assert again.start == confirmed


def test_wal_behind_a_landed_batch_is_released_when_it_fills_a_file(runner, database, job):
    database.execute("insert into t values (1, 'a')")
    write_wal(database, segments=2)
    drained = drain(runner, job)
    assert len(drained.batches) == 1
    assert confirmed_lsn(database.connection, job.pipeline.source.slot) == drained.end


def test_a_look_has_a_budget(database, job, monkeypatch):
    """More WAL than it can read in time is Spark's work; Airflow never has to kill it."""
    from waldelta_airflow import settings

    assert settings.IDLE_CHECK_TIMEOUT.total_seconds() >= 2 * idle.IDLE_CHECK_BUDGET_S
    write_wal(database)
    reads = []

    def read_long(connection, *_):
        reads.append(budget)
        with named_use("s", psycopg.errors.QueryCanceled):
            connection.execute("select pg_sleep(99)")

    monkeypatch.setattr(idle, "first_message", read_long)
    for budget in (0.0, 0.5, 1.5):
        monkeypatch.setattr(idle, "IDLE_CHECK_BUDGET_S", budget)
        seen = check_idle(job)
        assert seen.has_work
        assert seen.reason.startswith("more WAL between")
    assert reads == [1.5]
    monkeypatch.undo()
    assert not check_idle(job).has_work


def test_a_look_leaves_what_has_no_room_to_a_run(database, job):
    """A run takes smaller windows. The search for freshness names what the server lacks."""
    database.execute("insert into t select g, repeat('x', 1500) from generate_series(1, 8000) g")
    database.execute(f"alter database {database.name} set temp_file_limit = '6MB'")
    found = check_idle(job)
    assert found.has_work
    assert found.reason.endswith("or than the server has room for")
    upto = read_position(database.connection).flush_lsn
    with (
        job.source.connect("test") as connection,
        pytest.raises(PeekTooLarge, match="raise temp_file_limit for the role"),
    ):
        oldest_unread(connection, job, upto)


def test_airflows_timeout_ends_a_look(database, job, monkeypatch):
    """Wherever it interrupts a statement, also one whose errors mean that a run has to look."""
    monkeypatch.setattr(
        idle, "adopt_or_report", lambda connection, _: connection.execute("select pg_sleep(60)")
    )
    hanging = "select 1 from pg_stat_activity where query = 'select pg_sleep(60)'"

    def run_out() -> None:
        wait_until(lambda: database.execute(hanging))
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=run_out).start()
    with pytest.raises(AirflowTaskTimeout), TimeoutPosix(90):
        check_idle(job)


def test_moving_the_slot_has_no_limit_of_a_look(database, job, monkeypatch):
    """The statement that moves the slot has no statement timeout."""
    seen = []

    def move(connection, *_):
        seen.extend(connection.execute("show statement_timeout").fetchone())

    monkeypatch.setattr(idle, "move_idle_slot", move)
    write_wal(database, segments=1)
    check_idle(job)
    assert seen == ["0"]


def test_a_locked_table_doesnt_keep_what_waits_in_the_slot(runner, database, job):
    """A run lands during a VACUUM FULL of hours, so that WAL doesn't pile up."""
    database.execute("insert into t values (1, 'a')")
    # Were it waited for, the answer would be that of an unlocked table.
    with database.connect(
        application_name="vacuum", options="-c idle_in_transaction_session_timeout=60s"
    ) as locker:
        locker.execute("lock table t in access exclusive mode")
        seen = check_idle(job)
        assert seen.has_work
        assert seen.reason.startswith("changes between")
        assert drain(runner, job).changes == 1
        locker.rollback()
    assert not check_idle(job).has_work
