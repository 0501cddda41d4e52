"""Duplicate keys without Spark: marks tell what a set would, and leave the rest to Spark."""

import json
import random
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.seeds import chosen_seed, rounds
from waldelta.lake import READ_FAILURES
from waldelta.stages.check.measure.failing_rows import (
    FailingRows,
    IntegerKey,
    duplicate_keys,
    has_few_keys,
)

CASES = [
    ("one after the other", pa.int64(), list(range(1000)), True),
    ("in any order, with gaps", pa.int32(), [9, -3, 4, 0], True),
    ("one twice", pa.int64(), [*range(1000), 500], False),
    ("a null", pa.int64(), [1, 2, None], False),
    ("far apart", pa.int64(), [1, 10**12], False),
    ("the ends of bigint", pa.int64(), [-(2**63), 2**63 - 1], False),
    ("a small integer", pa.int16(), [-32_768, -32_767], True),
    ("text", pa.string(), ["a", "b"], False),
    ("no rows", pa.int64(), [], False),
]


def are_unique_here(uri: str, version: int, column: str) -> bool:
    key = IntegerKey.of(table_at(uri).open(version), column)
    return key is not None and key.is_unique()


@pytest.mark.parametrize(
    ("kind", "keys", "unique"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_only_what_is_certainly_unique_is_said_to_be(tmp_path, kind, keys, unique):
    write_deltalake(str(tmp_path), pa.table({"k": pa.array(keys, kind)}))
    assert are_unique_here(str(tmp_path), 0, "k") is unique


@pytest.mark.parametrize(
    ("kind", "keys", "unique"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_as_much_is_certain_in_several_passes(tmp_path, monkeypatch, kind, keys, unique):
    """Each marks other integers; more passes than a few are Spark's."""
    module = "waldelta.stages.check.measure.failing_rows"
    monkeypatch.setattr(f"{module}._MARKS", 100)
    test_only_what_is_certainly_unique_is_said_to_be(tmp_path, kind, keys, unique)
    monkeypatch.setattr(f"{module}._MOST_PASSES", 0)
    assert not are_unique_here(str(tmp_path), 0, "k")


def test_a_file_without_statistics_is_sparks(tmp_path):
    properties = {"delta.dataSkippingNumIndexedCols": "0"}
    write_deltalake(tmp_path, pa.table({"k": range(9)}), configuration=properties)
    assert not are_unique_here(str(tmp_path), 0, "k")


def test_values_of_several_files_are_compared_as_of_a_version(tmp_path):
    """Each file alone is unique; a column that isn't there is Spark's to complain of."""
    for keys in ([1, 2, 3], [4, 5, 6], [3, 7]):
        write_deltalake(str(tmp_path), pa.table({"k": pa.array(keys, pa.int64())}), mode="append")
    assert are_unique_here(str(tmp_path), 1, "k")
    assert not are_unique_here(str(tmp_path), 2, "k")
    assert not are_unique_here(str(tmp_path), 1, "other")


@pytest.mark.parametrize(
    ("kind", "keys", "is_read"),
    [
        (pa.string(), ["a", None], True),
        (pa.float64(), [0.0, float("nan")], True),
        (pa.binary(), [b"\xff\x00", b"a"], True),
        (pa.list_(pa.string()), [["a"], None], False),
        (pa.map_(pa.string(), pa.string()), [[("a", "b")], None], False),
        (pa.struct([("a", pa.int64())]), [{"a": 1}, None], False),
    ],
)
def test_keys_that_this_process_compares(tmp_path, monkeypatch, kind, keys, is_read):
    """Of those of another type, and of texts that are too long, Spark makes the best."""
    write_deltalake(str(tmp_path), pa.table({"k": pa.array(keys, kind)}))
    table = table_at(str(tmp_path)).open(0)
    assert has_few_keys(table, ["k"]) is is_read
    assert not has_few_keys(table, ["other"])
    if is_read:
        assert not duplicate_keys(table, ["k"]).rows
    monkeypatch.setattr("waldelta.stages.check.measure.failing_rows.MOST_DRIVER_BYTES", 0)
    assert has_few_keys(table, ["k"]) is (kind == pa.float64())


@pytest.mark.parametrize(
    ("keys", "rows", "examples"),
    [
        ({"a": [1, 1, None, 2, None], "b": ["x"] * 5}, 4, ("1, x", "null, x")),
        ({"c`{x}.y": [True, True, False]}, 2, ("true",)),
        ({"k": [Decimal("1E-9")] * 2}, 2, ("0.000000001",)),
        ({"k": [datetime(2026, 1, 1, 0, 0, 0, 500_000, UTC)] * 2}, 2, ("2026-01-01 00:00:00.5",)),
        ({"k": [*"aabbccddeeffg"]}, 12, (*"abcde",)),
    ],
)
def test_duplicate_keys_as_texts(tmp_path, keys, rows, examples):
    """Nulls count as equal; some of the keys are as Spark prints them."""
    write_deltalake(str(tmp_path), pa.table(keys))
    found = duplicate_keys(table_at(str(tmp_path)).open(0), [*keys])
    assert found == FailingRows(rows, examples)


OLD = [[1, 2], [10, 11], [30]]
SINCE = [
    ("nothing", OLD, [], True),
    ("keys of their own", OLD, [[20, 21], [40]], True),
    ("a key that was there", OLD, [[11, 20]], False),
    ("a key twice in one file", OLD, [[20, 20]], False),
    ("a key twice in two", OLD, [[20], [20, 21]], False),
    ("a null", OLD, [[20, None]], False),
    ("keys of their own, far apart", OLD, [[1000], [10**12]], False),
    ("keys beside others that were equal before", [[1], [1], [10]], [[5]], True),
]


@pytest.mark.parametrize(
    ("before", "written", "unique"), [c[1:] for c in SINCE], ids=[c[0] for c in SINCE]
)
def test_keys_written_since(tmp_path, before, written, unique):
    """Compared with those of files where they might be."""
    for keys in [*before, *written]:
        write_deltalake(str(tmp_path), pa.table({"k": pa.array(keys, pa.int64())}), mode="append")
    key = IntegerKey.of(table_at(str(tmp_path)).open(len(before) + len(written) - 1), "k")
    assert key.written_since(len(before) - 1).is_unique() is unique


def test_files_without_any_key_in_question_arent_read(tmp_path):
    """Where the version that was known is gone, it is an error, and Spark compares all."""
    uri = str(tmp_path)
    for keys in [*OLD, [11, 29]]:
        write_deltalake(uri, pa.table({"k": pa.array(keys, pa.int64())}), mode="append")
    first, *_ = sorted(tmp_path.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    key = IntegerKey.of(table_at(uri).open(3), "k")
    first.unlink()
    assert not key.written_since(2).is_unique()  # 11
    assert key.written_since(3).is_unique()
    with pytest.raises(READ_FAILURES):
        key.written_since(9)
    write_deltalake(uri, pa.table({"k": pa.array([12, 28], pa.int64())}), mode="append")
    assert IntegerKey.of(table_at(uri).open(4), "k").written_since(3).is_unique()


def test_random_rewrites(tmp_path):
    """As a set says, whatever was merged, deleted or compacted since its keys differed."""
    chance, told = random.Random(chosen_seed()), 0
    for number in rounds(32):
        uri, known = str(tmp_path / str(number)), 0
        for start in range(0, 400, 100):
            write_deltalake(
                uri, pa.table({"k": pa.array(range(start, start + 100), pa.int64())}), mode="append"
            )
        known = DeltaTable(uri).version()
        for _ in range(chance.randrange(1, 4)):
            table = DeltaTable(uri)
            low = chance.randrange(450)
            if (how := chance.randrange(3)) == 0:
                table.delete(f"k between {low} and {low + chance.randrange(60)}")
            elif how == 1:
                table.optimize.compact()
            else:
                keys = pa.array(
                    chance.sample(range(low, low + 60), chance.randrange(1, 20)), pa.int64()
                )
                write_deltalake(uri, pa.table({"k": keys}), mode="append")
        table = DeltaTable(uri)
        keys = table.to_pyarrow_table()["k"].to_pylist()
        found = (
            IntegerKey.of(table_at(uri).open(table.version()), "k").written_since(known).is_unique()
        )
        # Few keys that lie apart are left to Spark.
        assert not found or len(set(keys)) == len(keys), number
        told += found
    assert told


@pytest.mark.parametrize(("told", "lie"), [("min", 2), ("max", 2)])
def test_statistics_that_lie_are_noticed(tmp_path, told, lie):
    """A value outside of them would be a mark of another one."""
    write_deltalake(str(tmp_path), pa.table({"k": pa.array([1, 2, 3], pa.int64())}))
    (commit,) = (tmp_path / "_delta_log").glob("*.json")
    text = commit.read_text()
    bounds = json.loads(json.loads(text.splitlines()[-1])["add"]["stats"])[f"{told}Values"]["k"]
    honest, lying = (f'{told}Values\\":{{\\"k\\":{value}}}' for value in (bounds, lie))
    assert honest in text
    commit.write_text(text.replace(honest, lying))
    assert not are_unique_here(str(tmp_path), 0, "k")


def test_random_columns(tmp_path):
    """As a set says, whatever the files and batches are cut to."""
    chance = random.Random(chosen_seed())
    for number in rounds(80):
        keys = [chance.randrange(5000) for _ in range(chance.choice((5, 60, 700)))]
        if chance.random() < 0.5:
            keys = sorted(set(keys), key=lambda _: chance.random())
        cut, uri = chance.randrange(1, len(keys) + 1), str(tmp_path / str(number))
        for part in filter(None, (keys[:cut], keys[cut:])):
            write_deltalake(uri, pa.table({"k": pa.array(part, pa.int64())}), mode="append")
        is_dense = max(keys) - min(keys) < len(keys) * 8
        found = are_unique_here(uri, 1 if keys[cut:] else 0, "k")
        assert found is (is_dense and len(set(keys)) == len(keys)), number
