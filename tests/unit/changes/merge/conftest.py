"""A target to merge into, and tasks of a few rows."""

from types import SimpleNamespace

import pytest

from tests.support.data.merges import SCHEMA, write
from waldelta.changes.stage import net_files
from waldelta.lake import Lake


@pytest.fixture
def job(tmp_path):
    """A job, as far as the merge asks, whose target s.t is empty."""
    target = SimpleNamespace(root=tmp_path.as_uri(), metadata_columns=True)
    made = SimpleNamespace(pipeline=SimpleNamespace(target=target), lake=Lake(target.root))
    write(made, SCHEMA.empty_table())
    return made


@pytest.fixture
def small_parts(monkeypatch):
    """Tasks and parts of a few rows."""
    monkeypatch.setattr("waldelta.spark.runner.ROWS_PER_TASK", 3)
    monkeypatch.setattr(net_files, "ROWS_PER_PART", 2)
    monkeypatch.setattr(net_files, "ROWS_PER_READ", 1)
