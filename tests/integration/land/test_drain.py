"""Landing and consuming: what is durable when, and what a run does after a dead one."""

import json
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tests.support.landing import batch_end, land_only, wrongly_counted
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from tests.support.servers.foreign_language import in_a_foreign_language
from tests.support.servers.slot_reader import reading_slot
from tests.support.waiting import wait_until
from waldelta.config import Publication
from waldelta.errors import (
    ConsumeMismatch,
    LateWriter,
    LockHeld,
    PeekTimeout,
    PeekTooLarge,
    SlotGap,
    SlotInUse,
    SourceChanged,
    SourceDiskFull,
    SourceUnreachable,
    StandbyAway,
)
from waldelta.lake import bookkeeping_uri, local_path
from waldelta.lake.ledger.records import ReadWindowSetting
from waldelta.lake.storage import CHANGES
from waldelta.lsn import Lsn
from waldelta.pipeline import RunResult, StageResult, slot_lock
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.slot.gaps import open_gaps
from waldelta.slot.read.peek import LANDING_SCHEMA, reader_name
from waldelta.slot.slot import check_received
from waldelta.stages.land import drain as land_through
from waldelta.stages.land import idle_check as idle
from waldelta.stages.land.drain import drain, land
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.land.land_stage import land_to_now

pytestmark = pytest.mark.spark


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    return bare_job(database, lake)


@pytest.mark.nightly("what Delta for Spark writes, which changes with its version")
def test_the_change_log_is_the_table_that_spark_would_make(runner, job, lake):
    """Protocol, columns, partitions and properties: what Delta and whoever reads it go by."""
    kinds = {
        pa.int64(): "bigint", pa.string(): "string", pa.bool_(): "boolean", pa.binary(): "binary",
        pa.timestamp("us", tz="UTC"): "timestamp",
    }  # fmt: skip
    columns = ", ".join(f"{field.name} {kinds[field.type]}" for field in LANDING_SCHEMA)
    runner.spark().sql(
        f"create table delta.`{lake}/by_spark` (batch bigint, {columns}) using delta partitioned by"
        " (batch) tblproperties ('delta.dataSkippingStatsColumns' = 'relation_id,xid8,end_lsn',"
        " 'delta.checkpointInterval' = '10')"
    )
    log = job.change_log(job.read_identity())
    log.create(LANDING_SCHEMA)

    def made(uri):
        entry = local_path(uri) / "_delta_log" / f"{0:020d}.json"
        actions = {
            name: action
            for line in entry.read_text().splitlines()
            for name, action in json.loads(line).items()
        }
        kept = ("format", "schemaString", "partitionColumns", "configuration")
        return actions["protocol"], {name: actions["metaData"][name] for name in kept}

    assert made(log.uri) == made(f"{lake}/by_spark")


def test_changes_land_once_and_the_slot_follows(runner, database, job):
    """Also after a run that was killed while it created the change log."""
    killed = local_path(bookkeeping_uri(job.pipeline.target.root, CHANGES)) / "_delta_log"
    killed.mkdir(parents=True)
    (killed / ".00000000000000000000.json.8a3b.tmp").touch()
    database.execute("insert into t select g, 'x' from generate_series(1, 500) g")
    database.execute("update t set v = 'y' where id <= 10")
    database.execute("delete from t where id = 11")
    drained = drain(runner, job)
    (landed,) = drained.batches
    counted = landed.transactions
    assert (counted.commits, counted.inserts, counted.updates, counted.deletes) == (3, 500, 10, 1)
    assert confirmed_lsn(database.connection, job.pipeline.source.slot).value >= landed.end_lsn
    assert drained.end >= Lsn(landed.end_lsn)
    load = (
        drained.load
    )  # landed and consumed: the WAL was read twice, and what it holds decoded twice
    assert load.slot_calls in (2, 3)
    assert load.wal_read_bytes >= 2 * (Lsn(landed.end_lsn) - drained.start)
    assert load.decoded_bytes > 2 * 500
    assert 0 < load.server_seconds < load.slot_seconds
    assert drain(runner, job).batches == []


