"""Keys of quarantined rows as a repair reads them again: texts and typed values."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.changes.decode.net_rows import key_codes
from waldelta.errors import NeedsSync
from waldelta.postgres import PgType
from waldelta.snapshot.source_columns import KeyAttribute
from waldelta.stages.repair._repair_rows import quarantined_keys, removals
from waldelta.types.type_map import target_type


@pytest.fixture
def rows():
    types = {"a": PgType(25, -1, "text"), "id": PgType(23, -1, "integer")}
    kinds = tuple((name, target_type(kind)) for name, kind in types.items())
    key = tuple(KeyAttribute(name, types[name]) for name in ("id", "a"))
    return SimpleNamespace(key_types=[dict(kinds)[column.name] for column in key], key=key)


def test_quarantined_keys_are_as_touched_ones(rows):
    """In the key's order, whatever order the quarantine has."""
    keys = quarantined_keys(rows, {'{"a": "y", "id": "7"}', '{"id": "8", "a": "z"}'})
    found = keys.sort_by("k0").to_pylist()
    assert [tuple(row.values()) for row in found] == [("7", "y", 7, "y"), ("8", "z", 8, "z")]
    assert len(quarantined_keys(rows, set())) == 0


def test_a_renamed_key_needs_a_copy(rows):
    with pytest.raises(NeedsSync, match=r"its key was renamed, .*\(1 key\)"):
        quarantined_keys(rows, {'{"old": "7", "a": "y"}'})


NAN = float("nan")
# Keys that are asked for, those of which a row was read, those of rows that leave; and purges.
PURGES = {
    "nothing": ([], [], [], []),
    "all read": ([1.0, 2.0], [1.0, 2.0], [], []),
    "gone": ([1.0, 2.0], [2.0], [], [("touched", 1.0)]),
    "twice": ([1.0, 1.0], [], [1.0], [("touched", 1.0)]),
    "zeros are equal": ([-0.0], [0.0], [], []),
    "NaN are equal": ([NAN], [NAN], [], []),
    "leaves": ([], [2.0], [1.0, 2.0], [("leaves", 1.0)]),
}


@pytest.mark.parametrize("asked, read, leaving, expected", PURGES.values(), ids=PURGES)
def test_a_key_without_a_row_is_purged(asked, read, leaving, expected):
    kinds = [target_type(PgType(701, -1, "double precision"))]
    schema = pa.schema(
        [("why", pa.string()), ("action", pa.string()), ("b0", pa.float64()), ("c0", pa.string())]
    )
    asked, read, leaving = (
        [pa.chunked_array([pa.array(keys, pa.float64())])] for keys in (asked, read, leaving)
    )
    gone = {"touched": asked, "leaves": leaving}
    found = removals(kinds, read, gone, schema).to_pylist()
    assert [(row["why"], row["b0"]) for row in found] == expected
    assert all((row["action"], row["c0"]) == ("purge", None) for row in found)


def test_a_key_of_several_columns_is_equal_where_all_are():
    kinds = [target_type(PgType(23, -1, "integer")), target_type(PgType(25, -1, "text"))]
    one = [pa.chunked_array([[1, 1, 2]]), pa.chunked_array([["a", "b", "a"]])]
    other = [pa.chunked_array([[1, 2]]), pa.chunked_array([["b", "a"]])]
    of_one, of_other = key_codes(kinds, one, other)
    assert [of_one.tolist().index(code) for code in of_other.tolist()] == [1, 2]
