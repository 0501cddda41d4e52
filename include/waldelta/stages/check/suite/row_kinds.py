"""Kinds of expectations that judge each row by itself, by Spark columns that are true for rows that
fail.

They count what Great Expectations counts on Spark (tests compare the two): a null value meets every
expectation except "not null", and so does a condition that evaluates to null. Only for expectations
on nulls, with_raw() makes both consider values stored in ``_wd_raw``. Great Expectations runs a
query per expectation to count failing rows; a check counts those of all in one. Arrow counts them
where it certainly means the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from math import isnan
from operator import and_, or_
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.row_filter.spark.evaluate import evaluate, is_certain
from waldelta.spark_sql import quote
from waldelta.stages.check.measure.failing_rows import FailingRows
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
from waldelta.stages.check.suite.expectation import (
    Argument,
    DependsOn,
    ExpectationKind,
    Masks,
    Outcome,
    PlannedExpectation,
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


# Decimals of so many digits are distinct doubles.
_DIGITS, _MOST_EXACT = 15, 1e15
# A query that counts for more conditions than this takes longer to plan than several.
_MOST_COUNTED = 500
# Which rows an expectation applies to: all, those with a value in every column, or in any.
Judges = Literal["all", "complete", "any"]
# What an argument of an expectation on pairs says about it; by default, pairs of nulls are ignored.
IGNORE_ROW_IF = "ignore_row_if"
# Arguments that are true or false; Great Expectations converts other values.
_SWITCHES = frozenset({"strict_min", "strict_max", "or_equal"})
_PAIRS: dict[str, Judges] = {
    "both_values_are_missing": "any",
    "either_value_is_missing": "complete",
    "neither": "all",
}


@dataclass(frozen=True)
class RowKind(ExpectationKind):
    """A kind that judges each row by itself.

    ``columns`` are the arguments that name columns, ``required`` and ``optional`` its other
    arguments. ``expected`` returns the Spark condition, by these columns and the arguments, or None
    for arguments that only Great Expectations takes. ``meets`` returns the same by Arrow, or None
    where that is uncertain. Both see the lengths of texts where it ``is_of_lengths``, and it
    expects the contrary where it ``is_negated``. A row whose condition is null meets it. ``judges``
    says which rows it applies to. ``rules`` yields built-in expectations of this kind.
    """

    type: str
    columns: tuple[str, ...]
    expected: Callable[..., Column | None]
    meets: Callable[..., pa.ChunkedArray | None]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    judges: Judges = "any"
    is_of_lengths: bool = False
    is_negated: bool = False
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

    def judges_rows(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether no argument is one that only Great Expectations takes, or refuses."""
        required = self.required.union(self.columns)
        common = {name: kwargs[name] for name in kwargs.keys() & {"mostly"} - self.optional}
        ignored = kwargs.get(IGNORE_ROW_IF, "neither")
        return (
            required <= kwargs.keys()
            and not self.other_arguments(kwargs)
            and are_common(common)
            and isinstance(ignored, str)
            and ignored in _PAIRS
            and all(isinstance(kwargs[name], str) for name in self.columns)
            and all(isinstance(kwargs[name], bool) for name in _SWITCHES & kwargs.keys())
        )

    def _judged(self, kwargs: Mapping[str, Any]) -> Judges:
        return _PAIRS[kwargs[IGNORE_ROW_IF]] if IGNORE_ROW_IF in kwargs else self.judges

    def row_condition(self, kwargs: Mapping[str, Any]) -> RowCondition | None:
        """Returns the condition; None for arguments that only Great Expectations takes."""
        if not self.judges_rows(kwargs):
            return None
        names = tuple(column_name(kwargs[argument]) for argument in self.columns)
        values = [F.col(quote(name)) for name in names]
        present = [value.isNotNull() for value in values]
        if self.is_of_lengths:
            values = [*map(F.length, values)]
        if (expected := self.expected(*values, kwargs)) is None:
            return None
        expected = ~expected if self.is_negated else expected
        judges = self._judged(kwargs)
        if judges == "all":
            return RowCondition(~expected, None, names)
        judged = reduce(_BOTH[judges], present)
        return RowCondition(judged & ~expected, judged, names)

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns the columns of the condition, if Arrow may know it."""
        if not self.judges_rows(planned.kwargs):
            return None
        return [column_name(planned.kwargs[argument]) for argument in self.columns]

    def failing(self, rows: pa.Table, planned: PlannedExpectation) -> Masks | None:
        """Returns the rows that fail, and those that are judged."""
        values = [rows[column_name(planned.kwargs[argument])] for argument in self.columns]
        present = [pc.is_valid(value) for value in values]
        try:
            if self.is_of_lengths:
                values = [*map(pc.utf8_length, values)]
            meets = self.meets(*values, planned.kwargs)
        except (pa.ArrowException, OverflowError, TypeError):
            return None  # A value of no type that Arrow knows, or a number beyond 64 bits.
        if meets is None:
            return None
        meets = pc.invert(meets) if self.is_negated else meets
        judges = self._judged(planned.kwargs)
        judged = _all_true(rows) if judges == "all" else reduce(_ARROW_BOTH[judges], present)
        return pc.and_(judged, pc.invert(pc.fill_null(meets, True))), judged

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome by the rows that fail, with details as Great Expectations' own."""
        mostly = float(planned.kwargs.get("mostly", 1))
        details = {
            "element_count": found.total,
            "nonnull_count": None if self.judges == "all" else found.judged,
            "unexpected_count": found.rows,
            "partial_unexpected_list": [*found.examples],
        }
        return Outcome(planned, found.are_few(mostly), None, found.rows, details=details)


