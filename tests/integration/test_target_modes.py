"""Targets that keep more than a mirror does: what the source has now is in each of them, and what it had then in its history."""

from __future__ import annotations

import os

import pytest
from deltalake import DeltaTable

from spark_jobs.compare import compare_target
from spark_jobs.flow import consume
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from tests.random_workload import Workload
from tests.seeds import chosen_seed
from waldelta.lsn import Lsn
from waldelta.watermark import uri_of

pytestmark = [pytest.mark.pg, pytest.mark.spark, pytest.mark.usefixtures("compiled")]

MODES = {"w1": "history", "w2": "soft_delete", "w3": "changelog"}
NAMES = ["id", "part", "a", "b", "big"]


def target(lake, modes=MODES):
    """The pipeline file's target."""
    return {"root": lake, "tables": {f"public.{name}": {"mode": mode} for name, mode in modes.items()}}


def job_of(database, lake, modes=MODES):
    """A pipeline with a table of each mode."""
    pipeline = pipeline_file(lake, f"s_{database.name}", [f"public.{t}" for t in modes], target=target(lake, modes))
    return bare_slot(database, pipeline)


def held(job, name):
    """All rows of a target."""
    return DeltaTable(uri_of(job, f"public.{name}")).to_pyarrow_table().to_pylist()


def source(connection, name):
    """What the source has, as sorted tuples."""
    return sorted(connection.execute(f"select {', '.join(NAMES)} from {name}".encode()).fetchall(), key=repr)


def as_of(rows, lsn):
    """What a history says of a position: after every commit before it."""
    found = [
        r
        for r in rows
        if r["_wd_valid_from_lsn"] < lsn and (r["_wd_valid_to_lsn"] is None or r["_wd_valid_to_lsn"] >= lsn)
    ]
    return sorted((tuple(r[n] for n in NAMES) for r in found), key=repr)


def replayed(rows, lsn=None):
    """What a changelog says when its rows are done one by one, in order."""
    now = {}
    for row in sorted(rows, key=lambda r: (r["_wd_lsn"], r["_wd_seq"])):
        if lsn is not None and row["_wd_lsn"] >= lsn:
            break
        assert not row["_wd_unchanged"], row
        key = (row["id"], row["part"])
        if row["_wd_op"] == "truncate":
            now.clear()
        elif row["_wd_op"] == "delete":
            del now[key]
        else:
            if row["_wd_before"] is not None:
                del now[tuple(row["_wd_before"].values())]
            assert row["_wd_op"] != "insert" or key not in now
            now[key] = tuple(row[n] for n in NAMES)
    return sorted(now.values(), key=repr)


def check_intervals(rows):
    """Of each key states follow each other, and the last one alone may be open."""
    by_key = {}
    for row in rows:
        by_key.setdefault((row["id"], row["part"]), []).append(row)
    for states in by_key.values():
        states.sort(key=lambda r: r["_wd_valid_from_lsn"])
        for state, following in zip(states, [*states[1:], None], strict=True):
            until = state["_wd_valid_to_lsn"]
            assert until is None or until > state["_wd_valid_from_lsn"]
            assert state["_wd_valid_to"] is None or state["_wd_valid_to"] >= state["_wd_valid_from"]
            assert following is None or (until is not None and until <= following["_wd_valid_from_lsn"]), states


@pytest.mark.parametrize("where_decoded", ["driver", "tasks"], indirect=True)
def test_every_mode_holds_what_the_source_has_and_had(spark, database, lake, where_decoded):
    """The seed is printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer."""
    seed = chosen_seed()
    with database.connect(autocommit=True) as connection:
        workload = Workload(connection, seed, list(MODES))
        job = job_of(database, lake)
        for _ in range(20):
            workload.transaction()
        sync(spark, job)
        sampled = {}
        for run in range(int(os.environ.get("WALDELTA_ROUNDS") or 2)):
            for _ in range(4):
                for _ in range(10):
                    workload.transaction()
                ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
                sampled[Lsn.parse(lsn).value] = {name: source(connection, name) for name in MODES}
            result = consume(spark, job)
            what = (f"WALDELTA_SEED={seed}", run, result.warnings)
            for state in job.table_states().values():
                difference = compare_target(spark, job.conninfo, job.pipeline, state)
                assert difference.rows == 0, (what, difference)
            check_intervals(held(job, "w1"))
            for lsn, then in sampled.items():
                assert (what, as_of(held(job, "w1"), lsn)) == (what, then["w1"])
                assert (what, replayed(held(job, "w3"), lsn)) == (what, then["w3"])
            deleted = [r for r in held(job, "w2") if r["_wd_deleted"]]
            assert all(r["_wd_deleted_at"] is not None for r in deleted)
            keys = [(r["id"], r["part"]) for r in held(job, "w2")]
            assert len(keys) == len(set(keys)), what
        # A copy of what is there already changes nothing; of a source that went on unseen, what differs.
        before = {name: held(job, name) for name in MODES}
        sync(spark, job, [f"public.{name}" for name in MODES])
        assert {name: sorted(map(repr, held(job, name))) for name in MODES} == {
            name: sorted(map(repr, rows)) for name, rows in before.items()
        }
        for _ in range(10):
            workload.transaction()
        sync(spark, job, [f"public.{name}" for name in MODES])
        consume(spark, job)
        for lsn, then in sampled.items():
            assert as_of(held(job, "w1"), lsn) == then["w1"]
        check_intervals(held(job, "w1"))
        assert replayed(held(job, "w3")) == source(connection, "w3")
        for state in job.table_states().values():
            assert compare_target(spark, job.conninfo, job.pipeline, state).rows == 0
