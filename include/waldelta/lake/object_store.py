"""An object store asked directly: each request is counted, and a new object is made only once.

delta-rs and its file system for Arrow use more requests for the same: several for each log entry
and each file. They open the stores, and by the credentials, that this module doesn't.
"""

from __future__ import annotations

import io
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, S3Store
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileSystemHandler, FileType, PyFileSystem

from waldelta.config.stores import store_of

# Whatever else is set may change whom the store sees, or how delta-rs commits.
_KEYS = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"})
_CONFIGURED = _KEYS | {
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_SESSION_TOKEN",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
}
_OF_CLIENT = {
    "AWS_ALLOW_HTTP": "allow_http",
    "timeout": "timeout",
    "connect_timeout": "connect_timeout",
}
_OF_RETRIES = frozenset({"max_retries", "retry_timeout"})
# delta-rs's store ignores them, too.
_OF_OTHERS = frozenset(
    {"AWS_CA_BUNDLE", "AWS_EXECUTION_ENV", "AWS_MAX_ATTEMPTS", "AWS_PAGER", "AWS_RETRY_MODE"}
)
# A file up to this size is read whole, by one request. Of a larger one, this request gets the end,
# where Parquet's footer is, or the beginning of a stream; others get the parts that are needed.
_WHOLE_BYTES = 1 << 20
# A stream is read in blocks: Arrow reads one by messages, which would be a request each.
_BLOCK_BYTES = 8 << 20
# A larger file is written in parts.
_PART_BYTES = 8 << 20
_PARALLEL, _TO_READ_TOGETHER = 8, 2
_MOST_KEPT_BYTES = 32 << 20
# The ends of large files are kept beside small ones: of each, Parquet's footer, and at least what
# Arrow reads to find it.
_MOST_ENDS_BYTES, _LEAST_END_BYTES = 32 << 20, 64 << 10
_PARQUETS_TAIL = struct.Struct("<I4s")  # A Parquet file ends in the footer's length and "PAR1".


# What obstore knows of an object: its path in its bucket, size, last_modified and e_tag.
Listed = Mapping[str, Any]


class _Requests:
    """How many requests this process has made."""

    def __init__(self) -> None:
        self._lock, self.count = Lock(), 0

    def add(self, count: int = 1) -> None:
        with self._lock:
            self.count += count


_requests = _Requests()


def requests_made() -> int:
    """Returns how many requests this module has made in this process.

    Repeated requests, delta-rs's own, and those of Spark aren't included.
    """
    return _requests.count


@dataclass(frozen=True, slots=True)
class Tagged:
    """An object's content and its ETag."""

    content: bytes
    tag: str | None


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A part of an object: where it begins, its content, and how many bytes the object has."""

    start: int
    content: bytes
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole object."""
        return len(self.content) == self.size

    def read(self, start: int, end: int) -> bytes | None:
        """Returns the object's bytes from ``start`` to ``end``; None unless this part has all of
        them.
        """
        first, last = start - self.start, end - self.start
        return self.content[first:last] if first >= 0 and last <= len(self.content) else None

    @property
    def footer(self) -> ObjectPart:
        """Returns a Parquet file's footer out of its end, at least what Arrow reads of it."""
        length, _ = _PARQUETS_TAIL.unpack(self.content[-_PARQUETS_TAIL.size :])
        last = max(length + _PARQUETS_TAIL.size, _LEAST_END_BYTES)
        content = self.content[-last:]
        return ObjectPart(self.size - len(content), content, self.size)


