"""The lake: where a pipeline's Delta tables are, and what opens their object store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from waldelta.config import split_table_name
from waldelta.lake.delta_log import DeltaLog
from waldelta.lake.storage import bookkeeping_uri, local_path, target_uri

# Prefixes of the environment variables with an object store's credentials, as delta-rs names them,
# e.g. AWS_ENDPOINT_URL.
_STORAGE_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


@dataclass(frozen=True, slots=True)
class Lake:
    """All tables of one pipeline: the lake's root as a URI, and its object store's credentials.

    Nothing else holds these credentials. Spark's tasks get the lake, because their process may lack
    the environment of the job's.
    """

    root: str
    storage_options: dict[str, str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, root: str) -> Lake:
        """Return the lake with the credentials of the environment; a local folder has none."""
        if root.startswith("file://"):
            return cls(root)
        return cls(root, {k: v for k, v in os.environ.items() if k.startswith(_STORAGE_PREFIXES)})

    def target(self, table_name: str) -> DeltaTarget:
        """Return the target of a table, by its name with the schema."""
        return DeltaTarget(self, target_uri(self.root, *split_table_name(table_name)))

    def bookkeeping(self, name: str) -> DeltaTarget:
        """Return one of the pipeline's own tables (see bookkeeping_uri)."""
        return DeltaTarget(self, bookkeeping_uri(self.root, name))

    def files(self, uri: str) -> FileSystem:
        """Return a folder of the lake as a file system of its own."""
        folder = local_path(uri)
        if folder is not None:
            return SubTreeFileSystem(str(folder), LocalFileSystem())
        return PyFileSystem(DeltaStorageHandler(uri, self.storage_options))


@dataclass(frozen=True, slots=True)
class DeltaTarget:
    """One Delta table of the lake, at ``uri``; every call reads the table as it is then."""

    lake: Lake
    uri: str

    @property
    def exists(self) -> bool:
        """Whether there is a Delta table."""
        return DeltaTable.is_deltatable(self.uri, self.lake.storage_options)

    @property
    def files(self) -> FileSystem:
        """The table's folder."""
        return self.lake.files(self.uri)

    @property
    def log(self) -> DeltaLog:
        """The table's log, commit by commit."""
        return DeltaLog(self)

    @property
    def version(self) -> int:
        """The newest version."""
        return self.open().version()

    def open(self, version: int | None = None) -> DeltaTable:
        """Open the table at a version (None: the newest), without Spark.

        Raises TableNotFoundError when there is no table, DeltaError when it can't be read.
        """
        return DeltaTable(self.uri, version=version, storage_options=self.lake.storage_options)

    def find(self) -> DeltaTable | None:
        """Open the newest version; None when there is no table."""
        try:
            return self.open()
        except TableNotFoundError:
            return None

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the table's commits, newest first, as delta-rs reads them from its log."""
        return self.open().history(limit)
