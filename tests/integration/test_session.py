"""The Python that Spark's tasks run in, which is started ahead."""

from __future__ import annotations

import psutil
import pytest

pytestmark = pytest.mark.spark


def test_workers_that_were_started_ahead_are_those_of_every_task(spark):
    """Spark keeps a daemon for each environment: one more would import everything once more, while the first tasks wait."""
    spark.range(1).mapInArrow(lambda parts: parts, "id bigint").collect()
    jvm = psutil.Process(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    assert sum("spark_jobs.python_daemon" in child.cmdline() for child in jvm.children()) == 1
