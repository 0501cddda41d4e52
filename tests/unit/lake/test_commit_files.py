"""Commits of files: their paths as the log has them, and the change data feed as readers see it."""

from __future__ import annotations

import json
import os
import time
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from waldelta.lake import Lake, Overtaken, Tag, local_path, replace_by_rows
from waldelta.lake.commit_files import changed_rows
from waldelta.lake.data_file import DataFiles, discard
from waldelta.lake.layout import CHANGE_DATA_FEED, CHANGE_FOLDER, NewFile

TAG = Tag("app", 7, '{"waldelta": {"batch": 7}}')
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.string())])


def rows(values: dict[int, str]) -> pa.Table:
    return pa.table({"id": [*values], "v": [*values.values()]}, SCHEMA)


@pytest.fixture
def target(lake):
    """A target with a change data feed and two rows."""
    place = Lake(lake).target("s.t")
    place.create(SCHEMA, configuration={CHANGE_DATA_FEED: "true"})
    write_deltalake(place.uri, rows({1: "a", 2: "b"}), mode="append")
    return place


def changes(target, version) -> list[tuple]:
    found = pa.table(DeltaTable(target.uri).load_cdf(version, version).read_all())
    return sorted(zip(*(found[n].to_pylist() for n in ("_change_type", "id", "v")), strict=True))


def update(table, tag=TAG) -> int:
    """Changes the row 2 to "😀", whose half delta-rs would lose of an escaped one."""
    parts = {"update_preimage": rows({2: "b"}), "update_postimage": rows({2: "😀"})}
    after, layout = rows({1: "a", 2: "😀"}), table.layout
    added, shown = write(table, layout, after), write(table, layout.of_changes, changed_rows(parts))
    return table.replace_files(table.table_files, added, tag, changes=shown)


def write(table, layout, rows) -> list[NewFile]:
    with DataFiles(table.place.files, layout, "part-x-") as files:
        files.write(rows)
        return [*map(NewFile.of, files.close())]


def test_a_commit_shows_its_changed_rows_alone(target):
    table = target.open()
    assert (table.shows_changes, table.is_writable) == (True, True)
    assert update(table) == table.version == 2
    assert changes(target, 2) == [("update_postimage", 2, "😀"), ("update_preimage", 2, "b")]
    assert changes(target, 1) == [("insert", 1, "a"), ("insert", 2, "b")]
    assert target.open().committed("app") == 7
    found = DeltaTable(target.uri).to_pyarrow_table(filters=[("v", "=", "😀")])
    assert found["id"].to_pylist() == [2]


def test_files_of_changed_rows_are_forced_to_disk(target, monkeypatch):
    forced = []
    monkeypatch.setattr("waldelta.lake.storage._fsync", forced.append)
    update(target.open())
    (path,) = (local_path(target.uri) / CHANGE_FOLDER).iterdir()
    assert {path, path.parent} <= {*forced}


def test_an_overtaken_commit_leaves_no_file(target):
    table = target.open()
    write_deltalake(target.uri, rows({3: "c"}), mode="append")
    with pytest.raises(Overtaken):
        replace_by_rows(table, [], rows({4: "d"}), TAG)
    folder = local_path(target.uri)
    assert not any(path.name.startswith(".") for path in (folder / "_delta_log").iterdir())
    assert len([*folder.glob("*.parquet")]) == 2


def test_files_of_changed_rows_of_a_failed_attempt_are_removed(target):
    folder = local_path(target.uri) / CHANGE_FOLDER
    folder.mkdir()
    for name in ("part-x-1.parquet", "part-y-1.parquet"):
        (folder / name).touch()
    discard(target, "part-x-")
    assert [path.name for path in folder.iterdir()] == ["part-y-1.parquet"]


def test_a_vacuum_keeps_the_changed_rows_of_its_retention(target):
    update(target.open())
    (path,) = (local_path(target.uri) / CHANGE_FOLDER).iterdir()
    target.open().vacuum(168, full=True)
    assert path.exists()
    old = time.time() - 169 * 3600
    os.utime(path, (old, old))
    target.open().vacuum(168, full=True)
    assert not path.exists()


def test_a_file_is_removed_by_its_path_in_the_log(target):
    """An external writer's file may have any name; the log has it percent-encoded."""
    folder, name = local_path(target.uri), "a b%41ü+.parquet"
    pq.write_table(rows({4: "d"}), folder / name)
    add = {"path": quote(name), "size": (folder / name).stat().st_size, "partitionValues": {}}
    add |= {"modificationTime": 1, "dataChange": True, "stats": '{"numRecords":1}'}
    (folder / "_delta_log" / f"{2:020d}.json").write_text(json.dumps({"add": add}))
    table = target.open()
    assert len(table.dataset().to_table()) == 3
    replace_by_rows(table, table.table_files, rows({5: "e"}), TAG)
    assert target.open().dataset().to_table()["id"].to_pylist() == [5]


def test_only_tables_whose_features_are_implemented_are_written(target):
    """Delta's writer version of the change data feed allows CHECK constraints, too."""
    DeltaTable(target.uri).alter.add_constraint({"few": "id < 3"})
    assert not target.open().is_writable


def test_removed_files_have_what_spark_needs_to_read_changes(target):
    """Else it refuses a version without files of changed rows (extended file metadata)."""
    table = target.open()
    (size,) = (file.bytes for file in table.table_files)
    table.replace_files(table.table_files, [], TAG)
    lines = map(json.loads, target.log.read(2).lines)
    (removed,) = (line["remove"] for line in lines if "remove" in line)
    assert (removed["extendedFileMetadata"], removed["size"]) == (True, size)
    assert removed["partitionValues"] == {}
