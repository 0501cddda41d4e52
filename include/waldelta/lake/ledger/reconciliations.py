"""The results of reconciliations, one row per run and table, in ``_waldelta/reconciliations``.

This module works without a JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.lake import Lake
from waldelta.lake.ledger.records import LedgerRow
from waldelta.lake.ledger.table import LedgerTable, Newest, again_when_late, in_order, of_tables
from waldelta.quantities import counted

EQUAL, DIFFERENT, REPAIRED, NOT_COMPARED, COMPARISON_FAILED = (
    "equal",
    "different",
    "repaired",
    "not compared",
    "failed",
)

ANSWERS = (EQUAL, DIFFERENT, REPAIRED)


def kept_out(rows: int) -> str:
    """Return in words how many rows a comparison left out, because its target lacked them on
    purpose.

    The quarantine alone doesn't count them: discarded rows have left it, and others may since.

    >>> kept_out(1)
    '1 row not compared: quarantined or discarded'
    """
    return f"{counted(rows, 'row')} not compared: quarantined or discarded"


# Limits per table: differing rows that are kept, differing rows kept with values, and the length of
# a value.
ROWS_KEPT, ROWS_VALUED, TEXT_KEPT = 1_000, 100, 200


@dataclass(frozen=True, slots=True)
class Reconciliation(LedgerRow):
    """The result of comparing one table.

    The target's ``version`` has applied everything up to ``batch``; the source was read at
    ``position`` by ``snapshot``. ``in_flight`` counts keys that were changed between the two,
    ``lacking`` quarantined or discarded rows. Both are excluded, as are ``skipped_columns``. A
    target row at the key of a row that must be absent is extra. ``differences`` are the first of
    the differing rows; ``is_complete``: all of them were counted. ``reason`` says why a table
    wasn't compared, or couldn't be repaired.
    """

    table_name: str
    status: str
    reason: str | None = None
    generation: int = 0
    position: int | None = None
    batch: int | None = None
    version: int | None = None
    snapshot: str | None = None
    source_rows: int | None = None
    target_rows: int | None = None
    missing: int = 0
    extra: int = 0
    different: int = 0
    doubled: int = 0
    in_flight: int = 0
    lacking: int = 0
    repaired: int = 0
    buckets: int = 0
    differing_buckets: int = 0
    is_complete: bool = True
    skipped_columns: list[str] = field(default_factory=list)
    differences: list[RowDifference] = field(default_factory=list)
    seconds: float = 0.0
    source_seconds: float = 0.0
    by: str | None = None

    table: ClassVar[str] = "reconciliations"

    @property
    def differing(self) -> int:
        """The number of rows that aren't as they should be."""
        return self.missing + self.extra + self.different + self.doubled

    @property
    def compared(self) -> bool:
        """Whether the comparison had a result."""
        return self.status in ANSWERS


class Reconciliations:
    """Reads and writes the table of one lake; every write is durable when it returns."""

    def __init__(self, lake: Lake) -> None:
        self._table = LedgerTable(Reconciliation, lake)

    def add(self, rows: Sequence[Reconciliation], since: datetime | None = None) -> None:
        """Add the results of one run, in one commit.

        ``since`` is when the run began. A result that another run has recorded since then for a
        later version of a target, or for a repair, takes precedence. Raises LateWriter when other
        runs keep adding results on the same targets between the read and the commit.
        """
        if rows and since is not None:
            self._add_behind(rows, since)
        else:
            self._extend(rows)

    @again_when_late
    def _add_behind(self, rows: Sequence[Reconciliation], since: datetime) -> None:
        names = {row.table_name for row in rows}
        later = [row for row in self.history(since) if row.table_name in names]
        newest = Newest(
            later[-1].at if later else None,
            of_tables(names) & (pc.field("at") >= since),
            kept=False,
        )
        self._extend(
            [
                row
                for row in rows
                if row.status == REPAIRED or not any(_is_behind(row, one) for one in later)
            ],
            newest,
        )

    def _extend(self, rows: Sequence[Reconciliation], after: Newest | None = None) -> None:
        if rows:
            self._table.extend(in_order(rows), after)

    def in_full(self, answers: Mapping[str, Reconciliation]) -> dict[str, Reconciliation]:
        """Return rows of the history, by table, with the differing rows."""
        wanted = {name: (row.at, row.run_id) for name, row in answers.items()}
        if not wanted:
            return {}
        rows = self._table.read(
            pc.field("at").isin(pa.array([at for at, _ in wanted.values()], UTC_TIME))
        )
        return {
            row.table_name: row
            for row in rows
            if (row.at, row.run_id) == wanted.get(row.table_name)
        }

    def history(self, since: datetime | None = None) -> list[Reconciliation]:
        """Return all results without the differing rows, oldest first."""
        names = [name for name in self._table.schema.names if name != "differences"]
        return self._table.read(since=since, columns=names)

    def prune(self, oldest: datetime) -> int:
        """Drop rows older than ``oldest``, except each table's last result; returns how many.

        The table is compacted into one file.
        """
        return self._table.prune(lambda rows: _keep(rows, oldest))


def _is_behind(row: Reconciliation, other: Reconciliation) -> bool:
    """Return whether a result is about an older version than another one."""
    if other.table_name != row.table_name or other.status not in ANSWERS:
        return False
    if row.version is None or other.version is None:
        return False
    # The version of a repaired table is the one that was compared before the repair.
    return (other.version, other.status == REPAIRED) > (row.version, False)


def _keep(rows: Sequence[Reconciliation], oldest: datetime) -> list[bool]:
    """Keep each table's last result and last attempt, however old, and its last complete result.

    A target that differed still does until it is compared again, and one that was equal in all
    columns was equal then.
    """
    found, attempts = last_answers(rows)
    whole = last_whole(rows)
    needed = {id(row) for row in (*found.values(), *attempts.values(), *whole.values())}
    return [row.at >= oldest or id(row) in needed for row in rows]


def last_answers(
    rows: Iterable[Reconciliation],
) -> tuple[dict[str, Reconciliation], dict[str, Reconciliation]]:
    """Return, by table, the last result and the last attempt since that had none.

    Without any result, it is the last row. A target that differed still does when another
    comparison failed. ``rows`` are in their order.
    """
    found: dict[str, Reconciliation] = {}
    attempts: dict[str, Reconciliation] = {}
    for row in rows:
        name = row.table_name
        if row.status in ANSWERS:
            found[name] = row
            attempts.pop(name, None)
        elif name in found and found[name].status in ANSWERS:
            attempts[name] = row
        else:
            found[name] = row
    return found, attempts


def last_whole(rows: Iterable[Reconciliation]) -> dict[str, Reconciliation]:
    """Return, by table, the last result for which no column was left out; ``rows`` are in their
    order.
    """
    return {
        row.table_name: row for row in rows if row.status in ANSWERS and not row.skipped_columns
    }


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """A column whose values differ; None is null."""

    name: str
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs; ``key`` is a JSON object of PostgreSQL's texts.

    ``rows`` is the number of rows of this kind that it represents.
    """

    kind: str
    key: str
    rows: int = 1
    columns: list[ColumnDifference] = field(default_factory=list)
    hash: int = 0
