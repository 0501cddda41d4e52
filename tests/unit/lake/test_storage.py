"""Reading Parquet files of a lake so that memory holds a row group, not a file."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from waldelta.lake import by_row_group


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
