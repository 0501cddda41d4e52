"""The Python that Spark's tasks run in, which is started ahead."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

pytestmark = pytest.mark.spark


def test_workers_that_are_started_ahead_are_those_of_every_task(spark):
    """Spark keeps a daemon for each environment: one more would import everything once more, while
    the first tasks wait.
    """

    def told(_):
        yield pa.RecordBatch.from_pydict({"id": [os.getppid()]})

    ahead = spark.sparkContext.parallelize([0], 1).mapPartitions(lambda _: [os.getppid()]).collect()
    ((daemon,),) = spark.range(0, 1, 1, 1).mapInArrow(told, "id bigint").collect()
    assert ahead == [daemon]
