"""Net files: what is read of them, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from spark_jobs.net_files import at_places

ROWS = pa.Table.from_batches([pa.record_batch({"n": [k], "text": ["x" * 1_000_000]}) for k in range(40)])


@pytest.fixture
def pool() -> Iterator[pa.MemoryPool]:
    """One that knows the most that was taken of it."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.proxy_memory_pool(before))
    yield pool
    pa.set_memory_pool(before)


@pytest.mark.parametrize("places", [[], [0], [3, 17, 39], list(range(40))], ids=len)
def test_a_few_of_many_large_rows_take_the_memory_of_these_few(pool, places):
    """A merge holds its net changes, and takes some of them for each few rows of its files."""
    found = at_places(ROWS, np.array(places, np.int64))
    assert found["n"].to_pylist() == places
    assert pool.max_memory() < (len(places) + 2) * 1_000_000
