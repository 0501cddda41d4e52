"""Reread: what becomes of discarded rows by later changes; the rest needs a source."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from tests.unit.changes.decode.test_decode import change_log, described, plain, plan_of
from waldelta.lake import write_parquet
from waldelta.stages.apply.complete_rows import discarded_since

CASES = {
    "not touched": ([("update", 2, 2)], set(), {}),
    "changed": ([("update", 1, 1)], set(), {}),
    "deleted": ([("delete", 1, None)], {1}, {}),
    "left empty": ([("purge", 1, None)], {1}, {}),
    "another row at its key": ([("upsert", 1, 1)], {1}, {}),
    "another row that moves to its key": ([("update", 2, 1)], {1}, {}),
    "moved": ([("update", 1, 9)], {1}, {1: 9}),
    "moved, and another row at its key": ([("update", 1, 9), ("insert", None, 1)], {1}, {1: 9}),
    "moved to the key of one that is gone": ([("update", 1, 5)], {1, 5}, {1: 5}),
    "both moved": ([("update", 1, 5), ("update", 5, 1)], {1, 5}, {1: 5, 5: 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_discarded_rows(case, tmp_path):
    """The rows 1 and 5; as net changes with base key and present key."""
    changes, resolved, moved = CASES[case]
    decode = plan_of(change_log(plain(7, described())))
    folder = (tmp_path / "net").as_uri()
    rows = [{"action": action, "b0": base, "c0": key} for action, base, key in changes]
    write_parquet(folder, pa.Table.from_pylist(rows, schema=decode.net_schema))
    keys = {n: f'{{"id": "{n}"}}' for n in (1, 5, 9)}
    found = discarded_since(
        SimpleNamespace(folder=folder), SimpleNamespace(decode=decode), [keys[1], keys[5]]
    )
    expected = ({keys[n] for n in resolved}, {keys[old]: keys[new] for old, new in moved.items()})
    assert found == expected
    assert discarded_since(None, SimpleNamespace(decode=decode), []) == (set(), {})
