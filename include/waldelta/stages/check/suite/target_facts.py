"""Target facts: where a target is, and what its suite is planned from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from waldelta.errors import class_and_text
from waldelta.lake import READ_FAILURES, DeltaTarget, TargetVersion
from waldelta.lake.ledger import TableState
from waldelta.pipeline.lag import FreshnessLimit
from waldelta.row_filter import EnumType
from waldelta.spark import Runner
from waldelta.stages.check.constraints.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.measure.duplicate_keys import (
    IntegerKey,
    duplicate_keys,
    has_few_keys,
)
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.measure.profile import (
    Before,
    Measured,
    profile_by_statistics,
    profile_by_values,
)
from waldelta.stages.check.measure.references import Reference
from waldelta.stages.check.suite.sql_conditions import listed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target to check, as one Delta version."""

    state: TableState
    version: int
    table: DeltaTarget

    def frame(self, runner: Runner) -> DataFrame:
        """Returns the rows that the source has now, as a mirror would hold them."""
        return self.state.kept_as.live_rows(self.kept(runner), self.state.key_columns)

    def kept(self, runner: Runner) -> DataFrame:
        """Returns all rows, including those that are no longer in the source (unlike ``frame``)."""
        return self.table.frame(runner.spark(), self.version)


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a query, such as the changes that a gate judges."""

    given: DataFrame

    @property
    def types(self) -> Mapping[str, str]:
        """The Spark types of the columns, by the names that Great Expectations lists."""
        return {listed(name): kind for name, kind in self.given.dtypes}

    def duplicate_keys(self, columns: Sequence[str], *, are_met: bool) -> FailingRows:  # noqa: ARG002
        """Counts the rows that share these values with another row; nulls count as equal.

        ``are_met``: all rows of the version before the changes are known to differ in them.
        """
        return duplicate_keys(self.given, columns)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of a checked target, and what is known of them before they are read.

    ``table`` is what Arrow reads, None where only Spark reads the rows. ``met`` is a version whose
    rows are all known to meet the suite. ``measured`` is the profile, if it was measured.
    """

    target: CheckedTarget
    runner: Runner
    types: Mapping[str, str] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    table: TargetVersion | None = None
    met: int | None = None
    measured: Measured | None = None

    def frame(self) -> DataFrame:
        """Returns the rows that the source has now."""
        return self.target.frame(self.runner)

    def measure(self, columns: Sequence[Sequence[Any]]) -> Measured | None:
        """Returns the profile; None where the target lacks a column.

        After changes it comes from the statistics in the log, and is None without these.
        """
        if not {listed(name) for name, _ in columns} <= self.types.keys():
            return None
        table = self.table
        try:
            if table is not None and self.met is not None:
                return profile_by_statistics(table, columns)
            if table is not None and not table.place.lake.on_spark:
                return profile_by_values(table, columns)
        except (*READ_FAILURES, KeyError) as err:
            name = self.target.state.table_name
            log.info("table=%s: Spark measures the profile: %s", name, class_and_text(err))
        return None if self.met is not None else profile_by_values(self.frame(), columns)

    def duplicate_keys(self, columns: Sequence[str], *, are_met: bool) -> FailingRows:
        """Counts them by Arrow where this process reads the keys, else by Spark.

        Only keys of rows written since ``met`` are compared with the others.
        """
        table = self.table
        if table is None:
            return duplicate_keys(self.frame(), columns)
        is_single, since, key = len(columns) == 1, self.met if are_met else None, None
        if is_single or since is not None:
            key = IntegerKey.of(table, columns[0])
        if key is not None and since is not None:
            key = key.written_since(since)
        if is_single and key is not None and key.is_unique():
            return FailingRows()
        try:
            if has_few_keys(table, columns):
                return duplicate_keys(table, columns)
        except READ_FAILURES as err:
            name = self.target.state.table_name
            log.info("table=%s: Spark compares the keys: %s", name, class_and_text(err))
        rows = self.frame() if key is None else key.rows_in_question(self.frame())
        return duplicate_keys(rows, columns)


# Rows that expectations on several rows are judged on.
JudgedRows = TargetRows | GivenRows


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What the source guarantees for all rows of a table, and what limits its target.

    That is CHECK constraints, the enums of columns by name, declared types, and foreign keys. The
    target's freshness limits belong here too, and the number of rows it lacks because a value was
    never sent (None: not judged). ``omitted`` are rules that can't be judged, and why.
    """

    checks: Sequence[CheckConstraint] = ()
    enums: Mapping[str, EnumType] = field(default_factory=dict)
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
