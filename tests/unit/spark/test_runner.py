"""Where work runs: in this process while there is little of it, on a session from then on."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.errors import JavaMissing, PeekTimeout
from waldelta.lake import Lake
from waldelta.spark import InProcess, OnSpark, open_runner, session
from waldelta.spark import runner as module
from waldelta.spark.runner import LOCAL_TASKS, TASKS_AT_ONCE, most_messages, most_tasks


@pytest.mark.parametrize("uses", [0, 2])
def test_a_session_is_made_by_its_first_use(monkeypatch, uses):
    """Once, and stopped where it was made; its error reaches whoever uses it."""
    made, stopped = [], []

    def make(*_, name, **__):
        made.append(name)
        return SimpleNamespace(sparkContext=None, version="4", stop=lambda: stopped.append(name))

    monkeypatch.setattr(session, "spark_session", make)
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    with open_runner("test") as runner:
        assert (made, runner.is_started, runner.is_connect) == ([], False, False)
        assert [runner.spark().version for _ in range(uses)] == ["4"] * uses
        assert (made, runner.is_started, runner.uses) == (["test"] * bool(uses), bool(uses), uses)
    assert stopped == made


def test_a_session_that_does_all_is_made_at_once(monkeypatch):
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    spark = SimpleNamespace(sparkContext=None, stop=lambda: None)
    monkeypatch.setattr(session, "spark_session", lambda *_, **__: spark)
    job = SimpleNamespace(lake=Lake("file:///nowhere", on_spark=True))
    with open_runner("test", job) as runner:
        assert runner.spark() is spark
        assert (runner.is_started, runner.uses, runner.why) == (True, None, "runner: spark")


def test_a_runner_knows_a_server_once_it_has_a_session():
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "version": "4"})
    runner = InProcess(kind)
    assert not runner.is_connect
    assert runner.spark().version == "4"
    assert runner.is_connect


def test_a_sibling_has_no_session_before_its_first_use(monkeypatch):
    """Using it makes both, and counts as a use of the first."""
    monkeypatch.setattr(session, "set_settings", lambda _: {})
    spark = SimpleNamespace(newSession=lambda: SimpleNamespace(version="4"))
    first = InProcess(lambda: spark)
    with first.sibling(1) as second:
        assert (first.is_started, second.is_started) == (False, False)
        assert second.spark("column mapping").version == "4"
    assert (first.is_started, first.uses, first.why) == (True, 1, "column mapping")


def test_what_siblings_run_is_interrupted_with_it(monkeypatch):
    """An apply batch that takes too long may be in the session of a target beside others."""
    monkeypatch.setattr(session, "set_settings", lambda _: {})
    interrupted = []

    def made(name):
        return SimpleNamespace(
            newSession=lambda: made(f"{name}+"), interruptAll=lambda: interrupted.append(name)
        )

    runner = InProcess(lambda: made("s"))
    with runner.sibling(1) as used, runner.sibling(2):
        runner.interrupt()
        assert interrupted == []
        used.spark()
        runner.interrupt()
    assert interrupted == ["s", "s+"]


def test_a_session_is_started_in_the_background_once():
    """That is no use of it; its error is that of the first use."""
    made, spark = [], SimpleNamespace(version="4")

    def make():
        made.append(threading.current_thread().name)
        return spark

    runner = InProcess(make)
    with runner.prepared():
        runner.start("much waits")
        runner.start("more waits")
    assert (made, runner.is_started, runner.uses) == (["start Spark"], True, 0)
    runner.spark()
    assert runner.why == "much waits"

    def fails():
        raise JavaMissing("no java")

    runner = InProcess(fails)
    runner.start("much waits")
    with pytest.raises(JavaMissing, match="no java"):
        runner.spark()


def test_few_tasks_are_run_here_before_a_session_is_there():
    """With their rows, and the named error that one raised."""

    def no_session():
        raise AssertionError("Spark isn't needed")

    runner = InProcess(no_session)
    schema = pa.schema([("n", pa.int64()), ("raw", pa.binary())])
    rows = runner.run(2, schema, lambda n: pa.table({"n": [n], "raw": [b"\x00"]}, schema))
    assert rows == [{"n": 0, "raw": b"\x00"}, {"n": 1, "raw": b"\x00"}]
    assert runner.run(0, schema, no_session) == []

    def fails(_):
        raise PeekTimeout("too slow")

    with pytest.raises(PeekTimeout, match=r"^too slow$"):
        runner.run(1, schema, fails)
    assert runner.why == ""
    with pytest.raises(AssertionError, match="Spark isn't needed"):
        runner.run(LOCAL_TASKS + 1, schema, fails)
    assert runner.why == "it takes 17 tasks, this process runs up to 16"


def test_tasks_of_this_process_run_at_once():
    # A task ends when its neighbours have begun, so that one thread would never end.
    begun = threading.Barrier(TASKS_AT_ONCE, timeout=60)

    def task(number: int) -> pa.Table:
        begun.wait()
        return pa.table({"number": [number]})

    rows = InProcess(pytest.fail).run(3 * TASKS_AT_ONCE, pa.schema([("number", pa.int64())]), task)
    assert [row["number"] for row in rows] == [*range(3 * TASKS_AT_ONCE)]


def test_runners_of_this_process_share_what_runs_at_once(monkeypatch):
    """A single task doesn't wait: it may hold what the others wait for."""
    limit, entered = threading.BoundedSemaphore(1), []

    class Limit:
        def __enter__(self):
            limit.acquire()
            entered.append(threading.current_thread().name)

        def __exit__(self, *_):
            limit.release()

    monkeypatch.setattr(module, "_AT_ONCE", Limit())
    schema = pa.schema([("number", pa.int64())])
    for count, expected in ((6, 6), (3, 9), (1, 9)):
        InProcess(pytest.fail).run(count, schema, lambda n: pa.table({"number": [n]}))
        assert len(entered) == expected


def test_less_runs_in_this_process_where_a_server_opens_sessions(monkeypatch):
    """A JVM takes seconds to start; a session of a running server takes tenths of one."""
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    assert (most_tasks(), most_messages()) == (16, 1_000_000)
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost:15002")
    assert (most_tasks(), most_messages()) == (4 * TASKS_AT_ONCE, 100_000)


class Session:
    """A session, as far as its settings go."""

    def __init__(self, **settings):
        self.settings = settings
        self.conf = SimpleNamespace(get=settings.get, set=settings.__setitem__, unset=settings.pop)


def test_the_last_of_two_jobs_restores_the_session(monkeypatch):
    """However they overlap; the second one corrects what was changed since the first began."""
    monkeypatch.setattr(module, "SESSION_SETTINGS", {"zone": "UTC", "ansi": "true"})
    spark, other = Session(zone="Asia/Tokyo"), Session(zone="Europe/Rome")
    ours = {"zone": "UTC", "ansi": "true"}
    with ExitStack() as second:
        with OnSpark(spark).prepared(), OnSpark(other).prepared():
            spark.conf.set("ansi", "false")
            runner = InProcess(lambda: spark)
            second.enter_context(runner.prepared())
            assert runner.spark().settings["ansi"] == "false"
            second.enter_context(runner.prepared())
            assert spark.settings == ours
        assert (spark.settings, other.settings) == (ours, {"zone": "Europe/Rome"})
    assert spark.settings == {"zone": "Asia/Tokyo"}
    with OnSpark(spark).prepared():
        assert spark.settings == ours
    assert spark.settings == {"zone": "Asia/Tokyo"}
