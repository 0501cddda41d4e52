"""The lake: where a pipeline's Delta tables are, and what opens their object store."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, TypeVar

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow.fs import FileSystem

from waldelta.config import split_table_name
from waldelta.config.target_names import TargetNames
from waldelta.lake.delta_target import DeltaTarget
from waldelta.lake.log_copy import CopiedTable, KnownLogs, StoredLog, file_paths
from waldelta.lake.object_store import requests_made, store_folder
from waldelta.lake.storage import (
    CHANGES,
    bookkeeping_uri,
    entry_identity,
    entry_path,
    local_path,
    open_folder,
    target_uri,
)
from waldelta.lake.store_connection import read_store_options

log = logging.getLogger(__name__)

T = TypeVar("T")
# How many opened tables that no caller uses, and files of such tables, stay in memory: a run opens
# each target several times, and the ledger's tables all the time. A file takes about 1.5 kB.
_MOST_IDLE, _MOST_IDLE_FILES = 512, 100_000


class TableCache:
    """Opened tables that no caller holds any more, and what was read of their logs, by URI.

    Opening a table reads its checkpoint and every commit behind it, each by a request or two to an
    object store. Bringing one up to date that was opened before reads only the commits since then.
    A table is handed to one caller at a time: its commits are compare-and-swaps on the version that
    the caller has read.
    """

    def __init__(self, *, copies_logs: bool = True) -> None:
        self._copies_logs = copies_logs
        # A garbage collection within a method may give a table back in the same thread.
        self._lock = RLock()
        self._tables: OrderedDict[str, tuple[DeltaTable, tuple[int, int] | None, int]] = (
            OrderedDict()
        )
        self._root: FileSystem | None = None
        # By table and name: a version, the identity of its log entry, and what was read of it.
        self._read: dict[tuple[str, str], tuple[int, tuple[int, int] | None, Any]] = {}
        # A target's name in the lake, by its own name, where the two differ.
        self.stored_names: dict[str, str] = {}
        self._idle_files = 0
        self._logs: KnownLogs | None = None
        self._requests = requests_made()

    def __reduce__(self) -> tuple[Callable[[], TableCache], tuple[()]]:
        # Another process (pickle) gets an empty cache.
        return partial(TableCache, copies_logs=False), ()

    def log(self, lake: Lake, uri: str) -> StoredLog | None:
        """Returns the copy of a table's log that this run reads and commits through; None where
        only delta-rs reads the log.
        """
        if not self._copies_logs or lake.storage_options is None:
            return None
        with self._lock:
            if self._logs is None:
                self._logs = KnownLogs(lake.root, lake.storage_options)
        return self._logs.log(uri.removeprefix(f"{lake.root}/"))

    def new_requests(self) -> int:
        """Returns how many requests this process has made to object stores since the last call.

        Those of delta-rs itself, and of Spark's JVM and tasks, aren't included.
        """
        earlier, self._requests = self._requests, requests_made()
        return self._requests - earlier

    def leave_known(self, lake: Lake) -> None:
        """Store the copies of the tables' logs in the lake, so that the next run reads less."""
        if self._logs is None:
            return
        root, changes = bookkeeping_uri(lake.root, ""), bookkeeping_uri(lake.root, CHANGES)
        with self._lock:
            tables = {
                uri.removeprefix(f"{lake.root}/"): table
                for uri, (table, *_) in self._tables.items()
                # No run reads all of the change log, which is large.
                if uri.startswith(root) and uri != changes
            }
        try:
            self._logs.save({path: file_paths(table) for path, table in tables.items()})
        except (DeltaError, OSError, ValueError) as err:
            log.info("the next run reads more of the Delta logs: no copy can be written: %s", err)

    def take(self, uri: str, version: int | None = None) -> DeltaTable | None:
        """Returns a table that give_back() stored, at the version it had then, and forgets it; or
        None.

        A table at another version than ``version`` stays stored. On a disk, a table isn't returned
        if the log entry of its version has been replaced: it is another table then.
        """
        with self._lock:
            table, entry, files = self._tables.get(uri, (None, None, 0))
            if table is None or (version is not None and table.version() != version):
                return None
            self._tables.pop(uri, None)
            self._idle_files -= files
        return table if entry_identity(uri, table.version()) == entry else None

    def read_once(self, table: DeltaTable, uri: str, name: str, read: Callable[[], T]) -> T:
        """Returns the result of ``read`` for a table's version.

        The last version's result stays in memory under the name, for the next call.
        """
        version, entry = table.version(), entry_identity(uri, table.version())
        entry_read = self._read.get((uri, name))
        if entry_read is None or entry_read[:2] != (version, entry):
            entry_read = self._read[uri, name] = version, entry, read()
        value: T = entry_read[2]
        return value

    def unchanged(self, lake: Lake, uri: str, name: str) -> tuple[int, Any] | None:
        """Returns a version and what was read of it by this name while it is the newest, else None.

        On a disk this opens no table. In an object store it is always None.
        """
        version, entry, value = self._read.get((uri, name), (0, None, None))
        is_newest = (
            entry is not None
            and entry == entry_identity(uri, version)
            and not lake.has(f"{uri}/{entry_path(version + 1)}")
        )
        return (version, value) if is_newest else None

    def root_files(self, lake: Lake) -> FileSystem:
        """Returns the lake's root as a file system, always the same: it keeps its connections."""
        if self._root is None:
            self._root = lake.files(lake.root)
        return self._root

    def give_back(self, uri: str, table: DeltaTable) -> None:
        """Keep a table whose caller is done, unless a newer one is kept.

        Those that were kept longest go, so that the rest takes little memory. A copied table isn't
        kept when its last commit was interrupted and isn't in the store, or when its copy is
        removed: Python does that first with objects in a cycle, such as those of an error's frames.
        """
        version = table.version()
        if isinstance(table, CopiedTable) and not (
            version <= table.log.known.version and table.folder.exists()
        ):
            return
        entry, count = entry_identity(uri, version), len(table.file_uris())
        with self._lock:
            idle_table, _, files = self._tables.get(uri, (None, None, 0))
            if idle_table is not None and idle_table.version() > version:
                return
            self._tables[uri] = table, entry, count
            self._tables.move_to_end(uri)
            self._idle_files += count - files
            while len(self._tables) > _MOST_IDLE or self._idle_files > _MOST_IDLE_FILES:
                self._idle_files -= self._tables.popitem(last=False)[1][-1]


