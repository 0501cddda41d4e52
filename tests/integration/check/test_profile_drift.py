"""Drift against earlier runs: nothing is said while all is as it was; then a warning."""

from dataclasses import replace

import pytest

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.jobs.validate import run_validate
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.lake.ledger.check_records import latest_profiles
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.usefixtures("compiled")

ROWS, COLUMNS = (
    "the number of rows is as in earlier runs",
    "columns are distributed as in earlier runs",
)


def of_run(lake, run_id):
    found = [
        r
        for r in read_expectation_results(lake)
        if r.run_id == run_id and r.expectation == "expect_target_to_be_as_before"
    ]
    return {r.meaning: (r.success, r.severity, r.observed) for r in found}


@pytest.mark.soak("profiles of many runs")
def test_drift_is_told_of(runner, database, lake):
    """A column in other units, and rows that are gone; Arrow and Spark measure the same."""
    database.execute("create table t(id int primary key, v numeric(12,2), w text)")
    database.execute(
        "insert into t select g, 10 + g % 7, nullif(g % 4, 0)::text from generate_series(1, 400) g"
    )
    quality = {"enabled": True, "drift": {"after_runs": 3, "of_runs": 10}}
    job = bare_job(database, lake, quality=quality)
    sync(runner, job)
    for number in range(4):
        database.execute(f"insert into t values ({1000 + number}, 12, 'a')")
        consume(runner, replace(job, run_id=f"r{number}"))
        judged = number == 3
        assert bool(of_run(lake, f"r{number}")) == judged
    fine = {ROWS: (True, "warning", "as before"), COLUMNS: (True, "warning", "as before")}
    assert of_run(lake, "r3") == fine
    run_validate(runner, replace(job, run_id="all"))
    assert of_run(lake, "all") == {
        ROWS: (True, "warning", "as before"),
        COLUMNS: (True, "warning", "as before"),
    }
    history = latest_profiles(Ledger(Lake(lake)), ["public.t"], 9)["public.t"]
    assert [p.run_id for p in history] == ["r0", "r1", "r2", "r3", "all"]
    quick, full = history[-2:]
    assert quick.rows == full.rows
    for here, there in zip(quick.columns, full.columns, strict=True):
        for name in ("nulls", "mean", "deviation", "least", "most"):
            assert getattr(here, name) == pytest.approx(getattr(there, name)), (here.name, name)
    database.execute("update t set v = v * 100")
    result = consume(runner, replace(job, run_id="cents"))
    assert result.checked.passed == ["public.t"]
    assert of_run(lake, "cents")[ROWS][0] is True
    assert of_run(lake, "cents")[COLUMNS] == (
        False,
        "warning",
        "v: different mean; v: different minimum; v: different maximum",
    )
    database.execute("delete from t where id > 20")
    consume(runner, replace(job, run_id="gone"))
    assert of_run(lake, "gone")[ROWS] == (False, "warning", "20 rows, in earlier runs 192 to 615")
