"""A whole pipeline whose lake is in an object store, and the name of each failure."""

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.oracles.change_feed import compare_change_feed
from tests.oracles.compare import differing
from tests.support.fixtures.stores import ON_EACH_STORE
from tests.support.pipelines import new_pipeline, pipeline_file
from tests.support.servers.s3_server import READER, Identity
from waldelta import Pipeline
from waldelta.errors import PreflightFailed, StoreUnreachable, TargetNotWritable
from waldelta.lake import Lake, query
from waldelta.lake.log_copy import CopiedTable
from waldelta.pipeline.task_errors import last_error
from waldelta.spark.session import read_log_store
from waldelta.spark.settings import S3_LOG_STORE

STRANGER = Identity("nobody", "wrong-secret")
TABLES = ["public.keyed", "public.keyless", "public.parts"]
DDL = """
create table keyed(id int primary key, v text);
create table keyless(id int, v text);
alter table keyless replica identity full;
create table parts(id int primary key, v text) partition by range (id);
create table parts_low partition of parts for values from (0) to (100);
create table parts_high partition of parts for values from (100) to (200);
insert into keyed select n, 'a' || n from generate_series(1, 40) n;
insert into keyless select n % 7, 'b' from generate_series(1, 40) n;
insert into parts select n * 10, 'c' || n from generate_series(0, 19) n;
"""
CHANGES = """
update keyed set v = v || '!' where id % 2 = 0;
delete from keyed where id > 35;
insert into keyed select n, 'new' from generate_series(100, 120) n;
delete from keyless where id = 3;
insert into keyless values (3, 'again'), (3, 'again');
update parts set id = id + 1, v = 'moved' where id = 90;
"""


@pytest.fixture
def pipeline(database, bucket, runner, monkeypatch) -> Pipeline:
    """Three tables into a lake in the bucket; the environment opens it."""
    return opened(database, bucket, runner, monkeypatch)


def opened(database, bucket, runner, monkeypatch) -> Pipeline:
    for name, value in bucket.storage_options.items():
        monkeypatch.setenv(name, value)
    bucket.configure(runner)
    publication = {
        "name": f"{database.name}_pub",
        "publish_via_partition_root": True,
        "tables": [{"name": name} for name in TABLES],
    }
    slot = f"s_{database.name}"
    file = pipeline_file(
        bucket.uri("lake"),
        slot,
        source={"conn_id": "test_source", "slot": slot, "publications": [publication]},
        target={"root": bucket.uri("lake"), "change_data_feed": True},
    )
    return Pipeline(file)


def held(pipeline, name) -> list[tuple]:
    lake = Lake.of(pipeline.file.target.root)
    rows = lake.target(name).open().dataset().to_table(["id", "v"]).to_pylist()
    return sorted((row["id"], row["v"]) for row in rows)


def nothing_was_made(database) -> bool:
    made = "select 1 from pg_replication_slots union all select 1 from pg_publication"
    return database.execute(made) == []


@ON_EACH_STORE
def test_a_pipeline_holds_what_its_source_does(pipeline, database, bucket, runner):
    database.execute(DDL)
    assert pipeline.check(runner.spark()).problems == ()
    pipeline.setup(spark=runner.spark())
    assert pipeline.sync(runner).status == "succeeded"
    for change in CHANGES.strip().splitlines():
        database.execute(change)
        assert pipeline.consume(runner).status == "succeeded"
    for name in TABLES:
        table = name.removeprefix("public.")
        assert held(pipeline, name) == sorted(database.execute(f"select id, v from {table}"))
        target = pipeline.job().lake.target(name)
        # Where Spark must write, it rewrites a table without a key as a whole.
        replaced = () if target.open().is_writable else range(99)
        assert compare_change_feed(target.uri, 1, replaced, bucket.storage_options) == []
    assert pipeline.reconcile(runner).status == "succeeded"
    assert pipeline.maintain(runner).status == "succeeded"
    assert bucket.keys("lake/_waldelta/staging/") == []
    pipeline.teardown()
    assert nothing_was_made(database)


def test_a_query_reads_the_files_of_the_store(bucket, monkeypatch):
    """Of each version, whose log this process has a copy of."""
    for name, value in bucket.storage_options.items():
        monkeypatch.setenv(name, value)
    target = Lake.of(bucket.uri("lake")).target("public.t")
    for number in range(2):
        rows = pa.table({"id": [number]})
        write_deltalake(target.uri, rows, mode="append", storage_options=bucket.storage_options)
    for version in (1, 0, None):
        table = target.open(version)
        assert isinstance(table.table, CopiedTable)
        rows = query("select id from t", {"t": table}).read_all()
        assert sorted(rows["id"].to_pylist()) == [*range(table.version + 1)]


