"""Leftovers: staged changes in ``_waldelta/staging`` of a run that was killed or lost its target's
lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileSelector

from waldelta.errors import TargetNotWritable
from waldelta.failpoints import fault_point
from waldelta.lake.lake import Lake
from waldelta.lake.storage import (
    encode_segment,
    folders_in,
    list_folders,
    remove_folder,
    write_parquet,
)

log = logging.getLogger(__name__)

STAGING = "staging"
# The maximum length of a table's name in a folder name, because file systems limit that and the
# whole path.
_LONGEST_NAME = 100
# The end of the name of a folder that represents folders of runs that must still be fenced.
_TAKEN = "-taken"
# What follows the table: generation, batch, run, and the purpose of the folder.
_REST = re.compile(r"\d+-\d+-[0-9a-f]{12}(-[a-z]+)*")


def staging_folder(lake: Lake, table_name: str, generation: int, batch: int, run_id: str) -> str:
    """Returns the URI of a folder for the changes of one target up to one batch, unique for each
    call.

    So an attempt that still runs unnoticed removes its own folder when it ends, not that of the
    run's next attempt.
    """
    # Any run id, however long, makes a short folder name.
    name = f"{_prefix(table_name)}{generation}-{batch}-{_digest(f'{run_id} {uuid.uuid4()}')}"
    return f"{lake.bookkeeping(STAGING).uri}/{name}"


def copy_folder(lake: Lake, table_name: str) -> str:
    """Returns the URI of the folder in which a target's copy records what it has staged.

    take_over() leaves it to the next copy, and find_leftovers() finds it.
    """
    return f"{lake.bookkeeping(STAGING).uri}/{_prefix(table_name)}copy"


def division_folder(lake: Lake, table_name: str) -> str:
    """Returns the URI of the folder in which a division into partitions records what it has
    written; it is as copy_folder().
    """
    return f"{lake.bookkeeping(STAGING).uri}/{_prefix(table_name)}division"


def write_record(lake: Lake, folder: str, name: str, record: object) -> str:
    """Write what a task records in one of these folders, as JSON, which it returns; it replaces one
    of this name.
    """
    parent, _, last = folder.rpartition("/")
    files, text = lake.files(parent), json.dumps(record)
    files.create_dir(last)
    with files.open_output_stream(f"{last}/{name}.json") as sink:
        sink.write(text.encode())
    return text


def read_records(lake: Lake, folder: str) -> Iterator[dict[str, Any]]:
    """Yields what tasks have recorded in a folder; one that a kill has cut short is left out.

    A store may list the object by which Spark's S3A marks the folder, without a name.
    """
    files = lake.files(folder)
    for info in files.get_file_info(FileSelector("", allow_not_found=True)):
        if not (info.is_file and info.path):
            continue
        with files.open_input_file(info.path) as source:
            text = source.read()
        with suppress(ValueError):
            yield json.loads(text)


def find_leftovers(
    lake: Lake, tables: Iterable[str], before: datetime
) -> dict[str, tuple[str, ...]]:
    """Returns folders (URIs) in which nothing was written since ``before``, and the tables for one
    of which each was staged: one table's name may be the beginning of another's.

    A caller that removes one must hold its tables' locks: a run that works on one of them may still
    read it.
    """
    names = sorted(tables)
    return {
        uri: tuple(name for name in names if uri.rsplit("/", 1)[1].startswith(_prefix(name)))
        for uri, written in sorted(list_folders(lake.bookkeeping(STAGING).uri).items())
        if written < before
    }


def staged_for(lake: Lake, table_name: str) -> list[str]:
    """Returns the folders of changes that are staged for a target."""
    prefix = _prefix(table_name)
    folders = [(uri, uri.rsplit("/", 1)[1]) for uri in folders_in(lake.bookkeeping(STAGING).uri)]
    return [
        uri
        for uri, name in folders
        if name.startswith(prefix) and _REST.fullmatch(name, len(prefix))
    ]


def take_over(lake: Lake, table_name: str, shut_out: Callable[[], None]) -> list[str]:
    """Remove everything staged for a target before committing to it, and ``shut_out`` the runs
    that staged it.

    Returns the removed folders. The caller holds the target's lock and has staged nothing yet, so
    all folders are of runs that lost the lock or were killed. A statement of theirs that starts
    late fails, since its source is gone. One that began before conflicts with the commit that
    ``shut_out`` makes to the target. So it comes last. Until it has returned, a folder of ours
    represents the removed ones. A run that follows a kill in between finds it, and fences, too.
    Raises TargetNotWritable for a folder that can't be removed: as long as it exists, a late
    statement may still apply it.
    """
    folders = staged_for(lake, table_name)
    if not folders:
        return []
    mark = next((uri for uri in folders if uri.endswith(_TAKEN)), None)
    if mark is None:
        mark = staging_folder(lake, table_name, 0, 0, "") + _TAKEN
        write_parquet(mark, pa.table({"folder": folders}))
    for uri in folders:
        if uri == mark:
            continue
        log.warning("table=%s removing staged files of another run: %s", table_name, uri)
        if not remove_folder(uri):
            error = TargetNotWritable(
                f"{table_name}: {uri} can't be removed, and a late statement of another run could"
                " still apply it: give the user that runs the job permission to remove it, or"
                " remove it yourself; the next run continues"
            )
            # Nothing was read for the target yet, and a store may answer again.
            error.retryable = True
            raise error
    fault_point("takeover.removed")
    shut_out()
    remove_folder(mark)
    return folders


def _prefix(table_name: str) -> str:
    encoded = encode_segment(table_name)
    if len(encoded) > _LONGEST_NAME:
        encoded = f"{encoded[: _LONGEST_NAME - 13]}-{_digest(table_name)}"
    return f"{encoded}-"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
