"""A lake that can't be written is named before the slot gives anything away."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.pipelines import bare_job, new_pipeline
from waldelta.errors import PreflightFailed, TargetNotWritable
from waldelta.lake import bookkeeping_uri, why_not_writable
from waldelta.lake.storage import CHANGES
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.stages.land.drain import drain
from waldelta.stages.setup.preflight.lake import why_not_writable_in_task

pytestmark = pytest.mark.pg


@pytest.fixture
def blocked(tmp_path):
    """A root below a file; root itself may write anywhere else."""
    (tmp_path / "file").touch()
    return (tmp_path / "file" / "lake").as_uri()


def test_check_says_it_and_makes_nothing(database, blocked, lake):
    """A problem for setup and runs, not for a DBA who is to run the SQL."""
    database.execute("create table t(id int primary key)")
    plan = new_pipeline(database, blocked).check()
    (problem,) = plan.problems
    assert (
        problem
        == f"{blocked} can't be written (Not a directory): check target.root and the permissions"
        " of the user that runs the job"
    )
    with pytest.raises(PreflightFailed):
        plan.require()
    plan.require_for_dba()
    assert new_pipeline(database, lake).check().problems == ()
    assert not Path(urlsplit(lake).path).exists()


def test_object_stores_are_not_asked():
    assert why_not_writable("s3a://nowhere/lake") is None


def test_check_with_a_session_asks_a_task_too(runner, database, blocked, lake):
    database.execute("create table t(id int primary key)")
    assert why_not_writable_in_task(runner.spark(), lake) is None
    problems = new_pipeline(database, blocked).check(runner.spark()).problems
    assert [text.startswith("in Spark's tasks file:") for text in problems] == [False, True]


@pytest.mark.parametrize(
    "way", ["", "_delta_log", "batch=2"], ids=["the change log", "its log", "a batch more"]
)
def test_a_run_names_it_and_consumes_nothing(runner, database, lake, way):
    """With whatever stands in the way gone, the next run lands everything."""
    database.execute("create table t(id int primary key)")
    job = bare_job(database, lake)
    if way == "batch=2":
        database.execute("insert into t values (1)")
        drain(runner, job)
    database.execute("insert into t values (2)")
    slot = job.pipeline.source.slot
    before, moves = confirmed_lsn(database.connection, slot), job.ledger.slot_moves()
    stone = Path(urlsplit(bookkeeping_uri(lake, CHANGES)).path) / way
    stone.parent.mkdir(parents=True, exist_ok=True)
    stone.touch()
    with pytest.raises(TargetNotWritable, match=r"can't be written"):
        drain(runner, job)
    assert (confirmed_lsn(database.connection, slot), job.ledger.slot_moves()) == (before, moves)
    stone.unlink()
    assert drain(runner, job).changes == 1
