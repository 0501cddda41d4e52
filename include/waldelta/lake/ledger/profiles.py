"""Profiles of targets as measured by checks, in ``_waldelta/profiles``; profile anomalies are found
by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow.compute as pc

from waldelta.lake.ledger.ledger import Ledger
from waldelta.lake.ledger.ledger_row import LedgerRow, rows_of, schema_of
from waldelta.lake.ledger.table import (
    SHORT_ROWS_PER_GROUP,
    of_tables,
)

# The number of profiles kept per table. Between two maintenances, each table gets a row from each
# run that changes it.
KEPT_PER_TABLE = 100


@dataclass(frozen=True, slots=True)
class ColumnProfile:
    """A column's share of nulls and, for numbers, mean, standard deviation, least and greatest
    value.

    None: not measured.
    """

    name: str
    nulls: float | None = None
    mean: float | None = None
    deviation: float | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Profile(LedgerRow):
    """A target as of one version: its number of rows, and its columns' distributions."""

    table_name: str
    version: int
    rows: int
    columns: list[ColumnProfile] = field(default_factory=list)

    table: ClassVar[str] = "profiles"
    rows_per_group: ClassVar[int] = SHORT_ROWS_PER_GROUP


def latest_profiles(
    ledger: Ledger, tables: Collection[str], most: int, but: str | None = None
) -> dict[str, list[Profile]]:
    """Return the latest profiles of each of these tables, oldest first, without those of one run.

    A retry has the same run id.
    """
    rows = ledger.table(Profile).scan(schema_of(Profile).names, chosen=of_tables(tables))
    if but is not None:
        rows = rows.filter(pc.not_equal(rows["run_id"], but))
    found = {}
    for name in set(rows["table_name"].to_pylist()):
        own = rows.filter(pc.equal(rows["table_name"], name))
        found[name] = rows_of(Profile, own.slice(max(0, len(own) - most)))
    return found


def keep_profiles(rows: Sequence[Profile]) -> list[bool]:
    """Keep the latest of each table."""
    seen: dict[str, int] = {}
    kept = []
    for row in reversed(rows):
        seen[row.table_name] = seen.get(row.table_name, 0) + 1
        kept.append(seen[row.table_name] <= KEPT_PER_TABLE)
    return kept[::-1]
