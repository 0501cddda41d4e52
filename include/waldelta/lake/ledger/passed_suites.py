"""Records which suite all rows of a target met, as of which version, in ``_waldelta/judged``.

Rows that haven't changed since needn't be judged again. A check relies on this after few changes,
and maintenance for whole targets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa

from waldelta.lake.ledger.table import (
    FILES_READ_BY_CHECKS,
    SHORT_ROWS_PER_GROUP,
    LedgerTable,
    of_tables,
)
from waldelta.lake.storage import bookkeeping_uri


@dataclass(frozen=True, slots=True)
class PassedSuite:
    """A target's version of which all rows meet a suite (identified by its digest).

    ``whole``: every row was judged. Otherwise, only rows were judged that changed since an earlier
    version that met the suite. ``end_lsn``: the version has all changes before this position and
    none after it; None when not known.
    """

    at: datetime
    run_id: str
    table_name: str
    generation: int
    version: int
    suite: str
    whole: bool
    end_lsn: int | None = None

    table: ClassVar[str] = "judged"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", pa.timestamp("us", tz="UTC")),
            ("run_id", pa.string()),
            ("table_name", pa.string()),
            ("generation", pa.int64()),
            ("version", pa.int64()),
            ("suite", pa.string()),
            ("whole", pa.bool_()),
            ("end_lsn", pa.int64()),
        ]
    )


class PassedSuites:
    """Reads and writes this table of one lake, without a JVM."""

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        uri = bookkeeping_uri(root, PassedSuite.table)
        self._table = LedgerTable(
            uri,
            PassedSuite.schema,
            dict(storage_options or {}) or None,
            SHORT_ROWS_PER_GROUP,
            FILES_READ_BY_CHECKS,
        )

    def append(self, rows: Sequence[PassedSuite]) -> None:
        """Add what one check found, in one commit."""
        if rows:
            self._table.extend([asdict(row) for row in rows])

    def latest(self, tables: Collection[str]) -> dict[str, list[PassedSuite]]:
        """Return each table's latest row of a whole target, followed by its latest row."""
        rows = self._table.scan(PassedSuite.schema.names, chosen=of_tables(tables)).to_pylist()
        newest = {(row["table_name"], part): row for row in rows for part in _parts(row)}
        found: dict[str, list[PassedSuite]] = {}
        for name in {row["table_name"] for row in rows}:
            both = [newest[name, part] for part in (True, False) if (name, part) in newest]
            found[name] = [PassedSuite(**row) for row in both]
        return found

    def prune(self) -> int:
        """Drop all rows but these; returns how many were dropped."""
        return self._table.prune(_keep)


def _parts(row: dict[str, Any]) -> tuple[bool, ...]:
    """Return the categories whose latest row this may be: whole targets, and any."""
    return (True, False) if row["whole"] else (False,)


def _keep(rows: Sequence[dict[str, Any]]) -> list[bool]:
    latest = {
        (row["table_name"], part): number for number, row in enumerate(rows) for part in _parts(row)
    }
    kept = set(latest.values())
    return [number in kept for number in range(len(rows))]