def test_bites_are_bounded_and_nothing_falls_between_them(runner, database, lake):
    """With tiny bites the same changes land in several batches, each transaction whole."""
    database.execute("create table t(id int primary key, v text)")
    small = {"max_changes": 100, "wal_window_mb": 16}
    job = bare_job(database, lake, batch=small)
    for first in range(0, 500, 50):
        database.execute(
            f"insert into t select g, 'x' from generate_series({first}, {first + 49}) g"
        )
    drained = drain(runner, job)
    assert len(drained.batches) > 1
    assert sum(b.transactions.inserts for b in drained.batches) == 500


@contextmanager
def stalled(database):
    """Decoding waits, as on a slow server, until the block ends; yields the blocker."""
    with database.connect() as blocker:
        blocker.execute("lock table pg_catalog.pg_publication_rel in access exclusive mode")
        yield blocker


def small_bites(database, lake):
    """A pipeline that gives one call a second, and 16 MB of WAL."""
    database.execute("create table t(id int primary key, v text)")
    batch = {"wal_window_mb": 16, "statement_timeout_s": 1}
    return bare_job(database, lake, batch=batch)


@pytest.fixture
def wide(database, lake):
    """Of that pipeline: 18,000 changes, 27 MB of WAL."""
    job = small_bites(database, lake)
    for first in range(0, 18000, 1000):
        database.execute(
            f"insert into t select g, repeat('x', 1500) from generate_series({first},"
            f" {first + 999}) g"
        )
    return job


def windows(monkeypatch, job, killed_at=0):
    """The ends of the read windows in MB from the slot's position; one kills the run."""
    with job.source.connect("test") as connection:
        began, asked = confirmed_lsn(connection, job.pipeline.source.slot), []

    def seen(runner, conninfo, source, bound, *rest):
        asked.append((bound.upto_lsn - began) >> 20)
        if len(asked) == killed_at:
            raise SourceUnreachable("killed")
        return land(runner, conninfo, source, bound, *rest)

    monkeypatch.setattr("waldelta.stages.land.drain.land", seen)
    return asked


def test_a_statement_timeout_means_a_smaller_bite(runner, database, wide, monkeypatch, caplog):
    """In any language, in the next run, too; a role's shorter limit doesn't matter."""
    asked = windows(monkeypatch, wide, killed_at=3)
    with stalled(database), in_a_foreign_language(wide.source.conninfo) as foreign:
        for setting in ("statement_timeout", "transaction_timeout"):
            if database.execute("select 1 from pg_settings where name = %s", (setting,)):
                database.execute(f"alter database {database.name} set {setting} = '500ms'")
        abroad = replace(wide, source=replace(wide.source, conninfo=foreign))
        with pytest.raises(SourceUnreachable, match="killed"):
            drain(runner, abroad)
    assert asked == [16, 8, 4]
    assert caplog.text.count("the server was too slow: next read window") == 2
    with caplog.at_level("INFO", "waldelta.stages.land.drain"):
        drained = drain(runner, wide)
    assert asked[3:5] == [4, 12]  # 4 MB, where the first run was; soon answered, so 8 MB more
    assert (drained.changes, drained.load.timeouts) == (18000, 0)
    assert wide.ledger.table(ReadWindowSetting).newest().window_bytes in (8 << 20, 16 << 20, None)
    assert "of WAL left, about" in caplog.text


def test_an_answer_that_never_has_room_says_what_it_takes(runner, database, lake, monkeypatch):
    """As of one huge transaction; nothing is lost, and all goes on once there is room."""
    monkeypatch.setattr("waldelta.slot.read.read_window.SMALLEST_WINDOW_BYTES", 16 << 20)
    job = small_bites(database, lake)
    database.execute("insert into t select g, repeat('x', 1500) from generate_series(1, 8000) g")
    database.execute(f"alter database {database.name} set temp_file_limit = '6MB'")
    with pytest.raises(PeekTooLarge, match="raise temp_file_limit for the role"):
        drain(runner, job)
    database.execute(f"alter database {database.name} reset temp_file_limit")
    assert drain(runner, job).changes == 8000


def test_what_has_landed_is_compared_in_smaller_bites_where_room_lacks(runner, database, lake):
    """The next run, that is: nothing more is decoded in this one."""
    job = small_bites(database, lake)
    database.execute("insert into t select g, repeat('x', 1500) from generate_series(1, 8000) g")
    land_only(runner, job, 1)
    database.execute(f"alter database {database.name} set temp_file_limit = '1MB'")
    with pytest.raises(PeekTooLarge):
        drain(runner, job)
    assert job.ledger.table(ReadWindowSetting).newest().window_bytes == 8 << 20
    database.execute(f"alter database {database.name} reset temp_file_limit")
    assert drain(runner, job).changes == 0
    assert confirmed_lsn(database.connection, job.pipeline.source.slot).value >= batch_end(job, 1)