class _Cache:
    """The parts of files that were used last, by their paths, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._parts: OrderedDict[str, ObjectPart] = OrderedDict()
        self._lock = Lock()

    def get(self, path: str) -> ObjectPart | None:
        with self._lock:
            if path in self._parts:
                self._parts.move_to_end(path)
            return self._parts.get(path)

    def put(self, path: str, part: ObjectPart) -> None:
        with self._lock:
            self._remove(path)
            self._parts[path] = part
            self._bytes += len(part.content)
            while self._bytes > self._most_bytes:
                _, oldest = self._parts.popitem(last=False)
                self._bytes -= len(oldest.content)

    def forget(self, path: str) -> None:
        with self._lock:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if (part := self._parts.pop(path, None)) is not None:
            self._bytes -= len(part.content)


class ObjectStore:
    """One bucket. Raises OSError for a request that fails, FileNotFoundError without an object."""

    def __init__(self, store: S3Store | MemoryStore) -> None:
        self._store = store
        self._small, self._ends = _Cache(_MOST_KEPT_BYTES), _Cache(_MOST_ENDS_BYTES)

    def read_cached(self, path: str) -> bytes | None:
        """Returns a small file that was read before, and never changes."""
        part = self._small.get(path)
        return None if part is None else part.content

    def keep(self, path: str, content: bytes) -> None:
        """Keep a small file, which never changes, instead of those that were used first."""
        self._small.put(path, ObjectPart(0, content, len(content)))

    def read_end_once(self, path: str) -> ObjectPart:
        """Returns a small file, or the last part of another one; it never changes."""
        if (part := self._small.get(path) or self._ends.get(path)) is not None:
            return part
        part = self.read_part(path, {"suffix": _WHOLE_BYTES})
        if part.is_whole:
            self._small.put(path, part)
        else:
            self._ends.put(path, part.footer)
        return part

    def read_tagged(self, path: str) -> Tagged:
        """Returns an object with its tag."""
        with _request():
            answer = obstore.get(self._store, path)
            return Tagged(bytes(answer.bytes()), answer.meta["e_tag"])

    def read_all(self, paths: Sequence[str]) -> list[Tagged]:
        """Returns several objects, in order; a few are read at the same time."""
        if len(paths) < _TO_READ_TOGETHER:
            return [self.read_tagged(path) for path in paths]
        with ThreadPoolExecutor(min(_PARALLEL, len(paths))) as pool:
            return list(pool.map(self.read_tagged, paths))

    def read_part(self, path: str, range_: Any) -> ObjectPart:
        """Returns a part of an object, by a range as of obstore: from the beginning, or its end."""
        with _request():
            answer = obstore.get(self._store, path, options={"range": range_})
            return ObjectPart(answer.range[0], bytes(answer.bytes()), answer.meta["size"])

    def read_range(self, path: str, start: int, size: int) -> bytes:
        """Returns a part of an object."""
        with _request():
            return bytes(obstore.get_range(self._store, path, start=start, length=size))

    def write(self, path: str, content: bytes) -> str | None:
        """Write an object, also over another one; returns its tag."""
        self._forget(path)
        with _request():
            return obstore.put(self._store, path, content, use_multipart=False)["e_tag"]

    def create(self, path: str, content: bytes) -> Tagged | None:
        """Write an object unless there is one; returns it, or None when there is another one.

        An object with the same content is this one: its answer was lost, and the request repeated.
        """
        try:
            with _request():
                answer = obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except FileExistsError:
            existing = self.read_tagged(path)
            return existing if existing.content == content else None
        return Tagged(content, answer["e_tag"])

    def opened(self, path: str) -> Any:
        """Returns a writer of an object, which doesn't exist before the writer is closed."""
        self._forget(path)
        with _request():
            return obstore.open_writer(self._store, path, buffer_size=_PART_BYTES)

    def find(self, path: str) -> Listed | None:
        """Returns an object's path, size and tag; None if there is no such object."""
        try:
            with _request():
                return obstore.head(self._store, path)
        except FileNotFoundError:
            return None

    def objects(self, prefix: str, after: str | None = None) -> list[Listed]:
        """Returns the objects below a prefix, in the order of their paths; with ``after``, only
        those whose path comes after it.
        """
        with _request():
            listing = obstore.list(self._store, prefix, offset=after).collect()
        return sorted(listing, key=lambda listed: listed["path"])

    def entries(self, prefix: str) -> tuple[Sequence[str], Sequence[Listed]]:
        """Returns the folders and the objects directly in a folder."""
        with _request():
            listing = obstore.list_with_delimiter(self._store, prefix)
        return listing["common_prefixes"], listing["objects"]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, by one request for many of them; those that aren't there don't matter."""
        for path in paths:
            self._forget(path)
        if paths:
            with _request():
                obstore.delete(self._store, list(paths))

    def _forget(self, path: str) -> None:
        for cache in (self._small, self._ends):
            cache.forget(path)


@contextmanager
def _request(requests: int = 1) -> Iterator[None]:
    """Count requests; raise OSError with the store's answer where one failed."""
    _requests.add(requests)
    try:
        yield
    except AlreadyExistsError as err:
        raise FileExistsError(_answer(err)) from None
    except FileNotFoundError as err:
        raise FileNotFoundError(_answer(err)) from None
    except BaseError as err:
        raise OSError(_answer(err)) from None


def _answer(err: Exception) -> str:
    return str(err).partition("\n\nDebug source")[0]


def open_store(uri: str, options: Mapping[str, str]) -> tuple[ObjectStore, str] | None:
    """Returns the bucket of a URI, and the path in it; None where only delta-rs opens the store.

    ``options`` are delta-rs's. That a bucket is opened says nothing of whether it exists.
    """
    parts = urlsplit(uri)
    supported = _CONFIGURED | _OF_CLIENT.keys() | _OF_RETRIES | _OF_OTHERS
    if store_of(uri) != "s3" or not _KEYS <= options.keys() <= supported:
        return None
    return _bucket(parts.netloc, tuple(sorted(options.items()))), parts.path.strip("/")


