"""A change log that lost a batch: nothing is applied past it, and a resync ends the gap."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from deltalake import DeltaTable

from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, new_pipeline
from waldelta.errors import SlotGap
from waldelta.jobs import Pipeline
from waldelta.jobs.consume import consume
from waldelta.jobs.maintain import run_maintain
from waldelta.jobs.sync import run_resync
from waldelta.lake import local_path
from waldelta.lake.ledger import now
from waldelta.lsn import Lsn
from waldelta.pipeline.run_result import RunFailed
from waldelta.slot.gaps import open_gaps
from waldelta.stages.land.idle_check import check_idle


@pytest.fixture
def job(runner, database, lake):
    """A pipeline whose targets hold their copies."""
    database.execute(
        "create table a(id int primary key, v text); create table b(id int primary key, v text)"
    )
    made = copied_pipeline(runner, new_pipeline(database, lake, ["public.a", "public.b"]))
    return made.job("run")


def land(runner, database, job, *rows):
    """Lands one batch with these rows in both tables; returns the highest number."""
    for number in rows:
        database.execute(
            f"insert into a values ({number}, 'x'); insert into b values ({number}, 'x')"
        )
    consume(runner, job, ["land"])
    return job.change_log(job.read_identity()).highest_batch()


def overwrite_commit(change_log, batch):
    """Puts a DELETE of Spark's in place of a batch's commit, as a store without CAS does."""
    log = DeltaTable(change_log.uri)
    deleted = {
        "commitInfo": {"timestamp": 0, "operation": "DELETE", "operationParameters": {},
                       "engineInfo": "Spark"},
    }  # fmt: skip
    for version in range(log.version() + 1):
        entry = local_path(change_log.uri) / "_delta_log" / f"{version:020d}.json"
        if f'"batch={batch}/' in entry.read_text():
            entry.write_text(json.dumps(deleted) + "\n")
            return
    raise AssertionError(f"no commit adds batch {batch}")


def versions(job):
    return [DeltaTable(job.lake.target(name).uri).version() for name in ("public.a", "public.b")]


def failure(runner, job, *stages):
    with pytest.raises(RunFailed) as failed:
        consume(runner, job, list(stages) or None)
    assert isinstance(failed.value.__cause__, SlotGap), failed.value
    return str(failed.value.__cause__)


@pytest.mark.nightly("further holes, beside a batch that lost a message")
def test_a_batch_whose_commit_was_overwritten(runner, database, job):
    """Later batches landed on top: every run fails, one gap is recorded, a resync ends it."""
    log = job.change_log(job.read_identity())
    begin = log.end_lsn(land(runner, database, job, 1))
    lacking = land(runner, database, job, 2)
    lost = log.end_lsn(lacking)
    land(runner, database, job, 3)
    before = versions(job)
    overwrite_commit(log, lacking)
    told = failure(runner, job, "apply")
    assert f"{log.uri} has lost messages" in told
    assert f"batch {lacking} holds 0 messages" in told
    assert "run resync" in told
    failure(runner, replace(job, run_id="next"))
    with pytest.raises(SlotGap):
        check_idle(job)
    assert versions(job) == before
    (gap,) = job.ledger.gaps(job.pipeline.source.slot)
    assert (gap.cause, Lsn(gap.from_lsn), Lsn(gap.to_lsn)) == ("SlotGap", Lsn(begin), Lsn(lost))
    run_resync(runner, replace(job, run_id="resync"))
    assert not open_gaps(job.ledger.gaps(job.pipeline.source.slot))
    assert differing(runner, job) == {}
    land(runner, database, replace(job, run_id="after"), 4)
    consume(runner, replace(job, run_id="after 2"))
    assert differing(runner, job) == {}


def test_a_batch_that_lost_a_message(runner, database, job):
    """Its count isn't what had landed; once it is put back, runs go on."""
    batch = land(runner, database, job, 1, 2)
    log = job.change_log(job.read_identity())
    version, landed = DeltaTable(log.uri).version(), log.sizes(0, batch)[batch]
    DeltaTable(log.uri).delete(f"batch = {batch} and kind = 'I' and seq < 5")
    held = log.sizes(0, batch)[batch]
    assert f"batch {batch} holds {held} messages, but {landed} had landed" in failure(runner, job)
    DeltaTable(log.uri).restore(version)
    consume(runner, replace(job, run_id="next"))
    assert differing(runner, job) == {}
    assert not open_gaps(job.ledger.gaps(job.pipeline.source.slot))


@pytest.mark.nightly("further holes, beside a batch that lost a message")
def test_what_all_targets_have_applied(runner, database, job, monkeypatch):
    """Runs go on without it; a replay that needs it is refused; maintenance may drop it."""
    begin, batches = now(), []
    for number in (1, 2, 3):
        batches.append(land(runner, database, replace(job, run_id=f"run {number}"), number))
        consume(runner, replace(job, run_id=f"apply {number}"))
    log = job.change_log(job.read_identity())
    overwrite_commit(log, batches[1])
    consume(runner, replace(job, run_id="goes on"))
    assert not job.ledger.gaps(job.pipeline.source.slot)
    backfill = replace(
        job, run_type="backfill", interval_start=begin, interval_end=now() + timedelta(hours=1)
    )
    assert f"batch {batches[1]} holds 0 messages" in failure(
        runner, replace(backfill, run_id="refused")
    )
    # What landed behind the hole can be replayed.
    later = next(run.at for run in job.ledger.runs() if run.run_id == "apply 2")
    assert (
        consume(runner, replace(backfill, run_id="later", interval_start=later)).status
        == "succeeded"
    )

    database.execute("checkpoint")
    with monkeypatch.context() as old:
        old.setattr("waldelta.stages.maintain.maintain.now", lambda: now() + timedelta(days=90))
        old.setattr(
            "waldelta.slot.recovery.MOVING", timedelta(seconds=-1)
        )  # a checkpoint is known in whole seconds
        run_maintain(runner, replace(job, run_id="maintain"))
    assert log.sizes(0, 99) == {}
    land(runner, database, replace(job, run_id="run 4"), 4)
    consume(runner, replace(job, run_id="apply 4"))
    assert differing(runner, job) == {}
    # Of a table that is copied now, all batches are read again that its snapshot may lack: those
    # that were dropped aren't a hole.
    Pipeline(job.pipeline).sync(runner, ["public.b"], "again")
    land(runner, database, replace(job, run_id="run 5"), 5)
    consume(runner, replace(job, run_id="apply 5"))
    assert differing(runner, job) == {}
