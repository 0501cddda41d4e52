"""Commits that replace files of a Delta table, and show their changed rows in its change data feed.

Delta's protocol, "Add CDC File": readers of a version's changes read only such files, if it has
any. Otherwise, rows of added files are inserts and rows of removed files deletes. So a commit needs
them where a removed and an added file have rows in common. delta-rs's commits can't name them.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from waldelta.lake.delta_log import Tag
from waldelta.lake.log_copy import CopiedTable
from waldelta.lake.storage import NO_HOOKS, entry_path, is_local, local_path

# The property of a table whose commits show what they change.
CHANGE_DATA_FEED = "delta.enableChangeDataFeed"
CHANGE_FOLDER, CHANGE_TYPE = "_change_data", "_change_type"
SHOWN_INSERT, SHOWN_DELETE = "insert", "delete"
PREIMAGE, POSTIMAGE = "update_preimage", "update_postimage"


def change_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of the files with changed rows of a table with these columns."""
    return schema.append(pa.field(CHANGE_TYPE, pa.string()))


def changed_rows(rows: Mapping[str, pa.Table]) -> pa.Table:
    """Returns rows of the change data feed, from a commit's rows by type of change."""
    typed = [
        part.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(change, pa.string()), len(part)))
        for change, part in rows.items()
    ]
    return pa.concat_tables(typed)


@dataclass(frozen=True, slots=True)
class FileChange:
    """Files that a commit removes (path, bytes), those that it adds (path, bytes, statistics) to
    one partition, and files of changed rows (path, bytes).

    Without ``changes_data`` the added files have the rows of the removed ones.
    """

    removed: Sequence[tuple[str, int]]
    added: Sequence[tuple[str, int, str]]
    changes: Sequence[tuple[str, int]] = ()
    partition: Mapping[str, str] = field(default_factory=dict)
    changes_data: bool = True

    def log_entry(self, tag: Tag) -> bytes:
        """Returns the lines of the commit's log entry."""
        at = int(time.time() * 1000)
        info = {
            "timestamp": at,
            "operation": "WRITE",
            "operationParameters": {"mode": "Append", "partitionBy": json.dumps([*self.partition])},
            "userMetadata": tag.metadata,
            "engineInfo": "waldelta",
        }
        transaction = {"appId": tag.app_id, "version": tag.number, "lastUpdated": at}
        is_data = {"dataChange": self.changes_data}
        actions: list[dict[str, Any]] = [{"commitInfo": info}, {"txn": transaction}]
        actions += [
            # Without extended metadata, Spark doesn't read the changes of this version.
            {
                "remove": {"path": path, "size": size, "partitionValues": {}}
                | {"deletionTimestamp": at, "extendedFileMetadata": True, **is_data}
            }
            for path, size in self.removed
        ]
        actions += [
            {"add": self._file(path, size) | {"modificationTime": at, "stats": stats, **is_data}}
            for path, size, stats in self.added
        ]
        actions += [
            {"cdc": self._file(path, size) | {"dataChange": False}} for path, size in self.changes
        ]
        # delta-rs (arrow-json) loses half of an escaped character beyond 16 bits.
        return "\n".join(json.dumps(action, ensure_ascii=False) for action in actions).encode()

    def _file(self, path: str, size: int) -> dict[str, Any]:
        return {"path": path, "size": size, "partitionValues": {**self.partition}}


def creates_entries(table: DeltaTable, uri: str) -> bool:
    """Returns whether commit_files() creates the log's entry itself, in any but some stores."""
    return is_local(uri) or isinstance(table, CopiedTable)


def commit_files(table: DeltaTable, uri: str, files: FileChange, tag: Tag) -> None:
    """Commit files to the version after the table's; durable only in an object store.

    Raises CommitFailedError, also when another writer has made that version.
    """
    version = table.version() + 1
    if isinstance(table, CopiedTable):
        table.create_entry(version, files.log_entry(tag))
    elif (folder := local_path(uri)) is not None:
        path = folder / entry_path(version)
        draft = path.with_name(f".{path.name}.{uuid.uuid4()}.tmp")
        try:
            draft.write_bytes(files.log_entry(tag))
            os.link(draft, path)  # Unlike a renamed file, a link never replaces another one.
        except OSError as err:
            raise CommitFailedError(f"{path.name} can't be created: {err.strerror}") from None
        finally:
            draft.unlink(missing_ok=True)
    else:
        _commit_by_delta_rs(table, files, tag)


def _commit_by_delta_rs(table: DeltaTable, files: FileChange, tag: Tag) -> None:
    at, is_data = int(time.time() * 1000), files.changes_data
    table.create_write_transaction(
        [
            *(RemoveAction(path, is_data, at, size, {}) for path, size in files.removed),
            *(
                AddAction(path, size, files.partition, at, is_data, stats)
                for path, size, stats in files.added
            ),
        ],
        mode="append",
        schema=table.schema(),
        partition_by=[*files.partition] or None,
        commit_properties=CommitProperties(
            {"userMetadata": tag.metadata},
            max_commit_retries=0,
            app_transactions=[transaction(tag.app_id, tag.number)],
        ),
        post_commithook_properties=NO_HOOKS,
    )


def transaction(app_id: str, number: int) -> Transaction:
    """Returns Delta's transaction id of a commit that is made now."""
    return Transaction(app_id, number, int(time.time() * 1000))
