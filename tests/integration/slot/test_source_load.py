"""What the slot's counters and snapshots tell of one run, and of no other work."""

import psutil
import pytest

from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.pipeline.source import SlotMeter, xmin_age
from waldelta.postgres.server_position import read_position
from waldelta.slot.read.peek import call
from waldelta.slot.slot import read_slot
from waldelta.snapshot.exported_snapshot import SnapshotHolder


def test_calls_of_a_slot(database, conn, lake):
    """WAL from restart_lsn on, for each call; what was decoded and spilled for this slot."""
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake)
    source = job.pipeline.source
    database.execute("insert into t select g, repeat('x', 100) from generate_series(1, 3000) g")
    upto = read_position(conn).flush_lsn
    meter, restart = SlotMeter(conn, source.slot), read_slot(conn, source.slot).restart_lsn
    assert meter.restart() == restart
    conn.execute("set logical_decoding_work_mem = '64kB'")
    conn.execute("set work_mem = '64kB'")
    backend = psutil.Process(conn.info.backend_pid)
    before = sum(backend.cpu_times()[:2])
    rows = len(conn.execute(call("peek", source, upto, None, "1")).fetchall())
    assert rows > 3000
    meter.add(1, restart, upto)
    meter.add(2, restart, upto)
    cpu_s = sum(backend.cpu_times()[:2]) - before
    meter.timed_out(60)
    with meter.timed(database.connect(autocommit=True)) as session:
        session.execute("select pg_sleep(0.2)")
    load = meter.load(1.5)
    assert (load.slot_calls, load.wal_read_bytes) == (3, 3 * (upto - restart))
    assert 300_000 < load.decoded_bytes < 2_000_000
    assert load.spilled_bytes > 64_000
    # The whole answer went into a temporary file; of this database nobody else wrote any.
    assert 300_000 < load.database_temp_bytes < 2_000_000
    assert (load.timeouts, load.server_seconds) == (1, pytest.approx(60.2 + cpu_s, abs=1))
    assert load.server_seconds > 60.2 + cpu_s - 0.03  # CPU time is counted in hundredths
    # Another slot's work is another's.
    other = bare_slot(
        database, pipeline_file(f"{lake}2", f"o_{database.name}")
    ).pipeline.source.slot
    assert SlotMeter(conn, other).load(0).decoded_bytes == 0
    # Counters that were reset meanwhile count from there.
    meter = SlotMeter(conn, source.slot)
    conn.execute("select pg_stat_reset_replication_slot(%s)", (source.slot,))
    conn.execute(call("peek", source, upto, None, "1")).fetchall()
    assert 300_000 < meter.load(0).decoded_bytes < 2_000_000


def test_age_of_a_snapshot(database, conn):
    """Transactions that began while the snapshot was held, as somebody else counts them."""
    database.execute("create table t(id int primary key)")
    with SnapshotHolder(database.conninfo) as holder:
        before = xmin_age(conn, holder.snapshot)
        for number in range(5):
            database.execute(f"insert into t values ({number})")
        assert xmin_age(conn, holder.snapshot) >= before + 5
