"""What the catalogs' entries say of the time between two checks, without a server."""

import pytest

from waldelta.postgres.publication_membership import (
    Membership,
    from_texts,
    lost_operations,
    to_texts,
    was_interrupted,
)
from waldelta.stages.setup._slot_setup import is_replaced

ALL = frozenset({"insert", "update", "delete"})
INSERTS = frozenset({"insert"})


def said(*entries, relation=1, publication=1, **more):
    return Membership(relation, publication, frozenset(entries), **{"publishes": ALL} | more)


# What is said then and now, of one table; whether anything else may have held in between.
CASES = {
    "the same two": ([said("table 5", "schema 6")], [said("table 5", "schema 6")], False),
    "the schema, which decides, goes and comes": ([said("table 5", "schema 6")],
     [said("table 5", "schema 9")], True),
    "the filtered table beside its schema goes and comes": ([said("table 5", "schema 6")],
     [said("table 7", "schema 6")], True),
    "its schema comes": ([said("table 5", row_filter="(a > 1)")], [said("table 5", "schema 6")],
     False),
    "its schema goes": ([said("table 5", "schema 6")], [said("table 5", row_filter="(a > 1)")],
     False),
    "its schema comes and changes nothing": ([said("table 5")], [said("table 5", "schema 6")],
     False),
    "a leaf goes, its root stays": ([said("table 5", "table 6")], [said("table 6")], False),
    "a leaf comes beside its root": ([said("table 6")], [said("table 5", "table 6")], False),
    "a filtered leaf beside its root goes and comes": (
        [said("table 5", "table 6", row_filter="(a > 1)")],
        [said("table 6", "table 7", row_filter="(a > 1)")],
        True,
    ),
    "its schema goes, and another publication's filter changes": (
        [said("table 5", "schema 6"), said("table 8", publication=2, row_filter="(a > 5)")],
        [
            said("table 5", row_filter="(a > 1)"),
            said("table 9", publication=2, row_filter="(a < 0)"),
        ],
        True,
    ),
    "a renamed column": ([said("table 5", row_filter="(a > 1)")],
     [said("table 5", row_filter="(b > 1)")], False),
    "operations for a while": ([said("table 5", version=1)], [said("table 5", version=2)], True),
    # Limits: one change of options or owner explains a version, and nobody knows how many.
    "operations for a while, and options": ([said("table 5", version=1)],
     [said("table 5", version=2, options="t")], False),
    "operations for a while, and an owner": ([said("table 5", version=1)],
     [said("table 5", version=2, owner=3)], False),
    "fewer operations, and an owner": ([said("table 5", version=1)],
     [said("table 5", version=2, owner=3, publishes=INSERTS)], False),
    "another leaf's entry": ([said("table 5"), said("table 6", relation=2)],
     [said("table 5"), said("table 7", relation=2)], True),
    "a leaf more": ([said("table 5")], [said("table 5"), said("table 7", relation=2)], False),
}  # fmt: skip


@pytest.mark.parametrize(("then", "now", "expected"), CASES.values(), ids=list(CASES))
def test_what_held_in_between(then, now, expected):
    assert was_interrupted(then, now) is expected
    assert was_interrupted(from_texts(to_texts(then)), now) is expected


LOST = {
    "none": ([said("table 5")], [said("table 7")], frozenset()),
    "two": ([said("table 5")], [said("table 5", publishes=INSERTS)], {"update", "delete"}),
    "another publication sends them": ([said("table 5")],
     [said("table 5", publishes=INSERTS), said("table 6", publication=2)], set()),
    "one leaf's": ([said("table 5"), said("table 6", relation=2)],
     [said("table 5"), said("table 6", relation=2, publishes=INSERTS)], {"update", "delete"}),
    "a leaf that went": ([said("table 5"), said("table 6", relation=2)], [said("table 5")], set()),
    "nothing known": ([], [said("table 5")], set()),
}  # fmt: skip


@pytest.mark.parametrize(("then", "now", "expected"), LOST.values(), ids=list(LOST))
def test_lost_operations(then, now, expected):
    assert lost_operations(then, now) == expected


RENEWED = {
    # What is recorded, what setup found, what it left behind; whether that is recorded then.
    "another filter": (to_texts([said("table 5")]), [said("table 5")],
     [said("table 7", row_filter="(a > 1)")], True),
    "nothing": (to_texts([said("table 5")]), [said("table 5")], [said("table 5")], False),
    "it was away before": (to_texts([said("table 5")]), [said("table 6")], [said("table 7")],
     False),
    "fewer operations": (to_texts([said("table 5")]), [said("table 5")],
     [said("table 5", version=2, publishes=INSERTS)], False),
    "nothing known": ([], [said("table 5")], [said("table 7")], False),
}  # fmt: skip


@pytest.mark.parametrize(("held", "was", "now", "expected"), RENEWED.values(), ids=list(RENEWED))
def test_what_setup_renews(held, was, now, expected):
    """Setup's own transaction interrupts nothing; what somebody did before it stays to be told."""
    assert is_replaced(held, frozenset(was), frozenset(now)) is expected
