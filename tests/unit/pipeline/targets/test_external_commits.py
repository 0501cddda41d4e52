"""What a Delta log says: external commits, readable versions, how far runs have looked."""

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from shutil import copytree
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import PyFileSystem

from tests.support.bookkeeping import table_at
from waldelta.errors import StateError
from waldelta.lake import Lake
from waldelta.lake.ledger import BatchCut, TableState, TargetCut, now
from waldelta.lake.storage import sync_commits
from waldelta.pipeline.targets.external_commits import check_log, check_readable, checked_upto

ROWS = pa.table({"id": [1, 2], "v": ["a", "b"]})
OURS = '{"waldelta": {"verb": "apply"}}'


def as_ours(metadata=OURS):
    return CommitProperties(custom_metadata={"userMetadata": metadata})


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A table of two files, committed by us up to version 1."""
    folder = tmp_path_factory.mktemp("committed")
    for mode in ("error", "append"):
        write_deltalake(folder, ROWS, mode=mode, commit_properties=as_ours())
    return folder


@pytest.fixture
def uri(lake, committed):
    """The same table, to be changed."""
    copytree(committed, Path(urlsplit(lake).path) / "t")
    return f"{lake}/t"


def merge(uri):
    found = DeltaTable(uri).merge(ROWS, "t.id = s.id", source_alias="s", target_alias="t")
    found.when_matched_update_all().execute()


def vacuum(uri):
    DeltaTable(uri).vacuum(0, dry_run=False, enforce_retention_duration=False)


def write_entry(uri, info):
    """Commits without changing a row."""
    entry = f"{DeltaTable(uri).version() + 1:020d}.json"
    lines = {"commitInfo": info | {"timestamp": int(now().timestamp() * 1000)}}
    (Path(urlsplit(uri).path) / "_delta_log" / entry).write_text(f"{json.dumps(lines)}\n")


CASES = {
    "append": (lambda uri: write_deltalake(uri, ROWS, mode="append"), ["WRITE"]),
    "overwrite": (lambda uri: write_deltalake(uri, ROWS, mode="overwrite"), ["WRITE"]),
    "update": (lambda uri: DeltaTable(uri).update({"v": "'x'"}, predicate="id = 1"), ["UPDATE"]),
    "delete": (lambda uri: DeltaTable(uri).delete("id = 1"), ["DELETE"]),
    "merge": (merge, ["MERGE"]),
    "restore": (lambda uri: DeltaTable(uri).restore(0), ["RESTORE"]),
    "restore of the definition":
     (lambda uri: write_entry(uri, {"operation": "RESTORE", "engineInfo": "delta-rs"}),
      ["RESTORE"]),
    "other metadata": (lambda uri: write_deltalake(uri, ROWS, mode="append",
                        commit_properties=as_ours('["x"]')), ["WRITE"]),
    "our own": (lambda uri: write_deltalake(uri, ROWS, mode="append", commit_properties=as_ours()),
                []),
    "optimize": (lambda uri: DeltaTable(uri).optimize.compact(), []),
    "vacuum": (vacuum, []),
    "property": (
        lambda uri: DeltaTable(uri).alter.set_table_properties(
            {"delta.logRetentionDuration": "interval 60 days"}
        ),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("act, told", CASES.values(), ids=CASES)
def test_commits_of_others_that_change_data_are_found(uri, act, told):
    act(uri)
    seen = check_log(table_at(uri).log, 1, DeltaTable(uri).version())
    assert [commit.operation for commit in seen.commits] == told
    assert all(
        "delta-rs" in commit.by and now() - commit.at < timedelta(minutes=1)
        for commit in seen.commits
    )


def test_our_own_commits_say_how_far_was_looked(uri):
    """What lies beside them is looked at again, what lies before isn't even read."""
    write_deltalake(uri, ROWS, mode="append")
    write_deltalake(uri, ROWS, mode="append")
    ours = '{"waldelta": {"verb": "apply", "checked_version": 2}}'
    write_deltalake(uri, ROWS, mode="append", commit_properties=as_ours(ours))
    assert [commit.version for commit in check_log(table_at(uri).log, 1, 4).commits] == [3]


