"""The lake's layout, and what makes a Delta commit on a local disk survive a power cut."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import (
    FileSelector,
    FileSystem,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from waldelta.config.parse_text import parse_json
from waldelta.errors import StateError, TargetNotWritable
from waldelta.lake.log_copy import CopiedTable, checkpoint_name, entry_name
from waldelta.lake.object_store import store_folder
from waldelta.lake.store_connection import read_store_options

log = logging.getLogger(__name__)

# External writers may write timestamps as INT96, Spark's default. Arrow would read them as
# nanoseconds, which end in the year 2262.
INT96_AS_MICROSECONDS = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
# Columns of a row group with less than this between them are read together from an object store,
# which answers one request for a megabyte sooner than two for a few bytes.
_SKIPPED_BYTES = 1 << 20
_FROM_STORE = ds.ParquetFragmentScanOptions(
    cache_options=pa.CacheOptions(hole_size_limit=_SKIPPED_BYTES)
)
BOOKKEEPING = "_waldelta"
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_EARLIER = 5
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_HINT = "_last_checkpoint"
# Excludes a writer's temporary files: delta-rs ends their names in #1.
_VERSIONED = re.compile(r"\d{20}\.[^#]*$")
# By table: the version up to which this process has forced all commits to disk, and the inode and
# time of its log entry, since another table may take the place of this one.
_synced: dict[str, tuple[int, int, int]] = {}
# The roots of lakes that don't outlive this process.
_volatile: set[str] = set()
# delta-rs's own checkpoints aren't durable, and it drops the log's old entries at the same time.
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
CHANGES = "changes"
MESSAGES = "messages"


def target_uri(root: str, schema: str, table: str) -> str:
    """Returns the URI of a target's folder; encoded names can't leave the lake's root."""
    return f"{root}/{encode_segment(schema)}/{encode_segment(table)}"


def bookkeeping_uri(root: str, name: str) -> str:
    """Returns the URI of one of the pipeline's own tables.

    These are changes, messages, batches, tables, slot_moves, runs and quarantine.
    """
    return f"{root}/{BOOKKEEPING}/{name}"


@lru_cache(maxsize=4_096)
def local_path(uri: str) -> Path | None:
    """Returns the folder of a ``file://`` URI without decoding it; None for object stores."""
    parts = urlsplit(uri)
    return Path(parts.path) if parts.scheme == "file" else None


def is_local(uri: str) -> bool:
    """Returns whether a folder is on a disk of this machine, not in an object store."""
    return local_path(uri) is not None


@contextmanager
def volatile(root: str) -> Iterator[None]:
    """Force no commit of a lake to disk within the block, because the lake is removed after it."""
    _volatile.add(root)
    try:
        yield
    finally:
        _volatile.remove(root)


def _durable_folder(uri: str) -> Path | None:
    """Returns a folder whose files must survive a power cut; None where nothing need be forced."""
    is_volatile = any(uri.startswith(f"{root}/") for root in _volatile)
    return None if is_volatile else local_path(uri)


def sync_commit(uri: str, version: int) -> None:
    """Force one Delta commit and its files to disk; object stores have done so when they answer.

    Neither Spark nor delta-rs calls fsync. Without it, a power cut could undo a commit that later
    effects are built on.
    """
    folder = _durable_folder(uri)
    if folder is None:
        return
    forced = (version, *_identity(_entry(folder, version).stat()))
    if _synced.get(uri) == forced:
        return
    # Earlier commits that weren't forced are included: an external writer's, a killed run's, and
    # those that only changed properties or columns. A table can't be read when its log has a gap or
    # names a missing file.
    synced, *identity = _synced.get(uri, (version,))
    # Another table has taken the place of this one where the last commit's entry is another.
    is_same = bool(identity) and entry_identity(uri, synced) == tuple(identity)
    earliest = max(0, version - _EARLIER)
    if synced < version:
        earliest = synced + 1 if is_same else min(synced + 1, earliest)
    for earlier in range(earliest, version):
        _sync_if_there(folder, earlier)
    _sync_files(folder, version, _fsync)
    _fsync(folder / "_delta_log")
    if not is_same:  # The folders above the table are forced once.
        # Every table is two folders below the lake's root, which may be as new as the table.
        for path in (folder, *folder.parents[:2]):
            _fsync(path)
        with suppress(PermissionError):
            # The folder belongs to another user, who is responsible for it.
            _fsync(folder.parents[2])
    _synced[uri] = forced


