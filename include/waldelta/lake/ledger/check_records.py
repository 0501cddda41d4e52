"""What checks record in the ledger, in a table each.

- ``expectations``: the results of expectations, one row per expectation, table and run.
- ``profiles``: the profiles of targets, by which profile anomalies are found.
- ``passed_suites``: which suite all rows of a target met, as of which version. Rows that haven't
  changed since needn't be judged again. A check relies on this after few changes, and maintenance
  for whole targets.

The results of reconciliations, one row per run and table, in ``_waldelta/reconciliations``.

This module works without a JVM.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.lake.lake import Lake
from waldelta.lake.ledger.ledger import Ledger
from waldelta.lake.ledger.records import LedgerRow, rows_of, schema_of
from waldelta.lake.ledger.table import (
    SHORT_ROWS_PER_GROUP,
    LedgerTable,
    Newest,
    again_when_late,
    in_order,
    of_tables,
)
from waldelta.quantities import counted

REFERENCES_HOLD = "expect_target_rows_to_refer_to_rows"
IS_FRESH = "expect_target_to_be_fresh"
ALL_VALUES_KNOWN = "expect_target_to_know_all_values"
CAN_BE_JUDGED = "expect_target_to_be_judged"
VALUES_KNOWN = "no row is in quarantine because a value of it wasn't sent"
# Expectations of these kinds depend on more than a target's own rows. For a target that hasn't
# changed since its check, maintenance evaluates only these.
ON_OTHERS = frozenset({REFERENCES_HOLD, IS_FRESH, ALL_VALUES_KNOWN})
# Results of these alone don't make a check: a completed check has other results as well.
NO_CHECKS = ON_OTHERS | {CAN_BE_JUDGED}
Verdict = Literal["failed", "unknown", "warning", "passed"]
WORST_FIRST: tuple[Verdict, ...] = ("failed", "unknown", "warning", "passed")
# Another observed value may be that of a row.
_LET_IN = re.compile(r"(accepted|released|accepted or released) by an operator(: [\d,]+ rows?)?")
# The number of profiles kept per table. Between two maintenances, each table gets a row from each
# run that changes it.
KEPT_PER_TABLE = 100


def verdict_of(severity: str, *, success: bool | None) -> Verdict:
    """Returns the verdict on an expectation; ``success`` is None if it couldn't be evaluated.

    >>> verdict_of("critical", success=False), verdict_of("warning", success=False)
    ('failed', 'warning')
    """
    if success is None:
        return "unknown"
    if success:
        return "passed"
    return "warning" if severity == "warning" else "failed"


@dataclass(frozen=True, slots=True)
class ExpectationResult(LedgerRow):
    """What one expectation found; ``success`` is null when it could not be evaluated.

    ``version`` is the target's Delta version. It is null for a gate, which judges changes before
    the merge, and for rows that an operator discarded or repaired. ``not_checked`` is in the first
    row of a table's check: what couldn't be judged at all, and why. ``suite`` is in each row of a
    check: the digest of the table's own expectations. ``examples`` are some rows as JSON
    that fail an expectation on single rows: ``key`` where it is known, and ``values``.
    """

    table_name: str
    expectation: str
    meaning: str
    severity: str
    origin: str
    success: bool | None
    observed: str | None
    unexpected_count: int | None
    version: int | None
    not_checked: list[str] | None = None
    suite: str | None = None
    examples: list[str] | None = None

    table: ClassVar[str] = "expectations"
    rows_per_group: ClassVar[int] = SHORT_ROWS_PER_GROUP


def describe_unknown(rows: int) -> str:
    """Returns the observed value for rows that wait for a value."""
    return counted(rows, "row in quarantine lacks values", "rows in quarantine lack values")


def describe_admission(decision: str, rows: int | None) -> str:
    """Returns the observed value of a gate that fails only on rows which an operator accepted or
    released.
    """
    return f"{decision} by an operator" + (f": {counted(rows, 'row')}" if rows else "")


def is_admission(observed: str | None) -> bool:
    """Returns whether an observed value was made by describe_admission().

    >>> is_admission(describe_admission("released", 2)), is_admission("2 rows")
    (True, False)
    """
    return _LET_IN.fullmatch(observed or "") is not None


def read_last_unknown(ledger: Ledger, tables: Collection[str]) -> dict[str, str | None]:
    """Returns the last observed value of ALL_VALUES_KNOWN, by table; tables without results are
    left out.
    """
    where = (pc.field("expectation") == ALL_VALUES_KNOWN) & of_tables(tables)
    rows = ledger.table(ExpectationResult).scan(["table_name", "observed"], where=where)
    return dict(zip(rows["table_name"].to_pylist(), rows["observed"].to_pylist(), strict=True))


def newest_versions(
    ledger: Ledger, since: datetime, tables: Collection[str]
) -> tuple[dict[str, int], Newest]:
    """Returns the latest version of each target with results since then, and the last such row."""
    where = of_tables(tables)
    rows = ledger.table(ExpectationResult).scan(["at", "table_name", "version"], since, where)
    at = rows["at"][-1].as_py() if rows.num_rows else None
    newest = (
        rows.filter(pc.is_valid(rows["version"]))
        .group_by("table_name")
        .aggregate([("version", "max")])
    )
    versions = dict(
        zip(newest["table_name"].to_pylist(), newest["version_max"].to_pylist(), strict=True)
    )
    return versions, Newest(at, where & (pc.field("at") >= since), cache=False)


def keep_results(rows: Sequence[ExpectationResult], oldest: datetime) -> list[bool]:
    """Keep each table's last check: a table without changes isn't checked again.

    That includes a check that broke off.
    """
    checked = {
        row.table_name: row.at
        for row in rows
        if row.version is not None and row.expectation not in NO_CHECKS
    }
    # For a table without a completed check, the check that broke off is all that is known.
    broke_off = {row.table_name: row.at for row in rows if row.expectation == CAN_BE_JUDGED}
    needed = broke_off | checked
    return [row.at >= min(oldest, needed.get(row.table_name, oldest)) for row in rows]


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

    table: ClassVar[str] = "passed_suites"
    rows_per_group: ClassVar[int] = SHORT_ROWS_PER_GROUP


def latest_suites(ledger: Ledger, tables: Collection[str]) -> dict[str, list[PassedSuite]]:
    """Returns each table's latest row of a whole target, followed by its latest row."""
    rows = ledger.table(PassedSuite).read(of_tables(tables))
    newest = {(row.table_name, part): row for row in rows for part in _parts(row)}
    return {
        name: [newest[name, part] for part in (True, False) if (name, part) in newest]
        for name in {row.table_name for row in rows}
    }


