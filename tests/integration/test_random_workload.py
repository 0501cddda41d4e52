"""Random DDL and DML: after every run each target equals its source's rows, whatever protocol options it came by."""

from __future__ import annotations

import os
import random

import pytest

from spark_jobs.compare import compare_target
from spark_jobs.flow import consume
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from tests.random_workload import Workload

pytestmark = [pytest.mark.pg, pytest.mark.spark]

TABLES = ["w1", "w2"]
OPTIONS = {
    "protocol 1": {},
    "streamed, binary": {"streaming": "on", "binary": True},
}
RUNS = 2


@pytest.mark.parametrize("name", OPTIONS)
def test_targets_equal_their_sources(spark, database, lake, name):
    """The seed is printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer."""
    seed = int(os.environ.get("WALDELTA_SEED") or random.randrange(1 << 30))
    print(f"WALDELTA_SEED={seed}")
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, TABLES)
        job = bare_slot(
            database, pipeline_file(lake, f"s_{database.name}", [f"public.{t}" for t in TABLES], OPTIONS[name])
        )
        for _ in range(20):
            workload.transaction()
        sync(spark, job)
        done = []
        for run in range(int(os.environ.get("WALDELTA_ROUNDS") or RUNS)):
            for _ in range(15):
                workload.transaction()
            if run % 2 == 0:
                done.append(workload.alter())
            for _ in range(15):
                workload.transaction()
            result = consume(spark, job)
            for state in job.table_states().values():
                difference = compare_target(spark, job.conninfo, job.pipeline, state)
                assert difference.rows == 0, (f"WALDELTA_SEED={seed}", run, done, result.warnings, difference)