def test_a_timeout_of_a_slot_that_waits_for_a_standby_is_the_standbys(database):
    """No read window is small enough, and no transaction is to blame."""
    if database.connection.info.server_version < 170000:
        pytest.skip("failover slots are PostgreSQL 17's")
    slot, standby = f"s_{database.name}", f"standby_{database.name}"
    database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput', false, false, true)", (slot,)
    )
    database.execute("select pg_create_physical_replication_slot(%s, true)", (standby,))
    database.execute("select pg_logical_emit_message(true, 'x', 'behind the standby')")
    ((upto,),) = database.execute("select pg_current_wal_flush_lsn()::text")
    with database.connect() as connection:
        check_received(connection, slot, Lsn.parse(upto))
        database.execute(f"alter system set synchronized_standby_slots = '{standby}'")
        database.execute("select pg_reload_conf()")
        try:
            wait_until(
                lambda: (
                    connection.execute("show synchronized_standby_slots").fetchone() == (standby,)
                )
            )
            with pytest.raises(
                StandbyAway, match=f"{standby} .up to .*remove it from synchronized_standby_slots"
            ):
                check_received(connection, slot, Lsn.parse(upto))
            check_received(connection, slot, Lsn(1))
        finally:
            database.execute("alter system reset synchronized_standby_slots")
            database.execute("select pg_reload_conf()")
    for name in (slot, standby):
        database.execute("select pg_drop_replication_slot(%s)", (name,))


def test_a_slot_that_is_stuck_names_who_holds_it(runner, database, lake, monkeypatch, caplog):
    """At the smallest window the timeout grows; then the run ends and names the transaction."""
    monkeypatch.setattr("waldelta.slot.read.read_window.SMALLEST_WINDOW_BYTES", 16 << 20)
    monkeypatch.setattr("waldelta.slot.read.read_window.LONGEST_TIMEOUT_S", 2)
    job = small_bites(database, lake)
    database.execute("insert into t values (1, 'a')")
    before = confirmed_lsn(database.connection, job.pipeline.source.slot)
    with stalled(database) as blocker:
        named = f"oldest open transaction, pid {blocker.info.backend_pid}, open since "
        with pytest.raises(PeekTimeout, match=named):
            drain(runner, job)
        assert (
            "the smallest read window took longer than 1 s: every call reads from the start of the"
            f" {named}" in caplog.text
        )
    assert confirmed_lsn(database.connection, job.pipeline.source.slot) == before
    assert drain(runner, job).changes == 1
    assert job.ledger.table(ReadWindowSetting).newest().window_bytes is None


@pytest.mark.parametrize(
    "error, reads",
    [
        (StandbyAway("conflict with recovery"), 5),  # 16, 8, 4, 2, 1 MB
        (PeekTooLarge("temporary file size exceeds temp_file_limit"), 5),
        (SourceDiskFull("no space left on device"), 2),  # Other sessions need the disk, too.
    ],
    ids=["replay", "limit", "disk"],
)
def test_a_read_that_the_server_ends_means_a_smaller_bite(
    database, lake, monkeypatch, error, reads
):
    """Down to a megabyte: then the run is left to be tried again."""
    database.execute("create table t(id int primary key)")
    job = bare_job(database, lake, batch={"wal_window_mb": 16})
    database.execute("insert into t values (1)")
    asked = []

    def in_the_way(*_):
        asked.append(1)
        raise error

    monkeypatch.setattr("waldelta.stages.land.drain.land", in_the_way)
    with pytest.raises(type(error)):
        drain(None, job)
    assert len(asked) == reads


def test_wal_that_nobody_flushes_is_landed_through(runner, database, job, monkeypatch):
    """A LOCK TABLE's record stays in a quiet server's buffers until a transaction ends."""
    monkeypatch.setattr(land_through, "FLUSH_TIMEOUT_S", 5.0)
    database.execute("insert into t values (1, 'a')")
    drain(runner, job)
    with database.connect() as locker:
        locker.execute("begin; lock table t in access exclusive mode")
        ((written,),) = locker.execute("select pg_current_wal_insert_lsn()::text")
        assert land_through.land_through(runner, job, Lsn.parse(written)).end >= Lsn.parse(written)


