"""What killed runs leave: found by age, with the tables whose locks say whether it is in use."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from pyarrow.fs import FileInfo, FileSelector, FileType

from tests.support.bookkeeping import read_expectation_results
from tests.unit.lake.ledger.test_ledger import NOON, OLD
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake, local_path, remove_folder, staging_folder, write_parquet
from waldelta.lake.ledger import ExpectationResult, Ledger, now
from waldelta.lake.ledger.check_records import keep_results
from waldelta.lake.staging_leftovers import (
    copy_folder,
    find_leftovers,
    read_records,
    staged_for,
    take_over,
    write_record,
)
from waldelta.lake.storage import remove_empty_log

DAY = timedelta(days=1)


def stage(uri: str, age: timedelta, *parts: str) -> None:
    """A staged file, and folders, of some age."""
    file = Path(urlsplit(uri).path, *parts, "part-0.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    at = (now() - age).timestamp()
    for path in (file, *file.parents[: len(parts) + 1]):
        os.utime(path, (at, at))


def test_only_folders_without_a_recent_file_are_found(lake):
    """By the newest file in them; the root's other folders are nobody's business here."""
    old = staging_folder(Lake(lake), "public.t", 1, 7, "killed")
    young = staging_folder(Lake(lake), "public.t", 1, 8, "running")
    goes_on = staging_folder(Lake(lake), "public.u", 1, 8, "x" * 300)
    stage(old, 2 * DAY, "net")
    stage(young, timedelta(0), "net")
    stage(goes_on, 2 * DAY, "net")
    stage(goes_on, timedelta(0), "complete")
    stage(f"{lake}/_waldelta/changes", 2 * DAY, "batch=1")
    found = find_leftovers(Lake(lake), ["public.t", "public.u"], now() - DAY)
    assert found == {old: ("public.t",)}
    assert find_leftovers(Lake(f"{lake}/absent"), [], now()) == {}


def test_each_folder_belongs_to_its_table(lake):
    """Whatever its name begins with or is cut to."""
    long = "public." + "ü" * 60
    stage(staging_folder(Lake(lake), long, 1, 7, "killed"), 2 * DAY)
    stage(staging_folder(Lake(lake), 'public."a-1"', 1, 7, "killed"), 2 * DAY)
    names = [long, f"{long}y", "public.x", "public.a", 'public."a-1"', 'public."a-1-1"']
    found = list(find_leftovers(Lake(lake), names, now() - DAY).values())
    assert sorted(found) == [('public."a-1"',), (long,)]


def test_whoever_takes_a_target_over_removes_what_is_staged_for_it(lake):
    """And nothing of another target's, whose run may be at work."""
    tables = [
        "public.a",
        "public.a-1",
        "public.a-1-2",
        "public.ab",
        "public." + "ü" * 60,
        "public." + "ü" * 60 + "y",
    ]
    folders = {name: staging_folder(Lake(lake), name, 1, 7, "run") for name in tables}
    for uri in [
        *folders.values(),
        f"{folders['public.a']}-fills",
        f"{folders['public.a-1']}-fills",
    ]:
        stage(uri, DAY, "net")
    for name in tables:
        both = name in ("public.a", "public.a-1")
        mine = [folders[name], f"{folders[name]}-fills"] if both else [folders[name]]
        standing = []
        removed = take_over(
            Lake(lake),
            name,
            lambda name=name, standing=standing: standing.extend(staged_for(Lake(lake), name)),
        )
        assert sorted(removed) == mine
        # Behind the removal, as somebody may begin until then; something still tells of a kill.
        assert not set(standing) & set(mine)
        assert len(standing) == 1
        assert (
            take_over(Lake(lake), name, lambda: pytest.fail("nothing is left to be kept out")) == []
        )


