"""Keys of quarantined rows as a repair reads them again: texts and typed values, as touched ones have."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from waldelta.errors import NeedsSync
from waldelta.postgres.type_catalog import PgType
from waldelta.stages.repair._repair_rows import stage_named
from waldelta.types.type_map import target_type


@pytest.fixture
def rows():
    kinds = {"a": target_type(PgType(25, -1, "text")), "id": target_type(PgType(23, -1, "integer"))}
    return SimpleNamespace(copy=SimpleNamespace(columns=tuple(kinds.items())), key=(("id", "integer"), ("a", "text")))


def test_keys_are_written_as_touched_ones_are(rows, tmp_path):
    """In the key's order, whatever order the quarantine has."""
    folder = (tmp_path / "named").as_uri()
    assert stage_named(rows, {'{"a": "y", "id": "7"}', '{"id": "8", "a": "z"}'}, folder) == 2
    found = pq.read_table(tmp_path / "named").sort_by("k0").to_pylist()
    assert [tuple(row.values()) for row in found] == [("7", "y", 7, "y"), ("8", "z", 8, "z")]
    assert stage_named(rows, set(), folder) == 0


def test_a_renamed_key_needs_a_copy(rows, tmp_path):
    with pytest.raises(NeedsSync, match="its key was renamed while 1 of its rows are in quarantine"):
        stage_named(rows, {'{"old": "7", "a": "y"}'}, (tmp_path / "touched").as_uri())
