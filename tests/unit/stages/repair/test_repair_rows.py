"""Keys of quarantined rows as a repair reads them again: texts and typed values, as touched ones
have.
"""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from waldelta.errors import NeedsSync
from waldelta.postgres import PgType
from waldelta.snapshot import KeyAttribute
from waldelta.stages.repair._repair_rows import net_changes, stage_named
from waldelta.types.type_map import target_type


@pytest.fixture
def rows():
    types = {"a": PgType(25, -1, "text"), "id": PgType(23, -1, "integer")}
    kinds = tuple((name, target_type(kind)) for name, kind in types.items())
    key = tuple(KeyAttribute(name, types[name]) for name in ("id", "a"))
    return SimpleNamespace(copy=SimpleNamespace(columns=kinds), key=key)


def test_keys_are_written_as_touched_ones_are(rows, tmp_path):
    """In the key's order, whatever order the quarantine has."""
    folder = (tmp_path / "named").as_uri()
    assert stage_named(rows, {'{"a": "y", "id": "7"}', '{"id": "8", "a": "z"}'}, folder) == 2
    found = pq.read_table(tmp_path / "named").sort_by("k0").to_pylist()
    assert [tuple(row.values()) for row in found] == [("7", "y", 7, "y"), ("8", "z", 8, "z")]
    assert stage_named(rows, set(), folder) == 0


def test_a_renamed_key_needs_a_copy(rows, tmp_path):
    with pytest.raises(
        NeedsSync, match="its key was renamed while 1 of its rows are in quarantine"
    ):
        stage_named(rows, {'{"old": "7", "a": "y"}'}, (tmp_path / "touched").as_uri())


NAN = float("nan")
# Keys that are asked for, rows that are read again, and what becomes of each key.
NET = {
    "nothing": ([], [], []),
    "read": ([1.0, 2.0], [(1.0, "a"), (2.0, "b")], [("upsert", 1.0, "a"), ("upsert", 2.0, "b")]),
    "gone": ([1.0, 2.0], [(2.0, "b")], [("upsert", 2.0, "b"), ("delete", 1.0, None)]),
    "all gone": ([1.0, 1.0], [], [("delete", 1.0, None)]),
    "printed otherwise": ([0.0, -0.0], [(0.0, "a"), (0.0, "a")], [("upsert", 0.0, "a")]),
    "zeros are equal": ([-0.0], [(0.0, "a")], [("upsert", 0.0, "a")]),
    "NaN are equal": ([NAN, NAN], [(NAN, "a")], [("upsert", NAN, "a")]),
}


@pytest.mark.parametrize("asked, read, expected", NET.values(), ids=NET)
def test_a_key_that_was_read_again_has_one_net_change(asked, read, expected):
    """The row that was read, else a delete."""
    touched = pa.table(
        {"t0": pa.array(map(str, asked), pa.string()), "k0": pa.array(asked, pa.float64())}
    )
    schema = pa.schema(
        [("c0", pa.float64()), ("c1", pa.string()), ("raw", pa.map_(pa.string(), pa.string()))]
    )
    again = pa.Table.from_pylist([{"c0": key, "c1": value} for key, value in read], schema)
    found = net_changes(again, touched, [0])
    assert repr([(row["action"], row["b0"], row["c1"]) for row in found.to_pylist()]) == repr(
        expected
    )


def test_a_key_of_several_columns_is_equal_where_all_are():
    touched = pa.table({"k0": [1, 1, 2], "k1": ["a", "b", "a"]})
    again = pa.table({"c0": ["b", "a"], "c1": [1, 2], "c2": ["x", "y"]})
    found = net_changes(again, touched, [1, 0]).select(["action", "b0", "b1", "c2"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("upsert", 1, "b", "x"), ("upsert", 2, "a", "y"), ("delete", 1, "a", None),
    ]  # fmt: skip