@lru_cache(maxsize=8)
def _bucket(name: str, options: tuple[tuple[str, str], ...]) -> ObjectStore:
    # The store is opened once, because it keeps its connections.
    config = {key: value for key, value in options if key in _CONFIGURED}
    client = {_OF_CLIENT[key]: value for key, value in options if key in _OF_CLIENT}
    limits = {key: value for key, value in options if key in _OF_RETRIES}
    retries: dict[str, Any] = {}
    if "max_retries" in limits:
        retries["max_retries"] = int(limits["max_retries"])
    if "retry_timeout" in limits:
        retries["retry_timeout"] = timedelta(seconds=float(limits["retry_timeout"].rstrip("s")))
    opened: Any = S3Store  # S3Store's keyword arguments are typed key by key.
    return ObjectStore(
        opened(name, config=config, client_options=client, retry_config=retries or None)
    )


def store_folder(
    uri: str, options: Mapping[str, str], *, unchanging: bool = False
) -> FileSystem | None:
    """Returns a folder of an object store as Arrow's file system; None as open_store() does.

    Of files that never change (``unchanging``), small ones and the ends of others are read once.
    """
    opened = open_store(uri, options)
    return None if opened is None else PyFileSystem(_Folder(*opened, unchanging))


@dataclass(frozen=True)
class _Folder(FileSystemHandler):  # type: ignore[misc]  # Arrow has no types.
    """A folder of a bucket, as Arrow asks for its files."""

    _store: ObjectStore
    _root: str
    _unchanging: bool

    def _path(self, path: str) -> str:
        return f"{self._root}/{path.strip('/')}".strip("/")

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def get_type_name(self) -> str:
        return "waldelta"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> FileInfo:
        entry = self._store.find(self._path(path))
        if entry is not None:
            return _file(path, entry)
        folders, objects = self._store.entries(self._path(path))
        return FileInfo(path, FileType.Directory if folders or objects else FileType.NotFound)

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        base = self._path(selector.base_dir)
        folders, objects = (
            ((), self._store.objects(base)) if selector.recursive else self._store.entries(base)
        )
        if not (folders or objects or selector.allow_not_found or not selector.base_dir):
            raise FileNotFoundError(selector.base_dir)
        # Some stores list the object that marks the folder itself, which isn't in it.
        return [
            *(FileInfo(self._relative(path), FileType.Directory) for path in folders),
            *(
                _file(self._relative(listed["path"]), listed)
                for listed in objects
                if listed["path"] != base
            ),
        ]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing: a store has no folders of its own."""

    def delete_dir(self, path: str) -> None:
        self._store.delete([listed["path"] for listed in self._store.objects(self._path(path))])

    def delete_dir_contents(self, path: str, _missing_dir_ok: bool = False) -> None:
        self.delete_dir(path)

    def delete_root_dir_contents(self) -> None:
        self.delete_dir("")

    def delete_file(self, path: str) -> None:
        self._store.delete([self._path(path)])

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_input_file(self, path: str) -> pa.NativeFile:
        place = self._path(path)
        if self._unchanging:
            return self._open_part(place, self._store.read_end_once(place))
        return self._open_part(place, self._store.read_part(place, {"suffix": _WHOLE_BYTES}))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        place = self._path(path)
        part = self._store.read_part(place, (0, _WHOLE_BYTES))
        return self._open_part(place, part, block=_BLOCK_BYTES)

    def _open_part(self, place: str, part: ObjectPart, block: int = 0) -> pa.NativeFile:
        if part.is_whole:
            return pa.BufferReader(part.content)
        return pa.PythonFile(_Parts(self._store, place, part, block), mode="r")

    def open_output_stream(self, path: str, _metadata: Mapping[str, str] | None) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self._store.opened(self._path(path))), mode="w")

    def open_append_stream(self, path: str, metadata: Mapping[str, str] | None) -> pa.NativeFile:
        raise NotImplementedError


def _file(path: str, listed: Listed) -> FileInfo:
    return FileInfo(path, FileType.File, size=listed["size"], mtime=listed["last_modified"])


class _Parts(io.RawIOBase):
    """A file that is read in parts of at least ``block`` bytes; one part is known."""

    def __init__(self, store: ObjectStore, path: str, part: ObjectPart, block: int) -> None:
        self._store, self._path, self._block = store, path, block
        self._known, self._size, self._at = part, part.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = begins[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        start, self._at = self._at, max(self._at, end)
        if end <= start:
            return b""
        if (range_bytes := self._known.read(start, end)) is not None:
            return range_bytes
        read = min(max(end, start + self._block), self._size) - start
        content = self._store.read_range(self._path, start, read)
        if self._block:
            self._known = ObjectPart(start, content, self._size)
        return content[: end - start]


class _Upload(io.RawIOBase):
    """A file being written; its position is the number of bytes so far."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._at = writer, 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        with _request(0):  # The first request was counted when the file was opened.
            self._writer.write(bytes(content))
        self._at += size
        return size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if (offset, whence) != (0, io.SEEK_CUR):
            raise io.UnsupportedOperation
        return self._at

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with _request(self._at // _PART_BYTES and self._at // _PART_BYTES + 1):
            self._writer.close()