def test_one_huge_transaction_is_one_bite(runner, database, lake):
    """It can't be cut, so it goes through whole, in pieces of memory."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, batch={"max_changes": 100, "wal_window_mb": 16})
    database.execute("insert into t select g, repeat('x', 800) from generate_series(1, 30000) g")
    drained = drain(runner, job)
    assert [batch.transactions.inserts for batch in drained.batches] == [30000]


def test_a_run_that_died_before_consuming_is_finished_by_the_next(runner, database, job):
    """Landed but unconsumed changes are consumed, not landed again."""
    database.execute("insert into t values (1, 'a')")
    change_log = land_only(runner, job, 1)
    database.execute("insert into t values (2, 'b')")
    drained = drain(runner, job)
    assert [b.batch for b in drained.batches] == [2]
    assert [b.transactions.inserts for b in drained.batches] == [1]
    assert change_log.landed(1).transactions.inserts == 1
    # Who finds the log without the first one knows that it was there.
    assert [move.batch for move in job.ledger.slot_moves() if move.event == "intent"] == [1, 2]


@pytest.mark.parametrize("then", [False, True], ids=["switched on", "switched off"])
def test_options_that_were_changed_after_a_run_died_are_no_mismatch(runner, database, lake, then):
    """What landed is compared by the options of then: with logical messages, or without."""
    database.execute("create table t(id int primary key, v text)")
    files = {
        asked: pipeline_file(lake, f"s_{database.name}", options={"messages": asked})
        for asked in (False, True)
    }
    job = bare_slot(database, files[then])
    database.execute(
        "begin; insert into t values (1, 'a'); select pg_logical_emit_message(true, 'p', 'x');"
        " commit"
    )
    database.execute("select pg_logical_emit_message(true, 'p', 'a transaction of its own')")
    land_only(runner, job, 1)
    changed = replace(job, pipeline=files[not then])
    drain(runner, changed)
    assert confirmed_lsn(database.connection, job.pipeline.source.slot).value >= batch_end(job, 1)


# What each run asks for, into which tables rows went before it, and the rows of the batches that
# landed; idle: each run moves the slot over what isn't for it.
CHANGED = {
    "taken out": ([("pq", "tu"), ("p", "tu")], False, [2, 1]),
    "put in": ([("p", "tu"), ("pq", "tu")], False, [1, 3]),
    "put in behind an idle move": ([("p", "u"), ("pq", "tu")], True, [2]),
    "taken out before idle moves": ([("pq", "t"), ("p", "u")], True, [1]),
    "taken out for a while": ([("pq", "t"), ("p", "u"), ("pq", "t")], True, [1, 1]),
}


@pytest.mark.parametrize("runs, idle_moves, inserts", CHANGED.values(), ids=CHANGED)
def test_publications_that_were_changed_after_a_run_are_no_mismatch(
    runner, database, lake, runs, idle_moves, inserts
):
    """An immediate stop moved the slot back behind batches of other publications."""
    database.execute("create table t(id int primary key); create table u(id int primary key)")
    database.execute("create publication p for table t; create publication q for table u")
    slot = f"s_{database.name}"
    pipeline = pipeline_file(lake, slot, ["public.t"])
    job = bare_slot(database, pipeline)

    def named(names):
        publications = tuple(Publication(name=name, manage=False) for name in names)
        source = pipeline.source.model_copy(update={"publications": publications})
        return replace(job, pipeline=pipeline.model_copy(update={"source": source}))

    landed = []
    with database.slots_stay_in_memory():
        for number, (names, tables) in enumerate([*runs, (runs[-1][0], "tu")], 1):
            for table in tables:
                database.execute(f"insert into {table} values ({number})")
            if idle_moves and number <= len(runs):
                database.execute("select pg_switch_wal()")
            landed += drain(runner, named(names)).batches if number <= len(runs) else []
    assert [batch.transactions.inserts for batch in landed] == inserts
    database.restart()
    assert confirmed_lsn(database.connection, slot).value < landed[0].end_lsn
    drained = drain(runner, named(runs[-1][0]))
    assert [batch.transactions.inserts for batch in drained.batches] == [len(runs[-1][0])]


@pytest.mark.nightly("how far a slot goes back")
def test_a_slot_that_went_far_back_is_moved_on_a_bite_at_a_time(
    runner, database, lake, monkeypatch
):
    """All since the last checkpoint might be more than the server's disk holds."""
    database.execute("create table t(id int primary key, v text)")
    slot = f"s_{database.name}"
    job = bare_slot(
        database, pipeline_file(lake, slot, batch={"max_changes": 80, "wal_window_mb": 16})
    )
    for setting in (
        "work_mem = '64kB'",
        "temp_file_limit = '600kB'",
    ):  # between one bite's answer and five of them
        database.execute(f"alter database {database.name} set {setting}")
    for first in range(0, 500, 100):
        database.execute(
            f"insert into t select g, repeat('x', 3000) from generate_series({first},"
            f" {first + 99}) g"
        )
    ends = [batch.end_lsn for batch in drain(runner, job).batches]
    assert len(ends) == 5
    database.restart()

    def stands():
        return confirmed_lsn(database.connection, slot).value

    assert stands() < ends[0]
    before = len(job.ledger.slot_moves())
    assert "is behind the change log" in check_idle(job).reason
    assert stands() == ends[0]
    with monkeypatch.context() as patched:
        wrongly_counted(patched, 3)
        with pytest.raises(
            ConsumeMismatch, match=r"landed .* in batch 3; nothing of that was consumed"
        ):
            drain(runner, job)
    assert stands() == ends[1]
    database.execute("insert into t values (500, 'new')")
    assert [batch.transactions.inserts for batch in drain(runner, job).batches] == [1]
    moved = [move for move in job.ledger.slot_moves()[before:] if move.event == "intent"]
    assert [move.batch for move in moved] == [1, 2, 3, 4, 5, 6]
    assert [move.lsn for move in moved[:5]] == ends


