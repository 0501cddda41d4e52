"""Whether transactions stand in the change log more than once."""

from __future__ import annotations

import pyarrow.compute as pc
from deltalake import DeltaTable

from waldelta.lake import bookkeeping_uri
from waldelta.lake.storage import CHANGES, local_path


def landed_twice(root: str) -> list[str]:
    """What is wrong with the change log of the lake at ``root``; nothing when each commit stands
    there once.
    """
    log = DeltaTable(str(local_path(bookkeeping_uri(root, CHANGES))))
    commits = log.to_pyarrow_dataset().to_table(
        columns=["end_lsn", "batch"], filter=pc.field("kind") == "C"
    )
    twice = len(commits) - pc.count_distinct(commits["end_lsn"]).as_py()
    return [f"change log: {twice} transactions landed twice"] if twice else []