def test_a_store_that_ignores_conditions_is_refused(pipeline, database, runner, monkeypatch):
    """It would let one of two writers overwrite the other's commit."""
    database.execute(DDL)
    monkeypatch.setattr("waldelta.stages.setup.preflight.lake.replace_by_rows", lambda *_: None)
    with pytest.raises(PreflightFailed, match="two writers make the same commit"):
        pipeline.setup(spark=runner.spark())
    assert nothing_was_made(database)


def test_a_session_that_may_overwrite_commits_is_refused(pipeline, database, runner):
    database.execute(DDL)
    assert read_log_store(runner.spark(), "s3a") == S3_LOG_STORE
    runner.spark().conf.set(
        "spark.delta.logStore.s3a.impl", "io.delta.storage.S3SingleDriverLogStore"
    )
    try:
        for given in (runner.spark(), None):  # Without one, the session that is there is probed.
            with pytest.raises(PreflightFailed, match="accept_unsafe_store"):
                pipeline.setup(spark=given)
    finally:
        runner.spark().conf.set("spark.delta.logStore.s3a.impl", S3_LOG_STORE)
    assert nothing_was_made(database)


@pytest.mark.parametrize("identity", [READER, STRANGER], ids=["read-only", "unknown key"])
def test_a_key_that_lacks_rights_is_named(database, bucket, runner, monkeypatch, identity):
    database.execute(DDL)
    pipeline = opened(database, bucket.seen_by(identity), runner, monkeypatch)
    with pytest.raises(TargetNotWritable, match="check the credentials") as refused:
        pipeline.setup(spark=runner.spark())
    assert identity.secret_key not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not refused.value.retryable
    assert nothing_was_made(database)


def test_a_missing_bucket_is_named(database, bucket, runner, monkeypatch):
    database.execute(DDL)
    gone = type(bucket)(bucket.endpoint, "no-such-bucket", bucket.identity)
    with pytest.raises(TargetNotWritable, match="create the bucket"):
        opened(database, gone, runner, monkeypatch).setup(spark=runner.spark())
    assert nothing_was_made(database)


def test_a_store_that_is_away_is_named(database, bucket, proxy, runner, monkeypatch):
    """By a write, and by a read."""
    monkeypatch.setattr(
        "waldelta.lake.store_connection.REQUEST_LIMITS", {"max_retries": "1", "retry_timeout": "2s"}
    )
    endpoint = proxy.endpoint
    proxy.__exit__()
    with pytest.raises(TargetNotWritable, match="the store doesn't answer") as failed:
        opened(database, bucket.at(endpoint), runner, monkeypatch).setup(spark=runner.spark())
    assert failed.value.retryable
    lake = Lake.of(bucket.uri("lake"))
    with pytest.raises(OSError, match="Generic S3 error") as unnamed:
        lake.target("public.t").open()
    assert isinstance(last_error(unnamed.value), StoreUnreachable)


@pytest.mark.nightly("a move by hand, in the store")
def test_another_name_waits_until_the_operator_has_moved_the_objects(
    database, bucket, runner, monkeypatch
):
    """Runs go on at the old place, whatever part of the objects the new one has already."""
    for name, value in bucket.storage_options.items():
        monkeypatch.setenv(name, value)
    database.execute("create table t(id int primary key, v text); insert into t values (1, 'a')")

    def pipeline(**target):
        root = {"root": bucket.uri("lake")}
        return new_pipeline(database, root["root"], ["public.t"], target=root | target)

    def copy(keys):
        for key in keys:
            to = key.replace("lake/public/t/", "lake/raw/public_t/")
            bucket.client.copy_object(Bucket=bucket.name, Key=to, CopySource=f"{bucket.name}/{key}")

    def run(number, where):
        database.execute(f"insert into t values ({number}, 'b')")
        warnings = moved.consume(runner).warnings
        assert differing(runner, where.job(), "public.t") == {}
        return [text.partition(": ")[2] for text in warnings if "in the lake" in text]

    bucket.configure(runner)
    former = pipeline()
    former.setup(spark=runner.spark())
    former.sync(runner)
    moved = pipeline(names="raw.{schema}_{table}")
    (warning,) = run(2, former)
    assert warning.startswith("an object store can't rename a folder: move")
    copy(key for key in bucket.keys("lake/public/t/") if "_delta_log" not in key)
    assert run(3, former) == [warning]
    copy(bucket.keys("lake/public/t/"))
    (warning,) = run(4, former)
    assert "exists already" in warning
    copy(keys := bucket.keys("lake/public/t/"))
    for key in keys:
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    assert run(5, moved) == []
    assert bucket.keys("lake/public/t/") == []
    first = Lake.of(bucket.uri("lake")).target_named("raw.public_t").open(1)
    assert first.dataset().to_table(["id"])["id"].to_pylist() == [1]
