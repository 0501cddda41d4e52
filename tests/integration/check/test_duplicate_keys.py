"""Duplicate keys of Spark's rows, and which rows are compared."""

import pytest

from tests.support.bookkeeping import table_at
from waldelta.stages.check.measure.failing_rows import FailingRows, IntegerKey, duplicate_keys
from waldelta.stages.check.measure.profile import profile_by_statistics

CASES = {
    "three and two": ("int", [1, 1, 1, 2, 2, 3], FailingRows(5, ("1", "2"))),
    "two nulls": ("int", [1, None, None], FailingRows(2, ("null",))),
    "none": ("bigint", [-(2**63), 2**63 - 1, None], FailingRows(0)),
}


@pytest.mark.parametrize(("kind", "keys", "expected"), CASES.values(), ids=CASES)
def test_one_column(runner, kind, keys, expected):
    frame = runner.spark().createDataFrame([(key,) for key in keys], f"`a.b` {kind}")
    assert duplicate_keys(frame, ["a.b"]) == expected


def test_several_columns(runner):
    frame = runner.spark().sql("select * from values (1, 'a'), (1, 'b'), (1, 'a') as t(id, v)")
    assert duplicate_keys(frame, ["id", "v"]) == FailingRows(2, ("1, a",))


def test_a_mapped_column_is_sparks(runner, tmp_path):
    """Its files' statistics go by another name, which may be another column's."""
    runner.spark().range(0, 100).selectExpr("id as k").write.format("delta").option(
        "delta.columnMapping.mode", "name"
    ).save(str(tmp_path))
    table = table_at(str(tmp_path)).open(0)
    assert IntegerKey.of(table, "k") is None
    assert profile_by_statistics(table, [("k", True)]) is None


@pytest.mark.soak("a RESTORE of a target's file")
def test_rows_given_back_to_a_file_are_compared(runner, tmp_path):
    """What a deletion vector took from a file is no row any more, until a RESTORE."""
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
        return duplicate_keys(key.written_since(known).rows_in_question(frame), ["k"]).rows

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
    assert duplicate_keys(key.written_since(1).rows_in_question(frame), ["k", "w"]) == FailingRows(
        2, ("2, a",)
    )
    assert key.written_since(2).rows_in_question(frame).count() == 0
