"""An expectation that is planned for a target, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from waldelta.config.expectation_files import Severity
from waldelta.errors import WaldeltaError
from waldelta.quantities import counted

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

    def __str__(self) -> str:
        if self.error is not None:
            return f"couldn't be checked: {self.error}"
        found = "could not be evaluated" if self.success is None else ""
        if self.unexpected_count:
            found = counted(self.unexpected_count, "row")
        told = self.planned.meaning
        # The name of an own expectation without notes already consists of its type and columns.
        if not told.startswith(self.planned.type):
            column = self.planned.kwargs.get("column") if self.planned.origin == "own" else None
            told = f"{self.planned.type}: {told}" + (f" on {column}" if column else "")
        return told + (f" ({found})" if found else "")