def move_folder(uri: str, to: str) -> None:
    """Rename a table's folder on a disk, durably; raises OSError where another one is in the way.

    The folder above it, where it was, is removed when it has nothing else.
    """
    old, new = Path(urlsplit(uri).path), Path(urlsplit(to).path)
    new.parent.mkdir(parents=True, exist_ok=True)
    old.rename(new)
    for path in (new.parent, new.parent.parent, old.parent):
        _fsync(path)
    with suppress(OSError):
        old.parent.rmdir()


def sync_files(uri: str, names: Iterable[str]) -> None:
    """Force files of a folder to disk, as sync_commit() does a commit's."""
    if (folder := _durable_folder(uri)) is not None:
        for path in (*(folder / name for name in names), folder):
            _fsync(path)


def sync_commits(uri: str, versions: Iterable[int]) -> None:
    """Force commits, perhaps of external writers, to disk.

    Files that are gone or can't be opened are ignored: nothing is built on them.
    """
    folder = _durable_folder(uri)
    if folder is not None and (there := list(versions)):
        for version in there:
            _sync_if_there(folder, version)
        _fsync(folder / "_delta_log")


def sync_behind(uri: str, version: int) -> int:
    """Force all commits after a version to disk, as sync_commits() does; returns the last one."""
    folder, last = local_path(uri), version
    while folder is not None and _entry(folder, last + 1).exists():
        last += 1
    sync_commits(uri, range(version + 1, last + 1))
    return last


def _sync_if_there(folder: Path, version: int) -> None:
    with suppress(FileNotFoundError):  # The log's retention has removed the entry.
        _sync_files(folder, version, _fsync_if_there)


def _sync_files(folder: Path, version: int, fsync: Callable[[Path], None]) -> None:
    """Force a commit's files to disk, then its log entry.

    Then follow the checkpoint that Spark wrote after it, and the pointer to that checkpoint.
    """
    entry = _entry(folder, version)
    added = [
        parse_json(line)[kind]
        for line in entry.read_text().splitlines()
        for kind in ("add", "cdc")
        if f'"{kind}"' in line[:8]
    ]
    names = [unquote(add["path"]) for add in added]
    names += [
        marks
        for add in added
        if (marks := deletion_vector_path(add.get("deletionVector"))) is not None
    ]
    # A path outside the table, from an external writer, isn't a file of this table.
    files = [folder / name for name in names if is_within(name)]
    # The commit may also have created the folders of partitions. A power cut could undo a new
    # folder until the folder above it is forced to disk.
    folders = {above for file in files for above in file.parents if above.is_relative_to(folder)}
    for path in [*files, *sorted(folders)]:
        fsync(path)
    _fsync(entry)
    # A pattern of pathlib's would be compiled for each version.
    begin, there = f"{version:020d}.checkpoint", entry.parent.iterdir()
    if checkpoints := [p for p in there if p.name.startswith(begin) and p.suffix == ".parquet"]:
        for path in (*sorted(checkpoints), entry.parent / _HINT):
            _fsync_if_there(path)


def entry_path(version: int) -> str:
    """Returns the path of a version's log entry in its table's folder."""
    return f"_delta_log/{entry_name(version)}"


def entry_identity(uri: str, version: int) -> tuple[int, int] | None:
    """Returns the inode and time of a version's log entry on a disk.

    They are others when another table has taken its place. None in an object store, or without an
    entry.
    """
    folder = local_path(uri)
    try:
        # A run asks thousands of times, and a Path takes longer to build than this.
        entry = f"{folder}/{entry_path(version)}"
        return None if folder is None else _identity(os.stat(entry))  # noqa: PTH116
    except OSError:
        return None


def _identity(entry: os.stat_result) -> tuple[int, int]:
    return entry.st_ino, entry.st_mtime_ns


def _entry(folder: Path, version: int) -> Path:
    return folder / entry_path(version)


