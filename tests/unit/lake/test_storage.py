"""Reading Parquet files of a lake by row group, and what is forced to disk."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import write_deltalake

from waldelta.lake import by_row_group
from waldelta.lake.storage import sync_commit, volatile


def test_the_same_rows_by_row_group(tmp_path):
    """In order; row groups without a chosen row are left out, and a missing file has none."""
    for name, first in (("a", 0), ("b", 10)):
        pq.write_table(
            pa.table({"n": range(first, first + 10)}),
            tmp_path / f"{name}.parquet",
            row_group_size=4,
        )
    dataset = ds.dataset(tmp_path, format="parquet")
    found = by_row_group(dataset)
    assert [[group.num_rows for group in part.row_groups] for part in found.get_fragments()] == [
        [4],
        [4],
        [2],
    ] * 2
    assert found.to_table()["n"].to_pylist() == list(range(20))
    chosen = pc.field("n") == 13
    assert [part.row_groups[0].id for part in by_row_group(dataset, chosen).get_fragments()] == [0]
    assert by_row_group(dataset, chosen).to_table(filter=chosen)["n"].to_pylist() == [13]
    nothing = ds.dataset([], format="parquet", schema=dataset.schema)
    assert len(by_row_group(nothing).to_table()) == 0


def test_a_lake_that_is_removed_is_not_forced_to_disk(tmp_path, monkeypatch):
    """No other lake whose root begins alike is left out, and nothing after the block."""
    table, other = (f"{tmp_path.as_uri()}/{name}/public/t" for name in ("lake", "lake2"))
    for uri in (table, other):
        write_deltalake(uri, pa.table({"n": [1]}))
    forced, fsync = [], os.fsync

    def record(handle: int) -> None:
        forced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr("os.fsync", record)
    with volatile(f"{tmp_path.as_uri()}/lake"):
        sync_commit(table, 0)
        assert forced == []
        sync_commit(other, 0)
        assert {path.is_relative_to(tmp_path / "lake") for path in forced} == {False}
    forced.clear()
    sync_commit(table, 0)
    assert tmp_path / "lake/public/t/_delta_log/00000000000000000000.json" in forced
