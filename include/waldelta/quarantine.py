"""Rows that came without all of their values, and what became of them: the bookkeeping table ``quarantine``.

Latest row per table, generation and key counts: ``quarantined`` (not in the target: the source had moved on), ``reread``
(in the target, with some values as they were later than the change), ``resolved`` (was quarantined; a later change has
replaced, moved or deleted the row). A batch's rows are written before the target's commit; what a run that died in between
left is replaced by the next one, whose watermark tells it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import tenacity
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from waldelta.lake import bookkeeping_uri, sync_commit

REREAD, QUARANTINED, RESOLVED = "reread", "quarantined", "resolved"

_UTC = pa.timestamp("us", tz="UTC")
_ONLY_IF_UNCHANGED = CommitProperties(max_commit_retries=0)

# A reader that opened the table before a rewrite still finds its files.
_KEEP_FILES_HOURS = 24

_again_when_changed = tenacity.retry(
    retry=tenacity.retry_if_exception_type(CommitFailedError),
    wait=tenacity.wait_random(0.01, 0.2),
    stop=tenacity.stop_after_attempt(20),
    reraise=True,
)


@dataclass(frozen=True, slots=True)
class IncompleteRow:
    """A row that came without the values of ``columns``.

    ``key`` and ``sent`` (the values that did come; None unless quarantined) are JSON objects of PostgreSQL's texts.
    ``batch`` is the last of the batches that were applied with it.
    """

    at: datetime
    run_id: str
    status: str  # quarantined, reread, resolved
    table_name: str
    generation: int
    batch: int
    key: str
    columns: list[str] = field(default_factory=list)
    sent: str | None = None
    lsn: int | None = None
    commit_ts: datetime | None = None
    reason: str | None = None

    table: ClassVar[str] = "quarantine"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("status", pa.string()), ("table_name", pa.string()),
            ("generation", pa.int64()), ("batch", pa.int64()), ("key", pa.string()), ("columns", pa.list_(pa.string())),
            ("sent", pa.string()), ("lsn", pa.int64()), ("commit_ts", _UTC), ("reason", pa.string()),
        ]
    )  # fmt: skip


class Quarantine:
    """Reads and writes the table of one lake; without a JVM, and durable when a call returns."""

    def __init__(self, root: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = bookkeeping_uri(root, IncompleteRow.table)
        self._options = storage_options

    def rows(self, table_name: str, generation: int) -> list[IncompleteRow]:
        """The rows of one copy of a table, oldest first."""
        return self._read((pc.field("table_name") == table_name) & (pc.field("generation") == generation))

    def open_counts(self, generations: dict[str, int]) -> dict[str, int]:
        """How many rows each of these tables lacks in the given generation of its target; those without any are left out."""
        counts: dict[str, int] = {}
        held = [row for row in self._read() if generations.get(row.table_name) == row.generation]
        for name in sorted({row.table_name for row in held}):
            if lacking := open_keys(row for row in held if row.table_name == name):
                counts[name] = len(lacking)
        return counts

    @_again_when_changed
    def replace(self, table_name: str, generation: int, after_batch: int, rows: Sequence[IncompleteRow]) -> None:
        """Make these the rows of one copy's batches after ``after_batch``, in one commit."""
        # In this order: the first column by which rows are read back in order.
        told = [asdict(row) | {"at": row.at + timedelta(microseconds=n)} for n, row in enumerate(rows)]
        data = pa.Table.from_pylist(told, schema=IncompleteRow.schema)
        table = self._open()
        if table is None:
            write_deltalake(self.uri, data, storage_options=self._options, commit_properties=_ONLY_IF_UNCHANGED)
        else:
            name = table_name.replace("'", "''")
            predicate = f"table_name = '{name}' and generation = {generation:d} and batch > {after_batch:d}"
            write_deltalake(table, data, mode="overwrite", predicate=predicate, commit_properties=_ONLY_IF_UNCHANGED)
        written = self._open()
        if written is not None:
            sync_commit(self.uri, written.version())

    @_again_when_changed
    def prune(self, oldest: datetime) -> int:
        """Drop rows older than ``oldest`` but those of open keys, and leave one file; returns how many were dropped."""
        table = self._open()
        if table is None:
            return 0
        rows = self._read()
        copies = {(row.table_name, row.generation) for row in rows}
        opened = {
            (*copy, key)
            for copy in copies
            for key in open_keys(r for r in rows if (r.table_name, r.generation) == copy)
        }
        kept = [r for r in rows if r.at >= oldest or (r.table_name, r.generation, r.key) in opened]
        if len(kept) < len(rows):
            data = pa.Table.from_pylist([asdict(row) for row in kept], schema=IncompleteRow.schema)
            write_deltalake(table, data, mode="overwrite", commit_properties=_ONLY_IF_UNCHANGED)
            sync_commit(self.uri, table.version())
        table.vacuum(_KEEP_FILES_HOURS, dry_run=False, enforce_retention_duration=False)
        return len(rows) - len(kept)

    def _read(self, chosen: pc.Expression | None = None) -> list[IncompleteRow]:
        table = self._open()
        if table is None:
            return []
        rows: list[dict[str, Any]] = table.to_pyarrow_dataset().to_table(filter=chosen).sort_by("at").to_pylist()
        return [IncompleteRow(**row) for row in rows]

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None


def open_keys(rows: Iterable[IncompleteRow]) -> set[str]:
    """Keys whose latest row is quarantined, of the rows of one copy in their order."""
    latest = {row.key: row.status for row in rows}
    return {key for key, status in latest.items() if status == QUARANTINED}
