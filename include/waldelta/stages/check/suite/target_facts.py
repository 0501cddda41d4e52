"""Target facts: where a target is, and what its suite is planned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from waldelta.lake import DeltaTarget, TargetVersion
from waldelta.lake.ledger import TableState
from waldelta.spark import Runner
from waldelta.stages.check.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.measure import Reference
from waldelta.stages.check.suite._freshness import FreshnessLimit
from waldelta.stages.check.suite.profile_drift import Before

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target to check, as one Delta version."""

    state: TableState
    version: int
    table: DeltaTarget

    def open(self) -> TargetVersion:
        """Opens the target's version without Spark."""
        return self.table.open(self.version)

    def frame(self, runner: Runner) -> DataFrame:
        """Returns the rows that the source has now, as a mirror would hold them."""
        return self.state.kept_as.live_rows(self.kept(runner), self.state.key_columns)

    def kept(self, runner: Runner) -> DataFrame:
        """Returns all rows, including those that are no longer in the source (unlike ``frame``)."""
        return self.table.frame(runner.spark(), self.version)


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What the source guarantees for all rows of a table, and what limits its target.

    That is CHECK constraints, labels of enum columns by name, declared types, and foreign keys. The
    target's freshness limits belong here too, and the number of rows it lacks because a value was
    never sent (None: not judged). ``omitted`` are rules that can't be judged, and why.
    """

    checks: Sequence[CheckConstraint] = ()
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    declared: Sequence[DeclaredType] = ()
    references: Sequence[Reference] = ()
    freshness: Sequence[FreshnessLimit] = ()
    unknown_rows: int | None = None
    omitted: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target's state, the columns its Delta table has now, and the source's rules.

    ``before`` are the bounds from earlier measurements (None: not judged). Planning adds to
    ``omitted`` the rules that can't be judged, and why.
    """

    state: TableState
    columns: Sequence[str]
    rules: SourceRules = field(default_factory=SourceRules)
    before: Before | None = None
    omitted: list[str] = field(default_factory=list)
