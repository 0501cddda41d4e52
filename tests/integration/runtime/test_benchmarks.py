"""`make bench` works: what it writes, measures and compares, at sizes that say nothing about
speed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from deltalake import DeltaTable

from benchmarks import results, runners
from benchmarks.__main__ import main
from benchmarks.baselines import Naive
from benchmarks.ours import Waldelta
from benchmarks.scores import scores
from benchmarks.stack import Stack
from benchmarks.workloads import (
    NATIVE,
    PEEK,
    RECVLOGICAL,
    chosen,
)

pytestmark = [pytest.mark.pg, pytest.mark.soak("the benchmark is no part of the product")]


def test_baselines_beside_each_other(postgres):
    """The raw drains and PostgreSQL's own subscription, which has applied what was written; no slot
    or database stays.
    """
    (workload,) = chosen(["backlog-1m-clustered"])
    with Stack(postgres) as stack:
        measured = runners.run(
            stack, replace(workload, contenders=(PEEK, RECVLOGICAL, NATIVE)), runners.Plan(0.001, 1)
        )
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
    assert "backlog-1m-clustered/native subscriber ÷ pg_recvlogical" in {
        score.name for score in scores(measured)
    }


@pytest.mark.soak("the benchmark is no part of the product")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("who", "workload"), [(Waldelta, "tables-20"), (Waldelta, "sync"), (Naive, "sync")]
)
def test_a_row_that_differs_in_the_lake_fails_its_workload(tmp_path, monkeypatch, who, workload):
    """Whoever is fast and wrong isn't published: a row is lost behind its back, after the last
    round.
    """

    verify = who.verify

    def tampered(self):
        for table in self.place.source.tables:
            assert DeltaTable(self.target(table)).delete("id = 7")["num_deleted_rows"] == 1
        verify(self)

    monkeypatch.setattr(who, "verify", tampered)
    only = ["--scale", "0.001", "--rounds", "1", "--results", str(tmp_path), "--only", workload]
    assert main(only) == 1
    ((failed, error),) = results.read(tmp_path / "last.json").failed.items()
    left, there = map(int, re.findall(r"\((\d+), ", error))
    assert (failed, there - left) == (workload, 1)


@pytest.mark.soak("the benchmark is no part of the product")
def test_pages_over_a_long_history_take_less_than_a_second():
    """100 tables, 10,000 runs, each page by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pages"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stdout.count("/p/shop") > 5
