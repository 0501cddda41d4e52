"""The end of a session: nothing of PySpark's own holds up the process."""

import threading
from types import SimpleNamespace

import pytest
from pyspark import SparkContext
from pyspark.accumulators import AccumulatorTCPServer

from waldelta.spark import open_session
from waldelta.spark import session as module

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
    """Else a fresh JVM's jobs would be slower by a second, and nobody would see why."""
    assert "_accumulatorServer" in SparkContext._do_init.__code__.co_names
    assert callable(AccumulatorTCPServer.shutdown)
