"""Splitting what the driver read of the change log."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from tests.support.data.messages import T, plain, row, written
from waldelta.lake.changelog import BatchNumbers, BatchRanges
from waldelta.lake.changelog import batch_range as stretch
from waldelta.lake.changelog.batch_range import split_by_relation


@pytest.mark.parametrize("ids", [[], [7], [7, 7, 7], [9, 7, 9, 8, 7]])
def test_rows_are_split_by_relation_in_the_order_of_the_log(ids):
    """Also when there are none: all messages may be of transactions that don't count."""
    rows = pa.table(
        {"relation_id": pa.array(ids, pa.int64()), "seq": pa.array(range(len(ids)), pa.int64())}
    )
    found = {oid: part["seq"].to_pylist() for oid, part in split_by_relation(rows).items()}
    assert found == {oid: [k for k, other in enumerate(ids) if other == oid] for oid in set(ids)}


@pytest.mark.parametrize("most", [0, 1 << 30], ids=["counted", "bounded"])
def test_the_bytes_of_one_table(tmp_path, monkeypatch, most):
    """Of many bytes it is told which table they are of; of few it doesn't matter."""
    monkeypatch.setattr(stretch, "BYTES_PER_COLLAPSE", most)
    monkeypatch.setattr(stretch, "MOST_DRIVER_ROWS", 0)
    large = [row(key, value="x" * 10_000) for key in range(100)]
    log = written(tmp_path, plain(7, *large), plain(8, row(1)))
    everything = sum(log.bytes_of_batches(0, 2).values())
    of_table, of_another = (SimpleNamespace(relation_ids=[oid], snapshot="0:0:") for oid in (T, 1))
    found = BatchRanges(log, log.sizes(0, 2)).of(BatchNumbers(0, 2))
    assert 1_000_000 < found.volume(of_table).bytes <= everything < 2_000_000
    assert found.volume(of_another).bytes == (everything if most else 0)


def test_few_large_rows_are_not_read_at_once(tmp_path, monkeypatch):
    """What this process reads is bounded in bytes, not only in rows."""
    log = written(tmp_path, plain(7, *(row(key, value="x" * 10_000) for key in range(100))))

    def is_in_memory():
        return BatchRanges(log, log.sizes(0, 1)).of(BatchNumbers(0, 1)).is_in_memory

    assert is_in_memory()
    monkeypatch.setattr(stretch, "MOST_DRIVER_MESSAGE_BYTES", 100_000)
    assert not is_in_memory()
