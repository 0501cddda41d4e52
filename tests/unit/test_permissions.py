"""Files are their owner's, or as WALDELTA_UMASK says, in a process of any umask."""

import os
import stat
from pathlib import Path
from threading import Barrier, Thread

import pytest

from waldelta.errors import ConfigError
from waldelta.lake import Lake, check_writable, local_path
from waldelta.lake.ledger import Ledger, Run, now
from waldelta.permissions import UMASK_VARIABLE, lake_umask, private_files
from waldelta.spark.settings import driver_settings


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022


def modes(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


@pytest.mark.parametrize(
    "text, mask", [(None, 0o077), ("", 0o077), ("027", 0o027), ("0007", 0o007), ("022", 0o022)]
)
def test_the_lakes_umask(monkeypatch, text, mask):
    """Hadoop is told the same as the processes have."""
    monkeypatch.delenv(UMASK_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(UMASK_VARIABLE, text)
    assert lake_umask() == mask
    assert driver_settings()["spark.hadoop.fs.permissions.umask-mode"] == f"{mask:03o}"


@pytest.mark.parametrize("text", ["77", "u=rwx", "0o27", "-27", "088", "700", "277", "7777", "27 "])
def test_a_wrong_umask_is_refused(monkeypatch, text):
    """Also one that would keep the owner from the files."""
    monkeypatch.setenv(UMASK_VARIABLE, text)
    with pytest.raises(ConfigError, match=r"WALDELTA_UMASK is .*: set it to a umask in octal"):
        lake_umask()


def test_a_group_can_read_a_lake_of_its_own(monkeypatch, tmp_path):
    """A root that was made for a group stays, and what is made in it is the group's."""
    monkeypatch.setenv(UMASK_VARIABLE, "027")
    root = tmp_path / "lake"
    root.mkdir()
    os.chown(root, -1, os.getgid())
    root.chmod(0o2770)
    with private_files():
        check_writable(root.as_uri())
        Ledger(Lake(root.as_uri())).append(Run(now(), "r", "consume", "running"))
    runs = root / "_waldelta" / "runs"
    assert modes(root, runs, runs / "_delta_log") == [0o2770, 0o2750, 0o2750]
    assert set(modes(*runs.rglob("*.*"))) == {0o640}


def test_a_root_of_ours_is_the_owners_alone(lake):
    with private_files():
        check_writable(lake)
    path = local_path(lake)
    assert path is not None
    assert modes(path) == [0o700]


def test_threads_dont_open_each_others_files(tmp_path):
    """The first to enter is the first to leave; what it puts back would open the other's files."""
    both, left, written = Barrier(2), Barrier(2), Barrier(2)

    def first() -> None:
        with private_files(0o077):
            both.wait(10)
        left.wait(10)
        written.wait(10)

    def second() -> None:
        with private_files(0o027):
            both.wait(10)
            left.wait(10)
            (tmp_path / "file").touch()
        written.wait(10)

    threads = [Thread(target=first), Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert modes(tmp_path / "file") == [0o640]
    (tmp_path / "later").touch()
    assert modes(tmp_path / "later") == [0o644]


def test_the_strictest_counts_inside(tmp_path):
    """Reports stay the owner's, in a lake that a group reads."""
    with private_files(0o027), private_files(0o077):
        (tmp_path / "report").touch()
    assert modes(tmp_path / "report") == [0o600]
