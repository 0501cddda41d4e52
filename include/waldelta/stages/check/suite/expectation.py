"""Expectations that are planned for a target, their outcomes, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from waldelta.config.expectation_files import Severity
from waldelta.errors import QualityFailed, WaldeltaError
from waldelta.lake.ledger import CAN_BE_JUDGED
from waldelta.quantities import counted
from waldelta.stages.check.measure.profile import Measured

Origin = Literal["catalog", "publication", "pipeline", "own"]


@dataclass(frozen=True, slots=True)
class PlannedExpectation:
    """One expectation: its type and arguments in Great Expectations' terms, and its origin.

    ``suffices``: a column; without nulls in it the expectation is certainly met. If it has nulls,
    the expectation must be evaluated.
    """

    type: str
    kwargs: dict[str, Any] = field(hash=False)
    severity: Severity
    origin: Origin
    meaning: str
    place: str | None = None  # Of an own expectation: file and number.
    is_gate: bool = False  # Of an own expectation: whether it judges changes before the merge.
    suffices: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one expectation; ``success`` is None when it could not be evaluated."""

    planned: PlannedExpectation
    success: bool | None
    observed: str | None
    unexpected_count: int | None
    error: WaldeltaError | None = None
    # Some values that fail, as JSON, for the ledger alone.
    examples: tuple[str, ...] = ()
    # What the page shows, in Great Expectations' terms, and why there is no result.
    details: Mapping[str, Any] = field(default_factory=dict)
    raised: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"couldn't be checked: {self.error}"
        found = "could not be evaluated" if self.success is None else ""
        if self.unexpected_count:
            found = counted(self.unexpected_count, "row")
        kind = "" if self._is_unnamed else f"{self.planned.type}: "
        return f"{kind}{self.name}" + (f" ({found})" if found else "")

    @property
    def name(self) -> str:
        """Returns what the expectation means, an own one with its column."""
        column = self.planned.kwargs.get("column") if self.planned.origin == "own" else None
        if column is None or self._is_unnamed:
            return self.planned.meaning
        return f"{self.planned.meaning} on {column}"

    @property
    def verdict(self) -> str:
        """Returns whether it is met, and how many rows don't meet it."""
        if self.success is None:
            return "not evaluated"
        if self.success:
            return "met"
        rows = self.unexpected_count
        return f"not met: {counted(rows, 'row')}" if rows else "not met"

    @property
    def _is_unnamed(self) -> bool:
        # Without notes, the meaning of an own expectation consists of its type and columns.
        return self.planned.meaning.startswith(self.planned.type)


def unchecked(err: WaldeltaError) -> Outcome:
    """Returns the outcome for an error that keeps a target, or part of its suite, from being
    judged.

    It counts as a failed critical expectation.
    """
    planned = PlannedExpectation(
        CAN_BE_JUDGED, {}, "critical", "pipeline", "all its expectations can be judged"
    )
    return Outcome(planned, None, str(err)[:200], None, err)


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """A target's outcomes, their Delta version, and their page.

    ``page`` is a path, or a URI in an object store; None without a page.
    ``version`` is None for a missing target.
    """

    table: str
    version: int | None
    outcomes: tuple[Outcome, ...]
    omitted: tuple[str, ...]
    page: Path | str | None = None
    seconds: float = 0.0
    measured: Measured | None = None
    # The suite's digest, when all rows meet the expectations that depend on rows alone, and whether
    # all rows were judged (``PassedSuite``).
    suite: str | None = None
    whole: bool = False
    # What was measured for later runs, which can't be judged yet.
    measured_only: tuple[PlannedExpectation, ...] = ()

    def failed(self, severity: str) -> list[Outcome]:
        """Returns the unmet outcomes of one severity."""
        return [o for o in self.outcomes if not o.success and o.planned.severity == severity]


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What a run's check found, and where its report is: an index, or the run's folder in a
    store.
    """

    run_id: str
    tables: tuple[TableVerdict, ...]
    index: Path | str | None = None
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Returns the critical expectations that weren't met, with their tables."""
        return self._failed("critical")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns the expectations of severity warning that weren't met, with their tables."""
        return self._failed("warning")

    @property
    def failed_tables(self) -> tuple[str, ...]:
        """Returns the tables with a critical expectation that wasn't met."""
        return tuple(verdict.table for verdict in self.tables if verdict.failed("critical"))

    @property
    def location(self) -> str | None:
        """Returns the page to open: the first table's of those that failed worst, else the index of
        all reports.
        """
        return next(iter(self._pages()), None)

    def _pages(self) -> list[str]:
        """Returns the pages of the tables that failed worst; the index, if one of them has none."""
        index = [] if self.index is None else [str(self.index)]
        for severity in ("critical", "warning"):
            if missed := [verdict for verdict in self.tables if verdict.failed(severity)]:
                pages = [str(verdict.page) for verdict in missed if verdict.page is not None]
                return pages if len(pages) == len(missed) else [*pages, *index]
        return index

    @property
    def summary(self) -> str:
        """Returns one line for logs."""
        count = sum(len(verdict.outcomes) for verdict in self.tables)
        missed = (
            f"{len(self.failures)} critical and {counted(len(self.warnings), 'warning')} not met"
        )
        return f"{counted(count, 'expectation')} on {counted(len(self.tables), 'table')}, {missed}"

    def raise_if_critical(self) -> None:
        """Raise QualityFailed when a critical expectation wasn't met."""
        if not self.failures:
            return
        listed = "\n".join(f"  - {failure}" for failure in self.failures)
        failed = QualityFailed(
            f"{counted(len(self.failures), 'critical expectation')} failed (the changes are applied"
            f" and safe):\n{listed}" + "".join(f"\nreport: {page}" for page in self._pages())
        )
        failed.causes = tuple(
            o.error for v in self.tables for o in v.outcomes if o.error is not None
        )
        failed.retryable = any(cause.retryable for cause in failed.causes)
        raise failed

    def _failed(self, severity: str) -> tuple[str, ...]:
        return tuple(f"{v.table}: {outcome}" for v in self.tables for outcome in v.failed(severity))
