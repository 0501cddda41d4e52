"""Keys of quarantined rows as a repair reads them again: texts and typed values, beside the touched ones."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_jobs.repair_rows import stage_named
from waldelta.errors import NeedsSync
from waldelta.lake import write_parquet
from waldelta.type_catalog import PgType
from waldelta.type_map import target_type


@pytest.fixture
def rows():
    kinds = {"a": target_type(PgType(25, -1, "text")), "id": target_type(PgType(23, -1, "integer"))}
    return SimpleNamespace(copy=SimpleNamespace(columns=tuple(kinds.items())), key=(("id", "integer"), ("a", "text")))


def test_keys_stand_beside_the_touched_ones(rows, tmp_path):
    """In the key's order, whatever order the quarantine has."""
    folder = (tmp_path / "touched").as_uri()
    write_parquet(folder, pa.table({"t0": ["1"], "t1": ["x"], "k0": pa.array([1], pa.int32()), "k1": ["x"]}))
    assert stage_named(rows, {'{"a": "y", "id": "7"}', '{"id": "8", "a": "z"}'}, folder) == 2
    found = pq.read_table(tmp_path / "touched").sort_by("k0").to_pylist()
    assert [tuple(row.values()) for row in found] == [("1", "x", 1, "x"), ("7", "y", 7, "y"), ("8", "z", 8, "z")]
    assert stage_named(rows, set(), folder) == 0


def test_a_renamed_key_needs_a_copy(rows, tmp_path):
    with pytest.raises(NeedsSync, match="its key was renamed while 1 of its rows are in quarantine"):
        stage_named(rows, {'{"old": "7", "a": "y"}'}, (tmp_path / "touched").as_uri())
