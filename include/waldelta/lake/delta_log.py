"""Reads a Delta table's log commit by commit: the writer, whether data changed, files added and
removed; the identity of commits.

It reads the log's files directly. Neither delta-rs's nor Spark's history says whether a commit
changes data, and both read more commits than needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from deltalake.exceptions import CommitFailedError, DeltaError
from pyarrow.fs import FileSystem, FileType

from waldelta.config.parse_text import parse_json
from waldelta.lake.storage import (
    deletion_vector_path,
    entry_path,
    irregular,
    is_within,
    local_path,
)

if TYPE_CHECKING:
    from waldelta.lake.delta_target import DeltaTarget

# The property of a table to which rows are only added.
APPEND_ONLY = "delta.appendOnly"


@dataclass(frozen=True)
class Definition:
    """What a table is by its log: its schema, as Delta's JSON, and its properties."""

    schema: str
    properties: Mapping[str, str]

    @cached_property
    def columns(self) -> Mapping[str, Mapping[str, Any]]:
        """The columns by name, as Delta's JSON has them."""
        return {field["name"]: field for field in parse_json(self.schema)["fields"]}

    @property
    def constraints(self) -> list[str]:
        """The names of CHECK constraints."""
        prefix = "delta.constraints."
        return [name.removeprefix(prefix) for name in self.properties if name.startswith(prefix)]

    @property
    def is_append_only(self) -> bool:
        """Whether no commit may update or delete rows."""
        return self.properties.get(APPEND_ONLY, "false").lower() == "true"

    @property
    def generated(self) -> list[str]:
        """The columns whose values Delta computes."""
        return [
            name
            for name, field in self.columns.items()
            if "delta.generationExpression" in field.get("metadata", {})
        ]

    @property
    def required(self) -> list[str]:
        """The NOT NULL columns."""
        return [name for name, field in self.columns.items() if not field.get("nullable", True)]


@dataclass(frozen=True)
class Commit:
    """One version of a table, as the lines of its log entry; they are parsed on first use."""

    version: int
    lines: list[bytes]

    @cached_property
    def info(self) -> dict[str, Any]:
        """Who did what, as the writer recorded it (``commitInfo``); empty when it recorded
        nothing.
        """
        return next(iter(self._actions("commitInfo")), {})

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The metadata that waldelta wrote into the commit; empty for an external commit."""
        return read_metadata(self.info)

    @property
    def changes_data(self) -> bool:
        """Whether the commit may have changed rows.

        OPTIMIZE, VACUUM and changes of properties keep rows as they are.
        """
        return any(
            action.get("dataChange", True)
            for action in [*self._actions("add"), *self._actions("remove")]
        )

    @property
    def definition(self) -> Definition | None:
        """The table's definition from this commit on; None when the commit doesn't change it."""
        actions = self._actions("metaData")
        return next(
            (Definition(one["schemaString"], one.get("configuration", {})) for one in actions),
            None,
        )

    @property
    def protocol(self) -> dict[str, Any]:
        """What readers and writers must implement from this commit on; else empty."""
        return next(iter(self._actions("protocol")), {})

    @property
    def added(self) -> set[str]:
        """The files that it adds: those with rows, and those that mark rows as deleted."""
        return {path for action in self._actions("add") for path in _paths(action)}

    @property
    def named(self) -> Iterator[str]:
        """The paths of the files that it adds, as they are written, including paths outside the
        table.
        """
        return (path for action in self._actions("add") for path in _paths_of(action))

    @property
    def removed(self) -> set[str]:
        """The files that the table doesn't need from this version on."""
        return {path for action in self._actions("remove") for path in _paths(action)}

    def _actions(self, kind: str) -> list[dict[str, Any]]:
        name = f'"{kind}"'.encode()
        return [parse_json(line)[kind] for line in self.lines if name in line[: len(name) + 4]]


