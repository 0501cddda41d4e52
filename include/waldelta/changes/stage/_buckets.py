"""Assigns rows to buckets, one per task, by their key's text; the same in every process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from waldelta.arrow import Ints, one_array

_Hashes = npt.NDArray[np.uint64]

_SEED = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xFF51AFD7ED558CCD)


def buckets_of(keys: Sequence[pa.ChunkedArray], count: int) -> Ints:
    """Return the bucket, from 0 to ``count`` - 1, of each row of a key's binary columns.

    Nulls are equal to each other.
    """
    found = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        found = _mixed(found * np.uint64(31) + _hashes(key))
    return (found % np.uint64(count)).astype(np.int64)


def _hashes(column: pa.ChunkedArray) -> _Hashes:
    """Return sums of each byte times its position's number, modulo 2**64."""
    values = one_array(column).cast(pa.large_binary()).fill_null(b"")
    _, offsets, data = values.buffers()
    ends: Ints = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    held = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    ends = ends - ends[0]
    places = np.arange(len(held)) - np.repeat(ends[:-1], np.diff(ends))
    products = (held.astype(np.uint64) + np.uint64(1)) * _numbers(int(places.max(initial=0)) + 1)[
        places
    ]
    sums: _Hashes = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products, dtype=np.uint64)])
    return sums[ends[1:]] - sums[ends[:-1]]


def _numbers(count: int) -> _Hashes:
    """Return a pseudorandom number for each position within a value (splitmix64)."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_SEED))


def _mixed(numbers: _Hashes) -> _Hashes:
    numbers = (numbers ^ (numbers >> np.uint64(33))) * _MIX
    return numbers ^ (numbers >> np.uint64(29))