@dataclass(frozen=True, slots=True)
class Lake:
    """All tables of one pipeline: the lake's root as a URI, and its object store's credentials.

    Nothing else holds these credentials. Spark's tasks get the lake, because their process may lack
    the environment of the job's.
    """

    root: str
    storage_options: dict[str, str] | None = field(default=None, repr=False, compare=False)
    # Whether Spark does all work, however small it is.
    on_spark: bool = False
    # The names that the pipeline file gives targets.
    names: TargetNames = field(default_factory=TargetNames, repr=False, compare=False)
    cache: TableCache = field(default_factory=TableCache, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        root: str,
        conn_id: str | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        on_spark: bool = False,
        names: TargetNames | None = None,
    ) -> Lake:
        """Returns the lake with its store's options; see read_store_options(), also for errors."""
        options = read_store_options(root, conn_id, environment) or None
        return cls(root, options, on_spark, names or TargetNames())

    def target(self, table_name: str) -> DeltaTarget:
        """Returns the target of a table, by its name with the schema, where it is stored."""
        return self.target_named(self.stored_name(table_name))

    def target_named(self, name: str) -> DeltaTarget:
        """Returns the target that has, or would have, this name in the lake."""
        return DeltaTarget(self, target_uri(self.root, *split_table_name(name)))

    def stored_name(self, table_name: str) -> str:
        """Returns a target's name in the lake: the one that the ledger was last read to have.

        A target that the ledger lacks gets the pipeline file's name. Another name in the file moves
        the target only when a run has recorded it.
        """
        return self.cache.stored_names.get(table_name) or self.names.of(table_name)

    def bookkeeping(self, name: str) -> DeltaTarget:
        """Returns one of the pipeline's own tables (see bookkeeping_uri)."""
        return DeltaTarget(self, bookkeeping_uri(self.root, name))

    def leave_known(self) -> None:
        """Leave what this process knows of the tables in an object store for the next run."""
        self.cache.leave_known(self)

    def has(self, uri: str) -> bool:
        """Returns whether there is such a file in the lake, by one request to an object store."""
        if (path := local_path(uri)) is not None:
            return path.is_file()
        try:
            self.cache.root_files(self).open_input_file(uri.removeprefix(f"{self.root}/")).close()
        except FileNotFoundError:
            return False
        return True

    def files(self, uri: str) -> FileSystem:
        """Returns a folder of the lake as a file system of its own."""
        return open_folder(uri, self.storage_options)

    def unchanging_files(self, uri: str) -> FileSystem:
        """Returns a folder, to read files of it that never change.

        These are a table's data files, and the changes that tasks have staged.
        """
        return store_folder(uri, self.storage_options or {}, unchanging=True) or self.files(uri)
