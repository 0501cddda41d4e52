"""Commits of Spark and of delta-rs to one table on S3: none is lost, none counts twice."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from demo.stack.processes import stop, wait_until
from demo.stack.spark_connect_server import SparkConnectServer
from tests.support.fixtures.stores import ON_EACH_SERVER
from tests.support.seeds import chosen_seed
from tests.support.servers.s3_server import READER, Bucket
from waldelta.rehearsal.embedded_postgres import free_port
from waldelta.spark.settings import S3_LOG_STORE, log_store_settings

pytestmark = pytest.mark.skipif(
    not log_store_settings(), reason="WALDELTA_STORES=s3 make setup fetches the jars of S3"
)

IMPL = "spark.delta.logStore.s3a.impl"
FIRST_COMMIT = r"java PUT .*/_delta_log/0{19}1\.json"
THROTTLED_ROUNDS, RACE_ROUNDS = 5, 1000


@dataclass
class Table:
    """A table of one column and one row; Spark reaches it through the proxy."""

    runner: Any
    bucket: Bucket

    def __post_init__(self) -> None:
        self.uri = self.bucket.uri("t")
        self.append_by_delta_rs(0)

    def append_by_delta_rs(self, row: int) -> None:
        rows = pa.table({"id": pa.array([row], pa.int64())})
        write_deltalake(self.uri, rows, mode="append", storage_options=self.bucket.storage_options)

    def append_by_spark(self, row: int) -> None:
        rows = self.runner.spark().range(row, row + 1, 1, 1)
        rows.write.format("delta").mode("append").save(self.uri)

    def opened(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self.bucket.storage_options)

    def rows(self) -> list[int]:
        return sorted(self.opened().to_pyarrow_table()["id"].to_pylist())


@pytest.fixture
def table(runner, bucket, proxy) -> Table:
    bucket.at(proxy.endpoint).configure(runner)
    return Table(runner, bucket)


def commit_while_spark_does(table: Table, proxy) -> None:
    """Spark has found version 1 absent; before its commit arrives, delta-rs commits version 1."""
    with ThreadPoolExecutor(1) as pool, proxy.hold(FIRST_COMMIT) as commit:
        appended = pool.submit(table.append_by_spark, 1)
        commit.wait()
        table.append_by_delta_rs(2)
        commit.release()
        appended.result()


def test_sessions_have_the_log_store(runner):
    assert runner.spark().conf.get(IMPL) == S3_LOG_STORE
    assert runner.spark().conf.get(IMPL.replace("s3a", "s3")) == S3_LOG_STORE


@ON_EACH_SERVER
def test_spark_commits_after_a_commit_that_was_first(table, proxy):
    commit_while_spark_does(table, proxy)
    assert table.rows() == [0, 1, 2]
    assert table.opened().version() == 2
    assert proxy.statuses(FIRST_COMMIT) == [412]


@ON_EACH_SERVER
def test_a_commit_whose_answer_is_lost_counts_once(table, proxy):
    """The SDK repeats the request, and the store refuses the second one because of the first."""
    with proxy.lose_answers(FIRST_COMMIT):
        table.append_by_spark(1)
    assert proxy.statuses(FIRST_COMMIT) == [200, 412]
    assert table.rows() == [0, 1]
    assert table.opened().version() == 1
    table.append_by_spark(2)
    assert table.rows() == [0, 1, 2]


def test_a_commit_by_another_writer_is_no_lost_answer(table, proxy):
    """The first request is refused, its answer is lost, and so the second one is refused, too."""
    with (
        ThreadPoolExecutor(1) as pool,
        proxy.hold(FIRST_COMMIT) as commit,
        proxy.lose_answers(FIRST_COMMIT),
    ):
        appended = pool.submit(table.append_by_spark, 1)
        commit.wait()
        table.append_by_delta_rs(2)
        commit.release()
        appended.result()
    assert proxy.statuses(FIRST_COMMIT) == [412, 412]
    assert table.rows() == [0, 1, 2]


@pytest.mark.nightly("a throttled store")
def test_a_throttled_store_gets_each_commit_once(table, proxy):
    proxy.fail_share = 0.1
    for row in range(1, THROTTLED_ROUNDS):
        table.append_by_spark(row)
    proxy.fail_share = 0
    assert table.rows() == list(range(THROTTLED_ROUNDS))
    assert 503 in proxy.statuses("java")


# pyspark keeps a process in one mode, classic or Connect, so a client is a process of its own.
CONNECT_CLIENT = """
import json, sys
from waldelta.spark.session import spark_session

