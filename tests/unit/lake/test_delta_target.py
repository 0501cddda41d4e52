"""The protocol of commits to a Delta table: a compare-and-swap, its lost answer is found again."""

import os
import pickle
import re
import shutil

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from deltalake.exceptions import CommitFailedError

from waldelta.errors import StateError
from waldelta.lake import Lake, Overtaken, Tag, local_path, replace_by_rows
from waldelta.lake import delta_target as module
from waldelta.lake.delta_statements import dbt_properties

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
TAG = Tag("app", 7, '{"waldelta": {"batch": 7}}')


@pytest.fixture
def target(lake):
    """A target with two rows."""
    found = Lake(lake).target("s.t")
    write_deltalake(found.uri, ROWS)
    return found


def ids(target) -> list[int]:
    return sorted(target.open().dataset().to_table()["id"].to_pylist())


def rows(table, tag=TAG, *, appends=True) -> int:
    return replace_by_rows(table, [] if appends else table.table_files, ROWS, tag)


def no_files(table, tag=TAG) -> int:
    return table.replace_files(table.table_files, [], tag)


@pytest.mark.parametrize(("write", "left"), [(rows, [1, 1, 2, 2]), (no_files, [])])
def test_a_commit_has_its_tag(target, write, left):
    table = target.open()
    assert (write(table), table.version, ids(target)) == (1, 1, left)
    assert (table.committed("app"), table.committed("other")) == (7, 0)
    assert target.log.read(1).info["userMetadata"] == TAG.metadata


@pytest.mark.parametrize("write", [rows, no_files])
def test_a_commit_of_another_writer_is_not_overwritten(target, write):
    table = target.open()
    write_deltalake(target.uri, ROWS, mode="append")
    with pytest.raises(Overtaken) as overtaken:
        write(table)
    assert [commit.version for commit in overtaken.value.commits] == [1]
    assert (ids(target), target.open().committed("app")) == ([1, 1, 2, 2], 0)


def test_a_commit_whose_answer_was_lost_is_found_behind_another(target):
    """Its version may not be the newest any more."""
    table, late = target.open(), target.open()
    assert rows(table) == 1
    write_deltalake(target.uri, ROWS, mode="append")
    assert (rows(late), late.version) == (1, 2)
    assert ids(target) == [1, 1, 1, 2, 2, 2]


def test_a_commit_that_may_exist_is_neither_found_nor_overtaken(target, monkeypatch):
    def fail(*_, **__):
        raise CommitFailedError("no answer")

    monkeypatch.setattr(module, "commit_files", fail)
    with pytest.raises(CommitFailedError, match="no answer") as failed:
        rows(target.open())
    assert not isinstance(failed.value, Overtaken)


def test_a_commit_is_forced_to_disk_before_its_checkpoint(target, monkeypatch):
    synced = []
    monkeypatch.setattr(module, "CHECKPOINT_INTERVAL", 2)
    monkeypatch.setattr(module, "sync_commit", lambda uri, version: synced.append(version))
    monkeypatch.setattr(module, "write_checkpoint", lambda table: synced.append("checkpoint"))
    table = target.lake.target("s.t").open()
    for number in (7, 8):
        rows(table, Tag("app", number, str(number)))
    assert synced == [1, 2, "checkpoint"]


def test_another_table_at_the_same_place_is_forced_to_disk(target, monkeypatch):
    """Although it has the version that was forced last."""
    forced = []
    monkeypatch.setattr("waldelta.lake.storage._fsync", lambda path: forced.append(path.name))
    rows(target.open())
    assert forced
    forced.clear()
    target.open().keep(1)
    assert forced == []
    for path in local_path(target.uri).rglob("*.*"):
        path.unlink()
    write_deltalake(target.uri, ROWS)
    DeltaTable(target.uri).delete()
    target.open().keep(1)
    assert f"{1:020d}.json" in forced


def test_the_folder_of_a_new_partition_is_forced_to_disk_with_each_commit(lake, monkeypatch):
    """It is an entry of the folder above it, whatever was forced before."""
    forced, place = [], Lake.of(lake).target("s.t")
    monkeypatch.setattr("waldelta.lake.storage._fsync", forced.append)
    folder = local_path(place.uri)
    for version, part in enumerate("ab"):
        parts = ROWS.append_column("p", pa.array([part] * len(ROWS)))
        parts = parts.append_column("q", parts["p"])
        write_deltalake(place.uri, parts, mode="append", partition_by=["p", "q"])
        forced.clear()
        place.sync_commit(version)
        assert {folder / f"p={part}/q={part}", folder / f"p={part}", folder} <= {*forced}


def test_all_commits_of_another_table_at_the_same_place_are_forced_to_disk(target, monkeypatch):
    """Although the table before had only one."""
    target.open().keep(0)
    shutil.rmtree(local_path(target.uri))
    for _ in range(3):
        write_deltalake(target.uri, ROWS, mode="append")
    forced = []
    monkeypatch.setattr("waldelta.lake.storage._fsync", lambda path: forced.append(path.name))
    target.open().keep(2)
    assert {f"{version:020d}.json" for version in range(3)} <= {*forced}


