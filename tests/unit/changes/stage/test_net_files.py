"""Net files: what is read of them, and how much memory that takes."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyarrow.fs import FileInfo, FileSystem, FileType, FSSpecHandler, PyFileSystem

from waldelta.changes.stage import net_files
from waldelta.changes.stage.net_files import NetFiles, at_places
from waldelta.lake import Lake, write_parquet
from waldelta.spark import InProcess

ROWS = pa.Table.from_batches(
    [pa.record_batch({"n": [k], "text": ["x" * 1_000_000]}) for k in range(40)]
)


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


class Marked(FSSpecHandler):
    """A folder of an object store, in which S3A has put an object that marks it as one."""

    def __init__(self, files: FileSystem, marker: FileInfo) -> None:
        self.fs, self.marker = files, marker

    def get_file_info_selector(self, selector):
        return [self.marker, *self.fs.get_file_info(selector)]

    def open_input_file(self, path):
        return self.fs.open_input_file(path)


@pytest.mark.parametrize("kind", [FileType.File, FileType.Directory], ids=lambda kind: kind.name)
def test_a_folder_with_a_marker_object(tmp_path, monkeypatch, kind):
    """A store lists it, without a name, among the objects of its folder."""
    for name, rows in (
        ("part-1.parquet", 2),
        ("part-0.parquet", 3),
        ("_SUCCESS", 1),
        (".part-0.crc", 1),
    ):
        pq.write_table(pa.table({"n": list(range(rows))}), tmp_path / name)
    marker = FileInfo("", kind, size=0)
    files = Lake.files
    monkeypatch.setattr(
        Lake, "files", lambda lake, uri: PyFileSystem(Marked(files(lake, uri), marker))
    )
    found = NetFiles.of(tmp_path.as_uri(), Lake(tmp_path.as_uri()))
    assert (found.paths, found.rows) == (["part-0.parquet", "part-1.parquet"], [3, 2])


@pytest.mark.parametrize("out", [[], [1], [0, 2, 4], [0, 1, 2, 3, 4]], ids=len)
def test_rows_are_taken_out_by_their_numbers_among_all_files(tmp_path, out):
    """A file keeps the order of its rows; what comes instead is a file of its own."""
    folder, numbers = (tmp_path / "net").as_uri(), np.array(out, np.int64)
    for part, values in enumerate([[0, 1], [2], [3, 4]]):
        write_parquet(folder, pa.table({"n": values}), part)
    files = NetFiles.of(folder, Lake(tmp_path.as_uri()))
    assert files.at(numbers)["n"].to_pylist() == out
    write_parquet(f"{folder}-let", pa.table({"n": [-1]}))
    rest = files.without(InProcess(pytest.fail), numbers, f"{folder}-let", 1)
    assert rest.read(["n"])["n"].to_pylist() == [-1, *(n for n in range(5) if n not in out)]


def test_files_that_are_written_at_once_all_stay(tmp_path):
    """The first task, which has most to write, is the last one to begin its file."""
    folder, counts = (tmp_path / "net").as_uri(), [500_000, *[1] * 8]
    for part, count in enumerate(counts):
        write_parquet(folder, pa.table({"n": np.arange(count)}), part)
    (tmp_path / "net-rest").mkdir()
    (tmp_path / "net-rest" / "part-7.parquet").write_bytes(b"of an attempt before")
    files = NetFiles.of(folder, Lake(tmp_path.as_uri()))
    rest = files.without(InProcess(pytest.fail), np.array([0]), f"{folder}-rest")
    assert sorted(rest.rows) == sorted([0, counts[0] - 1, *counts[1:]])


def test_rows_that_unpack_to_much_are_not_read_at_all(tmp_path, monkeypatch):
    """A file of a few kilobytes may hold more than memory has room for: its footer says so."""
    monkeypatch.setattr(net_files, "MOST_DRIVER_BYTES", 1 << 20)
    large = pa.table({"v": [f"{number}" * (1 << 16) for number in range(10, 90)]})
    target = Lake(tmp_path.as_uri()).target("s.t")
    write_deltalake(target.uri, large)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.parquet")) < 1 << 20

    def read(*given):
        raise AssertionError("rows were read")

    monkeypatch.setattr(net_files, "batches", read)
    assert net_files.small_rows(target.open()) is None
