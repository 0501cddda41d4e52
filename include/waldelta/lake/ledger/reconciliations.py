"""What reconciliations found: one row per run and table, in ``_waldelta/reconciliations``; written
and read without a JVM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.ledger.table import LedgerTable, Newest, again_when_late, in_order, of_tables
from waldelta.lake.storage import bookkeeping_uri

EQUAL, DIFFERENT, REPAIRED, NOT_COMPARED, COMPARISON_FAILED = (
    "equal",
    "different",
    "repaired",
    "not compared",
    "failed",
)

ANSWERS = (EQUAL, DIFFERENT, REPAIRED)

# Rows that differ which are kept of one table, those with their values, and the length of a value.
ROWS_KEPT, ROWS_VALUED, TEXT_KEPT = 1_000, 100, 200

_COLUMN = pa.struct([("name", pa.string()), ("source", pa.string()), ("target", pa.string())])
_ROW = pa.struct(
    [
        ("kind", pa.string()),
        ("key", pa.string()),
        ("rows", pa.int64()),
        ("columns", pa.list_(_COLUMN)),
        ("hash", pa.int64()),
    ]
)
_SHORT = (
    "at",
    "run_id",
    "table_name",
    "status",
    "reason",
    "position",
    "version",
    "source_rows",
    "target_rows",
    "missing",
    "extra",
    "different",
    "doubled",
    "in_flight",
    "lacking",
    "repaired",
    "is_complete",
    "left_out",
    "seconds",
    "by",
)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What was found of one table.

    The target's ``version`` has applied everything up to ``batch``; the source was read at
    ``position`` by ``snapshot``. ``in_flight`` are keys that were changed between the two,
    ``lacking`` quarantined or discarded rows: both are left out, as are the columns ``left_out``; a
    row at the key of one that isn't to be there is extra. ``differences`` are the first of the rows
    that differ; ``is_complete``: all of them were counted. ``reason`` says why a table wasn't
    compared, or couldn't be repaired.
    """

    at: datetime
    run_id: str
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
    left_out: list[str] = field(default_factory=list)
    differences: list[RowDifference] = field(default_factory=list)
    seconds: float = 0.0
    source_seconds: float = 0.0
    by: str | None = None

    table: ClassVar[str] = "reconciliations"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("table_name", pa.string()),
            ("status", pa.string()),
            ("reason", pa.string()),
            ("generation", pa.int64()),
            ("position", pa.int64()),
            ("batch", pa.int64()),
            ("version", pa.int64()),
            ("snapshot", pa.string()),
            ("source_rows", pa.int64()),
            ("target_rows", pa.int64()),
            ("missing", pa.int64()),
            ("extra", pa.int64()),
            ("different", pa.int64()),
            ("doubled", pa.int64()),
            ("in_flight", pa.int64()),
            ("lacking", pa.int64()),
            ("repaired", pa.int64()),
            ("buckets", pa.int64()),
            ("differing_buckets", pa.int64()),
            ("is_complete", pa.bool_()),
            ("left_out", pa.list_(pa.string())),
            ("differences", pa.list_(_ROW)),
            ("seconds", pa.float64()),
            ("source_seconds", pa.float64()),
            ("by", pa.string()),
        ]
    )

    @property
    def differing(self) -> int:
        """Rows that aren't as they should be."""
        return self.missing + self.extra + self.different + self.doubled

    @property
    def compared(self) -> bool:
        """Whether an answer was found."""
        return self.status in ANSWERS