def test_credentials_are_in_no_repr(lake, monkeypatch):
    """Nor in that of a table; only an object store has any."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    there = Lake.of("s3a://bucket/lake")
    assert there.storage_options["AWS_SECRET_ACCESS_KEY"] == "geheim"
    assert "geheim" not in repr(there.target("s.t"))
    assert Lake.of(lake).storage_options is None


def test_a_table_is_opened_once_and_then_brought_up_to_date(target, monkeypatch):
    """Another writer's commits are there, and the log is read from its beginning only once."""
    opened = []
    monkeypatch.setattr(
        module,
        "DeltaTable",
        lambda *args, **options: opened.append(1) or DeltaTable(*args, **options),
    )
    for version in range(3):
        assert target.open().version == version
        write_deltalake(target.uri, ROWS, mode="append")
    assert len(opened) == 1


def test_a_table_that_someone_holds_is_not_shared(target):
    """The commits of each are compare-and-swaps on what it has read."""
    one, other = target.open(), target.open()
    assert one.table is not other.table
    rows(one)
    assert other.version == 0


def test_a_table_whose_newest_version_is_kept_is_not_replaced_by_an_older_one(target):
    early, late = target.open(), target.open()
    rows(late)
    del late
    del early
    assert target.lake.cache.take(target.uri).version() == 1


def test_tables_that_were_opened_are_not_sent_to_another_process(target):
    target.open()
    other = pickle.loads(pickle.dumps(target))
    assert other == target
    assert other.lake.cache.take(target.uri) is None
    assert target.lake.cache.take(target.uri) is not None


@pytest.mark.parametrize("limit", ["_MOST_IDLE", "_MOST_IDLE_FILES"])
def test_only_so_many_tables_are_kept(lake, monkeypatch, limit):
    """By their number, and by that of their files, which take the memory."""
    monkeypatch.setattr(f"waldelta.lake.lake.{limit}", 2)
    targets = [Lake(lake).target(f"s.t{number}") for number in range(3)]
    cache = targets[0].lake.cache
    for target in targets:
        write_deltalake(target.uri, ROWS)
        cache.give_back(target.uri, DeltaTable(target.uri))
    assert [cache.take(target.uri) is not None for target in targets] == [False, True, True]


def test_a_table_made_again_at_the_same_place_is_another_one(target):
    for _ in range(2):
        write_deltalake(target.uri, ROWS, mode="append")
    assert target.open().version == 2
    shutil.rmtree(local_path(target.uri))
    assert target.find() is None
    write_deltalake(target.uri, ROWS)
    assert (target.open().version, ids(target)) == (0, [1, 2])


def test_a_log_entry_that_is_no_file_is_not_waited_for(target):
    """Opening a FIFO would wait without end."""
    target.open()
    os.mkfifo(local_path(target.uri) / "_delta_log" / f"{1:020d}.json")
    assert target.open().version == 0


def _links_in_a_circle(path):
    path.symlink_to(path)


@pytest.mark.parametrize("name", ["_last_checkpoint", f"{0:020d}.checkpoint.parquet"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), _links_in_a_circle]
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_checkpoint_that_is_no_file_is_refused(target, make, name, is_kept):
    """delta-rs would wait for a FIFO without end, and Spark would read a device without end."""
    if is_kept:
        target.open()
        write_deltalake(target.uri, ROWS, mode="append")
    make(local_path(target.uri) / "_delta_log" / name)
    with pytest.raises(StateError, match=f"{re.escape(name)} is not a regular file"):
        target.open()


def test_a_garbage_collection_in_the_cache_waits_for_nobody(target, monkeypatch):
    """One that finds an opened table gives it back to the cache in the same thread."""
    target.open()
    version, other = DeltaTable.version, [target.open()]

    def collected(table):
        other.clear()
        return version(table)

    monkeypatch.setattr(DeltaTable, "version", collected)
    assert target.open().version == 0


def test_commits_without_spark_are_durable_on_return(lake, monkeypatch):
    synced, target = [], Lake(lake).target("s.durable")
    monkeypatch.setattr(module, "sync_commit", lambda _, version: synced.append(version))
    target.create_with(ROWS)
    table = target.open()
    table.append(ROWS)
    table.overwrite(ROWS)
    no_files(table)
    assert synced == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("columns", "fits"),
    [
        ([("id", pa.int64(), False), ("v", pa.string(), False)], True),
        ([("id", pa.int64(), False), ("v", pa.string(), True)], True),
        ([("id", pa.int64(), True), ("v", pa.string(), True)], False),
        ([("id", pa.int32(), False), ("v", pa.string(), True)], False),
        ([("id", pa.int64(), False)], False),
    ],
)
def test_a_table_can_store_rows_of_its_own_columns(lake, columns, fits):
    """With their types, whose NOT NULL constraints are those of the table, or more."""
    created = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])
    table = Lake(lake).target("s.created").create(created)
    assert table.can_store(pa.schema([pa.field(*column) for column in columns])) is fits
    assert table.can_store(table.schema)


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        (None, {"plugin": "delta", "delta_table_path": "{uri}"}),
        (TableFeatures.DeletionVectors, {"external_location": "delta_scan('{uri}')"}),
    ],
)
def test_dbt_finds_a_target_by_a_reader_of_its_features(target, feature, wanted):
    """DuckDB's own extension reads what the plugin can't."""
    if feature is not None:
        DeltaTable(target.uri).alter.add_feature(feature, allow_protocol_versions_increase=True)
    properties = {name: text.format(uri=target.uri) for name, text in wanted.items()}
    assert dbt_properties(target) == properties
