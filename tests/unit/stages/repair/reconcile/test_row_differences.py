"""Rows of buckets that differ: each kind of difference, by key or as a multiset."""

import json

import pytest

from waldelta.stages.repair.reconcile._row_differences import (
    HashedRows,
    Valued,
    differing_rows,
    with_columns,
)

A, B, C = (1, 10, "a"), (2, 20, "b"), (3, 30, "c")
KEYED = {
    "equal": ([A, B, C], [C, A, B], []),
    "missing": ([A, B], [A], [("missing", "b", 1)]),
    "extra": ([A], [A, B], [("extra", "b", 1)]),
    "different": ([A, B], [A, (2, 21, "b")], [("different", "b", 1)]),
    "twice, alike": ([A], [A, A, A], [("doubled", "a", 2)]),
    "twice, once as it should be": ([A], [A, (1, 11, "a")], [("doubled", "a", 1)]),
    "twice, and not on the source": ([], [A, A], [("doubled", "a", 1)]),
    "all of them": ([A, B], [(2, 22, "b"), C],
                    [("missing", "a", 1), ("different", "b", 1), ("extra", "c", 1)]),
    "nothing there": ([], [], []),
}  # fmt: skip


@pytest.mark.parametrize("source, target, expected", KEYED.values(), ids=KEYED.keys())
def test_rows_with_a_key(source, target, expected):
    found = differing_rows(HashedRows.of(source, 1), HashedRows.of(target, 1), ["id"], keyed=True)
    assert [(one.kind, json.loads(one.key)["id"], one.rows) for one in found] == expected


X, Y = (7, 7, "x"), (8, 8, "y")
MULTISETS = {
    "equal": ([X, X, Y], [Y, X, X], []),
    "one copy less": ([X, X], [X], [("missing", "x", 1)]),
    "two more, and another": ([X, Y], [X, X, X], [("extra", "x", 2), ("missing", "y", 1)]),
}


@pytest.mark.parametrize("source, target, expected", MULTISETS.values(), ids=MULTISETS.keys())
def test_rows_without_a_key_are_counted(source, target, expected):
    found = differing_rows(HashedRows.of(source, 1), HashedRows.of(target, 1), ["v"], keyed=False)
    assert [(one.kind, json.loads(one.key)["v"], one.rows) for one in found] == expected


def test_columns_that_differ_are_told_with_both_values():
    """As they are compared, not as they are shown; long ones are cut."""
    (one,) = differing_rows(
        HashedRows.of([A], 1), HashedRows.of([(1, 11, "a")], 1), ["id"], keyed=True
    )
    source = Valued(("a", "1.0", "x" * 300, None), ("a", "1.0", "x" * 300, "n"))
    target = Valued(("a", "1.00", "y", None), ("a", "1.0", "y", "n"))
    told = with_columns(one, ["id", "same", "long", "null"], source, target, 10)
    assert [(c.name, c.source, c.target) for c in told.columns] == [
        ("long", "xxxxxxxxxx… (300 characters)", "y")
    ]
    assert with_columns(one, ["id"], None, target, 10) == one