_BOTH = {"complete": and_, "any": or_}
_ARROW_BOTH = {"complete": pc.and_, "any": pc.or_}


def _all_true(rows: pa.Table) -> pa.ChunkedArray:
    return pa.chunked_array([pa.repeat(True, len(rows))])


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

    def row_condition(self, kwargs: Mapping[str, Any]) -> RowCondition | None:
        """Returns the condition with the columns that its text names."""
        found = super().row_condition(kwargs)
        return None if found is None else replace(found, columns=columns_of(kwargs["condition"]))

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns the columns of a condition that Arrow may evaluate."""
        if not self.judges_rows(planned.kwargs):
            return None
        condition = planned.kwargs["condition"]
        columns = columns_of(condition) if is_certain(condition) else None
        return columns if planned.suffices is None else [*(columns or ()), planned.suffices]

    def failing(self, rows: pa.Table, planned: PlannedExpectation) -> Masks | None:
        """Returns the rows that don't make the condition true."""
        judged = _all_true(rows)
        if planned.suffices is not None and not rows[planned.suffices].null_count:
            return pc.invert(judged), judged
        found = evaluate(planned.kwargs["condition"], rows)
        return None if found is None else (pc.invert(pc.fill_null(found, False)), judged)

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome by the rows that don't make the condition true."""
        # The report shows no values of the columns that a condition reads.
        return ExpectationKind.outcome(self, planned, replace(found, examples=()))

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row" if the condition is known to depend only on the row."""
        is_of_row = is_fixed(str(kwargs.get("condition")))
        return super().own_scope(kwargs) if is_of_row else "anything"

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns the meaning and the condition."""
        share = " for a share of $mostly" if kwargs.get("mostly", 1) < 1 else ""
        return f"$meaning{share}; in Spark SQL: $condition", kwargs


def are_common(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether any row expectation may have these arguments: a share of the judged rows.

    >>> are_common({"mostly": 0.5}), are_common({"mostly": 2}), are_common({"regex": "x"})
    (True, False, False)
    """
    mostly = kwargs.get("mostly", 1.0)
    is_number = isinstance(mostly, (int, float)) and not isinstance(mostly, bool)
    return kwargs.keys() <= {"mostly"} and is_number and 0 <= mostly <= 1


