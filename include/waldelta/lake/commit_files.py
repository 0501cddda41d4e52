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
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from waldelta.lake.delta_log import Tag
from waldelta.lake.layout import CHANGE_TYPE, NewFile, TableFile, log_path
from waldelta.lake.log_copy import CopiedTable
from waldelta.lake.storage import NO_HOOKS, entry_path, is_local, local_path

SHOWN_INSERT, SHOWN_DELETE = "insert", "delete"
PREIMAGE, POSTIMAGE = "update_preimage", "update_postimage"


def changed_rows(rows: Mapping[str, pa.Table]) -> pa.Table:
    """Returns rows of the change data feed, from a commit's rows by type of change."""
    typed = [
        part.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(change, pa.string()), len(part)))
        for change, part in rows.items()
    ]
    return pa.concat_tables(typed)


@dataclass(frozen=True, slots=True)
class FileChange:
    """Files that a commit removes, those that it adds, and files of changed rows.

    Without ``changes_data`` the added files have the rows of the removed ones. ``definition`` is
    the table's new metaData action, where the commit changes its columns.
    """

    removed: Sequence[TableFile]
    added: Sequence[NewFile]
    changes: Sequence[NewFile] = ()
    changes_data: bool = True
    definition: Mapping[str, Any] | None = None

    def log_entry(self, tag: Tag | None) -> bytes:
        """Returns the lines of the commit's log entry; without a tag it sets properties alone."""
        at, has_files = int(time.time() * 1000), bool(self.removed or self.added)
        info: dict[str, Any] = {
            "timestamp": at,
            "operation": "WRITE" if has_files or self.definition is None else "ADD COLUMNS",
            "operationParameters": {"mode": "Append"},
            "engineInfo": "waldelta",
        }
        if tag is None:
            info |= {"operation": "SET TBLPROPERTIES", "operationParameters": {}}
        else:
            info["userMetadata"] = tag.metadata
        is_data = {"dataChange": self.changes_data}
        actions: list[dict[str, Any]] = [{"commitInfo": info}]
        if tag is not None:
            actions += [{"txn": {"appId": tag.app_id, "version": tag.number, "lastUpdated": at}}]
        actions += [] if self.definition is None else [{"metaData": {**self.definition}}]
        actions += [
            # Without extended metadata, Spark doesn't read the changes of this version.
            {
                "remove": {"path": file.path, "size": file.bytes}
                | {"partitionValues": {**file.partition}, "extendedFileMetadata": True}
                | {"deletionTimestamp": at, **is_data}
            }
            for file in self.removed
        ]
        actions += [
            {"add": _entry(file) | {"modificationTime": at, "stats": file.stats, **is_data}}
            for file in self.added
        ]
        actions += [{"cdc": _entry(file) | {"dataChange": False}} for file in self.changes]
        # delta-rs (arrow-json) loses half of an escaped character beyond 16 bits.
        return "\n".join(json.dumps(action, ensure_ascii=False) for action in actions).encode()


def _entry(file: NewFile) -> dict[str, Any]:
    return {
        "path": log_path(file.path), "size": file.size, "partitionValues": {**file.partition},
    }  # fmt: skip


def creates_entries(table: DeltaTable, uri: str) -> bool:
    """Returns whether commit_files() creates the log's entry itself, in any but some stores."""
    return is_local(uri) or isinstance(table, CopiedTable)


def commit_files(table: DeltaTable, uri: str, files: FileChange, tag: Tag | None) -> None:
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
    elif tag is not None:
        _commit_transaction(table, files, tag)
    else:
        raise CommitFailedError(f"only delta-rs sets properties of {uri}")


def _commit_transaction(table: DeltaTable, files: FileChange, tag: Tag) -> None:
    at, is_data = int(time.time() * 1000), files.changes_data
    table.create_write_transaction(
        [
            *(
                RemoveAction(unquote(old.path), is_data, at, old.bytes, {**old.partition})
                for old in files.removed
            ),
            *(
                AddAction(new.path, new.size, new.partition, at, is_data, new.stats)
                for new in files.added
            ),
        ],
        mode="append",
        schema=table.schema(),
        partition_by=table.metadata().partition_columns,
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
