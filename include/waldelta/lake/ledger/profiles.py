"""Profiles of targets, as checks measured them, in ``_waldelta/profiles``: what drift is told
by.
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

# Between two maintenances each table gets a row from each run that changes it; of a table's rows so
# many are kept.
KEPT_PER_TABLE = 100


@dataclass(frozen=True, slots=True)
class ColumnProfile:
    """A column's share of nulls and, of numbers, their mean, standard deviation, least and most;
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
    """A target as of one version: how many rows it has, and how its columns are distributed."""

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
    """Reads and writes the table of one lake; without a JVM."""

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
        """The latest profiles of each of these tables, oldest first, but those of one run (a retry
        is no run of its own).
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
