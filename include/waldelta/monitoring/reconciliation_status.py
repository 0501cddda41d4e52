"""How the lake compares with its source: each table's last comparison result, however old."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger import DIFFERENT, Ledger, Reconciliation, last_rows, of_tables
from waldelta.lake.ledger.check_records import (
    ANSWERS,
    Verdict,
    kept_out,
    last_answers,
    last_results_of_all_columns,
)
from waldelta.lake.ledger.check_records import COMPARISON_FAILED as NOT_ANSWERED
from waldelta.lake.ledger.records import rows_of
from waldelta.monitoring.attention import Attention, names, on_names
from waldelta.monitoring.table_list import copied_at
from waldelta.quantities import counted


@dataclass(frozen=True, slots=True)
class Compared:
    """The tables of a lake by their last comparison result.

    ``equal`` were equal or repaired; ``partly`` too, but columns were left out; ``copied``
    differed, and were copied as a whole since. ``unanswered`` were never compared to the end,
    although that was tried; ``never`` were not compared at all. ``oldest`` is the oldest result of
    ``equal`` and ``partly``. ``answers`` are the last results without left-out columns, where
    equal. In ``again`` are tables whose latest comparison has no result, in ``broken`` those where
    it failed. ``kept_out`` counts the rows that the results of ``equal`` and ``partly`` left out,
    because the targets lacked them on purpose. ``different_since`` is when the first of
    ``different`` was found.
    """

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    oldest: datetime | None = None
    again: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    kept_out: int = 0
    answers: Mapping[str, Reconciliation] = field(default_factory=dict)
    different_since: datetime | None = None

    @property
    def count(self) -> int:
        """Returns the number of tables to compare."""
        return len(self.equal) + len(self.rest)

    @property
    def rest(self) -> tuple[str, ...]:
        """Returns the tables that aren't known to be equal."""
        return (*self.different, *self.copied, *self.partly, *self.unanswered, *self.never)

    @property
    def verdict(self) -> Verdict:
        """Returns whether the lake is known to equal its source."""
        return (
            "failed" if self.different else "unknown" if self.rest or not self.equal else "passed"
        )

    @property
    def headline(self) -> str:
        """Returns the number that the verdict is about: tables that differ, or else equal ones.

        >>> Compared(different=("a",), never=("b", "c")).headline
        '1 of 3 tables differs'
        """
        of = counted(self.count, "table")
        if self.different:
            verb = "differs" if len(self.different) == 1 else "differ"
            return f"{len(self.different):,} of {of} {verb}"
        return f"{len(self.equal):,} of {of}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Returns in words what the headline doesn't say of the other tables and rows."""
        if not self.equal and self.never == self.rest:
            return ("never compared",) if self.never else ()
        counts = (
            (self.equal if self.different else (), "equal"),
            (self.copied, "copied since it differed"),
            (self.partly, "equal, some columns not compared"),
            (self.unanswered, "no result"),
            (self.never, "never compared"),
        )
        words = [f"{len(tables):,} {what}" for tables, what in counts if tables]
        return (*words, *([kept_out(self.kept_out)] if self.kept_out else []))


def read_compared(ledger: Ledger, tables: Collection[str]) -> Compared:
    """Returns how these tables compare; pass only replicated ones, because others don't matter."""
    scanned = ledger.table(Reconciliation).scan(
        ("at", "run_id", "table_name", "status", "version", "skipped_columns", "lacking")
    )
    # Each table's last results with and without left-out columns, and its last failure; older
    # rows add nothing.
    answered = pc.is_in(scanned["status"], value_set=pa.array(ANSWERS))
    whole = pc.equal(pc.fill_null(pc.list_value_length(scanned["skipped_columns"]), 0), 0)
    scanned = scanned.append_column("answered", answered).append_column("whole", whole)
    last = last_rows(scanned, ["table_name", "answered", "whole"])
    rows = [row for row in rows_of(Reconciliation, last) if row.table_name in tables]
    answers_by_table, attempts = last_answers(rows)
    answers = {name: row for name, row in answers_by_table.items() if row.status in ANSWERS}
    differed = {name: row.at for name, row in answers.items() if row.status == DIFFERENT}
    equal = sorted(answers.keys() - differed.keys())
    partly = tuple(name for name in equal if answers[name].skipped_columns)
    copied = {name for name, at in copied_at(ledger, differed).items() if at > differed[name]}
    latest = answers_by_table | attempts
    return Compared(
        equal=tuple(name for name in equal if name not in partly),
        different=tuple(sorted(differed.keys() - copied)),
        copied=tuple(sorted(copied)),
        partly=partly,
        unanswered=tuple(sorted(answers_by_table.keys() - answers.keys())),
        never=tuple(sorted(set(tables) - answers_by_table.keys())),
        oldest=min((answers[name].at for name in equal), default=None),
        again=tuple(sorted(attempts)),
        broken=tuple(sorted(name for name, row in latest.items() if row.status == NOT_ANSWERED)),
        kept_out=sum(answers[name].lacking for name in equal),
        answers={
            name: row
            for name, row in last_results_of_all_columns(rows).items()
            if name in equal and row.status != DIFFERENT
        },
        different_since=_different_since(ledger, differed.keys() - copied),
    )


def _different_since(ledger: Ledger, tables: Collection[str]) -> datetime | None:
    """Returns when the first of these tables was found different, and never equal since."""
    if not tables:
        return None
    columns = ("at", "run_id", "table_name", "status")
    scanned = ledger.table(Reconciliation).scan(columns, None, of_tables(tables))
    since: dict[str, datetime] = {}
    for row in rows_of(Reconciliation, scanned):
        if row.status == DIFFERENT:
            since.setdefault(row.table_name, row.at)
        elif row.status in ANSWERS:
            since.pop(row.table_name, None)
    return min(since.values(), default=None)


def of_compared(compared: Compared) -> Iterator[Attention]:
    """Yields attention for targets that differ from their source, and for failed comparisons.

    A difference stays although later attempts had no result.
    """
    page = ("reconciliation",)
    if compared.different:
        since = ""
        if again := [name for name in compared.different if name in compared.again]:
            of = "" if len(again) == len(compared.different) else f"at {names(again)} "
            since = f"; the latest attempt {of}couldn't compare them again"
        yield Attention(
            "failed",
            "different",
            f"{names(compared.different)}: different from the source{since}",
            page,
            objects=compared.different,
        )
    yield from on_names(
        "warning",
        "copied_since",
        compared.copied,
        "{}: differed and was copied since then: compare again",
        *page,
    )
    yield from on_names(
        "warning",
        "failed_comparison",
        compared.broken,
        "{}: the comparison with the source failed",
        *page,
    )
