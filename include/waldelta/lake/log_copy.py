"""A Delta table in an object store, opened by delta-rs from a copy of its log on this machine.

By itself, delta-rs reads each log entry twice, a checkpoint in a dozen parts, and lists the log at
each step. Here, an entry is read once in a run, and a commit is two requests: its file, and its
entry, which is created only where there is none. What reads other files of the table, or removes
some, is left to delta-rs in the store itself (``stored()``).
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from waldelta.config.parse_text import parse_json
from waldelta.lake.object_store import ObjectStore, Tagged, open_store, store_folder

log_ = logging.getLogger(__name__)

_LOG = "_delta_log"
_HINT = "_last_checkpoint"
_JSON, _CHECKPOINT = ".json", ".checkpoint.parquet"
# What runs know of the logs, for the next run, in the pipeline's own folder of the lake.
_PACK = "_waldelta/known_logs.zip"
_INDEX = "index.json"
# Larger logs, and what is more in all, are left to the next run to read.
_MOST_LOG_BYTES = 128 << 10
_MOST_PACKED_BYTES = 2 << 20
_TORN = (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError)
# Of a version: its commit, or its checkpoint in one file. Others are left to delta-rs.
_ENTRY = re.compile(r"(\d{20})(\.json|\.checkpoint\..*)$")
# The folders of copies, and the process that made each.
_folders: dict[str, int] = {}


class NotCopied(DeltaError):
    """The log has parts that this module doesn't read; delta-rs does."""


@dataclass(slots=True)
class KnownLog:
    """The part of a table's log that this machine has read: the newest checkpoint (-1: none) and
    the entries after it, by version.

    Delta's log entries never change.
    """

    checkpoint: int = -1
    entries: dict[int, Tagged] = field(default_factory=dict, repr=False)
    content: Tagged | None = field(default=None, repr=False)

    @property
    def version(self) -> int:
        """The newest version that this machine has read."""
        return max(self.entries, default=self.checkpoint)


