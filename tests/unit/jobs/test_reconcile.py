"""Which tables share a snapshot of a reconciliation."""

import pytest

from waldelta.jobs.reconcile import BYTES_PER_SNAPSHOT, in_groups

MOST = BYTES_PER_SNAPSHOT
CASES = {
    "none": ({}, []),
    "an empty one": ({"a": 0}, [["a"]]),
    "small ones together": ({"a": 1, "b": 0, "c": 2}, [["c", "a", "b"]]),
    "a large one alone": ({"a": 2 * MOST, "b": 1}, [["a"], ["b"]]),
    "up to the limit": ({"a": MOST - 1, "b": 1, "c": 1}, [["a", "b"], ["c"]]),
}


@pytest.mark.parametrize("sizes, groups", CASES.values(), ids=CASES.keys())
def test_small_tables_share_a_snapshot(sizes, groups):
    assert in_groups(sizes) == groups