uri, settings = sys.argv[1], json.loads(sys.argv[2])
spark = spark_session()
for name, value in settings.items():
    spark.conf.set(name, value)
spark.range(1, 2, 1, 1).write.format("delta").mode("append").save(uri)
"""


@pytest.mark.soak("a second way to the same commit")
def test_a_connect_server_commits_after_a_commit_that_was_first(table, proxy, bucket, tmp_path):
    server = SparkConnectServer(
        tmp_path / "connect", free_port(), "1g", token="test-token", log=tmp_path / "spark.log"
    )
    settings = json.dumps(bucket.at(proxy.endpoint).hadoop_settings)
    client = [sys.executable, "-c", CONNECT_CLIENT, table.uri, settings]
    part = server.start(os.environ)
    try:
        wait_until(server.is_listening, "the Spark Connect server", 120, [part])
        with proxy.hold(FIRST_COMMIT) as commit:
            environment = os.environ | {"SPARK_REMOTE": server.remote}
            with subprocess.Popen(client, env=environment) as appended:
                commit.wait()
                table.append_by_delta_rs(2)
                commit.release()
                assert appended.wait() == 0
    finally:
        stop([part], grace_s=5)
    assert proxy.statuses(FIRST_COMMIT) == [412]
    assert table.rows() == [0, 1, 2]


class LogStore:
    """The log store itself, called as Delta calls it."""

    def __init__(self, runner, bucket: Bucket) -> None:
        self._jvm = runner.spark().sparkContext._jvm
        self._conf = runner.spark()._jsparkSession.sessionState().newHadoopConf()
        self._store = getattr(self._jvm.waldelta.spark, S3_LOG_STORE.rpartition(".")[2])(self._conf)
        self._bucket = bucket

    def path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._bucket.uri(f"t/_delta_log/{name}"))

    def write(self, name: str, *lines: str, overwrite: bool = False) -> None:
        actions = self._jvm.java.util.ArrayList()
        for line in lines:
            actions.add(line)
        self._store.write(self.path(name), actions.iterator(), overwrite, self._conf)

    def read(self, name: str) -> list[str]:
        return list(self._store.read(self.path(name), self._conf))

    def names_from(self, name: str) -> list[str]:
        found = self._store.listFrom(self.path(name), self._conf)
        return [status.getPath().getName() for status in found]

    def is_partial_write_visible(self) -> bool:
        return self._store.isPartialWriteVisible(self.path("0.json"), self._conf)


@pytest.fixture
def store(runner, bucket) -> LogStore:
    bucket.configure(runner)
    return LogStore(runner, bucket)


@ON_EACH_SERVER
def test_a_file_is_written_once(store, bucket):
    store.write("0.json", "é", "b")
    assert bucket.read("t/_delta_log/0.json") == "é\nb\n".encode()
    with pytest.raises(Exception, match=r"java\.nio\.file\.FileAlreadyExistsException: .*/0\.json"):
        store.write("0.json", "é", "c")
    store.write("0.json", "é", "b")
    assert store.read("0.json") == ["é", "b"]


@ON_EACH_SERVER
def test_a_large_file_is_written_once(runner, bucket):
    """S3A uploads it in parts; the request that completes it has the condition."""
    bucket.configure(runner)
    for name in ("multipart.size", "multipart.threshold"):
        runner.spark().conf.set(f"fs.s3a.bucket.{bucket.name}.{name}", "5M")
    store, lines = LogStore(runner, bucket), ["a" * 1_000_000] * 6
    for _ in range(2):
        store.write("0.json", *lines)
    with pytest.raises(Exception, match="FileAlreadyExistsException"):
        store.write("0.json", *lines, "b")
    assert store.read("0.json") == lines


def test_a_file_that_may_be_replaced(store):
    for line in ("a", "b"):
        store.write("_last_checkpoint", line, overwrite=True)
    assert store.read("_last_checkpoint") == ["b"]


def test_an_iterator_that_fails_leaves_no_file(runner, store, bucket):
    lines = runner.spark().sparkContext._jvm.java.util.ArrayList()
    lines.add("a")
    lines.add(1)  # It isn't text.
    with pytest.raises(Exception, match="ClassCastException"):
        store._store.write(store.path("0.json"), lines.iterator(), False, store._conf)
    assert bucket.keys() == []


def test_a_store_that_refuses_is_named(runner, bucket):
    """No file is there that could be one's own."""
    reader = bucket.seen_by(READER)
    reader.configure(runner)
    with pytest.raises(Exception, match="AccessDenied"):
        LogStore(runner, reader).write("0.json", "a")
    assert bucket.keys() == []


