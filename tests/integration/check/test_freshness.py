"""Freshness as the check stage finds it: quiet while nothing is behind, told when something is."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.jobs.validate import run_validate
from waldelta.pipeline import slot_lock
from waldelta.stages.sync.sync import sync


def of_run(lake, run_id):
    kind = "expect_target_to_be_fresh"
    found = [
        r for r in read_expectation_results(lake) if (r.run_id, r.expectation) == (run_id, kind)
    ]
    return {r.meaning: (r.success, r.severity) for r in found}


def copy_slot(database, slot, name):
    database.execute("select pg_copy_logical_replication_slot(%s, %s)", (slot, name))


@pytest.mark.soak("a wait for WAL that ages")
def test_how_far_behind(runner, database, lake, monkeypatch):
    """By when the run asked the source, not when anything changed last; and by WAL since."""
    database.execute("create table t(id int primary key); create table other(x text)")
    quality = {"enabled": True, "freshness": {"critical_seconds": 7200, "warn_mb": 20}}
    job = bare_job(database, lake, quality=quality)
    sync(runner, job)
    database.execute("insert into t values (1)")
    consume(runner, replace(job, run_id="fresh"))
    seconds, hours = "at most 3,600 s behind the source", "at most 7,200 s behind the source"
    size = "at most 20 MB of WAL behind the source"
    fresh = {seconds: (True, "warning"), hours: (True, "critical"), size: (True, "warning")}
    assert of_run(lake, "fresh") == fresh
    from waldelta.stages.check.suite import source_constraints as source_rules

    # Two hours later nothing has happened on the source: a run that finds that out is up to date.
    database.execute("insert into t values (2)")
    clock = source_rules.now
    with monkeypatch.context() as later:
        later.setattr(source_rules, "now", lambda: clock() + timedelta(seconds=4000))
        result = consume(runner, replace(job, run_id="late"))
    assert result.checked.passed == ["public.t"]
    assert of_run(lake, "late") == fresh | {seconds: (False, "warning")}
    # Asked for, all targets are judged, with checks switched off too; now none is behind.
    off = job.pipeline.quality.model_copy(update={"enabled": False})
    # A message of no transaction, which has no time, stands before the change.
    options = job.pipeline.source.options.model_copy(update={"messages": True})
    source = job.pipeline.source.model_copy(update={"options": options})
    job = replace(job, pipeline=job.pipeline.model_copy(update={"quality": off}))
    with_messages = replace(job, pipeline=job.pipeline.model_copy(update={"source": source}))

    def validated(run_id, job=job):
        with monkeypatch.context() as later:
            later.setattr(source_rules, "now", lambda: clock() + timedelta(seconds=4000))
            run_validate(runner, replace(job, run_id=run_id))
        return of_run(lake, run_id)

    assert validated("idle") == fresh
    kept = f"{source.slot}_kept"
    copy_slot(database, source.slot, kept)
    database.execute("select pg_logical_emit_message(false, 'p', 'm')")
    database.execute("insert into t values (3)")
    assert validated("unread", with_messages) == fresh | {seconds: (False, "warning")}
    consume(runner, replace(job, run_id="lands"), ["land"])
    assert validated("unapplied") == fresh | {seconds: (False, "warning")}
    with slot_lock(job):
        assert validated("being read") == {size: (True, "warning"), seconds: (False, "warning")}
    consume(runner, replace(job, run_id="applies"))
    # 20 MB of WAL that nobody has read, and that hold nothing for the target.
    database.execute(
        "insert into other select repeat(md5(g::text), 60) from generate_series(1, 20000) g; select"
        " pg_switch_wal()"
    )
    assert validated("all") == fresh | {size: (False, "warning")}
    # After an immediate stop of its server the slot has again what is applied: how much it has
    # beyond isn't known before a run.
    database.execute("select pg_drop_replication_slot(%s)", (source.slot,))
    copy_slot(database, kept, source.slot)
    database.execute("select pg_drop_replication_slot(%s)", (kept,))
    assert validated("back") == {size: (False, "warning")}
