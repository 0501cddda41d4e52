"""How many requests a pipeline makes to its object store, and that they don't grow with its age."""

import pytest

from tests.support.pipelines import pipeline_file
from waldelta import Pipeline
from waldelta.jobs import _stages
from waldelta.lake import Lake, delta_target
from waldelta.lake.object_store import requests_made
from waldelta.stages.land.idle_check import check_idle

TABLES = 5
PACK = "lake/_waldelta/known_logs.zip"
# One change is merged and checked by about 20 requests.
MOST_OF_RUN, MOST_OF_IDLE_CHECK, MOST_OF_STATUS = 175, 25, 27
MOST_OF_OLD_LEDGER = 195


@pytest.fixture
def pipeline(database, bucket, runner, monkeypatch) -> Pipeline:
    """Five tables that are copied, in a lake of which delta-rs opens no table any more."""
    for name, value in bucket.storage_options.items():
        monkeypatch.setenv(name, value)
    bucket.configure(runner)
    for n in range(TABLES):
        database.execute(f"create table t{n}(id int primary key, v text)")
        database.execute(f"insert into t{n} select i, 'a' from generate_series(1, 40) i")
    names = [f"public.t{n}" for n in range(TABLES)]
    file = pipeline_file(bucket.uri("lake"), f"s_{database.name}", names, quality={})
    made = Pipeline(file)
    made.setup(spark=runner.spark())
    made.sync(runner)
    change(database)
    made.consume(runner)
    return made


def change(database) -> None:
    for n in range(TABLES):
        database.execute(f"update t{n} set v = v || '!' where id = 1")


def counted(do) -> int:
    """What a call returned isn't looked at; how many requests it made."""
    before = requests_made()
    do()
    return requests_made() - before


def only_copies(monkeypatch) -> None:
    """Fail where delta-rs opens a table in the store, by requests that aren't counted."""

    def refuse(*_, **__):
        raise AssertionError("delta-rs opens a table in the store")

    monkeypatch.setattr(delta_target, "DeltaTable", refuse)


@pytest.mark.nightly("test_lake_on_s3 has such runs, whose requests are counted here")
def test_requests_of_runs(pipeline, database, runner, bucket, monkeypatch):
    only_copies(monkeypatch)
    change(database)
    results = []
    requests = counted(lambda: results.append(pipeline.consume(runner)))
    assert requests <= MOST_OF_RUN
    assert 0 < results[0].store_requests <= requests
    assert counted(lambda: check_idle(pipeline.job())) <= MOST_OF_IDLE_CHECK
    assert counted(pipeline.status) <= MOST_OF_STATUS
    assert {row["v"] for row in rows(pipeline, "public.t4")} == {"a", "a!!"}


@pytest.mark.nightly("many runs, of which test_requests_of_runs has the first")
def test_they_dont_grow(pipeline, database, runner, monkeypatch):
    """Each run is a process of its own here, which begins with what the one before has left."""
    only_copies(monkeypatch)
    requests = []
    for _ in range(12):  # Checkpoints are written, and the ledger's files are compacted.
        change(database)
        requests.append(counted(lambda: pipeline.consume(runner)))
    assert max(requests) <= MOST_OF_OLD_LEDGER
    assert {row["v"] for row in rows(pipeline, "public.t0")} == {"a", "a" + "!" * 13}


@pytest.mark.nightly("a store from which others take away")
def test_a_run_without_what_was_left(pipeline, database, runner, bucket, monkeypatch):
    """It is read again, by more requests; and by another run, where only something is missing."""
    only_copies(monkeypatch)
    old = bucket.read(PACK)
    change(database)
    with_it = counted(lambda: pipeline.consume(runner))
    bucket.client.delete_object(Bucket=bucket.name, Key=PACK)
    change(database)
    assert counted(lambda: pipeline.consume(runner)) > with_it
    bucket.client.put_object(Bucket=bucket.name, Key=PACK, Body=old)
    change(database)
    pipeline.consume(runner)
    assert {row["v"] for row in rows(pipeline, "public.t0")} == {"a", "a!!!!"}
    assert check_idle(pipeline.job()).has_work is False


@pytest.mark.nightly("a store from which others take away")
def test_a_target_that_is_gone_is_noticed(pipeline, database, runner, bucket):
    change(database)
    for key in bucket.keys("lake/public/t2/"):
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    assert check_idle(pipeline.job()).has_work
    with pytest.raises(_stages.RunFailed, match=r"public\.t2: its target .* is gone"):
        pipeline.consume(runner)
    assert {row["v"] for row in rows(pipeline, "public.t1")} == {"a", "a!!"}


def rows(pipeline, name) -> list[dict]:
    target = Lake.of(pipeline.file.target.root).target(name)
    return target.open().dataset().to_table(["id", "v"]).to_pylist()