def count_rows(frame: DataFrame, conditions: Sequence[RowCondition]) -> list[FailingRows]:
    """Returns of each condition how many rows fail it, and how many it applies to.

    One query counts for many conditions. It compiles each of them, so what all rows are judged by
    counts nothing but the rows that fail.
    """
    found: list[FailingRows] = []
    for first in range(0, len(conditions), _MOST_COUNTED):
        part = conditions[first : first + _MOST_COUNTED]
        counted = {f"f{n}": c.unexpected for n, c in enumerate(part)}
        counted |= {f"j{n}": c.judged for n, c in enumerate(part) if c.judged is not None}
        counts = [F.count_if(condition).alias(name) for name, condition in counted.items()]
        (row,) = frame.agg(F.count("*").alias("total"), *counts).collect()
        counts_of = row.asDict()
        total = counts_of["total"]
        found += [
            FailingRows(counts_of[f"f{n}"], (), counts_of.get(f"j{n}", total), total)
            for n in range(len(part))
        ]
    return found


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


def _regex(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    return value.rlike(kwargs["regex"]) if isinstance(kwargs["regex"], str) else None


def _equals(value: Column, kwargs: Mapping[str, Any]) -> Column | None:
    return value == F.lit(kwargs["value"]) if isinstance(kwargs["value"], int) else None


def _greater(left: Column, right: Column, kwargs: Mapping[str, Any]) -> Column:
    return (left >= right) | left.eqNullSafe(right) if kwargs.get("or_equal") else left > right


def _meets_bounds(values: pa.ChunkedArray, kwargs: Mapping[str, Any]) -> pa.ChunkedArray | None:
    low, high = (_number(kwargs.get(name)) for name in ("min_value", "max_value"))
    if not {type(low), type(high)} <= {float, type(None)}:
        return None
    if any(bound is not None and isnan(bound) for bound in (low, high)):
        return None  # Spark sorts it above infinity.
    parts = []
    for bound, name, beyond, at_least in (
        (low, "strict_min", pc.greater, pc.greater_equal),
        (high, "strict_max", pc.less, pc.less_equal),
    ):
        if bound is not None:
            if (pair := _comparable(values, bound)) is None:
                return None
            parts.append((beyond if kwargs.get(name) else at_least)(*pair))
    return reduce(pc.and_, parts) if parts else None


def _comparable(values: pa.ChunkedArray, bound: float) -> tuple[pa.ChunkedArray, Any] | None:
    """Returns numbers and a bound that Arrow compares as Spark does, which rounds them to doubles.

    Returns None where that is uncertain: Spark sorts NaN above infinity, and two long decimals may
    round to one double.
    """
    kind = values.type
    if pa.types.is_decimal(kind):
        exact = Decimal(repr(bound))
        is_short = len(exact.as_tuple().digits) <= _DIGITS and abs(bound) < _MOST_EXACT
        return (values, pa.scalar(exact)) if is_short and kind.precision <= _DIGITS else None
    if pa.types.is_integer(kind) or (
        pa.types.is_floating(kind) and not pc.any(pc.is_nan(values)).as_py()
    ):
        return pc.cast(values, pa.float64(), safe=False), bound
    return None


def _is_in_arrow(values: pa.ChunkedArray, kwargs: Mapping[str, Any]) -> pa.ChunkedArray | None:
    """Returns which values are in the set, whose values must be of the column's family."""
    given, kind = kwargs["value_set"], values.type
    if not isinstance(given, (list, tuple, set)) or not given:
        return None
    if pa.types.is_string(kind) and all(isinstance(value, str) for value in given):
        return pc.is_in(values, value_set=pa.array(list(given), kind))
    if pa.types.is_integer(kind) and all(type(value) is int for value in given):
        return pc.is_in(values.cast(pa.int64()), value_set=pa.array(list(given), pa.int64()))
    return None


# Of such an expression Java and RE2 find the same texts, in lines without a line's end.
_SAME_REGEX = re.compile(
    r"\^?(?:[\w :;,@#%&=<>~'\"/-]|\[\^?[\w :;,@#%=<>~'\"/.+*-]+\]|\\[dw.\-+*?()\[\]{}|/^$]"
    r"|\((?!\?)|\)|[|.*+?]|\{\d+(?:,\d*)?\})*\$?",
    re.ASCII,
)
_LINE_ENDS = "[\n\r\x85\u2028\u2029]"


def _matches_in_arrow(values: pa.ChunkedArray, kwargs: Mapping[str, Any]) -> pa.ChunkedArray | None:
    regex = kwargs["regex"]
    if not (
        pa.types.is_string(values.type)
        and isinstance(regex, str)
        and _SAME_REGEX.fullmatch(regex)
        and not pc.any(pc.match_substring_regex(values, _LINE_ENDS)).as_py()
    ):
        return None
    return pc.match_substring_regex(values, regex)


def _equals_in_arrow(values: pa.ChunkedArray, kwargs: Mapping[str, Any]) -> pa.ChunkedArray | None:
    return pc.equal(values, kwargs["value"]) if type(kwargs["value"]) is int else None


def _is_comparable(first: pa.ChunkedArray, second: pa.ChunkedArray) -> bool:
    """Returns whether Spark and Arrow compare these columns in the same way."""
    kinds = [first.type, second.type]
    if all(map(pa.types.is_integer, kinds)):
        return True
    known = (pa.types.is_string, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_boolean)
    return first.type == second.type and any(test(first.type) for test in known)


def _pair_is_equal(
    first: pa.ChunkedArray, second: pa.ChunkedArray, _: Mapping[str, Any]
) -> pa.ChunkedArray | None:
    if not _is_comparable(first, second):
        return None
    # One null isn't equal to a value.
    both = pc.and_(pc.is_null(first), pc.is_null(second))
    return pc.or_(both, pc.fill_null(pc.equal(first, second), False))


def _pair_is_greater(
    first: pa.ChunkedArray, second: pa.ChunkedArray, kwargs: Mapping[str, Any]
) -> pa.ChunkedArray | None:
    if not _is_comparable(first, second):
        return None
    return (pc.greater_equal if kwargs.get("or_equal") else pc.greater)(first, second)


_BOUNDS = frozenset({"min_value", "max_value", "strict_min", "strict_max"})
_COLUMN, _PAIR = ("column",), ("column_A", "column_B")
_SET, _REGEX = frozenset({"value_set"}), frozenset({"regex"})
_IGNORE = frozenset({IGNORE_ROW_IF})
ROW_EXPECTATION_KINDS = (
    RowKind(
        NOT_NULL,
        _COLUMN,
        lambda value, _: value.isNotNull(),
        lambda values, _: pc.is_valid(values),
        judges="all",
        rules=not_null,
        of_nulls=value_condition,
    ),
    RowKind(IN_SET, _COLUMN, _in_set, _is_in_arrow, _SET, rules=enum_labels),
    RowsSatisfy(
        ROWS_SATISFY,
        (),
        # A null condition admits no row.
        lambda kwargs: F.coalesce(F.expr(kwargs["condition"]), F.lit(False)),
        lambda _: None,
        frozenset({"condition"}),
        frozenset({"meaning"}),
        judges="all",
        rules=conditions,
    ),
    RowKind(
        "expect_column_values_to_be_null",
        _COLUMN,
        lambda value, _: value.isNull(),
        lambda values, _: pc.is_null(values),
        judges="all",
        of_nulls=null_condition,
    ),
    RowKind(
        "expect_column_values_to_be_between", _COLUMN, _between, _meets_bounds, optional=_BOUNDS
    ),
    RowKind(
        "expect_column_values_to_not_be_in_set",
        _COLUMN,
        _in_set,
        _is_in_arrow,
        _SET,
        is_negated=True,
    ),
    RowKind(MATCH_REGEX, _COLUMN, _regex, _matches_in_arrow, _REGEX),
    RowKind(
        "expect_column_values_to_not_match_regex",
        _COLUMN,
        _regex,
        _matches_in_arrow,
        _REGEX,
        is_negated=True,
    ),
    RowKind(
        LENGTHS_BETWEEN,
        _COLUMN,
        _between,
        _meets_bounds,
        optional=_BOUNDS,
        is_of_lengths=True,
    ),
    RowKind(
        LENGTHS_EQUAL,
        _COLUMN,
        _equals,
        _equals_in_arrow,
        frozenset({"value"}),
        is_of_lengths=True,
    ),
    RowKind(
        "expect_column_pair_values_to_be_equal",
        _PAIR,
        lambda left, right, _: left.eqNullSafe(right),
        _pair_is_equal,
        optional=_IGNORE,
    ),
    RowKind(
        "expect_column_pair_values_a_to_be_greater_than_b",
        _PAIR,
        _greater,
        _pair_is_greater,
        optional=frozenset({"or_equal"}) | _IGNORE,
    ),
)
