"""An object store asked directly: which ones are, and a folder as Arrow sees it."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore
from pyarrow.fs import FileSelector, FileType

from waldelta.lake import object_store, parquet_format
from waldelta.lake.object_store import ObjectStore, open_store, requests_made, store_folder

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu-central-1"}


@pytest.mark.parametrize(
    ("uri", "options", "is_opened"),
    [("s3a://bucket/lake", KEYS, True),
     ("s3://bucket", KEYS | {"AWS_ALLOW_HTTP": "true", "timeout": "30s", "max_retries": "3"}, True),
     ("s3a://bucket/lake", KEYS | {"AWS_CA_BUNDLE": "/x"}, True),
     ("s3a://bucket/lake", {}, False),
     ("s3a://bucket/lake", {"AWS_REGION": "eu-central-1"}, False),
     ("s3a://bucket/lake", KEYS | {"AWS_IAM_ROLE_ARN": "arn"}, False),
     ("s3a://bucket/lake", KEYS | {"AWS_S3_LOCKING_PROVIDER": "dynamodb"}, False),
     ("s3a://bucket/lake", KEYS | {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, False),
     ("abfss://c@a.dfs.core.windows.net/lake", KEYS, False),
     ("file:///lake", KEYS, False)],
)  # fmt: skip
def test_which_stores_are_asked_directly(uri, options, is_opened):
    """Others may see other credentials, or need another way to commit."""
    assert (open_store(uri, options) is not None) == is_opened


def test_no_secret_is_shown():
    opened = open_store("s3a://bucket/lake", KEYS | {"AWS_SECRET_ACCESS_KEY": "very-secret"})
    assert "very-secret" not in repr(opened)


@pytest.fixture
def store(monkeypatch):
    """An empty one, which tables of any address are in."""
    made = ObjectStore(MemoryStore())
    monkeypatch.setattr(object_store, "open_store", lambda *_: (made, "lake/t"))
    return made


@pytest.fixture
def folder(store):
    return store_folder("s3://bucket/lake/t", {})


@pytest.fixture
def files(store):
    """A table's, which never change."""
    return store_folder("s3://bucket/lake/t", {}, unchanging=True)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_file_is_read_as_it_was_written(folder, size):
    """Whole, or in parts."""
    table = pa.table({"a": [os.urandom(size)], "b": [1]})
    pq.write_table(table, "x/a.parquet", filesystem=folder)
    assert pq.read_table("x/a.parquet", filesystem=folder).equals(table)
    with folder.open_input_file("x/a.parquet") as file:
        assert file.size() > size
        file.seek(4)
        assert file.tell() == 4


def test_a_small_file_of_a_table_is_read_once(store):
    store.write("lake/t/part-1.parquet", b"content")
    before = requests_made()
    for _ in range(2):
        files = store_folder("s3://bucket/lake/t", {}, unchanging=True)
        assert files.open_input_file("part-1.parquet").read() == b"content"
    assert requests_made() - before == 1


def test_a_large_file_that_never_changes_is_opened_once(files):
    """Each row group of a Parquet file is a fragment, which opens the file."""
    rows = pa.table({"a": [os.urandom(1_000_000) for _ in range(4)]})
    pq.write_table(rows, "a.parquet", filesystem=files, row_group_size=1)
    before = requests_made()
    dataset = ds.dataset("a.parquet", filesystem=files, format="parquet")
    groups = [one for part in dataset.get_fragments() for one in part.split_by_row_group()]
    assert pa.concat_tables(group.to_table() for group in groups).equals(rows)
    # Whether there is a file, its end with the footer, and each row group.
    assert requests_made() - before == 2 + len(groups) == 6