def check_log_files(uri: str) -> None:
    """Raise StateError where the log of a table on a disk has an entry that can't be read safely.

    Opening a FIFO would wait without end, and reading a device might not end. delta-rs opens the
    pointer to the checkpoint whatever it is; Spark also opens checkpoints and commits.
    """
    folder = local_path(uri)
    if folder is None:
        return
    # Opening the table will report why the log can't be listed.
    with suppress(OSError), os.scandir(folder / "_delta_log") as entries:
        for entry in entries:
            if not _is_readable(entry):
                raise irregular(uri, entry.name)


def _is_readable(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file() or entry.is_dir() or not os.path.lexists(entry)
    except OSError:  # Links that lead to each other.
        return False


def irregular(uri: str, name: str) -> StateError:
    """Returns the error for an entry of a table's log that isn't a regular file."""
    return StateError(
        f"{uri}: its log entry {name} is not a regular file: find out which program created it, and"
        " remove it"
    )


def write_checkpoint(table: DeltaTable) -> bool:
    """Write a checkpoint that is durable before anything refers to it; returns whether there is one
    now.

    Everything that it names is durable before it. Readers trust a checkpoint without reading the
    commits before it, and fail when the checkpoint that they are pointed to is torn.
    """
    uri, version = table.table_uri.rstrip("/"), table.version()
    if uri.startswith(
        "file:"
    ):  # delta-rs encodes the URI; a folder's own name has no % (pipeline_file).
        uri = unquote(uri)
    try:
        if isinstance(table, CopiedTable) or (folder := local_path(uri)) is None:
            table.create_checkpoint()
        else:
            _write_checkpoint(folder, uri, version)
    except (DeltaError, OSError) as err:
        log.info(
            "%s: the checkpoint of version %d could not be written; readers use an earlier one: %s",
            uri,
            version,
            err,
        )
        return False
    return True


def _write_checkpoint(folder: Path, uri: str, version: int) -> None:
    sync_commit(uri, version)
    entries = folder / "_delta_log"
    if (newest := _newest_checkpoint(entries)) == version:
        # Another writer's: sync_commit() may have forced the commit before there was one.
        sync_commits(uri, [version])
        return
    with tempfile.TemporaryDirectory(prefix="waldelta-") as beside:
        temporary = _checkpoint_elsewhere(
            entries, version, newest if newest < version else -1, Path(beside)
        )
        for name in (checkpoint_name(version), _HINT):
            _put(temporary / name, entries / name)


def _checkpoint_elsewhere(entries: Path, version: int, newest: int, folder: Path) -> Path:
    """Returns a log of the same commits in another folder, with a checkpoint.

    delta-rs writes a checkpoint and the pointer to it in one step, so it can't do so in the table
    itself.
    """
    there = folder / "_delta_log"
    there.mkdir()
    for entry in entries.iterdir():
        number = entry.name[:20]
        if entry.is_dir() or (number.isdigit() and newest <= int(number) <= version):
            (there / entry.name).symlink_to(entry)
    if newest >= 0:
        shutil.copyfile(entries / _HINT, there / _HINT)
    DeltaTable(str(folder), version=version).create_checkpoint()
    return there


def _newest_checkpoint(entries: Path) -> int:
    """Returns the version of the checkpoint that readers are pointed to; -1 when there is none."""
    try:
        return int(parse_json((entries / _HINT).read_bytes())["version"])
    except (OSError, ValueError, KeyError):
        return -1


def _put(source: Path, path: Path) -> None:
    """Copy a file so that it is either durable under its name or not there at all."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4()}.tmp")
    try:
        shutil.copyfile(source, draft)
        _fsync(draft)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


def is_within(path: str) -> bool:
    """Returns whether a path of a table's log stays in the table's folder.

    A clone's path leads to another table by a URI.

    >>> [is_within(path) for path in ("part-1.parquet", "day=a:b/part-1.parquet")]
    [True, True]
    >>> [is_within(path) for path in ("file:/t/x", "/etc/x", "a/../../x")]
    [False, False, False]
    """
    first, *tail = path.split("/")
    return bool(first) and ".." not in (first, *tail) and not _SCHEME.match(path)


def deletion_vector_path(vector: dict[str, Any] | None) -> str | None:
    """Returns the file, relative to the table, that marks rows of a data file as deleted.

    None for marks within the commit itself. Delta's protocol, "Deletion Vector Descriptor Schema":
    an optional folder, then a UUID in 20 characters of Z85.
    """
    if vector is None or vector["storageType"] != "u":
        return None
    folder, encoded = vector["pathOrInlineDv"][:-20], vector["pathOrInlineDv"][-20:]
    words = [encoded[i : i + 5] for i in range(0, 20, 5)]
    number = b"".join(
        sum(_Z85.index(c) * 85 ** (4 - i) for i, c in enumerate(w)).to_bytes(4, "big")
        for w in words
    )
    return f"{folder}/" * bool(folder) + f"deletion_vector_{uuid.UUID(bytes=number)}.bin"


def check_writable(root: str) -> None:
    """Create the lake's root.

    Raises TargetNotWritable when the root, or the change log in it, is on this machine and can't be
    written. Object stores aren't checked: the first write shows whether they work.
    """
    folder = local_path(root)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise TargetNotWritable(_not_writable(root, err)) from None
    for uri in (root, f"{bookkeeping_uri(root, CHANGES)}/_delta_log"):
        if (problem := why_not_writable(uri)) is not None:
            raise TargetNotWritable(problem)


def why_not_writable(root: str) -> str | None:
    """Returns why a local folder of the lake can't be written or created; creates nothing.

    None for object stores, which aren't checked.
    """
    folder = local_path(root)
    if folder is None:
        return None
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as err:
        return _not_writable(root, err)


def _not_writable(root: str, err: OSError) -> str:
    return (
        f"{root} can't be written ({err.strerror}): check target.root and the permissions of the"
        " user that runs the job"
    )


def write_parquet(folder: str, table: pa.Table, part: int = 0) -> None:
    """Write a table as a Parquet file of a folder.

    With part 0, it replaces everything in the folder, or raises TargetNotWritable.
    """
    if part == 0 and not remove_folder(folder):
        raise TargetNotWritable(
            f"{folder} can't be removed, and its old files would be read together with the new"
            " ones: see the log for the reason"
        )
    if (path := local_path(folder)) is not None:
        path.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, f"part-{part}.parquet", filesystem=open_folder(folder))


def open_parquet(folder: str) -> ds.Dataset:
    """Open the Parquet files of a folder, whether Spark or Arrow wrote them."""
    files = open_folder(folder)
    return ds.dataset(data_paths(files), filesystem=files, format=parquet_format(folder))


def parquet_format(uri: str) -> ds.ParquetFileFormat:
    """Returns how Arrow reads the Parquet files below a URI, whether Spark or Arrow wrote them."""
    return ds.ParquetFileFormat(
        read_options=INT96_AS_MICROSECONDS, default_fragment_scan_options=scan_options(uri)
    )


def scan_options(uri: str) -> ds.ParquetFragmentScanOptions:
    """Returns how Arrow scans the Parquet files below a URI."""
    return ds.ParquetFragmentScanOptions() if is_local(uri) else _FROM_STORE


def row_group_bytes(dataset: ds.Dataset) -> list[int]:
    """Returns the uncompressed size of each row group of a dataset, from the files' footers.

    Values that a dictionary stores once count once.
    """
    return [group.total_byte_size for part in dataset.get_fragments() for group in part.row_groups]


def by_row_group(dataset: ds.Dataset, condition: pc.Expression | None = None) -> ds.Dataset:
    """Returns the same rows, or the parts that may have chosen ones, as fragments of one row group
    each.

    A scanner reads ahead by fragments, and within one by rows: for a file of large rows, that is
    the whole file.
    """
    if isinstance(dataset, ds.InMemoryDataset):
        return dataset
    groups = [
        group
        for part in dataset.get_fragments(condition)
        for group in part.split_by_row_group(condition, dataset.schema)
    ]
    return ds.FileSystemDataset(groups, dataset.schema, dataset.format, dataset.filesystem)


def remove_folder(uri: str) -> bool:
    """Remove a folder with its contents; returns whether it is gone or wasn't there.

    A folder that can't be removed is logged and doesn't stop the run. It is a leftover, which
    maintenance tries to remove again.
    """
    folder = local_path(uri)
    try:
        if folder is not None:
            # rmtree removes as much of the folder as it can.
            shutil.rmtree(folder, ignore_errors=True)
            if os.path.lexists(folder):
                shutil.rmtree(folder)
        else:
            parent, name = uri.rsplit("/", 1)
            open_folder(parent).delete_dir(name)
    except FileNotFoundError:  # Another run has removed the folder since.
        return True
    except OSError as err:
        log.warning("%s can't be removed: %s", uri, err)
        return False
    return True


def row_count(files: pa.Table) -> int | None:
    """Returns how many rows the files have, including deleted ones.

    None where a file's statistics don't have the number.
    """
    if not len(files):
        return 0
    if "num_records" not in files.column_names or files["num_records"].null_count:
        return None
    return int(pc.sum(files["num_records"]).as_py())


def remove_empty_log(uri: str) -> None:
    """Remove a Delta log without any commit, which a run leaves when it is killed while creating
    the table.

    Spark treats such a table as existing and doesn't create it, and nothing can read it. Object
    stores have no empty folders.
    """
    folder = local_path(uri)
    if folder is None or not (log_folder := folder / "_delta_log").is_dir():
        return
    paths = list(log_folder.iterdir())
    # A checkpoint alone is a complete table, too.
    if any(_VERSIONED.match(path.name) or path.name == _HINT for path in paths):
        return
    log.warning(
        "%s: a run was interrupted while it created the table, which has no commit: creating it"
        " again",
        uri,
    )
    # Another run that creates the table right now may have committed; then the folder isn't empty,
    # and stays.
    with suppress(OSError):
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        log_folder.rmdir()


def list_folders(uri: str) -> dict[str, datetime]:
    """Returns the folders directly below a folder, by URI, with the time of the last write in each.

    Returns none when the folder isn't there.
    """
    if (folder := local_path(uri)) is not None and not folder.exists():
        return {}
    written: dict[str, datetime] = {}
    for info in open_folder(uri).get_file_info(FileSelector("", recursive=True)):
        name, _, remainder = info.path.partition("/")
        is_in_folder = remainder or info.type == FileType.Directory
        # A store may list a folder, or the marker of one, whose files are gone.
        is_left = folder is not None or (info.type == FileType.File and info.size)
        if is_in_folder and is_left and info.mtime is not None:
            written[name] = max(written.get(name, info.mtime), info.mtime)
    return {f"{uri}/{name}": at for name, at in written.items()}


def folders_in(uri: str) -> list[str]:
    """Returns the URIs of the folders directly below a folder; none when it isn't there.

    In an object store, a folder is one that has files: some stores list a folder for a while after
    its last object was deleted.
    """
    if (folder := local_path(uri)) is None:
        return sorted(list_folders(uri))
    if not folder.exists():
        return []
    infos = open_folder(uri).get_file_info(FileSelector(""))
    return [f"{uri}/{info.base_name}" for info in infos if info.type == FileType.Directory]


def open_folder(uri: str, options: dict[str, str] | None = None) -> FileSystem:
    """Returns a folder as a file system of its own; a store's ``options`` as delta-rs names them.

    Without ``options``, they are those of the environment.
    """
    folder = local_path(uri)
    if folder is not None:
        return SubTreeFileSystem(str(folder), LocalFileSystem())
    store_options = read_store_options(uri) if options is None else options
    return store_folder(uri, store_options) or PyFileSystem(DeltaStorageHandler(uri, store_options))


def data_paths(files: FileSystem) -> list[str]:
    """Returns the data files directly in a folder, without those that Spark hides.

    S3A marks a folder by an object without bytes, which is listed as an entry without a name.
    """
    listed = sorted(info.path for info in files.get_file_info(FileSelector("")))
    return [path for path in listed if path.rpartition("/")[2][:1] not in ("", ".", "_")]


def _fsync(path: Path) -> None:
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_if_there(path: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):
        _fsync(path)


@lru_cache(4096)
def encode_segment(name: str) -> str:
    """Returns a name as one path segment: every byte that isn't plainly safe becomes ``~XX``.

    So no name can leave its folder. Percent-encoding doesn't work: Spark uses a percent sign in a
    path as it is, but delta-rs decodes it, so they would use different folders. A leading
    underscore would hide the folder from Spark.

    >>> encode_segment("odd name"), encode_segment("_t.x"), encode_segment("orders")
    ('odd~20name', '~5Ft~2Ex', 'orders')
    """
    encoded = "".join(
        chr(byte) if chr(byte) in _PLAIN else f"~{byte:02X}" for byte in name.encode()
    )
    return "~5F" + encoded[1:] if encoded.startswith("_") else encoded
