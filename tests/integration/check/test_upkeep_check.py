"""What checks after few changes leave to maintenance: rows that no change touched."""

import json
import os
from dataclasses import replace

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.jobs.consume import consume
from waldelta.jobs.maintain import run_maintain
from waldelta.jobs.sync import run_sync
from waldelta.lake import Lake, local_path, staging_folder
from waldelta.lake.ledger import Decisions, Ledger
from waldelta.lake.ledger.check_records import latest_suites
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.sync.sync import sync

BY_A_MERGE = CommitProperties({"userMetadata": json.dumps({"waldelta": {"verb": "apply"}})})


@pytest.mark.parametrize(
    "is_small",
    [True, pytest.param(False, marks=pytest.mark.nightly("the same rows, judged by Spark"))],
)
def test_maintenance_judges_all_rows_of_what_has_changed(
    runner, database, lake, monkeypatch, is_small
):
    """A run with few changes judges the rows it touched; another wrong one is found at night."""
    if not is_small:
        monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 1)
        monkeypatch.setattr("waldelta.stages.check.evaluate._MOST_ROWS", 1)
        # As if each maintenance were the first one after a time of quality.full_check.
        monkeypatch.setattr("waldelta.stages.check.check_run.latest_time", lambda _, now: now)
    database.execute(
        "create table t(id int primary key, v int check (v > 0)); create table u(id int primary"
        " key)"
    )
    database.execute(
        "insert into t select g, g from generate_series(1, 9) g; insert into u values (1)"
    )
    job = bare_job(database, lake, ["public.t", "public.u"], quality={"enabled": True})
    sync(runner, job)

    def run(run_id, statement):
        database.execute(statement)
        return consume(runner, replace(job, run_id=run_id)).checked.passed

    def night(run_id):
        return run_maintain(runner, replace(job, run_id=run_id)).stages["check"].detail

    def judged():
        *_, latest = latest_suites(Ledger(Lake(lake)), ["public.t"])["public.t"]
        return latest.run_id, latest.whole, latest.end_lsn is not None

    assert run("first", "insert into t values (10, 1)") == ["public.t", "public.u"]
    assert judged() == ("first", True, True)  # nothing was known before
    # As if a merge had written it.
    table = DeltaTable(job.lake.target("public.t").uri)
    table.update({"v": "-1"}, predicate="id = 3", commit_properties=BY_A_MERGE)
    if is_small:  # All its rows are read.
        with pytest.raises(RunFailed):
            run("second", "insert into t values (11, 1)")
    else:
        assert run("second", "insert into t values (11, 1)") == ["public.t", "public.u"]
        assert judged() == ("second", False, True)
    with pytest.raises(RunFailed) as failed:
        night("night")
    result = failed.value.result
    assert {name: stage.status for name, stage in result.stages.items()} == {
        "targets": "succeeded", "leftovers": "succeeded", "change_log": "succeeded",
        "ledger": "succeeded", "check": "failed", "reports": "succeeded",
    }  # fmt: skip
    assert result.error["class"] == "QualityFailed"
    assert [text.split(" (")[0] for text in result.checked.failed_expectations] == [
        "public.t: expect_target_rows_to_satisfy: CHECK constraint t_v_check holds:"
    ]
    assert job.ledger.last_run().run_id == "night"
    told = [r for r in read_expectation_results(lake) if r.run_id == "night"]
    assert ("public.t", False) in {(r.table_name, r.success) for r in told}
    assert {r.success for r in told if r.table_name == "public.u"} == {True}
    with pytest.raises(RunFailed):  # until it is met
        night("again")
    run("third", "update t set v = 4 where id = 3")
    # Of a small target, Arrow has judged all rows in that run.
    assert f"{0 if is_small else 1} of them in full" in night("mended")
    assert judged() == ("third" if is_small else "mended", True, True)
    left = local_path(staging_folder(Lake(lake), "public.t", 1, 1, "killed"))
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    assert "0 of them in full" in night("idle")
    # What had staged that writes nothing of quarantined rows any more: see
    # test_a_run_that_slept_since_it_asked_writes_nothing.
    assert (left.exists(), DeltaTable.is_deltatable(Decisions(Lake(lake)).uri)) == (False, True)
    assert run("fourth", "insert into t values (12, 1)") == ["public.t", "public.u"]
    assert judged() == ("fourth", is_small, True)


@pytest.mark.soak("a full check after an incremental one")
def test_changes_of_a_tenth_of_the_rows_are_checked_by_what_they_wrote(runner, database, lake):
    """A key that stands in a file that was there, too, is found; so are those of more changes."""
    database.execute("create table t(id int primary key, v int)")
    database.execute("insert into t select g, 0 from generate_series(1, 101000) g")
    job = bare_job(database, lake, quality={"enabled": True})
    run_sync(runner, job)
    assert latest_suites(Ledger(Lake(lake)), ["public.t"])["public.t"][-1].whole

    def run(run_id, statement):
        database.execute(statement)
        return consume(runner, replace(job, run_id=run_id))

    def whole():
        return latest_suites(Ledger(Lake(lake)), ["public.t"])["public.t"][-1].whole

    assert run("tenth", "update t set v = 1 where id > 90950").checked.passed == ["public.t"]
    assert not whole()
    table = DeltaTable(job.lake.target("public.t").uri)
    double = table.to_pyarrow_table(filters=[("id", "=", 7)])
    write_deltalake(table, double, mode="append", commit_properties=BY_A_MERGE)
    with pytest.raises(RunFailed) as failed:
        run("double", "update t set v = 2 where id > 100990")
    assert [
        text.split(" (")[0].split(":")[1].strip()
        for text in failed.value.result.checked.failed_expectations
    ] == ["expect_target_key_to_be_unique"]
    DeltaTable(table.table_uri).delete("id = 7")
    assert run("more", "update t set v = 3 where id > 90500").checked.passed == ["public.t"]
    assert not whole()


def test_a_sync_of_many_tables_makes_pages_of_those_that_dont_meet_all(
    runner, database, lake, monkeypatch
):
    """Great Expectations would look at each for a second."""
    monkeypatch.setattr("waldelta.stages.check.check_run._MOST_PAGES", 1)
    database.execute(
        "create table t(id int primary key); create table u(id int primary key, v int check (v"
        " > 0))"
    )
    database.execute("insert into t values (1); insert into u values (1, 1)")
    file = pipeline_file(
        lake, f"s_{database.name}", ["public.t", "public.u"], quality={"enabled": True}
    )
    result = run_sync(runner, bare_slot(database, file))
    assert result.checked.passed == ["public.t", "public.u"]
    assert result.checked.report is None
    told = read_expectation_results(lake)
    assert {(r.table_name, r.success) for r in told} == {("public.t", True), ("public.u", True)}
    assert {
        of[-1].whole for of in latest_suites(Ledger(Lake(lake)), ["public.t", "public.u"]).values()
    } == {True}
