"""Duplicate keys: the bitmap finds whatever grouping finds."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from waldelta.stages.check.measure.duplicate_keys import IntegerKey, find_duplicate_keys
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.measure.profile import profile_by_statistics

pytestmark = pytest.mark.spark

EDGES = [
    -65_537, -65_536, -32_769, -32_768, -32_767, -1, 0, 1, 32_767, 32_768, 32_769, 65_536, 65_537,
]  # fmt: skip
CASES = {
    "edges of the bitmaps": ("bigint", EDGES, FailingRows(0)),
    "three and two": ("int", [1, 1, 1, 2, 2, 3], FailingRows(5, ("1", "2"))),
    "two nulls": ("int", [1, None, None], FailingRows(2, ("null",))),
    "the bucket of both signs": ("bigint", [*EDGES, 0], FailingRows(2, ("0",))),
    "the ends of bigint": (
        "bigint",
        [-(2**63), 2**63 - 1, 2**63 - 1],
        FailingRows(2, (str(2**63 - 1),)),
    ),
}
OTHERS = {
    "no rows": ("bigint", [], FailingRows(0)),
    "a small integer": ("smallint", [-32_768, 32_767, -32_768], FailingRows(2, ("-32768",))),
    "one null": ("int", [1, None], FailingRows(0)),
    **{f"{n} twice": ("bigint", [*EDGES, n], FailingRows(2, (str(n),))) for n in EDGES},
}
FURTHER = pytest.mark.nightly("further keys at the edges of the bitmaps")


def is_dense(uri: str, version: int, column: str) -> bool:
    key = IntegerKey.of(table_at(uri).open(version), column)
    return key is not None and key.is_dense


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=FURTHER) for name, case in OTHERS.items()),
    ],
)
def test_the_bitmap_finds_what_grouping_finds(runner, kind, keys, expected):
    frame = runner.spark().createDataFrame([(key,) for key in keys], f"`a.b` {kind}")
    assert find_duplicate_keys(frame, ["a.b"], dense=True) == expected
    assert find_duplicate_keys(frame, ["a.b"]) == expected


def test_several_columns(runner):
    frame = runner.spark().sql("select * from values (1, 'a'), (1, 'b'), (1, 'a') as t(id, v)")
    assert find_duplicate_keys(frame, ["id", "v"]) == FailingRows(2, ("1, a",))


IDS = range(100_000)
DENSITY = {
    "one after the other": (pa.array(IDS), True),
    "a bit of a byte for each key": (pa.array(60 * key for key in IDS), True),
    "far apart": (pa.array(1000 * key for key in IDS), False),
    "text": (pa.array(map(str, IDS)), False),
    "a null hides nothing": (pa.array(None if key == 5 else key for key in IDS), True),
    "nulls alone": (pa.nulls(100, pa.int64()), False),
}


@pytest.mark.parametrize(("keys", "dense"), DENSITY.values(), ids=DENSITY)
def test_density_follows_from_the_files_statistics(tmp_path, keys, dense):
    half = len(keys) // 2
    for part in (keys[:half], keys[half:]):
        write_deltalake(tmp_path, pa.table({"k": part}), mode="append")
    assert is_dense(str(tmp_path), 1, "k") is dense


def test_a_file_without_statistics_is_taken_as_sparse(tmp_path):
    properties = {"delta.dataSkippingNumIndexedCols": "0"}
    write_deltalake(tmp_path, pa.table({"k": pa.array(IDS)}), configuration=properties)
    assert not is_dense(str(tmp_path), 0, "k")
    assert not is_dense(str(tmp_path), 0, "other")


def test_a_mapped_column_is_taken_as_sparse(runner, tmp_path):
    """Its files' statistics go by another name, which may be another column's."""
    runner.spark().range(0, 100_000).selectExpr("id as k").write.format("delta").option(
        "delta.columnMapping.mode", "name"
    ).save(str(tmp_path))
    assert not is_dense(str(tmp_path), 0, "k")


@pytest.mark.soak("a RESTORE of a target's file")
def test_rows_given_back_to_a_file_are_compared(runner, tmp_path):
    """What a deletion vector took from a file is no row any more, until a RESTORE takes the vector
    away.
    """
    uri, target = str(tmp_path), f"delta.`{tmp_path}`"
    with_vectors = {"delta.enableDeletionVectors": "true"}
    first = runner.spark().range(0, 1000, 1, 1).selectExpr("id as k", "'a' as tag")
    first.write.format("delta").options(**with_vectors).save(uri)
    runner.spark().sql("select * from values (5L, 'b'), (2000L, 'b') as t(k, tag)").coalesce(
        1
    ).write.format("delta").mode("append").save(uri)
    runner.spark().sql(f"delete from {target} where k = 5 and tag = 'a'")

    def found(known, version):
        frame = runner.spark().read.format("delta").option("versionAsOf", version).load(uri)
        key = IntegerKey.of(table_at(uri).open(version), "k")
        return find_duplicate_keys(key.written_since(known).rows_in_question(frame), ["k"]).rows

    assert len(list(tmp_path.glob("deletion_vector*"))) == 1
    assert [found(0, 1), found(2, 2)] == [2, 0]
    runner.spark().sql(f"restore table {target} to version as of 1")
    assert found(2, 3) == 2
    assert profile_by_statistics(table_at(uri).open(), [("tag", False)]) is None


def test_a_composite_key_is_compared_by_its_first_column(runner, tmp_path):
    """Where that is an integer; rows of other files aren't looked at."""
    uri = str(tmp_path)
    for keys in ("(1L, 'a'), (2L, 'a')", "(10L, 'a'), (10L, 'b')", "(2L, 'b'), (2L, 'a')"):
        runner.spark().sql(f"select * from values {keys} as t(k, w)").coalesce(1).write.format(
            "delta"
        ).mode("append").save(uri)
    key, frame = (
        IntegerKey.of(table_at(uri).open(2), "k"),
        runner.spark().read.format("delta").load(uri),
    )
    assert key.written_since(1).rows_in_question(frame).count() == 3
    assert find_duplicate_keys(
        key.written_since(1).rows_in_question(frame), ["k", "w"]
    ) == FailingRows(2, ("2, a",))
    assert key.written_since(2).rows_in_question(frame).count() == 0
