"""Random DDL and DML: after every run each target equals its source's rows."""

import os

import pytest

from tests.oracles.compare import compare_target
from tests.oracles.native_subscriber import native_subscriber, wait_until_caught_up
from tests.oracles.random_workload import FOLLOWED, Workload, create_tables
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from tests.support.seeds import chosen_seed
from waldelta.jobs.consume import consume
from waldelta.stages.sync.sync import sync

TABLES = ["w1", "w2"]
OPTIONS = {"protocol 1": {}, "streamed, binary": {"streaming": "on", "binary": True}}
# Of this many messages a batch, steps are applied while others land; streaming has WAL alone.
SMALL = {"protocol 1": {"max_changes": 20}}
# Of these Spark's tasks merge even what few changes there are, which were written anew by table;
# of the others the test's process does what it can.
MERGED_BY_TASKS = "streamed, binary"
RUNS = 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("protocol 1", marks=pytest.mark.nightly("the simplest protocol")),
        "streamed, binary",
    ],
)
def test_targets_equal_their_sources(runner, database, lake, name, request):
    """The seed is printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer."""
    seed = chosen_seed()
    if name == MERGED_BY_TASKS:
        for fixture in ("compiled", "merged_by_tasks", "split_by_table"):
            request.getfixturevalue(fixture)
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, TABLES)
        workload.large_share = 0.06
        tables = [f"public.{t}" for t in TABLES]
        job = bare_job(database, lake, tables, OPTIONS[name], batch=SMALL.get(name, {}))
        for _ in range(20):
            workload.transaction()
        sync(runner, job)
        done = []
        for run in range(int(os.environ.get("WALDELTA_ROUNDS") or RUNS)):
            for _ in range(15):
                workload.transaction()
            if run % 2 == 0:
                done += workload.alter()
            for _ in range(15):
                workload.transaction()
            result = consume(runner, job)
            for state in job.read_states().values():
                difference = compare_target(runner, job.source.conninfo, job.pipeline, state)
                assert difference.rows == 0, (
                    f"WALDELTA_SEED={seed}",
                    run,
                    done,
                    result.warnings,
                    difference,
                )


def rows_of(connection, table, names):
    listed = ", ".join(names)
    return sorted(connection.execute(f"select {listed} from {table}".encode()).fetchall(), key=repr)


@pytest.mark.soak("random ALTERs against a native subscriber")
def test_targets_equal_a_native_subscriber_that_follows_the_ddl(runner, database, postgres, lake):
    """Several ALTERs between two runs. The subscriber gets each one when it has caught up, as
    PostgreSQL's documentation asks for; a default that is volatile would give it other values, so
    it isn't among them.
    """
    seed = chosen_seed()
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, TABLES, kinds=FOLLOWED)
        pipeline = pipeline_file(lake, f"s_{database.name}", [f"public.{t}" for t in TABLES])
        job, done = bare_slot(database, pipeline), []
        publication = pipeline.source.publications[0].name
        with native_subscriber(
            postgres, database, [publication], lambda c: create_tables(c, TABLES)
        ) as (native, slot):
            workload.followers.append(native)
            sync(runner, job)
            for run in range(int(os.environ.get("WALDELTA_ROUNDS") or RUNS)):
                for _ in range(3):
                    for _ in range(10):
                        workload.transaction()
                    wait_until_caught_up(database, slot)
                    done += workload.alter()
                for _ in range(10):
                    workload.transaction()
                result = consume(runner, job)
                wait_until_caught_up(database, slot)
                for table in workload.tables:
                    names = ["id", "part", "big", *table.columns]
                    rows = read_target(job.lake.target(f"public.{table.name}").uri, *names)
                    found = sorted(map(tuple, rows), key=repr)
                    what = (f"WALDELTA_SEED={seed}", run, table.name, done, result.warnings)
                    assert (what, found) == (what, rows_of(native, table.name, names))
                    assert found == rows_of(connection, table.name, names), what
