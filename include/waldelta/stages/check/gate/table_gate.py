"""A table's gate, and the verdicts of its expectations, whoever evaluates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from waldelta.config.expectation_files import OwnExpectation
from waldelta.errors import ConfigError, QualityFailed
from waldelta.lake.ledger import ExpectationResult, now
from waldelta.pipeline import Job
from waldelta.quantities import counted
from waldelta.stages.check.gate.verdicts import QUARANTINE, STOP
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kind import RowCondition
from waldelta.stages.check.suite.kinds import kind_of

# More rows than this in one range are not a few bad ones: an operator must decide before anything
# is merged.
MOST_SET_ASIDE = 10_000
_CALLED = {"stop": STOP, "quarantine": QUARANTINE}


@dataclass(frozen=True, slots=True)
class Gated:
    """An expectation that judges before the merge, its place, and its name in its file."""

    item: OwnExpectation
    place: str
    called: str

    @property
    def meaning(self) -> str:
        """Returns the expectation's name in messages."""
        column = self.item.kwargs.get("column") if self.item.notes else None
        return self.called + (f" on {column}" if column else "")


@dataclass(frozen=True, slots=True)
class TableGate:
    """One table's gate; commits that end by ``released`` pass its ``stop``."""

    table: str
    expectations: tuple[Gated, ...] = ()
    problem: ConfigError | None = None
    released: int = 0


@dataclass(slots=True)
class Verdict:
    """The result of an expectation, and how it is judged.

    ``planned`` takes no value in ``_wd_raw`` for null. ``condition`` is that on single rows by
    Spark, None where there is none, or where Arrow judges.
    """

    gated: Gated
    planned: PlannedExpectation
    condition: RowCondition | None = None
    unexpected: int | None = None
    success: bool | None = None
    why: str | None = None
    observed: str | None = None
    examples: list[str] = field(default_factory=list)

    @property
    def columns(self) -> Sequence[str] | None:
        """Returns the columns that a condition on single rows reads; None where unknown."""
        if self.condition is not None:
            return self.condition.columns
        return kind_of(self.planned.type).columns_read(self.planned)

    def keep(self, found: FailingRows) -> None:
        """Keep what was counted."""
        mostly = float(self.planned.kwargs.get("mostly", 1))
        self.unexpected, self.success = found.rows, found.are_few(mostly)


def stopped(gate: TableGate, failed: Sequence[Verdict]) -> QualityFailed:
    """Returns the error of changes that fail expectations with ``gate: stop``."""
    return QualityFailed(
        f"{gate.table}: not merged, since its changes fail expectations with gate:"
        f" stop:\n{listed(failed)}\nThey wait in the change log, the slot advances,"
        " and the target stays unchanged. Correct the expectation or the data: the"
        " next run checks them again (as many as one apply batch takes:"
        " docs/how-to/release-a-gate.md). Or release the landed changes: quarantine"
        f" --release --tables {gate.table} --reason WHY. The command quarantine, and the page"
        " quarantine, show some of the rows"
    )


def listed(verdicts: Sequence[Verdict]) -> str:
    """Returns a line for each of these verdicts."""
    return "\n".join(f"  - {v.gated.meaning} ({_found(v)}) at {v.gated.place}" for v in verdicts)


def _found(verdict: Verdict) -> str:
    return verdict.why or (
        counted(verdict.unexpected, "row") if verdict.unexpected is not None else "not met"
    )


def record(job: Job, gate: TableGate, verdicts: Sequence[Verdict]) -> None:
    """Record the verdicts together with the checks' results, where the pages find both."""
    at = now()
    rows = [
        ExpectationResult(
            at,
            job.run_id,
            gate.table,
            v.gated.item.type,
            f"{_CALLED[v.gated.item.gate]}{v.gated.meaning}",
            v.gated.item.severity if v.gated.item.gate == "quarantine" else "critical",
            "own",
            v.success,
            v.why or v.observed,
            v.unexpected,
            None,
            examples=v.examples or None,
        )
        for v in verdicts
        if v.success is not None or v.why
    ]
    job.ledger.append_all(rows)
