"""How the lake compares with its source: each table's last answer, however long ago that was
found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger import Reconciliation
from waldelta.lake.ledger.reconciliations import ANSWERS, DIFFERENT, last_answers, last_whole
from waldelta.lake.ledger.reconciliations import COMPARISON_FAILED as NOT_ANSWERED
from waldelta.monitoring.attention import Attention, names
from waldelta.monitoring.check_results import Verdict
from waldelta.monitoring.lake_tables import Bookkeeping, last_rows
from waldelta.monitoring.table_list import copied_at
from waldelta.quantities import counted


@dataclass(frozen=True, slots=True)
class LastEqual:
    """When a target was found to equal its source in all columns, or repaired, and at which
    version.
    """

    at: datetime
    version: int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """The tables of a lake, each in one of these by its last answer; ``oldest`` is the oldest
    answer of those that are equal, partly or not.

    ``equal`` were equal, or repaired; ``partly`` were too, but columns were left out; ``copied``
    were different, and copied as a whole since; ``unanswered`` were never compared to an end,
    though somebody tried; ``never`` at all. ``answers`` are the last of both in which no column was
    left out, if that was equal. Of the tables in ``again`` the latest attempt found no answer, of
    those in ``broken`` because it failed.
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
    answers: Mapping[str, LastEqual] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many tables there are to compare."""
        return len(self.equal) + len(self.rest)

    @property
    def rest(self) -> tuple[str, ...]:
        """The tables that aren't known to be equal."""
        return (*self.different, *self.copied, *self.partly, *self.unanswered, *self.never)

    @property
    def verdict(self) -> Verdict:
        """Whether the lake is known to equal its source."""
        return (
            "failed" if self.different else "unknown" if self.rest or not self.equal else "passed"
        )

    @property
    def summary(self) -> tuple[str, ...]:
        """What is known of those that aren't known to be equal, in words."""
        if not self.equal and self.never == self.rest:
            return ("never compared",) if self.never else ()
        counts = (
            (self.different, "different"),
            (self.copied, "copied since it differed"),
            (self.partly, "equal but for columns left out"),
            (self.unanswered, "without an answer"),
            (self.never, "never compared"),
        )
        return tuple(f"{len(found):,} {what}" for found, what in counts if found)


def read_compared(
    lake: Bookkeeping, tables: Collection[str], history: pa.Table | None = None
) -> Compared:
    """How these tables compare: those that are still fed, since of others nobody asks. ``history``,
    where somebody has read it.
    """
    if history is None:
        history = lake.scan(Reconciliation, ("at", "table_name", "status", "version", "left_out"))
    rows = [row for row in _newest(history).to_pylist() if row["table_name"] in tables]
    found, attempts = last_answers(rows)
    answers = {name: row for name, row in found.items() if row["status"] in ANSWERS}
    differed = {name: row["at"] for name, row in answers.items() if row["status"] == DIFFERENT}
    equal = sorted(answers.keys() - differed.keys())
    partly = tuple(name for name in equal if answers[name]["left_out"])
    whole = {
        name: row
        for name, row in last_whole(rows).items()
        if name in equal and row["status"] != DIFFERENT
    }
    copied = {name for name, at in copied_at(lake, differed).items() if at > differed[name]}
    latest = found | attempts
    return Compared(
        equal=tuple(name for name in equal if name not in partly),
        different=tuple(sorted(differed.keys() - copied)),
        copied=tuple(sorted(copied)),
        partly=partly,
        unanswered=tuple(sorted(found.keys() - answers.keys())),
        never=tuple(sorted(set(tables) - found.keys())),
        oldest=min((answers[name]["at"] for name in equal), default=None),
        again=tuple(sorted(attempts)),
        broken=tuple(sorted(name for name, row in latest.items() if row["status"] == NOT_ANSWERED)),
        answers={name: LastEqual(row["at"], row["version"]) for name, row in whole.items()},
    )


def _newest(rows: pa.Table) -> pa.Table:
    """Of each table the last answers, with columns left out and without, and the last row without
    one: years of others say no more.
    """
    answered = pc.is_in(rows["status"], value_set=pa.array(ANSWERS))
    whole = pc.equal(pc.fill_null(pc.list_value_length(rows["left_out"]), 0), 0)
    rows = rows.append_column("answered", answered).append_column("whole", whole)
    return last_rows(rows, ["table_name", "answered", "whole"])


def of_compared(found: Compared) -> Iterator[Attention]:
    """Targets that were found to hold other rows than their source, whatever attempts since then
    couldn't say; and these.
    """
    page = ("reconciliation",)
    if found.different:
        since = ""
        if again := [name for name in found.different if name in found.again]:
            of = "" if len(again) == len(found.different) else f"at {names(again)} "
            since = f"; the latest attempt {of}couldn't compare them again"
        yield Attention(
            "failed",
            f"{counted(len(found.different), 'table differs', 'tables differ')} from the source:"
            f" {names(found.different)}{since}",
            page,
        )
    if found.copied:
        yield Attention(
            "warning",
            f"{names(found.copied)}: differed and was copied since then: compare again",
            page,
        )
    if found.broken:
        yield Attention(
            "warning", f"{names(found.broken)}: the comparison with the source failed", page
        )
