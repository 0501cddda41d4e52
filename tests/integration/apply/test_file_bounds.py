"""Merging by keys of every kind: only files that may hold a changed key are read, whoever wrote
them.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.oracles.compare import compare_target
from tests.support.pipelines import pipeline_file
from waldelta.changes.merge import by_file as module
from waldelta.jobs import Pipeline

pytestmark = [pytest.mark.pg, pytest.mark.spark]

MOMENT = "timestamp '2024-01-01' + g * interval '1 minute 1.000001 seconds'"
# The type of a key, and the value that follows from a number.
KEYS = {
    "number": ("bigint", "g"),
    "id": ("uuid", "(lpad(to_hex(g), 8, '0') || '-0000-4000-8000-000000000000')::uuid"),
    "name": (
        "text",
        "'Ünïcode customer with a name of more than 32 characters ' || lpad(g::text, 6, '0')",
    ),
    "short": ("text", "'c' || lpad(g::text, 6, '0')"),
    "day": ("date", "date '1960-01-01' + g"),
    "moment": ("timestamptz", f"({MOMENT}) at time zone 'UTC'"),
    "local": ("timestamp", MOMENT),
    "whole": ("numeric(12,0)", "g * 1000000::bigint"),
}
# Whose values differ after the 32 characters that bounds have.
CUT = "name"
RANGES = [(1, 900), (1001, 1900), (2001, 2900), (3001, 3900)]


@pytest.fixture
def pipeline(runner, database, lake):
    for name, (kind, _) in KEYS.items():
        database.execute(f"create table k_{name}(k {kind} primary key, v text)")
    made = Pipeline(
        pipeline_file(lake, f"s_{database.name}", [f"public.k_{name}" for name in KEYS])
    )
    made.setup()
    made.sync(runner)
    return made


@pytest.mark.usefixtures("merged_by_tasks")
@pytest.mark.soak("a bound that unit tests cover")
def test_only_files_that_may_hold_a_changed_key_are_read(runner, database, pipeline, monkeypatch):
    """Of four files, one written by Spark, the two that hold the changed keys; and then the targets
    equal their source.
    """
    for number, (first, last) in enumerate(RANGES):
        for name, (_, value) in KEYS.items():
            database.execute(
                f"insert into k_{name} select {value}, 'v' from generate_series({first}, {last}) g"
            )
        with monkeypatch.context() as by_spark:
            if number == 0:
                by_spark.setattr("waldelta.changes.merge.merge.merge_files", lambda *_: None)
            pipeline.consume(runner)
    files = {name: paths(pipeline, name) for name in KEYS}
    read, begun = {}, module._begun

    def watched(run, job, plan, *given):
        merge = begun(run, job, plan, *given)
        read[plan.state.table_name.removeprefix("public.k_")] = {
            file.path for file in merge._touched()
        }
        return merge

    monkeypatch.setattr(module, "_begun", watched)
    for name, (_, value) in KEYS.items():
        database.execute(
            f"update k_{name} set v = 'new' where k in (select {value} from generate_series(5, 890,"
            " 5) g)"
        )
        database.execute(
            f"delete from k_{name} where k in (select {value} from generate_series(2001, 2900,"
            " 3) g)"
        )
    pipeline.consume(runner)
    counts = {
        name: (len(read[name]), len(files[name]), len(files[name] & paths(pipeline, name)))
        for name in KEYS
    }
    assert counts == {name: (4, 4, 2) if name == CUT else (2, 4, 2) for name in KEYS}
    job = pipeline.job()
    for name in KEYS:
        state = job.read_states()[f"public.k_{name}"]
        assert compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0, name


def paths(pipeline, name) -> set[str]:
    told = pa.table(
        DeltaTable(pipeline.target_path(f"public.k_{name}")).get_add_actions(flatten=True)
    )
    return set(told["path"].to_pylist())