def _parts(row: PassedSuite) -> tuple[bool, ...]:
    """Returns the categories whose latest row this may be: whole targets, and any."""
    return (True, False) if row.whole else (False,)


def keep_suites(rows: Sequence[PassedSuite]) -> list[bool]:
    """Keep the rows that latest_suites() returns."""
    latest = {
        (row.table_name, part): number for number, row in enumerate(rows) for part in _parts(row)
    }
    numbers = set(latest.values())
    return [number in numbers for number in range(len(rows))]


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
    """Returns the latest profiles of each of these tables, oldest first, without those of one run.

    A retry has the same run id.
    """
    rows = ledger.table(Profile).scan(schema_of(Profile).names, where=of_tables(tables))
    if but is not None:
        rows = rows.filter(pc.not_equal(rows["run_id"], but))
    profiles = {}
    for name in set(rows["table_name"].to_pylist()):
        rows_of_table = rows.filter(pc.equal(rows["table_name"], name))
        profiles[name] = rows_of(Profile, rows_of_table.slice(max(0, len(rows_of_table) - most)))
    return profiles


def keep_profiles(rows: Sequence[Profile]) -> list[bool]:
    """Returns which rows stay: the latest KEPT_PER_TABLE of each table."""
    seen: dict[str, int] = {}
    flags = []
    for row in reversed(rows):
        seen[row.table_name] = seen.get(row.table_name, 0) + 1
        flags.append(seen[row.table_name] <= KEPT_PER_TABLE)
    return flags[::-1]


