"""The Python that Spark's tasks run in, which is started ahead."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.spark

# Of a session of its own: others' tests kill workers.
JOB = """
import psutil
from spark_jobs.session import open_session

with open_session("test") as spark:
    spark.range(1).mapInArrow(lambda parts: parts, "id bigint").collect()
    jvm = psutil.Process(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    print("daemons:", sum("spark_jobs.python_daemon" in child.cmdline() for child in jvm.children()))
"""


def test_workers_that_were_started_ahead_are_those_of_every_task():
    """Spark keeps a daemon for each environment: one more would import everything once more, while the first tasks wait."""
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1:] == ["daemons: 1"]
