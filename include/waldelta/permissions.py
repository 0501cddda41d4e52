"""File permissions: only the owner can read what waldelta writes to a disk, unless WALDELTA_UMASK
grants more.

Python processes, including Spark's Python tasks, use their umask. Spark's JVM doesn't: Hadoop sets
every file's and folder's mode by its setting ``fs.permissions.umask-mode``, whatever the process's
umask is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from threading import Lock

from waldelta.errors import ConfigError

UMASK_VARIABLE = "WALDELTA_UMASK"
OWNER_ONLY = 0o077
_OCTAL = re.compile(r"0?[0-7]{3}")


def lake_umask() -> int:
    """Returns the umask of a lake's files and folders.

    Raises ConfigError when WALDELTA_UMASK isn't a umask that leaves all permissions to the owner.
    """
    text = os.environ.get(UMASK_VARIABLE) or f"{OWNER_ONLY:03o}"
    mask = int(text, 8) if _OCTAL.fullmatch(text) else None
    if mask is None or mask & 0o700:
        raise ConfigError(
            f"environment variable {UMASK_VARIABLE} is {text!r}: set it to a umask in octal that"
            " keeps the owner's permissions (027 lets the group read files), or remove it"
        )
    return mask


def hadoop_settings() -> dict[str, str]:
    """Returns the same for Spark's JVM, driver and executors; raises ConfigError as
    lake_umask().
    """
    return {"spark.hadoop.fs.permissions.umask-mode": f"{lake_umask():03o}"}


@contextmanager
def private_files(mask: int | None = None) -> Iterator[None]:
    """Create files and folders in this block with this umask, also in child processes.

    The default is lake_umask(). A umask belongs to the whole process. So while several threads are
    in such a block, what any of them denies is denied, and the last one to leave restores the
    earlier umask.
    """
    mask = lake_umask() if mask is None else mask
    _process_umask.enter(mask)
    try:
        yield
    finally:
        _process_umask.leave(mask)


class _ProcessUmask:
    """Sets the process's umask to the union of the masks of all threads inside a block."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._denied: list[int] = []
        self._outside = 0

    def enter(self, mask: int) -> None:
        with self._lock:
            self._denied.append(mask)
            before = os.umask(reduce(or_, self._denied))
            if len(self._denied) == 1:
                self._outside = before

    def leave(self, mask: int) -> None:
        with self._lock:
            self._denied.remove(mask)
            os.umask(reduce(or_, self._denied) if self._denied else self._outside)


_process_umask = _ProcessUmask()
