"""Splitting what the driver read of the change log."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_jobs.stretch import split_by_relation


@pytest.mark.parametrize("ids", [[], [7], [7, 7, 7], [9, 7, 9, 8, 7]])
def test_rows_are_split_by_relation_in_the_order_of_the_log(ids):
    """Also when there are none: every message of a range may belong to transactions that don't count."""
    rows = pa.table({"relation_id": pa.array(ids, pa.int64()), "seq": pa.array(range(len(ids)), pa.int64())})
    found = {oid: part["seq"].to_pylist() for oid, part in split_by_relation(rows).items()}
    assert found == {oid: [k for k, other in enumerate(ids) if other == oid] for oid in set(ids)}
