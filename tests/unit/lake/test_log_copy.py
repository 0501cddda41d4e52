"""A table in an object store, opened from a copy of its log. The store is in memory."""

from __future__ import annotations

import gc
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from obstore.store import MemoryStore

from waldelta.lake import Lake, TargetVersion, log_copy
from waldelta.lake.commit_files import FileChange, commit_files
from waldelta.lake.delta_log import DeltaLog, Tag
from waldelta.lake.layout import NewFile, TableFile
from waldelta.lake.log_copy import CopiedTable, KnownLogs, NotCopied, StoredLog
from waldelta.lake.object_store import ObjectStore, requests_made
from waldelta.lake.storage import NO_HOOKS

PACK = "lake/_waldelta/known_logs.zip"
ONE_COMMIT = {
    "mode": "append",
    "commit_properties": CommitProperties(max_commit_retries=0),
    "post_commithook_properties": NO_HOOKS,
}


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(MemoryStore())


def upload(store, folder, path="lake/t") -> None:
    """Put a table's folder into the store."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            store.write(f"{path}/{file.relative_to(folder)}", file.read_bytes())


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three_versions")
    for n in range(3):
        write_deltalake(folder, rows(n), mode="append")
    return folder


@pytest.fixture
def log(store, three_versions) -> StoredLog:
    """A log of three versions."""
    upload(store, three_versions)
    return StoredLog(store, "lake/t")


def opened(log, version=None) -> CopiedTable:
    log.read_newest()
    return CopiedTable("s3://bucket/lake/t", log, {}, version)


def append(table, *numbers: int) -> None:
    before = table.version()
    write_deltalake(table, rows(*numbers), **ONE_COMMIT)
    table.push(before)


def another(log) -> StoredLog:
    """The same log, as another process sees it."""
    return StoredLog(log.store, log.path)


class Counted:
    def __enter__(self) -> Counted:
        self._before = requests_made()
        return self

    def __exit__(self, *_: object) -> None:
        self.requests = requests_made() - self._before


def test_each_entry_is_read_once(log):
    with Counted() as first:
        table = opened(log)
    assert (table.version(), table.schema().fields[0].name) == (2, "n")
    # The pointer to a checkpoint, which isn't there, the listing, and three entries.
    assert first.requests == 5
    with Counted() as again:
        table.update_incremental()
        CopiedTable("s3://bucket/lake/t", log, {})
    assert again.requests == 1


def test_a_commit_is_two_requests(log):
    table = opened(log)
    with Counted() as commit:
        append(table, 7)
    assert (commit.requests, table.version()) == (2, 3)
    seen = opened(another(log))
    assert seen.version() == 3
    assert len(log_copy.file_paths(seen)) == 4


def test_of_two_writers_of_a_version_one_wins(log):
    ours, theirs = opened(log), opened(another(log))
    append(theirs, 7)
    with pytest.raises(CommitFailedError, match="version 3 was committed by another writer"):
        append(ours, 8)
    assert ours.version() == 2
    ours.update_incremental()
    append(ours, 9)
    assert ours.version() == 4
    # The file of the commit that failed is deleted again.
    stored = [
        one["path"] for one in log.store.objects("lake/t") if one["path"].endswith(".parquet")
    ]
    assert sorted(stored) == sorted(f"lake/t/{path}" for path in log_copy.file_paths(ours))


def test_a_commit_whose_answer_was_lost_is_known(log, monkeypatch):
    """The store has it, and refuses the repeated request."""
    table, create = opened(log), ObjectStore.create

    def twice(self, path, content):
        assert create(self, path, content) is not None
        return create(self, path, content)

    monkeypatch.setattr(ObjectStore, "create", twice)
    append(table, 7)
    assert table.version() == 3


@pytest.mark.parametrize("error", [OSError("away"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_commit_that_fails_leaves_the_copy_as_it_was(log, monkeypatch, error):
    table = opened(log)
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "create", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            append(table, 7)
    assert table.version() == 2
    append(table, 8)
    assert opened(another(log)).version() == 3


def test_a_checkpoint_replaces_what_is_before_it(log):
    table = opened(log)
    append(table, 7)
    table.create_checkpoint()
    append(table, 8)
    with Counted() as reading:
        seen = opened(another(log))
    assert seen.version() == 4
    assert len(log_copy.file_paths(seen)) == 5
    # The pointer, the listing, the checkpoint, and one entry.
    assert reading.requests == 4
    append(seen, 9)
    assert opened(another(log)).version() == 5


def test_a_table_behind_a_checkpoint_of_another_writer_is_updated(log):
    held = opened(log)
    other = CopiedTable("s3://bucket/lake/t", log, {})
    append(other, 7)
    other.create_checkpoint()
    held.update_incremental()
    assert (held.version(), len(log_copy.file_paths(held))) == (3, 4)


def test_an_old_version_that_is_known(log):
    assert opened(log, 1).version() == 1
    with pytest.raises(NotCopied):
        opened(log, 5)


def test_a_missing_table_costs_one_request_again_until_it_is_created(store, tmp_path):
    log = StoredLog(store, "lake/t")
    with pytest.raises(TableNotFoundError):
        log.read_newest()
    with Counted() as again, pytest.raises(TableNotFoundError):
        log.read_newest()
    assert again.requests == 1
    write_deltalake(str(tmp_path / "t"), rows(1))
    upload(store, tmp_path / "t")
    assert opened(log).version() == 0


def without_entries(log, *versions):
    log.store.delete([f"lake/t/_delta_log/{n:020d}.json" for n in versions])


def with_checkpoint(log, of):
    log.store.write(f"lake/t/_delta_log/00000000000000000002.checkpoint.{of}", b"")


def with_checkpoint_alone(log):
    opened(log).create_checkpoint()
    without_entries(log, 0, 1, 2)


OTHERS = {
    "a checkpoint in parts": lambda log: with_checkpoint(log, "0000000001.0000000002.parquet"),
    "a checkpoint of Delta's second kind":
     lambda log: with_checkpoint(log, "80a083e8-7026-4e79-81be-64bd76c43a11.json"),
    "only a checkpoint": with_checkpoint_alone,
    "a gap": lambda log: without_entries(log, 1),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_logs_are_left_to_delta_rs(log, other):
    other(log)
    with pytest.raises(NotCopied):
        opened(another(log))


def test_a_thread_that_reads_all_again_hides_nothing_from_others(log, monkeypatch):
    """Others open the whole table meanwhile, at no earlier version."""
    opened(log)
    read_slowly, seen = ObjectStore.read_tagged, []
    inside, go_on = Event(), Event()

    def held(self, path):
        inside.set()
        assert go_on.wait(20)
        return read_slowly(self, path)

    log.store.write("lake/t/_delta_log/00000000000000000001.json", log.known.entries[1].content)
    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(ObjectStore, "read_tagged", held)
        log.known.entries[1] = log_copy.Tagged(log.known.entries[1].content, "another tag")
        reading = pool.submit(log.read_all)
        assert inside.wait(20)
        seen.append(log.known.version)  # No lock: of a caller that needs no newer version.
        opening = pool.submit(lambda: opened(log).version())
        go_on.set()
        reading.result()
        seen.append(opening.result())
    assert seen == [2, 2]


def test_an_overwritten_entry_is_read_again(log):
    """A writer without conditional writes may overwrite a commit of ours."""
    opened(log)
    path = "lake/t/_delta_log/00000000000000000002.json"
    other = log.store.read_tagged(path).content.replace(b"WRITE", b"OTHER")
    log.store.write(path, other)
    with Counted() as again:
        log.read_all()
    assert again.requests == 2
    assert log.read(2) == other


def test_history_is_read_when_it_is_needed(log):
    table = opened(log)
    table.create_checkpoint()
    seen = another(log)
    seen.read_newest()
    history = DeltaLog(SimpleNamespace(uri="memory://lake/t", known_log=seen))
    with Counted() as newest:
        assert next(history.before(3)).version == 2
    assert newest.requests == 0
    assert [commit.version for commit in history.before(3)] == [2, 1, 0]


def known(store, monkeypatch) -> KnownLogs:
    """What a new process knows."""
    monkeypatch.setattr(log_copy, "open_store", lambda *_: (store, "lake"))
    return KnownLogs("s3://bucket/lake", {})


def leave(store, monkeypatch) -> None:
    """Open the table and a missing one, and leave what is known."""
    logs = known(store, monkeypatch)
    table = opened(logs.log("t"))
    with pytest.raises(TableNotFoundError):
        logs.log("none").read_newest()
    append(table, 7)
    logs.save({"t": log_copy.file_paths(table)})


def test_the_next_process_begins_with_what_was_known(log, monkeypatch):
    leave(log.store, monkeypatch)
    append(opened(another(log)), 8)
    logs = known(log.store, monkeypatch)
    with Counted() as reading:
        table = opened(logs.log("t"))
    assert (table.version(), len(log_copy.file_paths(table))) == (4, 5)
    # What was left, the listing of what is newer, and one entry.
    assert reading.requests == 3
    with Counted() as missing, pytest.raises(TableNotFoundError):
        logs.log("none").read_newest()
    assert missing.requests == 1


def test_it_leaves_nothing_when_it_knows_no_more(log, monkeypatch):
    leave(log.store, monkeypatch)
    logs = known(log.store, monkeypatch)
    opened(logs.log("t"))
    with Counted() as saving:
        logs.save({})
    assert saving.requests == 0


@pytest.mark.parametrize("versions", [1, 4, 6])
def test_another_table_in_its_place_is_noticed(log, monkeypatch, tmp_path, versions):
    leave(log.store, monkeypatch)
    log.store.delete([one["path"] for one in log.store.objects("lake/t")])
    for n in range(versions):
        write_deltalake(str(tmp_path / "u"), pa.table({"other": [n]}), mode="append")
    upload(log.store, tmp_path / "u")
    table = opened(known(log.store, monkeypatch).log("t"))
    assert table.version() == versions - 1
    assert table.schema().fields[0].name == "other"


def test_a_table_that_is_gone_is_noticed(log, monkeypatch):
    leave(log.store, monkeypatch)
    log.store.delete([one["path"] for one in log.store.objects("lake/t")])
    with pytest.raises(TableNotFoundError):
        known(log.store, monkeypatch).log("t").read_newest()


def test_its_entries_are_checked_before_they_are_used(log, monkeypatch):
    """Also by a reader of single entries, which opens no table."""
    leave(log.store, monkeypatch)
    path = "lake/t/_delta_log/00000000000000000003.json"
    other = log.store.read_tagged(path).content.replace(b"WRITE", b"OTHER")
    log.store.write(path, other)
    assert known(log.store, monkeypatch).log("t").read(3) == other


def test_a_table_made_since_is_found_by_what_is_left_of_its_log(log, monkeypatch):
    """Its version 0 may be gone by now."""
    logs = known(log.store, monkeypatch)
    with pytest.raises(TableNotFoundError):
        logs.log("later").read_newest()
    table = opened(logs.log("t"))
    logs.save({})
    table.create_checkpoint()
    for one in log.store.objects("lake/t"):
        if not one["path"].endswith(("0.json", "1.json")):
            log.store.write(
                one["path"].replace("/t/", "/later/"), log.store.read_tagged(one["path"]).content
            )
    found = known(log.store, monkeypatch).log("later")
    assert found.is_missing
    found.read_newest()
    assert found.known.version == 2


def test_a_run_leaves_what_it_hasnt_looked_at(log, monkeypatch, tmp_path):
    write_deltalake(str(tmp_path / "u"), rows(1))
    upload(log.store, tmp_path / "u", "lake/u")
    logs = known(log.store, monkeypatch)
    opened(logs.log("t")), opened(logs.log("u"))
    logs.save({})
    later = known(log.store, monkeypatch)
    append(opened(later.log("t")), 7)
    later.save({})
    assert known(log.store, monkeypatch).log("u").known.version == 0


def test_only_so_much_is_left(log, monkeypatch):
    monkeypatch.setattr(log_copy, "_MOST_PACKED_BYTES", 100)
    leave(log.store, monkeypatch)
    assert len(log.store.read_tagged(PACK).content) < 1000
    assert opened(known(log.store, monkeypatch).log("t")).version() == 3


def packed(index: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as pack:
        pack.writestr("index.json", index)
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        b"PK\x05\x06" + bytes(18),
        packed("[]"),
        packed('{"versions": ["t"], "tags": {}}'),
        packed('{"versions": {"t": "x"}, "tags": {}}'),
        packed('{"versions": {}, "tags": {"t": 7}}'),
    ],
)
def test_an_unreadable_object_is_ignored(log, monkeypatch, content):
    log.store.write(PACK, content)
    assert opened(known(log.store, monkeypatch).log("t")).version() == 2


def test_a_copy_is_removed_with_its_table(log):
    table = opened(log)
    folder = table.folder
    assert DeltaTable(str(folder)).version() == 2
    del table
    assert not folder.exists()
    kept = opened(log)
    log_copy.remove_copies()
    assert not kept.folder.exists()


def test_a_table_whose_copy_is_removed_isnt_handed_out(log):
    """Python removes the copy of a table in a cycle before it deletes what gives the table back."""
    place = Lake("s3://bucket/lake").target("public.t")
    cycle: list[object] = [TargetVersion(place, opened(log))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert place.lake.cache.take(place.uri) is None


def test_a_commit_of_files_is_one_request(log):
    """It names files that are in the store already, also those of changed rows."""
    table, late = opened(log), opened(another(log))
    removed = [TableFile(path, 1) for path in log_copy.file_paths(table)[:1]]
    files = FileChange(removed, [], changes=[NewFile("_change_data/part-1.parquet", 1, "")])
    with Counted() as commit:
        commit_files(table, "s3://bucket/lake/t", files, Tag("app", 1, "{}"))
    assert (commit.requests, table.version(), len(log_copy.file_paths(table))) == (1, 3, 2)
    assert b'"cdc": {"path": "_change_data/part-1.parquet"' in log.read(3)
    with pytest.raises(CommitFailedError, match="version 3 was committed by another writer"):
        commit_files(late, "s3://bucket/lake/t", files, Tag("app", 2, "{}"))


def test_a_store_without_an_answer_fails_the_commit(log, monkeypatch):
    table = opened(log)
    monkeypatch.setattr(ObjectStore, "create", lambda *_: (_ for _ in ()).throw(OSError("away")))
    with pytest.raises(CommitFailedError, match="away"):
        commit_files(table, "s3://bucket/lake/t", FileChange([], []), Tag("app", 1, "{}"))
    assert table.version() == 2