def commit_of(uri, folder, path):
    """An external commit of a file, or of one whose rows another one marks as deleted."""
    of_marks = (
        {"deletionVector": path | {"sizeInBytes": 1, "cardinality": 1}}
        if isinstance(path, dict)
        else {}
    )
    path = "gone.parquet" if of_marks else path.format(folder=folder)
    add = of_marks | {
        "path": path,
        "partitionValues": {},
        "size": 1,
        "modificationTime": 1,
        "dataChange": True,
    }
    lines = [
        {"commitInfo": {"operation": "WRITE", "engineInfo": "x", "timestamp": 1}},
        {"add": add},
    ]
    entry = folder / "_delta_log" / f"{DeltaTable(uri).version() + 1:020d}.json"
    entry.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


STRAYS = {
    "a FIFO": ("fifo", "not a regular file"),
    "a folder": ("folder", "not a regular file"),
    "another folder's file": ("../secret", "isn't in its folder"),
    "by a detour": ("a/../../secret", "isn't in its folder"),
    "by percents": ("%2e%2e/secret", "isn't in its folder"),
    "an absolute path": ("/etc/passwd", "isn't in its folder"),
    "a shallow clone's file": ("file:{folder}/../secret", "isn't in its folder"),
    "a URI with a host": ("file://localhost/etc/passwd", "isn't in its folder"),
    "another bucket's file": ("s3a://elsewhere/secret.parquet", "isn't in its folder"),
    "a URI in percents": ("file%3A/etc/passwd", "isn't in its folder"),
    "marks elsewhere": (
        {"storageType": "p", "pathOrInlineDv": "file:/etc/secret"},
        "isn't in its folder",
    ),
    "a link to a file elsewhere": ("linked", "isn't in its folder"),
    "a file behind a link to a folder elsewhere": ("away/secret", "isn't in its folder"),
    "a FIFO behind such a link": ("away/fifo", "isn't in its folder"),
    "a link to a FIFO": ("to-fifo", "not a regular file"),
    "a file behind a link within the table": ("within/here.parquet", None),
    "a file that is gone": ("gone.parquet", None),
    "a file": ("day=a:b/here.parquet", None),
}


@pytest.mark.parametrize("path, wrong", STRAYS.values(), ids=STRAYS)
def test_a_file_that_no_reader_may_follow_is_refused(uri, tmp_path, path, wrong):
    """And to force it onto the disk waits for nobody: neither opens what isn't the table's."""
    folder = tmp_path / "lake/t"
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (tmp_path / "lake/secret").write_text("x")
    (folder / "day=a:b").mkdir()
    (folder / "day=a:b/here.parquet").touch()
    os.mkfifo(tmp_path / "lake/fifo")
    for link, target in (
        ("linked", "../secret"),
        ("away", ".."),
        ("to-fifo", "fifo"),
        ("within", "day=a:b"),
    ):
        (folder / link).symlink_to(target)
    commit_of(uri, folder, path)
    done = []
    syncing = threading.Thread(target=lambda: done.append(sync_commits(uri, [2])), daemon=True)
    syncing.start()
    syncing.join(20)
    assert done == [None]
    if wrong is None:
        assert [commit.version for commit in check_log(table_at(uri).log, 1, 2).commits] == [2]
    else:
        with pytest.raises(
            StateError, match=f"version 2 .WRITE by x.* {wrong}: .* run the initial sync"
        ) as refused:
            check_log(table_at(uri).log, 1, 2)
        assert "secret" not in str(refused.value)


def test_a_lake_may_lie_behind_a_link(uri, tmp_path):
    """The files of its tables are still within them."""
    (tmp_path / "linked").symlink_to(tmp_path / "lake")
    write_deltalake(uri, ROWS, mode="append")
    log = table_at((tmp_path / "linked/t").as_uri()).log
    assert [commit.version for commit in check_log(log, 1, 2).commits] == [2]


