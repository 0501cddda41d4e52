"""What a disk has: whom its files are for, and what is left of them after a power cut."""

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

# What readers need; checksums and the like they can do without.
_NEEDED = (".parquet", ".json", ".bin", "_last_checkpoint")


class Disk:
    """What has been forced onto the disk since it was made, file by file and folder by folder.

    ``at_each`` is called before each: it sees what a cut at that moment could leave.
    """

    def __init__(self, monkeypatch) -> None:
        self.at_each: Callable[[], None] = lambda: None
        self._synced: dict[
            int, float
        ] = {}  # by inode: files are synced before they get their names
        monkeypatch.setattr("os.fsync", self._fsync)

    def _fsync(self, handle: int) -> None:
        self.at_each()
        self._synced[os.fstat(handle).st_ino] = time.time()

    def is_kept(self, path: Path, since: float) -> bool:
        """Whether what a file held, or a folder was told, at a moment is safe."""
        return self._synced.get(path.stat().st_ino, -1.0) >= since

    def volatile(self, root: Path, tables: str) -> list[str]:
        """What of tables wouldn't survive: files not synced since they were written, folders."""
        return volatile(root, tables, self.is_kept)

    def after_a_cut(self, table: Path, copy: Path) -> Path:
        """A copy as a cut may leave it: files that weren't synced are empty."""
        shutil.copytree(table, copy)
        for path in table.rglob("*"):
            if path.is_file() and not self.is_kept(path, path.stat().st_mtime):
                (copy / path.relative_to(table)).write_bytes(b"")
        return copy


def volatile(root: Path, tables: str, is_kept: Callable[[Path, float], bool]) -> list[str]:
    """Files not synced since they were written, folders not since a file or a folder came in."""
    needed: dict[Path, float] = {}
    for table in (path.parent for path in root.glob(f"{tables}/_delta_log")):
        for folder in (table, *table.parents[: len(table.relative_to(root).parts) + 1]):
            needed.setdefault(folder, 0.0)
        for path in table.rglob("*"):
            if path.name.endswith(_NEEDED):
                needed[path] = path.stat().st_mtime
                changed = path.stat().st_ctime  # also by being renamed
                needed[path.parent] = max(changed, needed.get(path.parent, 0.0))
                # A partition's folder is no older than the first file in it.
                first = min(one.stat().st_ctime for one in path.parent.iterdir())
                above = path.parent.parent
                if path.parent not in (table, table / "_delta_log"):
                    needed[above] = max(first, needed.get(above, 0.0))
    return sorted(str(path) for path, at in needed.items() if not is_kept(path, at))


def open_to_others(folder: Path) -> list[str]:
    """Whatever of a folder, itself included, grants anything to group or others."""
    return [
        str(path)
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
