"""The session that a check borrows, and the Python that Spark's tasks run in."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from waldelta.spark.session import borrowed_session


@pytest.mark.nightly("a JVM of its own; unit tests have the setting")
def test_the_drivers_port_refuses_a_stranger(runner):
    """Another user of the machine could send it messages, and run code."""
    jvm, conf = runner.spark().sparkContext._jvm, runner.spark().sparkContext.getConf()
    manager, plain = jvm.org.apache.spark.SecurityManager, jvm.org.apache.spark.SparkConf(False)
    defaults = [getattr(manager, f"$lessinit$greater$default${n}")() for n in (2, 3)]
    rpc = jvm.org.apache.spark.rpc
    address = rpc.RpcAddress(conf.get("spark.driver.host"), int(conf.get("spark.driver.port")))
    stranger = rpc.RpcEnv.create(
        "stranger", "127.0.0.1", "127.0.0.1", 0, plain, manager(plain, *defaults), 0, True
    )
    try:
        with pytest.raises(Exception, match="Expected SaslMessage"):
            stranger.setupEndpointRef(address, "HeartbeatReceiver")
    finally:
        stranger.shutdown()


def test_workers_that_are_started_ahead_are_those_of_every_task(runner):
    """Spark keeps a daemon for each environment; another would import all again."""

    def told(_):
        yield pa.RecordBatch.from_pydict({"id": [os.getppid()]})

    ahead = (
        runner.spark()
        .sparkContext.parallelize([0], 1)
        .mapPartitions(lambda _: [os.getppid()])
        .collect()
    )
    ((daemon,),) = runner.spark().range(0, 1, 1, 1).mapInArrow(told, "id bigint").collect()
    assert ahead == [daemon]


@pytest.mark.nightly("a session of two threads")
def test_a_check_in_another_thread_leaves_the_session_running(runner):
    """Spark keeps the active session by thread; a thread without one has the default session.

    ``doctor`` runs its checks in threads, to give up on them after a while.
    """

    def borrow() -> str:
        runner.spark()._jvm.SparkSession.clearActiveSession()
        with borrowed_session(None) as borrowed:
            return borrowed.sparkContext.applicationId

    with ThreadPoolExecutor() as pool:
        assert pool.submit(borrow).result() == runner.spark().sparkContext.applicationId
    assert runner.spark().range(3).count() == 3


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
