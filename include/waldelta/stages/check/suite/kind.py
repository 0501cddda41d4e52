"""The base class of all kinds of expectations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from pyspark.sql import Column

from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation
from waldelta.stages.check.suite.target_facts import JudgedRows, TargetFacts

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
# Which rows don't meet an expectation, and which it applies to.
Masks = tuple[pa.ChunkedArray, pa.ChunkedArray]


@dataclass(frozen=True, slots=True)
class RowCondition:
    """One expectation: ``unexpected`` is true for a failing row, ``judged`` for a row it applies
    to.

    ``columns`` are the columns it reads, None where unknown; ``mostly`` is the share of judged rows
    that must meet it.
    """

    unexpected: Column
    judged: Column
    columns: tuple[str, ...] | None
    mostly: float = 1.0


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kind: its Python type, its meaning, and other options of pydantic's Field,
    such as a default.
    """

    type: Any
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, value: Any) -> bool:
        """Returns whether a value is of the type.

        >>> [Argument(list[str], "columns").takes(value) for value in (["id"], "id", None)]
        [True, False, False]
        """
        try:
            _adapter(self.type).validate_python(value, strict=True)
        except ValidationError:
            return False
        return True


@cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(of)


class ExpectationKind:
    """A kind of expectation: how it is planned and evaluated, and what its result depends on.

    ``type`` is the name in Great Expectations. ``scope`` is what a planned expectation of this kind
    depends on, unless it is an engineer's own. ``of_nulls`` returns, of a kind that judges nulls,
    the SQL condition by which a value in ``_wd_raw`` isn't one. A kind that ``needs_profile`` takes
    the ``columns`` of its arguments as measured, with the number of rows.

    A kind with ``arguments`` gets a class in Great Expectations, which checks them and describes
    the expectation on a page. The other kinds are Great Expectations' own.
    """

    type: str
    scope: ClassVar[DependsOn] = "rows"
    of_nulls: Callable[[str], str] | None = None
    needs_profile: ClassVar[bool] = False
    arguments: ClassVar[Mapping[str, Argument]] = {}

    def plan(self, facts: TargetFacts) -> Iterable[PlannedExpectation]:  # noqa: ARG002
        """Yields the built-in expectations of this kind that a target must meet."""
        return ()

    def depends_on(self, planned: PlannedExpectation) -> DependsOn:
        """Returns what decides the result of an expectation of this kind."""
        return self.scope if planned.origin != "own" else self.own_scope(planned.kwargs)

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:  # noqa: ARG002
        """Returns what decides the result of an own expectation, by its arguments."""
        return "anything"

    def misfits(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Returns the arguments that a kind of ours lacks, doesn't take, or takes of another type.

        Great Expectations says the same of its own kinds, and converts some types.
        """
        if not self.arguments:
            return []
        absent = {name for name, of in self.arguments.items() if "default" not in of.options}
        return sorted(
            (absent - kwargs.keys())
            | (kwargs.keys() - self.arguments.keys())
            | {n for n in self.arguments.keys() & kwargs if not self.arguments[n].takes(kwargs[n])}
        )

    def is_judged(self, kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Returns whether the expectation has a result; if not, it is only measured."""
        return True

    def judges_rows(self, kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Returns whether it judges each row by itself, with these arguments."""
        return self.scope == "row"

    def row_condition(self, kwargs: Mapping[str, Any]) -> RowCondition | None:  # noqa: ARG002
        """Returns the condition on single rows in Spark; None when there is none."""
        return None

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:  # noqa: ARG002
        """Returns the columns that Arrow reads to judge single rows; None when it can't."""
        return None

    def failing(self, rows: pa.Table, planned: PlannedExpectation) -> Masks | None:  # noqa: ARG002
        """Returns by Arrow which rows don't meet the expectation; None when that is uncertain."""
        return None

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome by the rows that don't meet the expectation."""
        details = {"unexpected_count": found.rows}
        return Outcome(planned, not found.rows, None, found.rows, details=details)

    def outcomes(
        self,
        planned: Sequence[PlannedExpectation],  # noqa: ARG002
        rows: JudgedRows,  # noqa: ARG002
    ) -> Sequence[Outcome] | None:
        """Returns the outcomes of expectations on a target as a whole; None for another kind."""
        return None

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns the expectation in words for the report, as a template and its parameters."""
        return "$meaning", kwargs


@dataclass(frozen=True)
class OtherKind(ExpectationKind):
    """A kind of Great Expectations that only it evaluates."""

    type: str

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