class Reconciliations:
    """Reads and writes the table of one lake; durable when a call returns."""

    def __init__(self, root: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = bookkeeping_uri(root, Reconciliation.table)
        self._table = LedgerTable(self.uri, Reconciliation.schema, storage_options)

    def add(self, rows: Sequence[Reconciliation], since: datetime | None = None) -> None:
        """Add what one run found, in one commit.

        ``since``: when it began. What another has answered since then of a later version of a
        target, or repaired, is the last word. Raises LateWriter when others keep entering answers
        on the same targets between the look at them and the commit.
        """
        if rows and since is not None:
            self._add_behind(rows, since)
        else:
            self._extend(rows)

    @again_when_late
    def _add_behind(self, rows: Sequence[Reconciliation], since: datetime) -> None:
        same = of_tables(row.table_name for row in rows)
        later = self.history(since).filter(same).to_pylist()
        newest = Newest(
            later[-1]["at"] if later else None, same & (pc.field("at") >= since), kept=False
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

    def of_run(self, run_id: str) -> list[Reconciliation]:
        """What one run found, by table; of one that was tried again, what it found last."""
        found = {row.table_name: row for row in self._read(pc.field("run_id") == run_id)}
        return [found[name] for name in sorted(found)]

    def latest(self, tables: Collection[str] | None = None) -> dict[str, Reconciliation]:
        """The last answer that was found of each table, or of these, with the rows that differ;
        where there is none, why not.
        """
        found, _ = last_answers(self.history().to_pylist())
        return self.in_full(
            {name: row for name, row in found.items() if tables is None or name in tables}
        )

    def in_full(self, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Reconciliation]:
        """Rows of the history, by table, with the rows that differ."""
        wanted = {name: (row["at"], row["run_id"]) for name, row in answers.items()}
        if not wanted:
            return {}
        rows = self._read(
            pc.field("at").isin(pa.array([at for at, _ in wanted.values()], UTC_TIME))
        )
        return {
            row.table_name: row
            for row in rows
            if (row.at, row.run_id) == wanted.get(row.table_name)
        }

    def history(self, since: datetime | None = None) -> pa.Table:
        """All that was found, without the rows that differ, oldest first."""
        return self._table.scan(_SHORT, since)

    def prune(self, oldest: datetime) -> int:
        """Drop what is older than ``oldest`` but each table's last answer, and leave one file;
        returns how many rows were dropped.
        """
        return self._table.prune(lambda rows: _keep(rows, oldest))

    def _read(self, chosen: pc.Expression) -> list[Reconciliation]:
        return [_built(row) for row in self._table.read(chosen)]


def _is_behind(row: Reconciliation, other: Mapping[str, Any]) -> bool:
    """Whether an answer is of a version that was there before what the other one says."""
    if (
        other["table_name"] != row.table_name
        or other["status"] not in ANSWERS
        or None in (row.version, other["version"])
    ):
        return False
    # A repaired one's version is that which was compared before.
    return (other["version"], other["status"] == REPAIRED) > (row.version, False)


def _keep(rows: Sequence[Mapping[str, Any]], oldest: datetime) -> list[bool]:
    """A target that differed does so still, however long nobody has compared it since; one that was
    equal in all columns had been.
    """
    found, attempts = last_answers(rows)
    whole = last_whole(rows)
    needed = {id(row) for row in (*found.values(), *attempts.values(), *whole.values())}
    return [row["at"] >= oldest or id(row) in needed for row in rows]


def last_answers(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Of rows in their order, by table: the last answer (where there is none, the last row), and
    the last attempt since that found none.

    A target that differed does so still when it couldn't be compared once more.
    """
    found: dict[str, Mapping[str, Any]] = {}
    attempts: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        name = row["table_name"]
        if row["status"] in ANSWERS:
            found[name] = row
            attempts.pop(name, None)
        elif name in found and found[name]["status"] in ANSWERS:
            attempts[name] = row
        else:
            found[name] = row
    return found, attempts


def last_whole(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of rows in their order, by table: the last answer for which no column was left out."""
    return {
        row["table_name"]: row for row in rows if row["status"] in ANSWERS and not row["left_out"]
    }


def _built(row: dict[str, Any]) -> Reconciliation:
    differences = [
        RowDifference(
            **found | {"columns": [ColumnDifference(**column) for column in found["columns"] or ()]}
        )
        for found in row["differences"] or ()
    ]
    return Reconciliation(**row | {"differences": differences, "left_out": row["left_out"] or []})


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """A column whose value isn't the same; None is null."""

    name: str
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs; ``key`` is a JSON object of PostgreSQL's texts, ``rows`` how many rows of
    the kind it stands for.
    """

    kind: str
    key: str
    rows: int = 1
    columns: list[ColumnDifference] = field(default_factory=list)
    hash: int = 0