class Overtaken(CommitFailedError):
    """Other commits took the version that a commit was for: it doesn't exist, and never will."""

    def __init__(self, commits: list[Commit]) -> None:
        super().__init__(f"version {commits[0].version} was committed by another writer")
        self.commits = commits


@dataclass(frozen=True, slots=True)
class Tag:
    """The identity of a commit: Delta's transaction id and number, and its userMetadata."""

    app_id: str
    number: int
    metadata: str

    @classmethod
    def of(cls, app_id: str, number: int, entries: Mapping[str, Any]) -> Self:
        """Returns a tag whose userMetadata has these entries in the form of all our commits."""
        return cls(app_id, number, json.dumps({"waldelta": dict(entries)}, sort_keys=True))


class DeltaLog:
    """The log of a table; every call reads it again, except for entries in an object store.

    Those never change, so that those that this process has read aren't read again.
    """

    def __init__(self, table: DeltaTarget) -> None:
        self.uri, self._table = table.uri, table

    @cached_property
    def _files(self) -> FileSystem:
        return self._table.files

    def read(self, version: int) -> Commit | None:
        """Returns one commit; None when it was never made, or log retention removed its entry.

        Raises StateError as check_entry() does.
        """
        self.check_entry(version)
        if (log := self._table.known_log) is not None:
            entry = log.read(version)
            return None if entry is None else Commit(version, entry.splitlines())
        try:
            with self._files.open_input_file(entry_path(version)) as file:
                return Commit(version, file.read().splitlines())
        except FileNotFoundError:
            return None

    def check_entry(self, version: int) -> None:
        """Raise StateError when a version's entry exists and isn't a regular file.

        Opening a FIFO would wait without end. delta-rs ignores such an entry; Spark opens it.
        """
        folder = local_path(self.uri)
        entry = folder / entry_path(version) if folder is not None else None
        if entry is not None and not entry.is_file() and os.path.lexists(entry):
            raise irregular(self.uri, entry.name)

    def behind(self, version: int) -> Iterator[Commit]:
        """Yields the commits after a version, in order."""
        while (commit := self.read(version := version + 1)) is not None:
            yield commit

    def before(self, version: int) -> Iterator[Commit]:
        """Yields the commits before a version, newest first, as far back as the log has them."""
        while version > 0 and (commit := self.read(version := version - 1)) is not None:
            yield commit

    def newest_with_rows_of(self, version: int) -> int:
        """Returns the newest version up to which no commit changed any data since ``version``."""
        for commit in self.behind(version):
            if commit.changes_data:
                break
            version = commit.version
        return version

    def can_be_read_at(self, version: int) -> bool:
        """Returns whether all files of a version still exist, without listing the table's folder.

        The newest version's files are assumed to exist: nothing may delete them.
        """
        later = list(self.behind(version))
        if not later:
            return self.read(version) is not None
        try:
            self._table.open_from_log(version)
        except (DeltaError, OSError):
            return False
        gone: set[str] = set()
        added: set[str] = set()
        for commit in later:
            gone |= commit.removed - added
            added |= commit.added
        return all(file.type == FileType.File for file in self._files.get_file_info(sorted(gone)))


def read_metadata(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what waldelta wrote into one of its commits; empty for an external commit."""
    try:
        metadata = parse_json(entry.get("userMetadata") or "{}").get("waldelta", {})
    except (ValueError, AttributeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _paths(action: Mapping[str, Any]) -> Iterator[str]:
    """Yields the files of an action in the table's own folder; a clone's files are another
    table's.
    """
    return filter(is_within, _paths_of(action))


def _paths_of(action: Mapping[str, Any]) -> Iterator[str]:
    yield unquote(action["path"])
    vector = action.get("deletionVector")
    if (marks := deletion_vector_path(vector)) is not None:
        yield marks
    elif vector is not None and vector["storageType"] == "p":
        yield unquote(vector["pathOrInlineDv"])
