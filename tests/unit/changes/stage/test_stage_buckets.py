"""Which task a row belongs to: the same for equal keys, wherever they stand."""

import numpy as np
import pyarrow as pa
import pytest

from waldelta.changes.stage.stage import buckets_of


def column(*values: str | None) -> pa.ChunkedArray:
    return pa.chunked_array(
        [[None if value is None else value.encode() for value in values]], pa.binary()
    )


def test_equal_keys_share_a_bucket_and_others_are_spread():
    """None of five buckets of numbers is much larger than the others."""
    keys = column(*(str(n) for n in range(100_000)))
    found = buckets_of([keys], 5)
    assert np.bincount(found).tolist() == pytest.approx([20_000] * 5, rel=0.03)
    assert np.array_equal(buckets_of([keys.slice(70_001)], 5), found[70_001:])
    again = pa.chunked_array([keys.slice(70_001), keys.slice(0, 70_001)])
    assert np.array_equal(buckets_of([again], 5), np.concatenate([found[70_001:], found[:70_001]]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(["ab", "c"], ["a", "bc"], id="columns"),
        pytest.param(["ab"], ["ba"], id="places"),
        pytest.param(["a"], ["a\0"], id="lengths"),
    ],
)
def test_keys_that_are_alike_differ(one, other):
    """As far as 64 bits go: with many buckets they fall into different ones."""
    many = 1 << 40
    assert buckets_of([column(v) for v in one], many) != buckets_of(
        [column(v) for v in other], many
    )


def test_it_is_the_same_in_every_process():
    """What one task wrote, another reads."""
    keys = [column("7", None, "", "x" * 5000), column("a", "b", None, "ß")]
    assert buckets_of(keys, 1000).tolist() == [703, 904, 0, 730]


def test_without_rows():
    assert buckets_of([column()], 3).tolist() == []
