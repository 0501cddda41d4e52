"""Expectations of a target: what they are planned from, their kinds, their outcomes, and the report
of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from waldelta.config.expectation_files import Severity
from waldelta.errors import QualityFailed, WaldeltaError
from waldelta.lake import TargetVersion
from waldelta.lake.ledger import CAN_BE_JUDGED, TableState
from waldelta.lake.ledger.check_records import is_admission
from waldelta.pipeline.lag import FreshnessLimit
from waldelta.quantities import counted
from waldelta.row_filter import EnumType
from waldelta.row_filter.spark.evaluate import evaluate, is_certain
from waldelta.spark import Runner
from waldelta.stages.check.constraints.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.measure.failing_rows import (
    FailingRows,
    IntegerKey,
    duplicate_keys,
    find_broken_rows,
    has_few_keys,
    leave_to_spark,
)
from waldelta.stages.check.measure.profile import (
    Measured,
    ProfileBounds,
    profile_by_statistics,
    profile_by_values,
    profile_in_memory,
)
from waldelta.stages.check.measure.references import CheckedTarget, Reference
from waldelta.stages.check.suite.sql_conditions import listed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows of a query, such as the changes that a gate judges."""

    frame: DataFrame

    @property
    def types(self) -> Mapping[str, str]:
        """The Spark types of the columns, by the names that Great Expectations lists."""
        return {listed(name): kind for name, kind in self.frame.dtypes}

    def duplicate_keys(self, columns: Sequence[str], *, are_met: bool) -> FailingRows:  # noqa: ARG002
        """Returns the count of rows whose values in ``columns`` another row has too; nulls count as
        equal.

        ``are_met`` is ignored here: all rows are compared.
        """
        return duplicate_keys(self.frame, columns)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of a checked target, and results of earlier checks that save reading them.

    ``table`` is the version that Arrow reads; None where only Spark reads the rows. ``met`` is an
    earlier version all of whose rows met the suite. ``measured`` is the profile, if it was
    measured. ``in_memory`` are all rows of a small mirror, which are read once.
    """

    target: CheckedTarget
    runner: Runner
    types: Mapping[str, str] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    table: TargetVersion | None = None
    met: int | None = None
    measured: Measured | None = None
    in_memory: pa.Table | None = None

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
        with leave_to_spark(f"measures the profile of {self.target.state.table_name}"):
            if self.in_memory is not None:
                return profile_in_memory(self.in_memory, columns)
            if table is not None and self.met is not None:
                return profile_by_statistics(table, columns)
            if table is not None and not table.place.lake.on_spark:
                return profile_by_values(self.target.live_rows(table), columns)
        return None if self.met is not None else profile_by_values(self.frame(), columns)

    def broken_rows(self) -> dict[str, FailingRows]:
        """Returns the rows that break each invariant of the mode, by its label."""
        mode, key = self.target.state.target_mode, self.target.state.key_columns
        with leave_to_spark(f"judges what {self.target.state.table_name} keeps"):
            table = self.target.open()
            if not table.place.lake.on_spark and has_few_keys(table, key):
                return find_broken_rows(table, table.schema.names, mode, key)
        frame = self.target.all_rows(self.runner)
        return find_broken_rows(frame, frame.columns, mode, key)

    def duplicate_keys(self, columns: Sequence[str], *, are_met: bool) -> FailingRows:
        """Returns the count of rows whose values in ``columns`` another row has too.

        Arrow counts them where this process reads the keys, else Spark. With ``are_met``, the rows
        of version ``met`` have no duplicates: only keys of rows written since are compared with the
        others.
        """
        table = self.table
        if table is None:
            return duplicate_keys(self.frame(), columns)
        is_single, since, key = len(columns) == 1, self.met if are_met else None, None
        with leave_to_spark(f"compares the keys of {self.target.state.table_name}"):
            # In other rows than live ones, keys occur again.
            if not self.target.state.target_mode.keeps_rows and (is_single or since is not None):
                key = IntegerKey.of(table, columns[0])
            if key is not None and since is not None:
                key = key.written_since(since)
            if is_single and key is not None and key.is_unique():
                return FailingRows()
            if has_few_keys(table, columns):
                return duplicate_keys(self.target.live_rows(table), columns)
        rows = self.frame() if key is None else key.rows_in_question(self.frame())
        return duplicate_keys(rows, columns)


# Rows that expectations on several rows are judged on.
JudgedRows = TargetRows | QueryRows


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

    ``bounds`` are the bounds from earlier measurements (None: not judged). Planning adds to
    ``omitted`` the rules that can't be judged, and why.
    """

    state: TableState
    columns: Sequence[str]
    rules: SourceRules = field(default_factory=SourceRules)
    bounds: ProfileBounds | None = None
    omitted: list[str] = field(default_factory=list)


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
        result = "could not be evaluated" if self.success is None else ""
        if self.unexpected_count:
            result = counted(self.unexpected_count, "row")
        kind = "" if self._is_unnamed else f"{self.planned.type}: "
        return f"{kind}{self.name}" + (f" ({result})" if result else "")

    @property
    def name(self) -> str:
        """Returns what the expectation means, an own one with its column."""
        column = self.planned.kwargs.get("column") if self.planned.origin == "own" else None
        if column is None or self._is_unnamed:
            return self.planned.meaning
        return f"{self.planned.meaning} on {column}"

    @property
    def verdict(self) -> str:
        """Returns in words whether the expectation is met, and how many rows don't meet it."""
        if self.success is None:
            return "not evaluated"
        if self.success:
            return str(self.observed) if is_admission(self.observed) else "met"
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
        """Returns in one line how many expectations were judged on how many tables, and how many
        weren't met.
        """
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


