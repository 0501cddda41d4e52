"""The lake's layout, and what makes a Delta commit on a local disk survive a power cut."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
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

from waldelta.errors import TargetNotWritable

log = logging.getLogger(__name__)

# Spark's timestamps are INT96, which Arrow would read as nanoseconds: these end in 2262.
SPARKS_TIMESTAMPS = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
BOOKKEEPING = "_waldelta"
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_EARLIER = 5
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_HINT = "_last_checkpoint"
# Not what a writer calls it before it is one: delta-rs ends that name in #1.
_VERSIONED = re.compile(r"\d{20}\.[^#]*$")
# By table: the version up to which this process has forced all commits onto the disk.
_synced: dict[str, int] = {}
# delta-rs's own checkpoints aren't durable, and it drops the log's old entries in the same breath.
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
CHANGES = "changes"
MESSAGES = "messages"


def target_uri(root: str, schema: str, table: str) -> str:
    """URI of a target's folder; names are encoded, so that no name can leave the lake's root."""
    return f"{root}/{encode_segment(schema)}/{encode_segment(table)}"


def bookkeeping_uri(root: str, name: str) -> str:
    """URI of one of the pipeline's own tables: changes, messages, batches, tables, slot_moves,
    runs, quarantine.
    """
    return f"{root}/{BOOKKEEPING}/{name}"


def local_path(uri: str) -> Path | None:
    """The folder of a ``file://`` URI, taken as it stands; None for object stores."""
    parts = urlsplit(uri)
    return Path(parts.path) if parts.scheme == "file" else None


def sync_commit(uri: str, version: int) -> None:
    """Force one Delta commit and the files it added onto the disk; object stores have done so when
    they answer.

    Neither Spark nor delta-rs calls fsync, so without this a power cut can take a commit back that
    we built on.
    """
    folder = local_path(uri)
    if folder is None:
        return
    # The earlier ones, too, that nobody is known to have cared for: other people's, a killed run's,
    # and those that only changed properties or columns. A table whose log has a gap, or names a
    # file that is gone, can't be read.
    known = _synced.get(uri, version)
    for earlier in range(known + 1 if known < version else max(0, version - _EARLIER), version):
        _sync_if_there(folder, earlier)
    _sync_files(folder, version, _fsync)
    # Every table lies two folders below the lake's root, which may be as new as the table.
    for path in (folder / "_delta_log", folder, *folder.parents[:2]):
        _fsync(path)
    with suppress(
        PermissionError
    ):  # a folder that isn't ours: whoever made the lake's root in it looks after it
        _fsync(folder.parents[2])
    _synced[uri] = version


def sync_commits(uri: str, versions: Iterable[int]) -> None:
    """Likewise commits that may be anybody's: what of their files is gone again, or isn't ours to
    open, nobody builds on.
    """
    folder = local_path(uri)
    if folder is not None and (there := list(versions)):
        for version in there:
            _sync_if_there(folder, version)
        _fsync(folder / "_delta_log")


def sync_behind(uri: str, version: int) -> int:
    """Force all commits after a version onto the disk, as sync_commits(); returns the last."""
    folder, last = local_path(uri), version
    while folder is not None and _entry(folder, last + 1).exists():
        last += 1
    sync_commits(uri, range(version + 1, last + 1))
    return last


def _sync_if_there(folder: Path, version: int) -> None:
    with suppress(FileNotFoundError):  # the entry itself: gone with the log's retention
        _sync_files(folder, version, _fsync_if_there)


def _sync_files(folder: Path, version: int, fsync: Callable[[Path], None]) -> None:
    """What a commit added, then its entry in the log; and the checkpoint that Spark wrote behind
    it, then what points to that.
    """
    entry = _entry(folder, version)
    added = [
        json.loads(line)["add"] for line in entry.read_text().splitlines() if '"add"' in line[:8]
    ]
    names = [unquote(add["path"]) for add in added]
    names += [
        marks
        for add in added
        if (marks := deletion_vector_path(add.get("deletionVector"))) is not None
    ]
    # What an external writer names elsewhere is no file of this table.
    files = [folder / name for name in names if is_within(name)]
    for path in [*files, *sorted({f.parent for f in files})]:
        fsync(path)
    _fsync(entry)
    if checkpoints := sorted(entry.parent.glob(f"{version:020d}.checkpoint*.parquet")):
        for path in (*checkpoints, entry.parent / _HINT):
            _fsync_if_there(path)


def _entry(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020d}.json"


def only_if_unchanged(app_id: str, number: int, metadata: str) -> dict[str, Any]:
    """Options of a commit by delta-rs that is a compare-and-swap on the version that was read,
    under Delta's transaction id.

    ``metadata`` is its userMetadata. Checkpoints are checkpoint()'s, which makes them durable, and
    old logs maintenance's.
    """
    transaction = Transaction(app_id, number, int(time.time() * 1000))
    return {
        "commit_properties": CommitProperties(
            custom_metadata={"userMetadata": metadata},
            max_commit_retries=0,
            app_transactions=[transaction],
        ),
        "post_commithook_properties": NO_HOOKS,
    }


