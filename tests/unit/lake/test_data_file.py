"""A data file under way: what is left of it when it ends, and when it can't."""

import resource

import pyarrow as pa
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from waldelta.lake import DataFile

SCHEMA = pa.schema([("id", pa.int64())])
ROWS = pa.table({"id": range(100)}, SCHEMA)


def write(folder, *, before_close) -> None:
    with DataFile(SubTreeFileSystem(str(folder), LocalFileSystem()), SCHEMA, "part-x-") as file:
        file.write(ROWS)
        before_close()
        file.close()


def test_a_closed_file_stays(tmp_path):
    write(tmp_path, before_close=lambda: None)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("part-x-")


def test_a_file_whose_end_finds_no_room_goes_again(tmp_path):
    """A disk may be full when the footer comes, with all rows written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (max(p.stat().st_size for p in tmp_path.iterdir()), limits[1])
        )

    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, before_close=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