def test_without_conditional_writes_nothing_is_written(runner, bucket):
    """An operator may have switched them off for a server that lacks them."""
    bucket.configure(runner)
    runner.spark().conf.set(f"fs.s3a.bucket.{bucket.name}.create.conditional.enabled", "false")
    with pytest.raises(Exception, match="Conditional Writes Unavailable"):
        LogStore(runner, bucket).write("0.json", "a")
    assert bucket.keys() == []


def test_listings_have_what_is_there_now(store, bucket):
    """Whichever client wrote or deleted it, in the order of the names."""
    for name in ("2.json", "1.json", "3.json"):
        store.write(name, name)
    bucket.client.delete_object(Bucket=bucket.name, Key="t/_delta_log/2.json")
    bucket.client.put_object(Bucket=bucket.name, Key="t/_delta_log/4.json", Body=b"")
    assert store.names_from("0.json") == ["1.json", "3.json", "4.json"]
    assert store.names_from("2.json") == ["3.json", "4.json"]


def test_no_write_shows_in_part(store):
    assert store.is_partial_write_visible() is False


@pytest.mark.soak("a thousand races of two writers")
def test_one_of_two_writers_wins_each_version(store, bucket):
    """Each of 1,000 versions is committed to by both at about the same moment: the other client,
    which is faster, begins at any moment of Spark's write.

    Not on moto, which looks for an object and writes it in two steps: of 1,500 objects that two
    clients of Amazon's own SDK created at the same moment, it let both create two.
    """
    won: Counter[str] = Counter()
    chosen = random.Random(chosen_seed())
    store.write("first.json", "spark")
    began = time.monotonic()
    store.write("second.json", "spark")
    longest_s = time.monotonic() - began

    def create(name: str) -> bool:
        time.sleep(chosen.uniform(0, longest_s))
        return bucket.create(f"t/_delta_log/{name}", b"other\n")

    with ThreadPoolExecutor(2) as pool:
        for version in range(RACE_ROUNDS):
            name = f"{version}.json"
            by_spark = pool.submit(store.write, name, "spark")
            by_other = pool.submit(create, name)
            refused = by_spark.exception()
            assert refused is None or "FileAlreadyExistsException" in str(refused)
            assert by_other.result() == (refused is not None)
            winner = "other" if by_other.result() else "spark"
            assert store.read(name) == [winner]
            won[winner] += 1
    print(won)
    assert min(won["spark"], won["other"]) > 0