def checkpoint(table: DeltaTable, interval: int) -> None:
    """Write a checkpoint with every so many versions; one that can't be written undoes no commit,
    and there will be a next one.
    """
    if table.version() % interval == 0:
        write_checkpoint(table)


def write_checkpoint(table: DeltaTable) -> bool:
    """Write a checkpoint that is durable before anything names it, behind all that it names;
    whether there is one now.

    Readers trust a checkpoint without looking at the commits before it, and fail when the one that
    they are pointed to is torn.
    """
    uri, version = table.table_uri.rstrip("/"), table.version()
    if uri.startswith(
        "file:"
    ):  # as delta-rs writes it; a folder's own name has no % (pipeline_file)
        uri = unquote(uri)
    try:
        if (folder := local_path(uri)) is None:
            table.create_checkpoint()
            return True
        sync_commit(uri, version)
        entries = folder / "_delta_log"
        if (newest := _newest_checkpoint(entries)) == version:
            return True
        with tempfile.TemporaryDirectory(prefix="waldelta-") as beside:
            made = _checkpoint_elsewhere(
                entries, version, newest if newest < version else -1, Path(beside)
            )
            for name in (f"{version:020d}.checkpoint.parquet", _HINT):
                _put(made / name, entries / name)
    except (DeltaError, OSError) as err:
        log.info("%s has no checkpoint of version %d: %s", uri, version, err)
        return False
    return True


def _checkpoint_elsewhere(entries: Path, version: int, newest: int, folder: Path) -> Path:
    """A log of the same commits in another folder, with a checkpoint: delta-rs writes it and what
    points to it in one go.
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
    """The version of the checkpoint that readers are pointed to; -1 when there is none."""
    try:
        return int(json.loads((entries / _HINT).read_bytes())["version"])
    except (OSError, ValueError, KeyError):
        return -1


def _put(made: Path, path: Path) -> None:
    """Copy a file, durable under its name or not there at all."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4()}.tmp")
    try:
        shutil.copyfile(made, draft)
        _fsync(draft)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


def is_within(path: str) -> bool:
    """Whether a path of a table's log stays in the table's folder; a clone's leads to another
    table's by a URI.

    >>> [is_within(path) for path in ("part-1.parquet", "day=a:b/part-1.parquet")]
    [True, True]
    >>> [is_within(path) for path in ("file:/t/x", "/etc/x", "a/../../x")]
    [False, False, False]
    """
    first, *others = path.split("/")
    return bool(first) and ".." not in (first, *others) and not _SCHEME.match(path)


def deletion_vector_path(vector: dict[str, Any] | None) -> str | None:
    """The file, relative to the table, that marks rows of a data file as gone; None for marks
    within the commit itself.

    Delta's protocol, "Deletion Vector Descriptor Schema": an optional folder, then a UUID in 20
    characters of Z85.
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
    """Make the lake's root; raises TargetNotWritable when it, or the change log in it, is on this
    machine and can't be written.

    Object stores aren't asked: they tell with the first write.
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
    """Why a folder of the lake can't be written, or made, from here; makes nothing. None for object
    stores, which aren't asked.
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
        f"{root} can't be written ({err.strerror}): check target.root and the rights of whoever"
        " runs the job"
    )


def write_parquet(folder: str, table: pa.Table, part: int = 0) -> None:
    """Write a table as a Parquet file of a folder; with part 0, as its only one, replacing what is
    there (else TargetNotWritable).
    """
    if part == 0 and not remove_folder(folder):
        raise TargetNotWritable(
            f"{folder} can't be removed, and what it holds would be read along: see the log for why"
        )
    files, path = _file_system(folder)
    files.create_dir(path)
    pq.write_table(table, f"{path}/part-{part}.parquet", filesystem=files)


def open_parquet(folder: str) -> ds.Dataset:
    """The Parquet files of a folder, whether Spark or Arrow wrote them."""
    files, path = _file_system(folder)
    return ds.dataset(
        path, filesystem=files, format=ds.ParquetFileFormat(read_options=SPARKS_TIMESTAMPS)
    )


def row_group_bytes(dataset: ds.Dataset) -> list[int]:
    """What each row group of a dataset takes once it is unpacked, as the files' footers say;
    values that repeat count once.
    """
    return [group.total_byte_size for part in dataset.get_fragments() for group in part.row_groups]


def by_row_group(dataset: ds.Dataset, chosen: pc.Expression | None = None) -> ds.Dataset:
    """The same rows, or those parts of it that may hold chosen ones, as fragments of a row group
    each.

    A scanner reads ahead by fragments, and within one by rows: of a file of large rows that is all
    of it.
    """
    groups = [
        group
        for part in dataset.get_fragments(chosen)
        for group in part.split_by_row_group(chosen, dataset.schema)
    ]
    return ds.FileSystemDataset(groups, dataset.schema, dataset.format, dataset.filesystem)


def remove_folder(uri: str) -> bool:
    """Remove a folder and what is in it; whether it is gone, or wasn't there.

    One that can't be removed is told in the log, and ends nobody's work: it is a leftover, which
    maintenance tries again.
    """
    folder = local_path(uri)
    try:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # as much of it as can be
            if os.path.lexists(folder):
                shutil.rmtree(folder)
        else:
            files, path = _file_system(uri)
            if files.get_file_info(path).type != FileType.NotFound:
                files.delete_dir(path)
    except FileNotFoundError:  # somebody else has removed it meanwhile
        return True
    except OSError as err:
        log.warning("%s can't be removed: %s", uri, err)
        return False
    return True


def remove_empty_folders(uri: str, may_go: Callable[[str], bool]) -> None:
    """Remove the empty folders right below one, by their names; object stores have none."""
    folder = local_path(uri)
    for path in folder.iterdir() if folder is not None else ():
        if may_go(path.name):
            with suppress(OSError):  # it isn't empty, or no folder
                path.rmdir()


def open_version(
    uri: str, version: int | None, storage_options: Mapping[str, str] | None = None
) -> DeltaTable:
    """A table as of a version (None: the latest), without Spark."""
    return DeltaTable(uri, version=version, storage_options=dict(storage_options or {}) or None)


def files_of(table: DeltaTable) -> pa.Table:
    """What a table's log says of its files, one row for each."""
    return pa.table(table.get_add_actions(flatten=True))


