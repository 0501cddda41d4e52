"""Kinds of expectations that judge each row by itself, by Spark columns that are true for rows that
fail.

They count what Great Expectations counts on Spark (tests compare the two): a null value meets every
expectation except "not null", and so does a condition that evaluates to null. Only for expectations
on nulls, with_raw() makes both consider values stored in ``_wd_raw``. Great Expectations runs a
query per expectation to count failing rows; the quick check evaluates many in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.quantities import counted
from waldelta.row_filter.spark.evaluate import evaluate, is_certain
from waldelta.spark_sql import quote
from waldelta.stages.check.suite._row_rules import (
    IN_SET,
    LENGTHS_BETWEEN,
    LENGTHS_EQUAL,
    MATCH_REGEX,
    NOT_NULL,
    ROWS_SATISFY,
    conditions,
    enum_labels,
    not_null,
)
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kind import (
    Argument,
    DependsOn,
    ExpectationKind,
    Judgement,
    RowCondition,
    is_plain,
)
from waldelta.stages.check.suite.sql_conditions import (
    columns_of,
    is_fixed,
    null_condition,
    value_condition,
)
from waldelta.stages.check.suite.target_facts import TargetFacts

# Great Expectations can't evaluate such a comparison, and reports only that it failed.
NO_TEXT = (
    "Great Expectations doesn't compare a text or boolean with bounds: cast it in the condition of"
    " an expect_target_rows_to_satisfy"
)


def _is_judged(*values: Column) -> Column:
    return reduce(or_, (value.isNotNull() for value in values))


@dataclass(frozen=True)
class RowKind(ExpectationKind):
    """A kind that judges each row by itself.

    ``columns`` are the arguments that name columns, ``required`` and ``optional`` its other
    arguments. ``expected`` returns the Spark condition, by these columns and the arguments, or None
    for arguments that only Great Expectations takes. ``judged`` is true for rows that it applies
    to: by default, those where one of the columns isn't null.

    ``meets`` returns by Arrow which values, none of them null, meet it. ``rules`` yields built-in
    expectations of this kind.
    """

    type: str
    columns: tuple[str, ...]
    expected: Callable[..., Column | None]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    judged: Callable[..., Column] = _is_judged
    meets: Callable[[pa.ChunkedArray, Mapping[str, Any]], pa.ChunkedArray] | None = None
    rules: Callable[[TargetFacts], Iterable[PlannedExpectation]] | None = None
    of_nulls: Callable[[str], str] | None = None

    scope: ClassVar[DependsOn] = "row"

    def plan(self, facts: TargetFacts) -> Iterable[PlannedExpectation]:
        """Yields the built-in expectations that its rules yield."""
        return () if self.rules is None else self.rules(facts)

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row", unless an argument may refer to other rows or to the date."""
        return "row" if is_plain(kwargs) else "anything"

    def other_arguments(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Returns the arguments that only Great Expectations takes."""
        own = self.required.union(self.columns, self.optional, {"mostly"})
        return sorted(kwargs.keys() - own)

    def row_condition(self, kwargs: Mapping[str, Any]) -> RowCondition | None:
        """Returns the condition; None for arguments that only Great Expectations takes."""
        required = self.required.union(self.columns)
        common = {name: kwargs[name] for name in kwargs.keys() & {"mostly"} - self.optional}
        if not required <= kwargs.keys() or self.other_arguments(kwargs) or not are_common(common):
            return None
        names = tuple(column_name(kwargs[argument]) for argument in self.columns)
        values = [F.col(quote(name)) for name in names]
        expected, judged = self.expected(*values, kwargs), self.judged(*values)
        if expected is None:
            return None
        return RowCondition(judged & ~expected, judged, names, float(kwargs.get("mostly", 1)))

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns the column whose values ``meets`` judges."""
        if self.meets is None:
            return super().columns_read(planned)
        return [column_name(planned.kwargs["column"])]

    def is_met_by(self, rows: pa.Table, planned: PlannedExpectation) -> bool:
        """Returns whether all values that aren't null meet the expectation."""
        if self.meets is None:
            return super().is_met_by(rows, planned)
        values = rows[column_name(planned.kwargs["column"])].drop_null()
        return bool(pc.all(self.meets(values, planned.kwargs), min_count=0).as_py())


class RowsSatisfy(RowKind):
    """Every row of the target, or a share of them, makes a Spark SQL condition true.

    Null counts as not true.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {
        "condition": Argument(str, "a condition in Spark SQL"),
        "meaning": Argument(str, "the same in words, for the report"),
        "mostly": Argument(
            float, "smallest share of rows that must meet it", {"default": 1.0, "ge": 0, "le": 1}
        ),
    }
    metrics: ClassVar[tuple[str, ...]] = ("target_rows.unsatisfied_count", "table.row_count")

    def row_condition(self, kwargs: Mapping[str, Any]) -> RowCondition | None:
        """Returns the condition with the columns that its text names."""
        found = super().row_condition(kwargs)
        return None if found is None else replace(found, columns=columns_of(kwargs["condition"]))

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns the columns of a condition that Arrow may evaluate."""
        condition = planned.kwargs["condition"]
        columns = columns_of(condition) if is_certain(condition) else None
        return super().columns_read(planned) if columns is None else columns

    def is_met_by(self, rows: pa.Table, planned: PlannedExpectation) -> bool:
        """Returns whether all rows certainly make the condition true."""
        if super().is_met_by(rows, planned):
            return True
        found = evaluate(planned.kwargs["condition"], rows)
        return found is not None and bool(pc.all(pc.fill_null(found, False), min_count=0).as_py())

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row" if the condition is known to depend only on the row."""
        is_of_row = is_fixed(str(kwargs.get("condition")))
        return super().own_scope(kwargs) if is_of_row else "anything"

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns the meaning and the condition."""
        share = " for a share of $mostly" if kwargs.get("mostly", 1) < 1 else ""
        return f"$meaning{share}; in Spark SQL: $condition", kwargs

    def judge(self, kwargs: Mapping[str, Any], metrics: Mapping[str, Any]) -> Judgement:
        """Returns whether the share of rows that meet the condition is large enough."""
        unexpected, rows = (metrics[name] for name in self.metrics)
        return is_met(unexpected, rows, kwargs["mostly"]), {
            "observed_value": counted(unexpected, "row fails", "rows fail"),
            "element_count": rows,
            "unexpected_count": unexpected,
        }


def are_common(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether any row expectation may have these arguments: a share of the judged rows.

    >>> are_common({"mostly": 0.5}), are_common({"mostly": 2}), are_common({"regex": "x"})
    (True, False, False)
    """
    mostly = kwargs.get("mostly", 1.0)
    is_number = isinstance(mostly, (int, float)) and not isinstance(mostly, bool)
    return kwargs.keys() <= {"mostly"} and is_number and 0 <= mostly <= 1


def is_met(unexpected: int, judged: int, mostly: float) -> bool:
    """Returns whether enough rows meet the expectation.

    Divides as Great Expectations does, because 0.55 * 100 is more than 55.

    >>> is_met(45, 100, 0.55), is_met(46, 100, 0.55), is_met(0, 0, 1.0)
    (True, False, True)
    """
    return not unexpected or (judged - unexpected) / judged >= mostly


def count_rows(frame: DataFrame, conditions: Sequence[RowCondition]) -> list[tuple[int, int]]:
    """Returns of each condition how many rows fail it, and how many it applies to, in one query.

    The latter are the failing ones again where all rows must meet it.
    """
    asked = [
        F.count(F.when(counts, 1)).alias(f"{name}{n}")
        for n, c in enumerate(conditions)
        for name, counts in (("f", c.unexpected), ("j", c.judged if c.mostly < 1 else c.unexpected))
    ]
    (row,) = frame.agg(*asked).collect()
    return [(int(row[f"f{n}"]), int(row[f"j{n}"])) for n in range(len(conditions))]


def column_name(column: Any) -> str:
    """Returns a column's name; Great Expectations puts a name with a dot in backticks."""
    text = str(column)
    return text[1:-1] if "." in text and text.startswith("`") and text.endswith("`") else text


def _between(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    low, high = (_number(kwargs.get(name)) for name in ("min_value", "max_value"))
    if any(isinstance(bound, Mapping) for bound in (low, high)):
        return None
    parts = []
    if low is not None:
        parts.append(value > F.lit(low) if kwargs.get("strict_min") else value >= F.lit(low))
    if high is not None:
        parts.append(value < F.lit(high) if kwargs.get("strict_max") else value <= F.lit(high))
    if not parts:
        return None
    between = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    # Otherwise Spark would compare as texts, or cast the texts to the bound's type while all can be
    # cast.
    is_text = F.typeof(value).rlike("^(string|boolean)")
    return F.when(is_text, F.raise_error(F.lit(NO_TEXT)).cast("boolean")).otherwise(between)


def _number(bound: Any) -> Any:
    """Returns a bound as Great Expectations takes it: a float for a number or its text."""
    try:
        return bound if bound is None else float(bound)
    except (TypeError, ValueError):
        return bound


def _in_set(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    values = kwargs["value_set"]
    return value.isin(list(values)) if isinstance(values, (list, tuple, set)) and values else None


def _not_in_set(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    found = _in_set(value, kwargs)
    return found if found is None else ~found


def _regex(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    return value.rlike(kwargs["regex"]) if isinstance(kwargs["regex"], str) else None


def _not_regex(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    found = _regex(value, kwargs)
    return found if found is None else ~found


def _length_equals(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    return F.length(value) == F.lit(kwargs["value"]) if isinstance(kwargs["value"], int) else None


def _greater(left: Column, right: Column, kwargs: Mapping[str, Any]) -> Column:
    return (left >= right) | left.eqNullSafe(right) if kwargs.get("or_equal") else left > right


_BOUNDS = frozenset({"min_value", "max_value", "strict_min", "strict_max"})
_COLUMN, _PAIR = ("column",), ("column_A", "column_B")
_SET, _REGEX = frozenset({"value_set"}), frozenset({"regex"})
# ``meets`` takes the arguments that the rules plan.
ROW_EXPECTATION_KINDS = (
    RowKind(
        NOT_NULL,
        _COLUMN,
        lambda value, _: value.isNotNull(),
        judged=lambda _: F.lit(True),
        rules=not_null,
        of_nulls=value_condition,
    ),
    RowKind(
        IN_SET,
        _COLUMN,
        _in_set,
        _SET,
        meets=lambda values, kwargs: pc.is_in(
            values, value_set=pa.array(kwargs["value_set"], values.type)
        ),
        rules=enum_labels,
    ),
    RowsSatisfy(
        ROWS_SATISFY,
        (),
        # A null condition admits no row.
        lambda kwargs: F.coalesce(F.expr(kwargs["condition"]), F.lit(False)),
        frozenset({"condition"}),
        frozenset({"meaning"}),
        judged=lambda: F.lit(True),
        rules=conditions,
    ),
    RowKind(
        "expect_column_values_to_be_null",
        _COLUMN,
        lambda value, _: value.isNull(),
        judged=lambda _: F.lit(True),
        of_nulls=null_condition,
    ),
    RowKind("expect_column_values_to_be_between", _COLUMN, _between, optional=_BOUNDS),
    RowKind("expect_column_values_to_not_be_in_set", _COLUMN, _not_in_set, _SET),
    RowKind(
        MATCH_REGEX,
        _COLUMN,
        _regex,
        _REGEX,
        meets=lambda values, kwargs: pc.match_substring_regex(values, kwargs["regex"]),
    ),
    RowKind("expect_column_values_to_not_match_regex", _COLUMN, _not_regex, _REGEX),
    RowKind(
        LENGTHS_BETWEEN,
        _COLUMN,
        lambda value, kwargs: _between(F.length(value), kwargs),
        optional=_BOUNDS,
        meets=lambda values, kwargs: pc.less_equal(pc.utf8_length(values), kwargs["max_value"]),
    ),
    RowKind(
        LENGTHS_EQUAL,
        _COLUMN,
        _length_equals,
        frozenset({"value"}),
        meets=lambda values, kwargs: pc.equal(pc.utf8_length(values), kwargs["value"]),
    ),
    RowKind(
        "expect_column_pair_values_to_be_equal",
        _PAIR,
        lambda left, right, _: left.eqNullSafe(right),
    ),
    RowKind(
        "expect_column_pair_values_a_to_be_greater_than_b",
        _PAIR,
        _greater,
        optional=frozenset({"or_equal"}),
    ),
)
