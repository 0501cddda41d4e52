"""Locks exclude other runs and end with their holder; the slot's state and health."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from tests.support.pipelines import job_for
from tests.support.servers.slot_reader import reading_slot
from tests.support.waiting import wait_until
from waldelta.errors import LockHeld, SlotForeign, SlotInUse, SlotLost, SlotMissing
from waldelta.jobs._stages import run_stages
from waldelta.pipeline import RunResult, advisory_locks, slot_lock, target_lock
from waldelta.pipeline.advisory_locks import (
    LockName,
    LockSessions,
    advisory_lock,
    slot_lock_name,
    target_lock_name,
)
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres import TableId
from waldelta.slot.slot import check_health, create_slot, drop_slot, read_slot
from waldelta.spark import InProcess

pytestmark = pytest.mark.pg


@pytest.fixture
def job(database, lake):
    return job_for(database, lake, {"name": "p", "tables": [{"name": "public.t"}]})


@pytest.fixture
def name(database):
    return "s_" + database.name


def test_keys_are_stable_and_differ():
    """The same in every process and version of Python: locks of two machines must meet."""
    # printf 'waldelta slot flights' | sha256sum
    assert slot_lock_name("flights").key & 0xFFFFFFFFFFFFFFFF == 0xDE91839828CE363C
    assert slot_lock_name("flights").key == int("de91839828ce363c", 16) - 2**64
    names = {
        slot_lock_name("a"),
        slot_lock_name("b"),
        target_lock_name("file:///a", TableId("s", "t")),
        target_lock_name("file:///b", TableId("s", "t")),
        target_lock_name("file:///a", TableId("s", "u")),
    }
    assert len({n.key for n in names}) == 5
    assert target_lock_name("file:///a/", TableId("s", "t")) == target_lock_name(
        "file:///a", TableId("s", "t")
    )


def test_a_stage_waits_for_the_run_that_holds_its_lock(job, monkeypatch):
    """And says so; without time to wait it fails at once."""
    monkeypatch.setattr(advisory_locks, "_PAUSE_S", 0.0)
    other, attempts = ExitStack(), []

    def copy(_, job, result, stage):
        attempts.append(job.lock_wait_s)
        result.warnings.append("public.t needs a whole copy")
        if len(attempts) == 3:
            other.close()
        with target_lock(job, "public.t"):
            stage.detail = "copied"

    def run(lock_wait_s):
        waiting = replace(job, lock_wait_s=lock_wait_s)
        return run_stages(
            InProcess(pytest.fail), waiting, RunResult("sync", "r"), {"sync": copy}, None
        )

    other.enter_context(target_lock(job, "public.t"))
    with other:
        with pytest.raises(RunFailed) as failed:
            run(0)
        assert failed.value.result.error["class"] == "LockHeld"
        result = run(60)
    assert (len(attempts), result.status, result.stages["sync"].detail) == (
        3,
        "succeeded",
        "copied",
    )
    needed, waited = result.warnings
    assert needed == "public.t needs a whole copy"
    assert waited.startswith("stage sync waited for another run: lock 'target ")


def test_second_run_is_told_who_holds_the_lock(job):
    with slot_lock(job) as held:
        held.verify()
        with (
            pytest.raises(
                LockHeld,
                match=rf"pid {held.pid} \(waldelta lock {job.pipeline.source.slot}\) since 20",
            ),
            slot_lock(job),
        ):
            pass
        again = target_lock(job, TableId("public", "t"))
        with (
            target_lock(job, "public.t"),
            target_lock(job, "public.u"),
            pytest.raises(LockHeld),
            again,
        ):
            pass
    with slot_lock(job):
        pass


def test_lock_is_given_back_after_an_error(job):
    with pytest.raises(ZeroDivisionError), slot_lock(job):
        raise ZeroDivisionError
    with slot_lock(job):
        pass


def test_a_lost_connection_is_noticed(database, job):
    with slot_lock(job) as held:
        database.execute("select pg_terminate_backend(%s, 5000)", (held.pid,))
        with pytest.raises(LockHeld, match="was lost"):
            held.verify()


def test_one_session_holds_one_lock_after_the_other(database, job):
    """Never two at once: the session would be given again what it holds."""
    met = []
    with LockSessions(job.source.conninfo) as sessions:

        def held(table):
            with target_lock(job, table, sessions) as lock:
                lock.verify()
                met.append(lock.pid)
                told = rf"'target .* {table}' is held .* pid {lock.pid} \(waldelta lock {table}\)"
                for others in (sessions, None):
                    with pytest.raises(LockHeld, match=told), target_lock(job, table, others):
                        pass
            with target_lock(job, table):
                pass
            return lock

        first = held("public.t")
        with pytest.raises(LockHeld, match="no longer held"):
            first.verify()
        held("public.u")
        with pytest.raises(ZeroDivisionError), target_lock(job, "public.v", sessions):
            raise ZeroDivisionError
        held("public.v")
        assert len(set(met)) == 1
        kept = set(met)
        for pid in _lock_sessions(database):
            database.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        held("public.u")
        assert met[-1] not in kept
        with target_lock(job, "public.t", sessions) as lock:
            database.execute("select pg_terminate_backend(%s, 5000)", (lock.pid,))
            with pytest.raises(LockHeld, match="was lost"):
                lock.verify()
        held("public.t")
        # One for the locks, and one that was refused them.
        wait_until(lambda: len(_lock_sessions(database)) == 2)
    wait_until(lambda: _lock_sessions(database) == [])


def _lock_sessions(database):
    of_ours = (
        "select pid from pg_stat_activity where datname = current_database() and application_name"
        " like 'waldelta lock%%'"
    )
    return [pid for (pid,) in database.execute(of_ours)]


def test_lock_ends_with_a_killed_process(job):
    """kill -9 leaves no lock behind."""
    program = (
        "import os, time, psycopg; from waldelta.pipeline.advisory_locks import advisory_lock,"
        " LockName\nwith advisory_lock(os.environ['SOURCE'], LockName('x'), 'child'):\n   "
        " print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"SOURCE": job.source.conninfo},
    ) as child:
        assert child.stdout.readline() == b"held\n"
        with (
            pytest.raises(LockHeld, match=r"\(child\)"),
            advisory_lock(job.source.conninfo, LockName("x"), "test"),
        ):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()

    def is_free():
        with suppress(LockHeld), advisory_lock(job.source.conninfo, LockName("x"), "test"):
            return True

    wait_until(is_free)


def test_slot_state(conn, database, name):
    assert read_slot(conn, name) is None
    made, read = create_slot(conn, name), read_slot(conn, name)
    moving = ("retained_bytes", "safe_wal_size", "wal_bytes_per_hour")
    assert made == replace(read, **{field: getattr(made, field) for field in moving})
    assert (made.plugin, made.slot_type, made.database, made.in_this_database) == (
        "pgoutput", "logical", database.name, True,
    )  # fmt: skip
    assert (made.active, made.two_phase, made.invalidation_reason, made.wal_status) == (
        False,
        False,
        None,
        "reserved",
    )
    assert made.retained_bytes >= 0
    assert made.timeline == 1
    ((system, lsn),) = database.execute(
        "select system_identifier::text, confirmed_flush_lsn::text from pg_control_system(),"
        " pg_replication_slots where slot_name = %s",
        (name,),
    )
    assert (made.system_identifier, str(made.confirmed_flush_lsn)) == (system, lsn)
    if conn.info.server_version >= 170000:
        assert made.inactive_since is not None
    assert check_health(made, name) is made
    assert drop_slot(conn, name) is True
    assert drop_slot(conn, name) is False


def test_two_phase(conn, name):
    assert create_slot(conn, name, two_phase=True).two_phase


def test_statement_timeout_is_put_back(conn, name):
    conn.execute("set statement_timeout = '7s'")
    create_slot(conn, name)
    assert conn.execute("show statement_timeout").fetchone() == ("7s",)


def test_health(conn, name):
    """Each unfit state has its own error with its remedy."""
    healthy = create_slot(conn, name)
    with pytest.raises(SlotMissing, match="run setup"):
        check_health(None, name)
    for change, error in (
        ({"plugin": "wal2json"}, SlotForeign),
        ({"slot_type": "physical"}, SlotForeign),
        ({"in_this_database": False, "database": "other"}, SlotForeign),
        ({"temporary": True}, SlotForeign),
        ({"wal_status": "lost"}, SlotLost),
        ({"invalidation_reason": "idle_timeout"}, SlotLost),
        ({"active": True, "active_pid": 1, "active_by": "debezium"}, SlotInUse),
    ):
        with pytest.raises(error, match=name):
            check_health(replace(healthy, **change), name)
    # The reader that an earlier attempt left behind is ended by whoever holds the lock.
    check_health(
        replace(healthy, active=True, active_pid=1, active_by=f"waldelta read {name}"), name
    )


def test_slot_in_use_by_another_process(conn, database, name):
    """A real reader: pg_recvlogical."""
    create_slot(conn, name)
    conn.execute("create publication p")
    with reading_slot(database, name, "p"):
        with pytest.raises(SlotInUse, match=r"\(pg_recvlogical\)"):
            check_health(read_slot(conn, name), name)
        with pytest.raises(SlotInUse, match="can't be dropped"):
            drop_slot(conn, name)