def test_small_files_are_kept_beside_large_ones(store, files):
    """The next run gets them with the copy of the logs (KnownLogs.save)."""
    store.write("lake/t/small", b"small")
    files.open_input_file("small").close()
    large = pa.table({"a": [os.urandom(1_500_000)]})
    names = [f"{n}.parquet" for n in range(40)]
    for name in names:
        pq.write_table(large, name, filesystem=files)
    before = requests_made()
    for name in names * 3:
        pq.ParquetFile(files.open_input_file(name)).close()
    assert requests_made() - before == len(names)
    assert store.read_cached("lake/t/small") == b"small"


def test_what_is_kept_longest_unused_goes_first(monkeypatch):
    monkeypatch.setattr(object_store, "_MOST_KEPT_BYTES", 30)
    store = ObjectStore(MemoryStore())
    for name in ("a", "b", "c"):
        store.keep(name, bytes(10))
    assert store.read_cached("a") is not None
    store.keep("d", bytes(10))
    assert [name for name in "abcd" if store.read_cached(name) is None] == ["b"]


def test_nothing_is_kept_of_what_this_process_replaces(files):
    for content in (b"first", b"second"):
        with files.open_output_stream("a") as file:
            file.write(content)
        assert files.open_input_file("a").read() == content
    files.delete_file("a")
    with pytest.raises(FileNotFoundError):
        files.open_input_file("a")


def test_columns_of_a_store_are_read_together(files):
    """Those near to each other, by one request; from a disk, only what is asked for."""
    columns = {
        "a": [1],
        "between": [os.urandom(500_000)],
        "b": [2],
        "last": [os.urandom(3_000_000)],
    }
    pq.write_table(pa.table(columns), "a.parquet", filesystem=files)
    requests = []
    for uri in ("s3://bucket/lake/t", "file:///lake/t"):
        dataset = ds.dataset("a.parquet", filesystem=files, format=parquet_format(uri))
        before = requests_made()
        assert dataset.to_table(["a", "b"]).to_pylist() == [{"a": 1, "b": 2}]
        requests.append(requests_made() - before)
    assert requests == [1, 2]


def test_a_stream_is_read_in_blocks(folder):
    content = os.urandom(20_000_000)
    with folder.open_output_stream("a") as file:
        file.write(content)
    before = requests_made()
    with folder.open_input_stream("a") as stream:
        read = b"".join(iter(lambda: stream.read(100_000), b""))
    assert read == content
    assert requests_made() - before == 4  # its beginning, then 8 MB each


def test_a_folder_is_listed_and_removed(folder):
    for path in ("a/1", "a/b/2", "c"):
        with folder.open_output_stream(path) as file:
            file.write(path.encode())
    listed = {i.path: i.type for i in folder.get_file_info(FileSelector(""))}
    assert listed == {"a": FileType.Directory, "c": FileType.File}
    every = [i.path for i in folder.get_file_info(FileSelector("", recursive=True))]
    assert sorted(every) == ["a/1", "a/b/2", "c"]
    found = folder.get_file_info(["a", "c", "d"])
    assert [i.type for i in found] == [FileType.Directory, FileType.File, FileType.NotFound]
    folder.delete_dir("a")
    folder.delete_file("c")
    assert folder.get_file_info(FileSelector("", recursive=True)) == []
    with pytest.raises(FileNotFoundError):
        folder.open_input_file("c")
    with pytest.raises(FileNotFoundError):
        folder.get_file_info(FileSelector("a"))
    assert folder.get_file_info(FileSelector("a", allow_not_found=True)) == []


def test_an_object_is_created_once():
    store = ObjectStore(MemoryStore())
    made = store.create("x", b"ours")
    assert made.content == b"ours"
    assert store.create("x", b"theirs") is None
    assert store.create("x", b"ours").tag == made.tag
    assert store.read_tagged("x").content == b"ours"


def test_threads_that_keep_the_same_file_count_its_bytes_once():
    """Tasks of one process read the same staged files at the same moment."""
    store, content, interval = ObjectStore(MemoryStore()), b"x" * 1000, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: store.keep("a", content), range(20_000)))
    finally:
        sys.setswitchinterval(interval)
    assert store._small._bytes == len(content)
