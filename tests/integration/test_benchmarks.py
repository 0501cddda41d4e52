"""`make bench` works: what it writes, measures and compares, at sizes that say nothing about speed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import results, runners
from benchmarks.scores import scores
from benchmarks.stack import Stack
from benchmarks.workloads import NATIVE, PEEK, RECVLOGICAL, WORKLOADS, Changes, Variant, chosen

pytestmark = pytest.mark.pg


def test_baselines_beside_each_other(postgres):
    """The raw drains and PostgreSQL's own subscription, which has applied what was written; no slot or database stays."""
    (workload,) = chosen(["backlog-1m-clustered"])
    with Stack(postgres) as stack:
        measured = runners.run(stack, replace(workload, contenders=(PEEK, RECVLOGICAL, NATIVE)), runners.Plan(0.001, 1))
        left = """select slot_name::text from pg_replication_slots where slot_name like 'bench%'
                  union all select datname::text from pg_database where datname like 'bench%'"""
        assert stack.sql(left) == []
    assert [(one.contender, one.changes, len(one.rounds)) for one in measured] == [
        (PEEK, 1000, 1),
        (RECVLOGICAL, 1000, 1),
        (NATIVE, 1000, 1),
    ]
    assert "source" in measured[0].rounds[0].cpu_s
    assert "subscriber" in measured[2].rounds[0].cpu_s
    assert "backlog-1m-clustered/native subscriber ÷ pg_recvlogical" in {score.name for score in scores(measured)}


@pytest.mark.soak
def test_every_backlog_can_be_written(postgres):
    """Each workload's tables and statements are what PostgreSQL takes."""
    plan = runners.Plan(0.0001, 1)
    with Stack(postgres) as stack:
        for workload in (workload for workload in WORKLOADS if isinstance(workload, Changes)):
            if workload.name.startswith(("backlog-10m", "backlog-50m")):
                continue  # the same on a larger table
            lean = replace(workload, contenders=(PEEK,), variants=(Variant(),))
            measured = runners.run(stack, lean, plan)
            assert [one.backlog for one in measured] == [backlog.name for backlog in workload.backlogs]


@pytest.mark.soak
@pytest.mark.spark
def test_make_bench(tmp_path):
    """All kinds of contenders, as the command line runs them."""
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.001", "--rounds", "1", "--results", str(tmp_path), "--only",
               "backlog-1m-random", "sync", "tables-20", "where", "drift", "idle"]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    result = results.read(tmp_path / "last.json")
    assert (result.failed, result.scale) == ({}, 0.001)
    assert result.machine["postgresql"]
    assert list(tmp_path.glob("bench-*.png"))


@pytest.mark.soak
def test_pages_over_a_long_history_take_less_than_a_second():
    """100 tables, 10,000 runs, each page by itself."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.pages"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stdout.count("/p/shop") > 5
