"""slot_limits: much WAL held back is a warning with figures."""

import logging

import pytest

from tests.support.pipelines import bare_job
from waldelta.config.pipeline_file import SlotLimits
from waldelta.jobs._stages import report_stage
from waldelta.jobs.consume import land_stage
from waldelta.lake.ledger import now
from waldelta.monitoring.status import of_live_slot, read_status
from waldelta.pipeline import RunResult, StageResult
from waldelta.slot.health import slot_warnings
from waldelta.slot.slot import read_slot
from waldelta.stages.land.idle_check import check_idle


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    limits = {"warn_mb": 20, "critical_mb": 60}
    return bare_job(database, lake, slot_limits=limits)


def hold_back(database, files: int) -> None:
    for _ in range(files):
        database.execute("insert into t values (1, 'x'); delete from t")
        database.execute("select pg_switch_wal()")


def warnings(database, job, limits=None):
    slot = read_slot(database.connection, job.pipeline.source.slot)
    return [
        str(w)
        for w in slot_warnings(
            slot, limits or job.pipeline.slot_limits, job.ledger.last_move(), now()
        )
    ]


def test_figures_and_limits(database, job):
    slot = job.pipeline.source.slot
    assert warnings(database, job) == []
    hold_back(database, 3)
    state = read_slot(database.connection, slot)
    (text,) = warnings(database, job)
    # Figures are rounded to the nearest MB, not down.
    assert text.startswith(
        f"slot {slot!r} keeps {round(state.retained_bytes / (1 << 20))} MB of WAL, and is lost"
        " after "
    )
    assert "slot_limits.warn_mb is 20 MB: run the pipeline more often" in text
    assert str(state.restart_lsn) in text
    hold_back(database, 3)
    (text,) = warnings(database, job)
    assert text.startswith("critical: ")
    assert "slot_limits.critical_mb is 60 MB" in text
    assert warnings(database, job, SlotLimits()) == []


def test_a_look_and_status_tell(database, job, caplog):
    """An idle pipeline starts no Spark, so the look has to say it."""
    hold_back(database, 4)
    with caplog.at_level(logging.WARNING):
        check_idle(job)
    assert "of WAL, and is lost after" in caplog.text
    assert "slot_limits." in read_status(job)["slot"]["warnings"][0]


def test_a_run_says_it_in_its_summary(runner, database, job):
    """And records what it saw of the slot, for those who can't ask the source."""
    hold_back(database, 3)  # 32 to 48 MB, by where in a file the slot begins
    result = RunResult("consume", "r")
    land_stage(runner, job, result, StageResult("running", 0.0))
    (warning,) = result.warnings
    assert warning.startswith(f"when the run began, slot {job.pipeline.source.slot!r} keeps ")
    report_stage(runner, job, result, StageResult("running", 0.0))
    before, after = result.landed.slot_before, result.reported.slot_after
    assert (before.wal_status, after.wal_status) == ("reserved", "reserved")
    assert before.lag_bytes > after.lag_bytes == result.reported.lag_bytes
    assert before.retained_bytes >= 20 << 20
    result.record(job)
    recorded = job.ledger.run_result("r")
    assert (recorded.as_of.isoformat(), recorded.lag_before_bytes) == (before.at, before.lag_bytes)
    assert (recorded.lag_bytes, recorded.retained_bytes) == (after.lag_bytes, after.retained_bytes)


def test_alerts_ask_the_server_itself(database, job):
    """Within the limits nothing; beyond them the warnings of a run; then that the slot is gone."""
    assert list(of_live_slot(job)) == []
    hold_back(database, 3)
    (found,) = of_live_slot(job)
    assert (found.kind, found.severity) == ("slot", "warning")
    assert [found.text] == warnings(database, job)
    database.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))
    (gone,) = of_live_slot(job)
    assert (gone.kind, gone.severity) == ("slot", "failed")
