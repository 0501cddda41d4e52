"""The list of a pipeline's reports, which both indexes show.

Great Expectations' own index needs scripts from the network, and reads every stored result again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Literal

_RunVerdict = Literal["failed", "warning", "passed"]


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One table's check in one run.

    ``page`` is its place among the docs, and empty for a table that couldn't be checked.
    ``version`` is None for a missing target. ``told`` is the result's text where the result isn't a
    count of met expectations.
    """

    at: datetime
    pipeline: str
    run_id: str
    table: str
    version: int | None
    expectations: int
    failures: tuple[str, ...]  # Critical expectations that failed, in words without values.
    warnings: tuple[str, ...]
    page: str
    told: str | None = None

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst result."""
        return "failed" if self.failures else "warning" if self.warnings else "passed"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The tables of one check, failed ones first."""

    at: datetime
    pipeline: str
    run_id: str
    entries: tuple[ReportEntry, ...]

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst verdict of its tables."""
        return self.entries[0].verdict


def dump_entry(entry: ReportEntry) -> dict[str, Any]:
    """Returns an entry for JSON."""
    return asdict(entry) | {"at": entry.at.isoformat()}


def parse_entry(row: Any) -> ReportEntry | None:
    """Returns the entry of a JSON object that dump_entry() made; None for anything else."""
    try:
        entry = ReportEntry(
            **{
                **row,
                "at": datetime.fromisoformat(row["at"]),
                "failures": tuple(map(str, row["failures"])),
                "warnings": tuple(map(str, row["warnings"])),
            }
        )
    except (ValueError, KeyError, TypeError):
        return None
    texts = (entry.pipeline, entry.run_id, entry.table, entry.page)
    numbers = (entry.expectations, entry.version or 0)
    is_one = all(isinstance(text, str) for text in texts) and isinstance(entry.told, str | None)
    is_one &= all(type(number) is int for number in numbers) and entry.at.tzinfo is not None
    return entry if is_one else None


def checked_runs(entries: Iterable[ReportEntry]) -> list[CheckedRun]:
    """Returns the reports by run, newest first; within a run failed ones come first, then by
    name.
    """
    worst: Sequence[_RunVerdict] = ("failed", "warning", "passed")
    ordered = sorted(entries, key=lambda e: (worst.index(e.verdict), e.table))
    ordered.sort(key=_run_of, reverse=True)
    grouped = ((key, tuple(of_run)) for key, of_run in groupby(ordered, key=_run_of))
    return [CheckedRun(at, pipeline, run_id, of_run) for (at, pipeline, run_id), of_run in grouped]


def _run_of(entry: ReportEntry) -> tuple[datetime, str, str]:
    return entry.at, entry.pipeline, entry.run_id
