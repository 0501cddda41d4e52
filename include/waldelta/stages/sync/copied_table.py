"""What sync knows of a copied table (size, snapshot), and the ledger's row for it. Part
of sync.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from waldelta.config import PipelineFile
from waldelta.lake.ledger import SYNCED, StorageState, TableState
from waldelta.lsn import Lsn
from waldelta.pipeline import SourceBill
from waldelta.pipeline.drift.drift import as_published
from waldelta.pipeline.targets import ReplicatedTarget
from waldelta.postgres import TableId
from waldelta.stages.sync._snapshot_diff import RowDiff
from waldelta.stages.sync.skipped_copy import SkippedCopy


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One table's copy: its size, and the snapshot that the stream continues from."""

    table: TableId
    generation: int
    version: int
    snapshot: str
    lsn: Lsn
    rows: int
    bytes: int
    seconds: float
    attempts: int
    relation_ids: tuple[int, ...]
    storage: StorageState | None = None
    target_filter: str | None = None
    bill: SourceBill = field(default_factory=SourceBill)
    # Of a table that was compared: what differed, which is all that was written. None: a whole
    # copy.
    diff: RowDiff | None = None
    whole: str | None = None  # Why the whole table was copied although a diff was requested.
    # Rows with a value that its column's type can't store, where the copy counted them.
    raw_rows: int | None = None
    # Of a table with ``copy: false``, of which nothing was read.
    skipped: SkippedCopy | None = None


def synced_state(
    begun: TableState, copied: SyncResult, replicated: ReplicatedTarget, pipeline: PipelineFile
) -> TableState:
    """Returns the ledger row after ``begun`` for a complete copy, with the source as of the
    snapshot.
    """
    table, name = replicated.table, begun.table_name
    mode = pipeline.target.mode_of(name)
    types = pipeline.target.types_of(name)
    state = replace(
        as_published(begun, table, copied.storage, copied.target_filter, types),
        status=SYNCED,
        snapshot=copied.snapshot,
        snapshot_lsn=copied.lsn.value,
        key_columns=list(table.key_columns),
        rows=copied.rows,
        bytes=copied.bytes,
        seconds=copied.seconds,
        version=copied.version,
        fed_by=replicated.other_source,
        root_id=replicated.mapping.root_id,
        mode=mode.name if mode.keeps_rows else None,
    )
    if copied.skipped is None:
        return state
    state = replace(state, copy_skipped=True, reason=str(copied.skipped))
    if (former := copied.skipped.former) is None:
        return state
    # The target keeps its columns: Relation messages contain later changes.
    return replace(state, columns=former.columns, key_columns=former.key_columns)
