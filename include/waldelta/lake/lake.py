"""The lake: where a pipeline's Delta tables are, and what opens their object store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from waldelta.config import split_table_name
from waldelta.lake.delta_target import DeltaTarget
from waldelta.lake.storage import bookkeeping_uri, local_path, target_uri

# Prefixes of the environment variables with an object store's credentials, as delta-rs names them,
# e.g. AWS_ENDPOINT_URL.
_STORAGE_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
# Spark writes checkpoints of targets at the same interval, in versions.
TARGET_CHECKPOINT_INTERVAL = 10


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
        uri = target_uri(self.root, *split_table_name(table_name))
        return DeltaTarget(self, uri, TARGET_CHECKPOINT_INTERVAL)

    def bookkeeping(self, name: str, interval: int = TARGET_CHECKPOINT_INTERVAL) -> DeltaTarget:
        """Return one of the pipeline's own tables (see bookkeeping_uri).

        ``interval`` is how many versions it has for each checkpoint.
        """
        return DeltaTarget(self, bookkeeping_uri(self.root, name), interval)

    def files(self, uri: str) -> FileSystem:
        """Return a folder of the lake as a file system of its own."""
        folder = local_path(uri)
        if folder is not None:
            return SubTreeFileSystem(str(folder), LocalFileSystem())
        return PyFileSystem(DeltaStorageHandler(uri, self.storage_options))