@dataclass(slots=True)
class StoredLog:
    """A table's log in an object store, with a copy in memory of what was read of it; threads can
    share it.

    ``known`` is that copy. A thread replaces it as a whole, or adds later entries, so that no other
    thread sees an incomplete one. ``is_missing``: the store has no log there.
    """

    store: ObjectStore
    path: str
    known: KnownLog = field(default_factory=KnownLog)
    is_missing: bool = False
    # Whether this process has compared the copy in memory with the store.
    is_seen: bool = False
    _lock: RLock = field(default_factory=RLock, repr=False)

    def read(self, version: int) -> bytes | None:
        """Returns a version's log entry, from memory or by one request; None if the log has no such
        entry.
        """
        if not (self.is_seen or self.is_missing):
            with suppress(TableNotFoundError, NotCopied):
                self.read_newest()
        if (local_entry := self.known.entries.get(version)) is not None:
            return local_entry.content
        entry = self._read(version)
        return None if entry is None else entry.content

    def _read(self, version: int) -> Tagged | None:
        with suppress(FileNotFoundError):
            return self.store.read_tagged(self._entry(version))
        return None

    def read_newest(self) -> None:
        """Read the log, or what is new of it; errors as of read_all()."""
        with self._lock:
            if self.known.version < 0:
                self._read_whole(KnownLog())
            elif self.is_seen:
                self.read_later()
            elif not self._continues():
                self._read_whole(KnownLog())

    def _continues(self) -> bool:
        """Read the entries after the newest one in memory, by one request and one for each new
        entry.

        Returns False, and reads nothing, if the store has another entry for the version in memory:
        the table was replaced by another one.
        """
        state = self.known
        newest = state.entries.get(state.version)
        tags = self._tags(state.version)
        versions = sorted(int(m[1]) for name in tags if (m := _ENTRY.match(name)) and m[2] == _JSON)
        is_same = newest is not None and None is not newest.tag == tags.get(
            entry_name(state.version)
        )
        later = [version for version in versions if version > state.version]
        if not is_same or versions != list(range(state.version, state.version + len(versions))):
            return False
        read = self.store.read_all([self._entry(version) for version in later])
        state.entries |= dict(zip(later, read, strict=True))
        self.is_seen = True
        return True

    def read_all(self) -> None:
        """Read a checkpoint, the one in memory if it suffices, else the newest, and all entries
        after it.

        What is in memory isn't read again if its ETag in the store is the same. Raises
        TableNotFoundError when there is no log, and NotCopied when it has a gap, or files that only
        delta-rs reads, such as a checkpoint of several parts.
        """
        with self._lock:
            self._read_whole(self.known)

    def _read_whole(self, earlier: KnownLog) -> None:
        """Read the log as read_all() does; ``earlier`` is what was read before."""
        log = f"{self.path}/{_LOG}"
        # A checkpoint replaces all before it, so that one that is known is as good as a later one.
        # Where there was no log, its listing alone shows whether there is one by now.
        hinted = earlier.version < 0 and not self.is_missing
        begin = self._read_hint() if hinted else earlier.checkpoint
        tags = self._tags(begin)
        parts = [(int(m[1]), m[2]) for name in tags if (m := _ENTRY.match(name)) is not None]
        self.is_missing = not parts and begin < 0
        if self.is_missing:
            raise TableNotFoundError(f"{self.path} has no Delta log")
        at, later = _checkpoint_and_later(parts, begin, earlier)
        entries = {entry_name(v): entry for v, entry in earlier.entries.items()}
        entries |= {checkpoint_name(earlier.checkpoint): earlier.content} if earlier.content else {}
        names = [*([checkpoint_name(at)] if at >= 0 else []), *map(entry_name, later)]
        unchanged = {
            n: o for n in names if (o := entries.get(n)) and None is not o.tag == tags.get(n)
        }
        missing = [name for name in names if name not in unchanged]
        read = self.store.read_all([f"{log}/{name}" for name in missing])
        contents = unchanged | dict(zip(missing, read, strict=True))
        content = contents.pop(checkpoint_name(at), None)
        self.known = KnownLog(at, {int(n[:20]): one for n, one in contents.items()}, content)
        self.is_seen = True

    def _tags(self, since: int) -> dict[str, str | None]:
        """Returns the tags of the log's objects from a version on (-1: of all), by name."""
        log = f"{self.path}/{_LOG}"
        listed = self.store.objects(log, None if since < 0 else f"{log}/{since:020d}")
        return {one["path"].rpartition("/")[2]: one["e_tag"] for one in listed}

    def read_later(self) -> None:
        """Read the entries after the newest one in memory."""
        with self._lock:
            while (entry := self._read(version := self.known.version + 1)) is not None:
                self.known.entries[version] = entry

    def create(self, version: int, entry: bytes) -> None:
        """Commit an entry; raises CommitFailedError when another writer has made this version.

        The other writers' entries are read before the error is raised.
        """
        with self._lock:
            tagged = self.store.create(self._entry(version), entry)
            if tagged is None:
                self.read_later()
                raise CommitFailedError(f"version {version} was committed by another writer")
            if self.known.version == version - 1:
                self.known.entries[version] = tagged

    def parts(self, path: str) -> dict[str, Tagged]:
        """Returns the entries and the checkpoint in memory, by their names below ``path``; nothing
        if they exceed _MOST_LOG_BYTES.
        """
        state = self.known
        entries = {entry_name(v): entry for v, entry in dict(state.entries).items()}
        if state.content is not None:
            entries[checkpoint_name(state.checkpoint)] = state.content
        if sum(len(one.content) for one in entries.values()) > _MOST_LOG_BYTES:
            return {}
        return {f"{path}/{_LOG}/{name}": one for name, one in entries.items()}

    def write_checkpoint(self, folder: Path, version: int) -> None:
        """Copy a checkpoint from a folder to the store, and then the pointer to it.

        The log in memory begins with this checkpoint from then on.
        """
        log, name = f"{self.path}/{_LOG}", checkpoint_name(version)
        content = (folder / _LOG / name).read_bytes()
        tag = self.store.write(f"{log}/{name}", content)
        self.store.write(f"{log}/{_HINT}", (folder / _LOG / _HINT).read_bytes())
        with self._lock:
            later = {v: entry for v, entry in self.known.entries.items() if v >= version}
            if version in later and version > self.known.checkpoint:
                self.known = KnownLog(version, later, Tagged(content, tag))

    def _entry(self, version: int) -> str:
        return f"{self.path}/{_LOG}/{entry_name(version)}"

    def _read_hint(self) -> int:
        try:
            hint = parse_json(self.store.read_tagged(f"{self.path}/{_LOG}/{_HINT}").content)
            return int(hint["version"])
        except FileNotFoundError:
            return -1
        except (ValueError, KeyError, TypeError):
            raise NotCopied from None


def entry_name(version: int) -> str:
    """Returns the name of a version's entry in a Delta log."""
    return f"{version:020d}.json"


def checkpoint_name(version: int) -> str:
    """Returns the name of a version's checkpoint, if it is one file."""
    return f"{version:020d}{_CHECKPOINT}"


