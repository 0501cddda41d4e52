"""The end of a session: nothing of PySpark's own holds up the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import SparkContext
from pyspark.accumulators import AccumulatorTCPServer

from waldelta.errors import JavaMissing, PeekTimeout
from waldelta.lake import Lake
from waldelta.spark import deferred_session, open_session, run_tasks
from waldelta.spark import session as module
from waldelta.spark.session import (
    DeferredSession,
    is_started,
    prepared_session,
    sibling_session,
    start_session,
    uses_of,
)
from waldelta.spark.session_settings import is_connect
from waldelta.spark.tasks import LOCAL_TASKS

WAIT_S = 30


class Accumulators:
    """A thread of PySpark's that ends when it comes to it."""

    def __init__(self):
        self.may_end, self.ended = threading.Event(), threading.Event()

    def shutdown(self):
        assert self.may_end.wait(WAIT_S)
        self.ended.set()


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_is_stopped_without_waiting_for_accumulators(monkeypatch, fails):
    """They are stopped behind it, whatever became of the job."""
    accumulators, stopped = Accumulators(), []
    context = SimpleNamespace(_accumulatorServer=accumulators)
    spark = SimpleNamespace(
        sparkContext=context, stop=lambda: stopped.append(context._accumulatorServer)
    )
    monkeypatch.setattr(module, "spark_session", lambda *_, **__: spark)
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    with pytest.raises(ValueError, match="the job's") if fails else open_session("test"):
        if fails:
            with open_session("test"):
                raise ValueError("the job's")
    assert stopped == [None]
    accumulators.may_end.set()
    assert accumulators.ended.wait(WAIT_S)


def test_pyspark_still_has_them_there():
    """Else a fresh JVM's jobs would be slower by up to a second and a half again, and nobody would
    see why.
    """
    assert "_accumulatorServer" in SparkContext._do_init.__code__.co_names
    assert callable(AccumulatorTCPServer.shutdown)


@pytest.mark.parametrize("uses", [0, 2])
def test_a_deferred_session_is_made_by_its_first_use(monkeypatch, uses):
    """Once, and stopped where it was made; a named error that it can't be made by reaches whoever
    uses it.
    """
    made, stopped = [], []

    def make(*_, name, **__):
        made.append(name)
        return SimpleNamespace(sparkContext=None, version="4", stop=lambda: stopped.append(name))

    monkeypatch.setattr(module, "spark_session", make)
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    with deferred_session("test") as spark:
        assert (made, is_started(spark), is_connect(spark)) == ([], False, False)
        assert [spark.version for _ in range(uses)] == ["4"] * uses
        assert (made, is_started(spark)) == (["test"] * bool(uses), bool(uses))
    assert stopped == made


def test_a_session_that_does_all_is_made_at_once(monkeypatch):
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    spark = SimpleNamespace(sparkContext=None, stop=lambda: None)
    monkeypatch.setattr(module, "spark_session", lambda *_, **__: spark)
    job = SimpleNamespace(lake=Lake("file:///nowhere", on_spark=True))
    with deferred_session("test", job) as made:
        assert made is spark
        assert is_started(made)
        assert uses_of(made) is None


def test_a_deferred_session_of_a_server_is_one_of_a_server():
    """Its siblings have addresses of their own."""
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "version": "4"})
    session = DeferredSession(kind)
    assert not is_connect(session)
    assert session.version == "4"
    assert is_connect(session)


def test_a_sibling_of_a_deferred_session_is_deferred(monkeypatch):
    """Using it makes both, and counts as a use of the first."""
    monkeypatch.setattr(module, "set_settings", lambda _: {})
    spark = SimpleNamespace(newSession=lambda: SimpleNamespace(version="4"))
    first = DeferredSession(lambda: spark)
    with sibling_session(first, 1) as second:
        assert (is_started(first), is_started(second)) == (False, False)
        assert second.version == "4"
    assert (is_started(first), uses_of(first)) == (True, 1)


def test_a_session_is_started_in_the_background_once():
    """That is no use of it; its error is that of the first use."""
    made, spark = [], SimpleNamespace(version="4")

    def make():
        made.append(threading.current_thread().name)
        return spark

    session = DeferredSession(make)
    with prepared_session(session):
        start_session(session)
        start_session(session)
    assert (made, is_started(session), uses_of(session)) == (["start Spark"], True, 0)

    def fails():
        raise JavaMissing("no java")

    session = DeferredSession(fails)
    start_session(session)
    with pytest.raises(JavaMissing, match="no java"):
        session.session()


def test_few_tasks_are_run_here_before_a_session_is_there():
    """With their rows, and the named error that one raised."""

    def no_session():
        raise AssertionError("Spark isn't needed")

    spark, told = DeferredSession(no_session), pa.schema([("n", pa.int64()), ("raw", pa.binary())])
    (row,) = run_tasks(
        spark, 1, told, lambda number: pa.table({"n": [number], "raw": [b"\x00"]}, told)
    )
    assert (row.n, row["raw"]) == (0, b"\x00")

    def fails(_):
        raise PeekTimeout("too slow")

    with pytest.raises(PeekTimeout, match=r"^too slow$"):
        run_tasks(spark, 1, told, fails)
    with pytest.raises(AssertionError, match="Spark isn't needed"):
        run_tasks(spark, LOCAL_TASKS + 1, told, fails)


PRINTING = """
import os
from waldelta.spark.session import _stdout_as_stderr
with _stdout_as_stderr():
    os.system("echo Deleted 0 files and directories in a total of 1 directories.")
print("result")
"""


def test_a_process_that_a_session_starts_prints_to_stderr():
    """Delta's VACUUM says there what it deleted; stdout has the JSON of the verb alone."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True
    )
    assert done.stdout == "result\n"
    assert "Deleted 0 files" in done.stderr


class Session:
    """A session, as far as its settings go."""

    def __init__(self, **settings):
        self.settings = settings
        self.conf = SimpleNamespace(
            get=settings.get,
            set=settings.__setitem__,
            unset=settings.pop,
        )


def test_the_last_of_two_jobs_restores_the_session(monkeypatch):
    """However they overlap; the second one corrects what was changed since the first began."""
    monkeypatch.setattr(module, "SESSION_SETTINGS", {"zone": "UTC", "ansi": "true"})
    spark, other = Session(zone="Asia/Tokyo"), Session(zone="Europe/Rome")
    ours = {"zone": "UTC", "ansi": "true"}
    with ExitStack() as second:
        with prepared_session(spark), prepared_session(other):
            spark.conf.set("ansi", "false")
            second.enter_context(prepared_session(DeferredSession(lambda: spark)))
            made = DeferredSession(lambda: spark)
            assert made.settings["ansi"] == "false"
            second.enter_context(prepared_session(made))
            assert spark.settings == ours
        assert (spark.settings, other.settings) == (ours, {"zone": "Europe/Rome"})
    assert spark.settings == {"zone": "Asia/Tokyo"}
    with prepared_session(spark):
        assert spark.settings == ours
    assert spark.settings == {"zone": "Asia/Tokyo"}
