"""Records which suite all rows of a target met, as of which version, in ``_waldelta/judged``.

Rows that haven't changed since needn't be judged again. A check relies on this after few changes,
and maintenance for whole targets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from waldelta.lake.ledger.ledger import Ledger
from waldelta.lake.ledger.ledger_row import LedgerRow
from waldelta.lake.ledger.table import (
    SHORT_ROWS_PER_GROUP,
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


def latest_suites(ledger: Ledger, tables: Collection[str]) -> dict[str, list[PassedSuite]]:
    """Return each table's latest row of a whole target, followed by its latest row."""
    rows = ledger.table(PassedSuite).read(of_tables(tables))
    newest = {(row.table_name, part): row for row in rows for part in _parts(row)}
    return {
        name: [newest[name, part] for part in (True, False) if (name, part) in newest]
        for name in {row.table_name for row in rows}
    }


def _parts(row: PassedSuite) -> tuple[bool, ...]:
    """Return the categories whose latest row this may be: whole targets, and any."""
    return (True, False) if row.whole else (False,)


def keep_suites(rows: Sequence[PassedSuite]) -> list[bool]:
    """Keep the rows that latest_suites() returns."""
    latest = {
        (row.table_name, part): number for number, row in enumerate(rows) for part in _parts(row)
    }
    kept = set(latest.values())
    return [number in kept for number in range(len(rows))]