def test_who_was_to_be_kept_out_is_after_a_kill(lake):
    """What was staged is gone by then."""
    stage(staging_folder(Lake(lake), "public.t", 1, 7, "killed"), DAY)

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_over(Lake(lake), "public.t", killed)
    fenced = []
    (mark,) = take_over(Lake(lake), "public.t", lambda: fenced.append(True))
    assert fenced == [True]
    assert not local_path(mark).exists()
    assert staged_for(Lake(lake), "public.t") == []


def test_a_folder_that_cannot_be_removed_stops_who_takes_over(lake, tmp_path, caplog):
    """A late statement would find its source there; nothing is written beside it."""
    stuck, other = (staging_folder(Lake(lake), "public.t", 1, batch, "killed") for batch in (7, 8))
    stage(other, DAY, "net")
    (tmp_path / "elsewhere").mkdir()
    local_path(stuck).symlink_to(tmp_path / "elsewhere")  # which nobody may remove as a folder
    with pytest.raises(TargetNotWritable, match="late statement") as caught:
        take_over(
            Lake(lake),
            "public.t",
            lambda: pytest.fail("nobody is kept out while a source is there"),
        )
    assert caught.value.retryable
    with pytest.raises(TargetNotWritable):
        take_over(Lake(lake), "public.t", lambda: None)
    assert stuck in (standing := staged_for(Lake(lake), "public.t"))
    assert len(standing) <= 3  # with the other one, perhaps, and with what stands for both
    assert f"{stuck} can't be removed: " in caplog.text
    assert (remove_folder(stuck), remove_folder(other)) == (False, True)
    with pytest.raises(TargetNotWritable, match="read together with the new ones"):
        write_parquet(stuck, pa.table({"a": [1]}))


@pytest.mark.parametrize(
    "held, stays",
    [
        ([], False),
        ([".00000000000000000000.json.8a3b.tmp", "_commits/x"], False),
        (["00000000000000000000.json"], True),
        # Whose older entries are gone.
        (["00000000000000000007.checkpoint.parquet", "_last_checkpoint"], True),
        (["_last_checkpoint"], True),
    ],
)
def test_a_log_that_holds_nothing_is_removed(lake, held, stays):
    """And no other, whatever of it is left: it is all that says which rows there are."""
    folder = local_path(lake) / "t" / "_delta_log"
    for name in held:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    folder.mkdir(parents=True, exist_ok=True)
    remove_empty_log(f"{lake}/t")
    assert folder.exists() == stays
    assert [name for name in held if (folder / name).exists()] == (held if stays else [])


def test_old_results_of_expectations_go(lake):
    """But a table's last check, which says what fails for as long as nothing changes it."""

    def result(at, run_id, table="public.t"):
        return ExpectationResult(
            at, run_id, table, "e", "m", "critical", "derived", True, None, None, 1
        )

    ledger = Ledger(Lake(lake))
    table = ledger.table(ExpectationResult)
    assert table.prune(lambda rows: keep_results(rows, NOON)) == 0
    ledger.append_all([result(OLD, "old"), result(OLD, "old")])
    ledger.append_all([result(OLD, "idle", "public.u")])
    ledger.append_all([result(NOON, "new")])
    assert table.prune(lambda rows: keep_results(rows, NOON - DAY)) == 2
    assert [r.run_id for r in read_expectation_results(lake)] == ["idle", "new"]


def test_only_whole_records_of_tasks_are_read(lake):
    """One may be cut short by a kill. A store may list an object that marks the folder."""
    folder = copy_folder(Lake(lake), "public.t")
    for name in ("whole", "cut short"):
        write_record(Lake(lake), folder, name, {"name": name})
    (Path(urlsplit(folder).path) / "cut short.json").write_text('{"name"')
    files = Lake(lake).files(folder)
    listed = [FileInfo("", FileType.File), *files.get_file_info(FileSelector(""))]
    store = SimpleNamespace(get_file_info=lambda _: listed, open_input_file=files.open_input_file)
    assert list(read_records(SimpleNamespace(files=lambda _: store), folder)) == [{"name": "whole"}]
    assert list(read_records(Lake(lake), f"{folder}-absent")) == []
