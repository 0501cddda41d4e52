"""Profiles of targets as measured by checks, in ``_waldelta/profiles``; profile anomalies are found
by them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger.table import (
    FILES_READ_BY_CHECKS,
    SHORT_ROWS_PER_GROUP,
    LedgerTable,
    of_tables,
)
from waldelta.lake.storage import bookkeeping_uri

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


_COLUMN = pa.struct(
    [
        ("name", pa.string()),
        *((name, pa.float64()) for name in ("nulls", "mean", "deviation", "least", "most")),
    ]
)


@dataclass(frozen=True, slots=True)
class Profile:
    """A target as of one version: its number of rows, and its columns' distributions."""

    at: datetime
    run_id: str
    table_name: str
    version: int
    rows: int
    columns: list[ColumnProfile] = field(default_factory=list)

    table: ClassVar[str] = "profiles"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", pa.timestamp("us", tz="UTC")),
            ("run_id", pa.string()),
            ("table_name", pa.string()),
            ("version", pa.int64()),
            ("rows", pa.int64()),
            ("columns", pa.list_(_COLUMN)),
        ]
    )


class Profiles:
    """Reads and writes this table of one lake, without a JVM."""

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        uri = bookkeeping_uri(root, Profile.table)
        self._table = LedgerTable(
            uri,
            Profile.schema,
            dict(storage_options or {}) or None,
            SHORT_ROWS_PER_GROUP,
            FILES_READ_BY_CHECKS,
        )

    def append(self, profiles: Sequence[Profile]) -> None:
        """Add a run's profiles in one commit."""
        if profiles:
            self._table.extend([asdict(profile) for profile in profiles])

    def latest(
        self, tables: Collection[str], most: int, but: str | None = None
    ) -> dict[str, list[Profile]]:
        """Return the latest profiles of each of these tables, oldest first, without those of one
        run.

        A retry has the same run id.
        """
        rows = self._table.scan(Profile.schema.names, chosen=of_tables(tables))
        if but is not None:
            rows = rows.filter(pc.not_equal(rows["run_id"], but))
        found = {}
        for name in set(rows["table_name"].to_pylist()):
            own = rows.filter(pc.equal(rows["table_name"], name))
            found[name] = [_profile(row) for row in own.slice(max(0, len(own) - most)).to_pylist()]
        return found

    def prune(self) -> int:
        """Drop all but the latest of each table; returns how many were dropped."""
        return self._table.prune(_keep)


def _profile(row: dict[str, Any]) -> Profile:
    return Profile(
        **{**row, "columns": [ColumnProfile(**column) for column in row["columns"] or ()]}
    )


def _keep(rows: Sequence[dict[str, Any]]) -> list[bool]:
    seen: dict[str, int] = {}
    kept = []
    for row in reversed(rows):
        seen[row["table_name"]] = seen.get(row["table_name"], 0) + 1
        kept.append(seen[row["table_name"]] <= KEPT_PER_TABLE)
    return kept[::-1]