def test_a_look_leaves_a_slot_that_is_far_behind_to_a_run(runner, database, job, monkeypatch):
    """No idle check could read a checkpoint's WAL again in its time."""
    slot = job.pipeline.source.slot
    before = confirmed_lsn(database.connection, slot)
    database.execute("insert into t select g, repeat('x', 500) from generate_series(1, 20000) g")
    landed = land_only(runner, job, 1).landed(1)
    monkeypatch.setattr(idle, "_STATEMENT_TIMEOUT_S", 0.001)
    seen = check_idle(job)
    assert (seen.has_work, seen.moved_to) == (True, None)
    assert "is behind the change log" in seen.reason
    assert confirmed_lsn(database.connection, slot) == before
    monkeypatch.undo()
    assert drain(runner, job).batches == []
    assert confirmed_lsn(database.connection, slot).value >= landed.end_lsn


def test_a_slot_moved_by_somebody_else_is_a_named_gap(runner, database, job):
    """Changes that somebody else consumed are never skipped in silence."""
    drain(runner, job)
    database.execute("insert into t values (1, 'lost')")
    slot, publication = job.pipeline.source.slot, job.pipeline.source.publications[0].name
    database.execute(
        "select count(*) from pg_logical_slot_get_binary_changes(%s, null, null, 'proto_version',"
        " '1', 'publication_names', %s)",
        (slot, publication),
    )
    with pytest.raises(SlotGap, match=f"{slot}.*another program consumed changes"):
        drain(runner, job)
    with pytest.raises(SlotGap):
        check_idle(job)


def test_a_change_log_that_lost_batches_is_a_named_gap(runner, database, job):
    """Their numbers would be given again, and targets take them for applied."""
    database.execute("insert into t values (1, 'landed')")
    drain(runner, job)
    folder = local_path(bookkeeping_uri(job.pipeline.target.root, CHANGES))
    folder.rename(folder.with_name("saved"))
    database.execute("insert into t values (2, 'waits')")
    for verb in (check_idle, partial(drain, runner)):
        with pytest.raises(
            SlotGap,
            match=r"ends at batch 0, but batch 1 had landed .* bring the batch back, or run resync",
        ):
            verb(job)
    (gap,) = open_gaps(job.ledger.gaps(job.pipeline.source.slot))
    stands = confirmed_lsn(database.connection, gap.slot)
    assert (gap.from_lsn, gap.to_lsn) == (Lsn.parse(gap.incarnation).value, stands.value)
    folder.with_name("saved").rename(folder)
    assert [batch.batch for batch in drain(runner, job).batches] == [2]


