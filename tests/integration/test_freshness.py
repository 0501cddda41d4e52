"""Freshness as the check stage finds it on real servers: quiet while nothing is behind, told when it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spark_jobs.flow import consume, run_validate
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from waldelta.expectation_results import read_expectation_results

pytestmark = [pytest.mark.pg, pytest.mark.spark, pytest.mark.usefixtures("compiled")]


def of_run(lake, run_id):
    kind = "expect_target_to_be_fresh"
    found = [r for r in read_expectation_results(lake) if (r.run_id, r.expectation) == (run_id, kind)]
    return {r.meaning: (r.success, r.severity) for r in found}


def test_how_far_behind(spark, database, lake, monkeypatch):
    """By when the run asked how far the source was, not by when anything changed last; and by WAL that came since."""
    database.execute("create table t(id int primary key); create table other(x text)")
    quality = {"enabled": True, "freshness": {"critical_seconds": 7200, "warn_mb": 20}}
    job = bare_slot(database, pipeline_file(lake, f"s_{database.name}", quality=quality))
    sync(spark, job)
    database.execute("insert into t values (1)")
    consume(spark, replace(job, run_id="fresh"))
    seconds, hours = "at most 3,600 s behind the source", "at most 7,200 s behind the source"
    size = "at most 20 MB of WAL behind the source"
    fresh = {seconds: (True, "warning"), hours: (True, "critical"), size: (True, "warning")}
    assert of_run(lake, "fresh") == fresh
    from spark_jobs import source_rules

    # Two hours later nothing has happened on the source: a run that finds that out is up to date.
    database.execute("insert into t values (2)")
    clock = source_rules.now
    with monkeypatch.context() as later:
        later.setattr(source_rules, "now", lambda: clock() + timedelta(seconds=4000))
        result = consume(spark, replace(job, run_id="late"))
    assert result.passed == ["public.t"]
    assert of_run(lake, "late") == fresh | {seconds: (False, "warning")}
    # 20 MB of WAL that nobody has read.
    database.execute(
        "insert into other select repeat(md5(g::text), 60) from generate_series(1, 20000) g; select pg_switch_wal()"
    )
    run_validate(spark, replace(job, run_id="all"))
    assert of_run(lake, "all") == {size: (False, "warning")}