ENTRIES = {
    "a FIFO": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_of_the_log_that_is_no_regular_file_is_refused(uri, tmp_path, make):
    """delta-rs overlooks a FIFO there, and to read one waits without end."""
    log, state = table_at(uri).log, TableState(now(), "r", "t", 1, "synced", version=1)
    make(tmp_path / "lake/t/_delta_log" / f"{2:020d}.json")
    for read in (
        lambda: log.read(2),
        lambda: list(log.behind(1)),
        lambda: check_readable(log, state, None, 1),
    ):
        with pytest.raises(StateError, match=r"00002\.json is not a regular file: .* remove it"):
            read()


def test_a_target_is_checked_before_it_is_read(uri, tmp_path):
    """As far as no run has: from the newest cut, or the copy, on."""
    commit_of(uri, tmp_path / "lake/t", "/etc/passwd")
    log = table_at(uri).log
    states = {at: TableState(now(), "r", "t", 1, "synced", version=at) for at in (1, 2, None)}
    for at in (2, None):
        check_readable(log, states[at], None, 2)
    with pytest.raises(StateError, match="version 2"):
        check_readable(log, states[1], None, 2)
    check_readable(log, states[1], BatchCut(now(), "r", 1, 1, None, [TargetCut("t", 1, 2)]), 2)


def test_a_log_that_does_not_reach_back_is_told(uri, tmp_path):
    for _ in range(3):
        write_deltalake(uri, ROWS, mode="append")
    (tmp_path / "lake/t/_delta_log" / f"{3:020d}.json").unlink()
    seen = check_log(table_at(uri).log, 1, 4)
    assert ([commit.version for commit in seen.commits], seen.lacks) == ([4], 3)


def test_a_vacuum_says_what_it_kept(uri):
    DeltaTable(uri).optimize.compact()
    vacuum(uri)
    kept = now() - check_log(table_at(uri).log, 1, DeltaTable(uri).version()).vacuumed
    assert timedelta(0) <= kept < timedelta(minutes=1)


def test_what_was_looked_through():
    """The later of copy's and newest cut's version; a cut of another copy says nothing."""
    cut = BatchCut(now(), "r", 1, 1, None, [TargetCut("t", 2, 7)])
    cases = {(2, 5): 7, (2, 9): 9, (2, None): 7, (3, 5): 5, (3, None): None}
    states = {
        case: TableState(now(), "r", "t", case[0], "synced", version=case[1]) for case in cases
    }
    assert {case: checked_upto(cut, state) for case, state in states.items()} == cases


@pytest.mark.parametrize(
    "files", [Lake.files, lambda _, uri: PyFileSystem(DeltaStorageHandler(uri))]
)
def test_a_version_can_be_read_as_long_as_its_files_are_there(uri, tmp_path, monkeypatch, files):
    """On a disk, and as an object store's files are asked for."""
    monkeypatch.setattr(Lake, "files", files)
    log = table_at(uri).log
    write_deltalake(uri, ROWS, mode="append")  # 2
    assert all(log.can_be_read_at(version) for version in (0, 1, 2))
    assert not log.can_be_read_at(3)
    DeltaTable(uri).optimize.compact()  # 3
    assert log.newest_with_rows_of(2) == 3
    assert log.can_be_read_at(2)
    vacuum(uri)  # 4, 5
    assert [log.can_be_read_at(version) for version in (0, 1, 2, 3)] == [False, False, False, True]
    assert log.newest_with_rows_of(2) == 5
    write_deltalake(uri, ROWS, mode="overwrite")  # 6
    assert log.newest_with_rows_of(2) == 5
    assert log.can_be_read_at(5)
    (tmp_path / "lake/t/_delta_log" / f"{0:020d}.json").unlink()
    assert [log.can_be_read_at(version) for version in (5, 6)] == [False, True]


def test_a_table_that_is_gone_cannot_be_read(lake):
    assert not table_at(f"{lake}/nothing").log.can_be_read_at(0)
