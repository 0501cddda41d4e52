"""The change data feed of each shape and mode, by each way to merge: of each version the difference
to the version before, equal in Spark and delta-rs.
"""

from __future__ import annotations

import random

import pytest
from deltalake import DeltaTable

from tests.integration.oracle.test_both_runners import DDL, MODES, change
from tests.oracles.change_feed import (
    as_rows,
    changes_by_delta_rs,
    changes_by_spark,
    compare_change_feed,
)
from tests.oracles.random_workload import Workload
from tests.support.pipelines import bare_slot, pipeline_file
from tests.support.seeds import chosen_seed
from waldelta.jobs.consume import consume
from waldelta.stages.maintain.maintain import maintain_target
from waldelta.stages.sync.sync import sync

KEYED = ["w1", "w2", "one_key"]
RUNS = 3
SMALL = pytest.mark.nightly("the unit tests compare the merges of small targets")
BY_SPARK = pytest.mark.nightly("Spark's own MERGE writes the change data feed itself")


def never(*_: object, **__: object) -> None:
    """A merge that leaves everything to the next one."""


# What is switched off, and the targets.
MERGES = {
    "small": ([], [*KEYED, "keyless"]),
    "tasks": (["file_merge.read_small"], [*KEYED, "keyless"]),
    "Spark": (["merge.merge_files"], [*KEYED, *MODES]),
}


@pytest.mark.parametrize(
    "merge",
    [
        pytest.param("small", marks=SMALL),
        "tasks",
        pytest.param("Spark", marks=BY_SPARK),
    ],
)
def test_each_version_shows_its_difference(runner, database, lake, monkeypatch, merge):
    """The seed is printed; WALDELTA_SEED repeats one."""
    off, names = MERGES[merge]
    for name in off:
        monkeypatch.setattr(f"waldelta.changes.merge.{name}", never)
    seed = chosen_seed()
    rng = random.Random(seed)
    database.execute(DDL)
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, ["w1", "w2"])
        own = {"public.w2": {"where": "part < 3 or part is null"}}
        own |= {"public.one_key": {"partition_by": ["part"]}}
        own |= {f"public.{name}": {"mode": MODES[name]} for name in names if name in MODES}
        target = {"root": lake, "change_data_feed": True, "tables": own}
        tables = [f"public.{name}" for name in names]
        file = pipeline_file(lake, f"s_{database.name}", tables, target=target)
        job = bare_slot(database, file)
        for _ in range(5):
            workload.transaction()
            change(database, rng)
        sync(runner, job)
        for run in range(RUNS):
            for _ in range(8):
                workload.transaction()
                change(database, rng)
            consume(runner, job)
            if run == 1:
                for table in tables:
                    maintain_target(runner, job, table)
        for table in tables:
            uri = job.lake.target(table).uri
            assert (f"WALDELTA_SEED={seed}", table, compare_change_feed(uri)) == (
                f"WALDELTA_SEED={seed}", table, []
            )  # fmt: skip
            if merge == "Spark" or runner.is_started:
                last = DeltaTable(uri).version()
                columns = [*changes_by_delta_rs(uri, 1, last)[0]]
                columns.remove("_commit_timestamp")
                by_delta_rs, by_spark = (
                    as_rows(rows, columns)
                    for rows in (
                        changes_by_delta_rs(uri, 1, last),
                        changes_by_spark(runner.spark(), uri, 1, last),
                    )
                )
                assert by_delta_rs == by_spark