def test_another_server_is_refused(runner, database, job):
    """Positions of one server mean nothing on another."""
    moves = job.ledger.slot_moves()
    job.ledger.append(replace(moves[-1], at=moves[-1].at.replace(year=2100), system_identifier="1"))
    with pytest.raises(SourceChanged, match="set up on system 1"):
        drain(runner, job)


def test_a_reader_left_behind_is_ended(runner, database, job):
    """The backend of a dead attempt doesn't keep the slot from the next one."""
    database.execute("insert into t select g, repeat('x', 500) from generate_series(1, 20000) g")
    slot, publication = job.pipeline.source.slot, job.pipeline.source.publications[0].name
    query = (
        f"select pg_sleep(0.01) from pg_logical_slot_peek_binary_changes('{slot}', null, null,"
        f" 'proto_version', '1', 'publication_names', '{publication}')"
    )
    conninfo = f"{database.conninfo} application_name='{reader_name(slot)}'"
    psql = [str(database.server.bin / "psql"), conninfo, "-Atc", query]
    stuck = subprocess.Popen(psql, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not database.execute(
            "select 1 from pg_stat_activity where application_name = %s", (reader_name(slot),)
        ):
            assert stuck.poll() is None
        assert drain(runner, job).changes == 20000
    finally:
        stuck.wait(timeout=30)


def test_a_run_that_lost_its_lock_has_no_further_effect(runner, database, job):
    """Landed is all it has then; the next run finishes that."""
    database.execute("insert into t values (1, 'a')")
    slot = job.pipeline.source.slot
    before = confirmed_lsn(database.connection, slot)
    asked = []
    with slot_lock(job) as lock:

        def check():
            asked.append(True)
            if len(asked) == 2:  # between landing and consuming
                database.execute("select pg_terminate_backend(%s)", (lock.pid,))
            lock.verify()

        with pytest.raises(LockHeld):
            drain(runner, job, SimpleNamespace(verify=check))
    assert confirmed_lsn(database.connection, slot) == before
    drain(runner, job)
    assert confirmed_lsn(database.connection, slot) > before


def test_what_a_task_raises_comes_back_by_name(runner, database, job):
    """A slot in use, or a bite that took too long, is known as such, not as a failure of Spark."""
    database.execute("insert into t select g, 'x' from generate_series(1, 1000) g")
    source = job.pipeline.source
    with (
        reading_slot(database, source.slot, source.publications[0].name),
        pytest.raises(SlotInUse, match="is being read by another process"),
    ):
        land_only(runner, job, 1)


def test_a_batch_landed_by_another_run_is_noticed(runner, database, job):
    """Delta skips our append in silence; the slot must not be moved to where we, not they, read."""
    database.execute("insert into t values (1, 'a')")
    land_only(runner, job, 1)
    database.execute("insert into t values (2, 'b')")
    with pytest.raises(LateWriter, match="landed by another run"):
        land_only(runner, job, 1)


def test_a_retried_run_has_landed_what_all_its_attempts_landed(runner, database, lake):
    """A failed attempt says what it landed before, and the next one adds its own to that."""
    database.execute("create table t(id int primary key)")
    job = bare_job(database, lake, batch={"max_changes": 10, "wal_window_mb": 16})
    for first in (0, 20, 40):
        database.execute("insert into t select generate_series(%s::int, %s)", (first, first + 19))

    def broken(_):
        raise LateWriter("another run")

    failed, landed, stage = RunResult("consume", "test"), [], StageResult("running", 0.0)
    with pytest.raises(LateWriter, match="another run"):
        land_to_now(runner, job, failed, stage, broken)
    assert 0 < failed.landed.changes < 60
    again = RunResult("consume", "test")
    land_to_now(runner, replace(job, again=True), again, stage, landed.append)
    assert (again.landed.changes, again.landed.start_lsn) == (60, failed.landed.start_lsn)
    other = RunResult("consume", "other")
    database.execute("insert into t values (60)")
    land_to_now(runner, replace(job, run_id="other", again=True), other, stage, landed.append)
    assert other.landed.changes == 1
