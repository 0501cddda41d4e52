"""What the list of reports has of each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Literal

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from waldelta.lake.ledger.check_records import WORST_FIRST

_RunVerdict = Literal["failed", "warning", "passed"]


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One table's check in one run.

    ``page`` is its place among the docs, and empty for a table that couldn't be checked.
    ``version`` is None for a missing target. ``result`` is the result's text where that isn't a
    count of met expectations.
    """

    at: AwareDatetime
    pipeline: str
    run_id: str
    table: str
    version: int | None
    expectations: int
    failures: tuple[str, ...]  # Critical expectations that failed, in words without values.
    warnings: tuple[str, ...]
    page: str
    result: str | None = None

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


_ENTRY = TypeAdapter(ReportEntry)


def dump_entry(entry: ReportEntry) -> Any:
    """Returns an entry for JSON."""
    return _ENTRY.dump_python(entry, mode="json")


def parse_entry(row: Any) -> ReportEntry | None:
    """Returns the entry of a JSON object that dump_entry() made; None for anything else."""
    try:
        return _ENTRY.validate_json(json.dumps(row), strict=True)
    except ValidationError:
        return None


def checked_runs(entries: Iterable[ReportEntry]) -> list[CheckedRun]:
    """Returns the reports by run, newest first; within a run failed ones come first, then by
    name.
    """
    ordered = sorted(entries, key=lambda e: (WORST_FIRST.index(e.verdict), e.table))
    ordered.sort(key=_run_of, reverse=True)
    grouped = ((key, tuple(of_run)) for key, of_run in groupby(ordered, key=_run_of))
    return [CheckedRun(at, pipeline, run_id, of_run) for (at, pipeline, run_id), of_run in grouped]


def _run_of(entry: ReportEntry) -> tuple[datetime, str, str]:
    return entry.at, entry.pipeline, entry.run_id
