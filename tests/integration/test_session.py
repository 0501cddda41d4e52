"""The Python that Spark's tasks run in, which is started ahead."""

from __future__ import annotations

import psutil
import pytest

pytestmark = pytest.mark.spark


def test_workers_that_were_started_ahead_are_those_of_every_task(spark):
    """Spark keeps a daemon for each environment: one more would import everything once more, while the first tasks wait."""
    spark.range(1).mapInArrow(lambda parts: parts, "id bigint").collect()
    daemons = [
        process
        for process in psutil.Process().children(recursive=True)
        if "spark_jobs.python_daemon" in process.cmdline() and process.parent().name() == "java"
    ]
    assert len(daemons) == 1
