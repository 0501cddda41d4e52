"""A lake is its owner's alone on the machine, whichever process writes it."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.support.disk import open_to_others
from tests.support.pipelines import new_pipeline
from waldelta.lake import storage as lake_module


@pytest.fixture(autouse=True)
def usual_umask():
    """What processes have where nobody has cared."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022


@pytest.fixture
def staged(monkeypatch):
    """What was open to others in folders that a run removes before it ends."""
    found: list[str] = []
    remove, removed = shutil.rmtree, []

    def look_and_remove(folder, **how):
        removed.append(folder)
        found.extend(open_to_others(Path(folder)) if Path(folder).exists() else [])
        remove(folder, **how)

    monkeypatch.setattr(lake_module.shutil, "rmtree", look_and_remove)
    yield found
    assert removed


def give_tasks_the_usual_umask(runner) -> None:
    """As tasks of a server have that another user started."""

    def set_umask(parts):
        os.umask(0o022)
        yield from parts

    runner.spark().range(0, 4, 1, 4).mapInArrow(set_umask, "id bigint").collect()


@pytest.mark.nightly("permissions of each kind of file; unit tests have those of each writer")
def test_a_lake_is_its_owners_alone(runner, database, tmp_path, monkeypatch, staged):
    """Targets, change log, ledger, staging and reports, by Spark, delta-rs and pyarrow."""
    database.execute("create table t(id int primary key, v text); insert into t values (1, 'a')")
    lake = tmp_path / "made_by_setup" / "lake"
    target = {"root": lake.as_uri(), "deletion_vectors": True}
    pipeline = new_pipeline(database, lake.as_uri(), target=target, quality={})
    pipeline.setup()
    assert stat.S_IMODE(lake.stat().st_mode) == 0o700
    pipeline.sync(runner)
    give_tasks_the_usual_umask(runner)
    with monkeypatch.context() as by_spark:
        by_spark.setattr("waldelta.lake.changelog.batch_range.MOST_DRIVER_ROWS", 0)
        by_spark.setattr("waldelta.changes.merge.file_merge.read_small", lambda *_: None)
        database.execute(
            "insert into t select n, 'b' from generate_series(2, 50) n; update t set v = 'c' where"
            " id = 1"
        )
        pipeline.consume(runner)
    database.execute("delete from t where id = 2")
    pipeline.consume(runner)
    pipeline.maintain(runner)
    pipeline.teardown()
    assert {path.name for path in lake.iterdir()} == {"_waldelta", "public"}
    assert open_to_others(lake) == []
    assert staged == []