EQUAL, DIFFERENT, REPAIRED, NOT_COMPARED, COMPARISON_FAILED = (
    "equal",
    "different",
    "repaired",
    "not compared",
    "failed",
)

ANSWERS = (EQUAL, DIFFERENT, REPAIRED)


def kept_out(rows: int) -> str:
    """Returns in words how many rows a comparison left out, because its target lacked them on
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
    def has_answer(self) -> bool:
        """Whether the target was compared: it was equal or not."""
        return self.status in ANSWERS


class Reconciliations:
    """The table of reconciliations of one lake; every write is durable when it returns."""

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
            cache=False,
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
        """Returns rows of the history, by table, with the differing rows."""
        ids = {name: (row.at, row.run_id) for name, row in answers.items()}
        if not ids:
            return {}
        rows = self._table.read(
            pc.field("at").isin(pa.array([at for at, _ in ids.values()], UTC_TIME))
        )
        return {
            row.table_name: row for row in rows if (row.at, row.run_id) == ids.get(row.table_name)
        }

    def history(self, since: datetime | None = None) -> list[Reconciliation]:
        """Returns all results without the differing rows, oldest first."""
        return rows_of(Reconciliation, self.scan(since))

    def scan(self, since: datetime | None = None) -> pa.Table:
        """Returns history() as Arrow: it has as many rows as tables for each night."""
        names = [name for name in self._table.schema.names if name != "differences"]
        return self._table.scan(names, since)

    def prune(self, oldest: datetime) -> int:
        """Drop rows older than ``oldest``, except each table's last result; returns how many.

        The table is compacted into one file.
        """
        return self._table.prune(lambda rows: _keep(rows, oldest))


def _is_behind(row: Reconciliation, second: Reconciliation) -> bool:
    """Returns whether a result is about an older version than another one."""
    if second.table_name != row.table_name or second.status not in ANSWERS:
        return False
    if row.version is None or second.version is None:
        return False
    # The version of a repaired table is the one that was compared before the repair.
    return (second.version, second.status == REPAIRED) > (row.version, False)


def _keep(rows: Sequence[Reconciliation], oldest: datetime) -> list[bool]:
    """Returns which rows are kept: those since ``oldest``, and of each table the last result, the
    last attempt and the last complete result.

    A target that differed still does until it is compared again, and one that was equal in all
    columns was equal then.
    """
    answers, attempts = last_answers(rows)
    whole = last_results_of_all_columns(rows)
    needed = {id(row) for row in (*answers.values(), *attempts.values(), *whole.values())}
    return [row.at >= oldest or id(row) in needed for row in rows]


def last_answers(
    rows: Iterable[Reconciliation],
) -> tuple[dict[str, Reconciliation], dict[str, Reconciliation]]:
    """Returns, by table, the last result and the last attempt since that had none.

    Without any result, it is the last row. A target that differed still does when another
    comparison failed. ``rows`` are in their order.
    """
    answers: dict[str, Reconciliation] = {}
    attempts: dict[str, Reconciliation] = {}
    for row in rows:
        name = row.table_name
        if row.status in ANSWERS:
            answers[name] = row
            attempts.pop(name, None)
        elif name in answers and answers[name].status in ANSWERS:
            attempts[name] = row
        else:
            answers[name] = row
    return answers, attempts


def last_results_of_all_columns(rows: Iterable[Reconciliation]) -> dict[str, Reconciliation]:
    """Returns, by table, the last result for which no column was left out; ``rows`` are in their
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