def row_count(files: pa.Table) -> int | None:
    """How many rows the files hold, deleted ones among them; None where not every file's statistics
    say.
    """
    if not len(files):
        return 0
    if "num_records" not in files.column_names or files["num_records"].null_count:
        return None
    return int(pc.sum(files["num_records"]).as_py())


def has_deletion_vectors(table: DeltaTable) -> bool:
    """Whether files of a table may hold rows that it doesn't: what the log says of a file counts
    them, and doesn't tell.
    """
    return "deletionVectors" in (table.protocol().reader_features or ())


def remove_empty_log(uri: str) -> None:
    """Remove a Delta log without any commit, as a run leaves it that is killed while it makes the
    table.

    Spark takes such a table to be there, makes none in its place, and nobody can read it; object
    stores know no empty folders.
    """
    folder = local_path(uri)
    if folder is None or not (log_folder := folder / "_delta_log").is_dir():
        return
    left = list(log_folder.iterdir())
    # A checkpoint, too, is all of a table.
    if any(_VERSIONED.match(path.name) or path.name == _HINT for path in left):
        return
    log.warning("%s: its making was broken off, and it has no commit: it is made anew", uri)
    # Whoever makes the table at this moment may have committed by now: the folder isn't empty then,
    # and stays.
    with suppress(OSError):
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        log_folder.rmdir()


def list_folders(uri: str) -> dict[str, datetime]:
    """The folders right below a folder, by URI, and when anything in each was written last; none
    when it isn't there.
    """
    files, path = _file_system(uri)
    written: dict[str, datetime] = {}
    for info in files.get_file_info(FileSelector(path, allow_not_found=True, recursive=True)):
        name, _, rest = info.path.removeprefix(path).lstrip("/").partition("/")
        if (rest or info.type == FileType.Directory) and info.mtime is not None:
            written[name] = max(written.get(name, info.mtime), info.mtime)
    return {f"{uri}/{name}": at for name, at in written.items()}


def folders_in(uri: str) -> list[str]:
    """URIs of the folders right below a folder; none when it isn't there."""
    files, path = _file_system(uri)
    found = files.get_file_info(FileSelector(path, allow_not_found=True))
    return [f"{uri}/{info.base_name}" for info in found if info.type == FileType.Directory]


def rooted(uri: str, storage_options: dict[str, str] | None = None) -> FileSystem:
    """A folder of the lake as a file system of its own, wherever it is asked: tasks may lack the
    credentials of whoever runs the job.
    """
    folder = local_path(uri)
    if folder is not None:
        return SubTreeFileSystem(str(folder), LocalFileSystem())
    return PyFileSystem(DeltaStorageHandler(uri, storage_options))


def _file_system(uri: str) -> tuple[FileSystem, str]:
    """Where a URI leads; Hadoop's schemes have other names in Arrow, and a local path is taken as
    it stands.
    """
    folder = local_path(uri)
    if folder is not None:
        return LocalFileSystem(), str(folder)
    scheme, rest = uri.split("://", 1)
    files, path = FileSystem.from_uri(f"{'s3' if scheme == 's3a' else scheme}://{rest}")
    return files, path


def _fsync(path: Path) -> None:
    # To open a FIFO otherwise waits for whoever writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_if_there(path: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):
        _fsync(path)


def encode_segment(name: str) -> str:
    """A name as one path segment: every byte that isn't plainly safe as ``~XX``, so that no name
    can leave its folder.

    Not percent-encoded: Spark takes a percent sign in a path as it stands, delta-rs decodes it, so
    that they would look into different folders. A leading underscore would hide the folder from
    Spark.

    >>> encode_segment("odd name"), encode_segment("_t.x"), encode_segment("orders")
    ('odd~20name', '~5Ft~2Ex', 'orders')
    """
    encoded = "".join(
        chr(byte) if chr(byte) in _PLAIN else f"~{byte:02X}" for byte in name.encode()
    )
    return "~5F" + encoded[1:] if encoded.startswith("_") else encoded