# Kinds of Great Expectations that judge only the target's rows, together or one by one.
_OF_ROWS = (
    "expect_column_",
    "expect_compound_columns_",
    "expect_multicolumn_",
    "expect_select_column_",
    "expect_table_column",
    "expect_table_row_count_to_be_between",
    "expect_table_row_count_to_equal",
)
# This kind also has one of the prefixes above, but depends on another table.
_OF_OTHERS = "expect_table_row_count_to_equal_other_table"


# What decides the result of an expectation.
# "row": each row for itself, so a row that met it meets it until it changes.
# "rows": all rows of the target together.
# "earlier runs": also what earlier runs measured.
# "other data": other targets, the source, or the time of the check. Maintenance evaluates only
# these for a target that is unchanged.
# "anything": what an own expectation refers to, such as the current date.
DependsOn = Literal["row", "rows", "earlier runs", "other data", "anything"]
ALL_ROWS = "true"


@dataclass(frozen=True, slots=True)
class RowCondition:
    """An expectation on single rows, as conditions in Spark SQL: a row that is ``judged`` meets it
    where ``met`` is true, and if ``null_meets`` where it is null.

    ``columns`` are the columns it reads, None where unknown. ``suffices``: a column; rows without
    nulls in it certainly meet the expectation. So does a row with a flag in a column of ``unsent``.
    Examples of rows that fail have the columns in ``example_columns``.
    """

    met: str
    columns: Sequence[str] | None
    judged: str = ALL_ROWS
    null_meets: bool = True
    suffices: str | None = None
    unsent: Sequence[str] = ()
    example_columns: Sequence[str] = ()

    @property
    def read_by_arrow(self) -> Sequence[str] | None:
        """Returns the columns that Arrow reads to judge rows; None where only Spark can."""
        columns = self.columns if is_certain(self.met) else None
        return columns if self.suffices is None else [*(columns or ()), self.suffices]

    def failing(self, rows: pa.Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray] | None:
        """Returns by Arrow which rows fail, and which are judged; None where that is uncertain."""
        is_sure = self.suffices is not None and not rows[self.suffices].null_count
        met, judged = evaluate(ALL_ROWS if is_sure else self.met, rows), evaluate(self.judged, rows)
        if met is None or judged is None:
            return None
        fails = pc.and_(judged, pc.invert(pc.fill_null(met, self.null_meets)))
        for flag in self.unsent:
            fails = pc.and_(fails, pc.invert(pc.fill_null(rows[flag], True)))
        return fails, judged


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kind: its Python type, its meaning, and other options of pydantic's Field,
    such as a default.
    """

    type: Any
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)


# An expectation in words: a template and its parameters.
Words = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class ExpectationKind:
    """A kind of expectation: how it is planned and evaluated, and what its result depends on.

    ``type`` is the name in Great Expectations. ``scope`` is what a planned expectation of this kind
    depends on, unless it is an engineer's own. ``of_nulls`` returns, of a kind that judges nulls,
    the SQL condition by which a value in ``_wd_raw`` isn't one. A kind that ``needs_profile`` takes
    the ``columns`` of its arguments as measured, with the number of rows. ``words`` describes an
    expectation with these arguments for a report.

    An ``is_internal`` kind is planned, and no own expectation: what it is judged by isn't among its
    arguments.

    A kind that ``is_ours`` gets a class in Great Expectations, which checks its ``arguments`` and
    describes the expectation on a page. The other kinds are Great Expectations' own, which takes
    more arguments, and converts some.
    """

    type: str
    _: KW_ONLY
    summary: str | None = None
    scope: DependsOn = "rows"
    of_nulls: Callable[[str], str] | None = None
    needs_profile: bool = False
    is_ours: bool = True
    is_internal: bool = False
    # What one row does, and what several rows do, that don't meet the expectation.
    one: str = "row fails"
    several: str = "rows fail"
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    words: Callable[[Mapping[str, Any]], Words] = lambda kwargs: ("$meaning", kwargs)

    def plan(self, facts: TargetFacts) -> Iterable[PlannedExpectation]:  # noqa: ARG002
        """Yields the built-in expectations of this kind that a target must meet."""
        return ()

    def depends_on(self, planned: PlannedExpectation) -> DependsOn:
        """Returns on what the result of an expectation of this kind depends: its rows, other data,
        or anything.
        """
        return self.scope if planned.origin != "own" else self.own_scope(planned.kwargs)

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:  # noqa: ARG002
        """Returns on what the result of an own expectation with these arguments depends."""
        return "anything"

    def misfits(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Returns the arguments that are missing, aren't known, or are of another type."""
        try:
            _model_of(self).model_validate(kwargs)
        except ValidationError as err:
            return sorted({str(error["loc"][0]) for error in err.errors()})
        return []

    def is_judged(self, kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Returns whether the expectation has a result; if not, it is only measured."""
        return True

    def row_condition(self, planned: PlannedExpectation) -> RowCondition | None:  # noqa: ARG002
        """Returns the condition on single rows; None when there is none."""
        return None

    def outcome(self, planned: PlannedExpectation, failing_rows: FailingRows) -> Outcome:
        """Returns the outcome by the rows that don't meet it; the page shows examples of them."""
        observed = counted(failing_rows.rows, self.one, self.several)
        keys = "; ".join(f"({key})" for key in failing_rows.examples)
        details = {
            "observed_value": f"{observed}, such as {keys}" if keys else observed,
            "unexpected_count": failing_rows.rows,
        }
        if failing_rows.total is not None:
            details["element_count"] = failing_rows.total
        is_met = failing_rows.are_few(float(planned.kwargs.get("mostly", 1)))
        return Outcome(planned, is_met, observed, failing_rows.rows, details=details)


@cache
def _model_of(kind: ExpectationKind) -> type[BaseModel]:
    fields: Any = {name: (of.type, Field(**of.options)) for name, of in kind.arguments.items()}
    return create_model(kind.type, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


class OtherKind(ExpectationKind):
    """A kind of Great Expectations that only it evaluates."""

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "rows" for types that are known to judge nothing else."""
        is_of_rows = self.type.startswith(_OF_ROWS) and self.type != _OF_OTHERS
        return "rows" if is_of_rows and is_plain(kwargs) else "anything"


def is_plain(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the arguments of an own expectation are values: none is a condition on rows,
    or a parameter that Great Expectations computes.
    """
    return "row_condition" not in kwargs and not any(
        isinstance(value, Mapping) for value in kwargs.values()
    )
