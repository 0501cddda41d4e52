"""Records which suite all rows of a target met, as of which version, in ``_waldelta/judged``.

Rows that haven't changed since needn't be judged again. A check relies on this after few changes,
and maintenance for whole targets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from waldelta.lake.ledger.ledger_row import LedgerRow
from waldelta.lake.ledger.table import (
    FILES_READ_BY_CHECKS,
    SHORT_ROWS_PER_GROUP,
    LedgerTable,
    of_tables,
)


@dataclass(frozen=True, slots=True)
class PassedSuite(LedgerRow):
    """A target's version of which all rows meet a suite (identified by its digest).

    ``whole``: every row was judged. Otherwise, only rows were judged that changed since an earlier
    version that met the suite. ``end_lsn``: the version has all changes before this position and
    none after it; None when not known.
    """

    table_name: str
    generation: int
    version: int
    suite: str
    whole: bool
    end_lsn: int | None = None

    table: ClassVar[str] = "judged"
    rows_per_group: ClassVar[int] = SHORT_ROWS_PER_GROUP
    most_files: ClassVar[int] = FILES_READ_BY_CHECKS


class PassedSuites:
    """Reads and writes this table of one lake, without a JVM."""

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        self._table = LedgerTable(PassedSuite, root, dict(storage_options or {}) or None)

    def append(self, rows: Sequence[PassedSuite]) -> None:
        """Add what one check found, in one commit."""
        if rows:
            self._table.extend(rows)

    def latest(self, tables: Collection[str]) -> dict[str, list[PassedSuite]]:
        """Return each table's latest row of a whole target, followed by its latest row."""
        rows = self._table.read(of_tables(tables))
        newest = {(row.table_name, part): row for row in rows for part in _parts(row)}
        return {
            name: [newest[name, part] for part in (True, False) if (name, part) in newest]
            for name in {row.table_name for row in rows}
        }

    def prune(self) -> int:
        """Drop all rows but these; returns how many were dropped."""
        return self._table.prune(_keep)


def _parts(row: PassedSuite) -> tuple[bool, ...]:
    """Return the categories whose latest row this may be: whole targets, and any."""
    return (True, False) if row.whole else (False,)


def _keep(rows: Sequence[PassedSuite]) -> list[bool]:
    latest = {
        (row.table_name, part): number for number, row in enumerate(rows) for part in _parts(row)
    }
    kept = set(latest.values())
    return [number in kept for number in range(len(rows))]