def _checkpoint_and_later(
    parts: Sequence[tuple[int, str]], hinted: int, state: KnownLog
) -> tuple[int, list[int]]:
    """Returns the version of the checkpoint to read (-1: none) and the versions of the log entries
    to read with it.

    The checkpoint is the one in memory if it still suffices, else the newest. delta-rs commits only
    after a version whose entry exists, so without later entries the checkpoint's own entry is read.
    Raises NotCopied for a log with files of other kinds, or with a gap.
    """
    if any(kind not in (_JSON, _CHECKPOINT) for _, kind in parts):
        raise NotCopied
    checkpoints = {-1, *(version for version, kind in parts if kind == _CHECKPOINT)}
    versions = sorted(version for version, kind in parts if kind == _JSON)
    for at in dict.fromkeys((state.checkpoint, max(checkpoints))):
        later = [version for version in versions if version > at]
        is_whole = later == list(range(at + 1, at + 1 + len(later)))
        if is_whole and at in checkpoints and at >= hinted and (later or at in versions):
            return at, later or [at]
    raise NotCopied


class CopiedTable(DeltaTable):
    """A table as delta-rs reads it from a copy of its log; every commit is made in the store."""

    def __init__(
        self, uri: str, log: StoredLog, options: Mapping[str, str], version: int | None = None
    ) -> None:
        """Open a version that is known (None: the newest one).

        Raises DeltaError when it can't be read, NotCopied when only delta-rs can read it.
        """
        self.uri, self.log, self._options = uri, log, dict(options)
        folder = tempfile.mkdtemp(prefix="waldelta-log-")
        self.folder, _folders[folder] = Path(folder), os.getpid()
        weakref.finalize(self, _remove, folder, os.getpid())
        (self.folder / _LOG).mkdir()
        state = log.known
        if version is not None and not state.checkpoint <= version <= state.version:
            raise NotCopied
        self._fill(state)
        super().__init__(str(self.folder), version=version)

    def _fill(self, state: KnownLog) -> None:
        if state.content is not None:
            name = checkpoint_name(state.checkpoint)
            (self.folder / _LOG / name).write_bytes(state.content.content)
        self._write(dict(state.entries))

    def update_incremental(self) -> None:
        """Move the table to the newest version, by a request for each new version and one more."""
        self.log.read_later()
        self.update_known()

    def update_known(self) -> None:
        """Move the table to the newest version in memory, without a request."""
        version, state = self.version(), self.log.known
        if version < state.checkpoint:  # The store may have no entries between the two.
            self._fill(state)
            super().__init__(str(self.folder))
        elif later := {v: entry for v, entry in dict(state.entries).items() if v > version}:
            self._write(later)
            super().update_incremental()

    def _write(self, entries: Mapping[int, Tagged]) -> None:
        for version, entry in entries.items():
            (self.folder / _LOG / entry_name(version)).write_bytes(entry.content)

    def create_entry(self, version: int, entry: bytes) -> None:
        """Commit an entry in the store; raises CommitFailedError."""
        try:
            self.log.create(version, entry)
        except OSError as err:  # The commit may exist: its answer may be lost.
            raise CommitFailedError(str(err)) from None
        self.update_known()

    def push(self, base: int) -> None:
        """Commit in the store what was committed to the copy after the version ``base``.

        Raises CommitFailedError when another writer has made this version; the copy is then at
        the version before.
        """
        version, name = base + 1, entry_name(base + 1)
        entry = (self.folder / _LOG / name).read_bytes()
        actions = map(parse_json, entry.splitlines())
        added = [unquote(one["add"]["path"]) for one in actions if "add" in one]
        local = [path for path in added if (self.folder / path).is_file()]
        files = {f"{self.log.path}/{path}": (self.folder / path).read_bytes() for path in local}
        try:
            for path, content in files.items():
                self.log.store.write(path, content)
                self.log.store.keep(path, content)
            self.log.create(version, entry)
        except BaseException as err:  # A signal, too, must leave no version that isn't stored.
            (self.folder / _LOG / name).unlink()
            super().__init__(str(self.folder), version=base)
            if isinstance(err, CommitFailedError):
                with suppress(OSError):
                    self.log.store.delete(list(files))
            raise
        finally:
            for path in local:
                (self.folder / path).unlink(missing_ok=True)
        if self.version() < version:
            super().update_incremental()

    def create_checkpoint(self) -> None:
        """Write a checkpoint of this version."""
        super().create_checkpoint()
        self.log.write_checkpoint(self.folder, self.version())

    def to_pyarrow_dataset(self, *arguments: Any, **options: Any) -> ds.Dataset:
        """Returns the rows as a dataset that reads the store's files."""
        options.setdefault("filesystem", store_folder(self.uri, self._options, unchanging=True))
        return super().to_pyarrow_dataset(*arguments, **options)

    def stored(self) -> DeltaTable:
        """Returns the same version as delta-rs opens it in the store itself."""
        return DeltaTable(self.uri, version=self.version(), storage_options=self._options)


