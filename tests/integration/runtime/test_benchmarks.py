"""`make bench` compares the rows in the lake, at sizes that say nothing about speed."""

import re

import pytest
from deltalake import DeltaTable

from benchmarks import results
from benchmarks.__main__ import main
from benchmarks.baselines import Naive
from benchmarks.ours import Waldelta

pytestmark = [pytest.mark.pg, pytest.mark.soak("the benchmark is no part of the product")]


@pytest.mark.soak("the benchmark is no part of the product")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("who", "workload"), [(Waldelta, "tables-20"), (Waldelta, "sync"), (Naive, "sync")]
)
def test_a_row_that_differs_in_the_lake_fails_its_workload(tmp_path, monkeypatch, who, workload):
    """A contender that is fast and wrong isn't published."""

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
