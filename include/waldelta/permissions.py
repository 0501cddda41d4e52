"""Who may read what waldelta makes on a disk: its owner alone, unless WALDELTA_UMASK grants more.

Processes here and Spark's Python tasks go by their umask. Spark's JVM doesn't: Hadoop gives every
file and folder the mode that its setting ``fs.permissions.umask-mode`` leaves, whatever the
process's umask is.
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
    """What files and folders of a lake don't grant; raises ConfigError when WALDELTA_UMASK isn't a
    umask that leaves all to the owner.
    """
    text = os.environ.get(UMASK_VARIABLE) or f"{OWNER_ONLY:03o}"
    mask = int(text, 8) if _OCTAL.fullmatch(text) else None
    if mask is None or mask & 0o700:
        raise ConfigError(
            f"environment variable {UMASK_VARIABLE} is {text!r}: set it to a umask in octal that"
            " takes nothing from the owner, 027 for files that their group may read, or remove it"
        )
    return mask


def hadoop_settings() -> dict[str, str]:
    """The same for whatever Spark's JVM writes, driver and executors; raises ConfigError as
    lake_umask() does.
    """
    return {"spark.hadoop.fs.permissions.umask-mode": f"{lake_umask():03o}"}


@contextmanager
def private_files(mask: int | None = None) -> Iterator[None]:
    """Files and folders made inside, by this process and those that it starts, have this umask;
    default: lake_umask().

    A umask is the whole process's. So while several of its threads are inside, what any of them
    denies is denied, and whoever leaves last puts back what was there before.
    """
    mask = lake_umask() if mask is None else mask
    _process.enter(mask)
    try:
        yield
    finally:
        _process.leave(mask)


class _Process:
    """This process's umask, by what those of its threads deny that are inside."""

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


_process = _Process()