class KnownLogs:
    """Copies of the logs of a lake's tables, filled by this process and by earlier ones.

    A run stores them as one object for the next run. Log entries, checkpoints and data files are
    never changed under the same name. So an old copy is still correct, and only saves requests.
    """

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        self._store: ObjectStore | None
        self._store, path = open_store(root, options) or (None, "")
        self._root = f"{path}/" if path else ""
        self._logs: dict[str, StoredLog] = {}
        self._pack: dict[str, int] | None = None
        self._lock = RLock()

    def log(self, path: str) -> StoredLog | None:
        """Returns a table's log by its path in the lake; None where delta-rs alone reads it."""
        if self._store is None:
            return None
        with self._lock:
            if self._pack is None:
                self._pack = {}
                self._unpack(self._store)
            if path not in self._logs:
                self._logs[path] = StoredLog(self._store, f"{self._root}{path}")
            return self._logs[path]

    def save(self, files: Mapping[str, Sequence[str]]) -> None:
        """Write the logs in memory to the lake for the next run, if this run has read more than the
        stored ones contain.

        ``files`` are the data files of tables whose rows each run reads, by the tables' paths. An
        error is logged: the next run then reads more.
        """
        all_logs = dict(self._logs).items()
        # Logs that this run didn't read stay as the last run stored them: the next run verifies all
        # of them.
        logs = {path: log for path, log in all_logs if log.known.version >= 0 or log.is_missing}
        versions = {path: log.known.version for path, log in logs.items()}
        if self._store is None or versions.items() <= (self._pack or {}).items():
            return
        parts: dict[str, Tagged] = {}
        for path, log in logs.items():
            parts |= log.parts(path)
            for name in files.get(path, ()):
                content = self._store.read_cached(f"{self._root}{path}/{name}")
                parts |= {} if content is None else {f"{path}/{name}": Tagged(content, None)}
        self._store.write(f"{self._root}{_PACK}", _pack(_up_to_limit(parts), versions))

    def _unpack(self, store: ObjectStore) -> None:
        try:
            parts, versions = _unpacked(store.read_tagged(f"{self._root}{_PACK}").content)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, *_TORN) as err:
            log_.info(
                "this run reads all Delta logs from the store, because %s, in which earlier runs"
                " stored them, can't be read: %s",
                _PACK,
                err,
            )
            return
        self._pack = versions
        for path, version in versions.items():
            log = StoredLog(store, f"{self._root}{path}", is_missing=version < 0)
            self._logs[path] = log
            head = f"{path}/{_LOG}/"
            log_parts = {
                n.removeprefix(head): one for n, one in parts.items() if n.startswith(head)
            }
            log.known = _log_of_parts(log_parts)
        for name, part in parts.items():
            if f"/{_LOG}/" not in name:
                store.keep(f"{self._root}{name}", part.content)


def _log_of_parts(parts: Mapping[str, Tagged]) -> KnownLog:
    """Returns the log that some entries and a checkpoint form; an empty one if some are missing."""
    entries = {(int(m[1]), m[2]): one for n, one in parts.items() if (m := _ENTRY.match(n))}
    try:
        at, later = _checkpoint_and_later(list(entries), -1, KnownLog())
        return KnownLog(at, {v: entries[v, _JSON] for v in later}, entries.get((at, _CHECKPOINT)))
    except (NotCopied, KeyError):
        return KnownLog()


def _up_to_limit(parts: Mapping[str, Tagged]) -> dict[str, Tagged]:
    """Returns the smallest parts that are together within the limit; the next run reads more."""
    selection, size = {}, 0
    for name, part in sorted(parts.items(), key=lambda item: len(item[1].content)):
        size += len(part.content)
        if size > _MOST_PACKED_BYTES:
            break
        selection[name] = part
    return selection


def _pack(parts: Mapping[str, Tagged], versions: Mapping[str, int]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as pack:
        tags = {name: part.tag for name, part in parts.items()}
        pack.writestr(_INDEX, json.dumps({"versions": versions, "tags": tags}))
        for name, part in parts.items():
            pack.writestr(name, part.content)
    return content.getvalue()


def _unpacked(content: bytes) -> tuple[dict[str, Tagged], dict[str, int]]:
    with zipfile.ZipFile(io.BytesIO(content)) as pack:
        if sum(info.file_size for info in pack.infolist()) > 2 * _MOST_PACKED_BYTES:
            raise ValueError("it is larger than a run leaves it")
        index = parse_json(pack.read(_INDEX))
        tags: dict[str, str | None] = index["tags"]
        parts = {name: Tagged(pack.read(name), tag) for name, tag in tags.items()}
    return parts, {path: int(version) for path, version in index["versions"].items()}


def file_paths(table: DeltaTable) -> list[str]:
    """Returns the paths of a table's data files in its folder."""
    paths: list[str] = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    return paths


def remove_copies() -> None:
    """Remove all copies of this process, which is about to end without Python's own clean-up."""
    for folder, pid in list(_folders.items()):
        _remove(folder, pid)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # A process that was forked has its parent's copies.
        _folders.pop(folder, None)
        shutil.rmtree(folder, ignore_errors=True)
