"""Kinds of expectations that judge each row by itself, by a condition in Spark SQL that rows meet.

They count what Great Expectations counts on Spark (tests compare the two): a null value meets every
expectation except "not null", and so does a condition that evaluates to null. Only for expectations
on nulls, with_raw() makes both consider values stored in ``_wd_raw``. Great Expectations runs a
query per expectation to count failing rows; a check counts those of all in one. Arrow evaluates the
same condition where it certainly means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.spark_sql import literal, quote, string
from waldelta.stages.check.measure.failing_rows import MOST_EXAMPLES, FailingRows
from waldelta.stages.check.suite._row_rules import (
    IN_SET,
    LENGTHS_BETWEEN,
    LENGTHS_EQUAL,
    MATCH_REGEX,
    NOT_NULL,
    ROWS_SATISFY,
    checks_hold,
    domains_hold,
    enum_labels,
    filters_hold,
    limits_hold,
    not_null,
)
from waldelta.stages.check.suite.expectation import (
    ALL_ROWS,
    Argument,
    DependsOn,
    ExpectationKind,
    Outcome,
    PlannedExpectation,
    RowCondition,
    TargetFacts,
    Words,
    is_plain,
)
from waldelta.stages.check.suite.sql_conditions import (
    columns_of,
    is_fixed,
    null_condition,
    value_condition,
)

# Examples cost a query for each expectation. So of the failing expectations of a group, only this
# many get examples.
_MOST_SHOWN = 50
# Which rows an expectation applies to: all, those with a value in every column, or in any.
Judges = Literal["all", "complete", "any"]
# The argument of an expectation on pairs of columns that says which pairs it ignores; by default
# pairs of nulls.
IGNORE_ROW_IF = "ignore_row_if"
_PAIRS: dict[str, Judges] = {
    "both_values_are_missing": "any",
    "either_value_is_missing": "complete",
    "neither": "all",
}


@dataclass(frozen=True, eq=False)
class RowKind(ExpectationKind):
    """A kind that judges each row by itself.

    ``columns`` are the arguments that name columns. ``condition`` returns the condition, by these
    columns in SQL and the arguments, or None for values that only Great Expectations takes. It sees
    the lengths of texts where it ``is_of_lengths``, and the contrary is expected where it
    ``is_negated``. A row whose condition is null meets it if ``null_meets``. ``judges`` says which
    rows it applies to. ``rules`` yields built-in expectations of this kind.
    """

    columns: tuple[str, ...]
    condition: Callable[..., str | None]
    judges: Judges = "any"
    is_of_lengths: bool = False
    is_negated: bool = False
    null_meets: bool = True
    rules: Callable[[TargetFacts], Iterable[PlannedExpectation]] | None = None
    scope: DependsOn = field(default="row", kw_only=True)
    is_ours: bool = field(default=False, kw_only=True)

    def plan(self, facts: TargetFacts) -> Iterable[PlannedExpectation]:
        """Yields the built-in expectations that its rules yield."""
        return () if self.rules is None else self.rules(facts)

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row", unless an argument may refer to other rows or to the date."""
        return "row" if is_plain(kwargs) else "anything"

    def _names(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(column_name(kwargs[argument]) for argument in self.columns)

    def row_condition(self, planned: PlannedExpectation) -> RowCondition | None:
        """Returns the condition; None for arguments that only Great Expectations takes."""
        kwargs = planned.kwargs
        if self.misfits(kwargs):
            return None
        names, form = self._names(kwargs), "length({})" if self.is_of_lengths else "{}"
        try:
            met = self.condition(*(form.format(quote(name)) for name in names), kwargs)
        except TypeError:  # A value has no literal.
            return None
        if met is None:
            return None
        judges = _PAIRS[kwargs[IGNORE_ROW_IF]] if IGNORE_ROW_IF in kwargs else self.judges
        present = [f"{quote(name)} is not null" for name in names]
        judged = ALL_ROWS if judges == "all" else _JOINED[judges].join(present)
        met = f"not ({met})" if self.is_negated else met
        return RowCondition(met, names, judged, self.null_meets, planned.suffices)

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome by the rows that fail, with details as Great Expectations' own."""
        names = self._names(planned.kwargs)
        values = [tuple(_without_zone(row[name]) for name in names) for row in found.examples]
        details = {
            "element_count": found.total,
            "nonnull_count": None if self.judges == "all" else found.judged,
            "unexpected_count": found.rows,
            "partial_unexpected_list": [*(v[0] if len(names) == 1 else v for v in values)],
        }
        mostly = float(planned.kwargs.get("mostly", 1))
        return Outcome(planned, found.are_few(mostly), None, found.rows, details=details)


_JOINED = {"complete": " and ", "any": " or "}


def _without_zone(value: Any) -> Any:
    """Returns a time as Spark returns it to Python, and any other value as it is."""
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


class RowsSatisfy(RowKind):
    """Every row of the target, or a share of them, makes a Spark SQL condition true.

    Null counts as not true.
    """

    def row_condition(self, planned: PlannedExpectation) -> RowCondition | None:
        """Returns the condition with the columns that its text names."""
        condition = super().row_condition(planned)
        return condition and replace(condition, columns=columns_of(condition.met))

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome by the rows that don't make the condition true."""
        # The report shows no values of the columns that a condition reads.
        return ExpectationKind.outcome(self, planned, replace(found, examples=()))

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row" if the condition is known to depend only on the row."""
        is_of_row = is_fixed(str(kwargs.get("condition")))
        return super().own_scope(kwargs) if is_of_row else "anything"


def is_of_column(kind: ExpectationKind) -> bool:
    """Returns whether a kind judges each value of one column."""
    return isinstance(kind, RowKind) and kind.columns == _COLUMN


def count_rows(
    frame: DataFrame, conditions: Mapping[int, RowCondition], most: int | None = MOST_EXAMPLES
) -> dict[int, FailingRows]:
    """Returns of each condition how many rows fail it, how many it applies to, and at most so many
    examples (None: all).

    One query counts for all conditions. It compiles each of them, so what all rows are judged by
    counts nothing but the rows that fail.
    """
    if not conditions:
        return {}
    counted = {f"f{n}": c.unexpected for n, c in conditions.items()}
    counted |= {f"j{n}": F.expr(c.judged) for n, c in conditions.items() if c.judged != ALL_ROWS}
    counts = [F.count_if(condition).alias(name) for name, condition in counted.items()]
    (row,) = frame.agg(F.count("*").alias("total"), *counts).collect()
    counts_of, total = row.asDict(), row["total"]
    # A condition may name a struct's fields too, which are no columns.
    names = {name.lower() for name in frame.columns}
    columns = {n: [c for c in of.shown if c.lower() in names] for n, of in conditions.items()}
    shown = [n for n in conditions if counts_of[f"f{n}"] and columns[n]]
    examples = {}
    for n in shown if most is None else shown[:_MOST_SHOWN]:
        failing = frame.where(conditions[n].unexpected).select(*map(quote, columns[n]))
        failing = failing if most is None else failing.limit(most)
        examples[n] = tuple(failing.toArrow().to_pylist())
    return {
        n: FailingRows(
            counts_of[f"f{n}"], examples.get(n, ()), counts_of.get(f"j{n}", total), total
        )
        for n in conditions
    }


def column_name(column: Any) -> str:
    """Returns a column's name; Great Expectations puts a name with a dot in backticks."""
    text = str(column)
    return text[1:-1] if "." in text and text.startswith("`") and text.endswith("`") else text


def _between(value: str, kwargs: Mapping[str, Any]) -> str | None:
    parts = []
    for name, strict, beyond, at_least in (
        ("min_value", "strict_min", ">", ">="),
        ("max_value", "strict_max", "<", "<="),
    ):
        if (bound := number_of(kwargs.get(name))) is not None:
            operator = beyond if kwargs.get(strict) else at_least
            parts.append(f"{value} {operator} {literal(bound)}")
    return " and ".join(parts) or None


def number_of(bound: Any) -> Any:
    """Returns a bound as Great Expectations takes it: a float for a number or its text."""
    try:
        return bound if bound is None else float(bound)
    except (TypeError, ValueError):
        return bound


def _in_set(value: str, kwargs: Mapping[str, Any]) -> str | None:
    values = kwargs["value_set"]
    if not isinstance(values, (list, tuple, set)) or not values:
        return None
    return f"{value} in ({', '.join(map(literal, values))})"


def _regex(value: str, kwargs: Mapping[str, Any]) -> str | None:
    regex = kwargs["regex"]
    return f"{value} rlike {string(regex)}" if isinstance(regex, str) else None


def _equals(value: str, kwargs: Mapping[str, Any]) -> str | None:
    return f"{value} = {literal(kwargs['value'])}" if isinstance(kwargs["value"], int) else None


def _greater(left: str, right: str, kwargs: Mapping[str, Any]) -> str:
    or_equal = f" or {left} = {right} or {left} <=> {right}" if kwargs.get("or_equal") else ""
    return f"{left} > {right}{or_equal}"


def _condition_words(kwargs: Mapping[str, Any]) -> Words:
    share = " for a share of $mostly" if kwargs.get("mostly", 1) < 1 else ""
    return f"$meaning{share}; in Spark SQL: $condition", kwargs


_MOSTLY = {
    "mostly": Argument(
        float, "smallest share of rows that must meet it", {"default": 1.0, "ge": 0, "le": 1}
    )
}
_VALUE, _BOUND = Argument(Any, "a value"), Argument(Any, "a bound", {"default": None})
_SWITCH = Argument(bool, "whether it is so", {"default": False})
_COLUMN, _PAIR = ("column",), ("column_A", "column_B")
_OF_COLUMN = {"column": Argument(str, "a column")} | _MOSTLY
_SET, _REGEX = (_OF_COLUMN | {name: _VALUE} for name in ("value_set", "regex"))
_BOUNDS = _OF_COLUMN | {
    "min_value": _BOUND,
    "max_value": _BOUND,
    "strict_min": _SWITCH,
    "strict_max": _SWITCH,
}
_OF_PAIR = {
    **dict.fromkeys(_PAIR, Argument(str, "a column")),
    IGNORE_ROW_IF: Argument(Literal[*_PAIRS], "pairs to ignore", {"default": "neither"}),
    **_MOSTLY,
}
ROW_EXPECTATION_KINDS = (
    RowKind(
        NOT_NULL,
        _COLUMN,
        lambda value, _: f"{value} is not null",
        judges="all",
        rules=not_null,
        of_nulls=value_condition,
        arguments=_OF_COLUMN,
    ),
    RowKind(IN_SET, _COLUMN, _in_set, rules=enum_labels, arguments=_SET),
    RowsSatisfy(
        ROWS_SATISFY,
        (),
        lambda kwargs: kwargs["condition"],
        judges="all",
        null_meets=False,
        words=_condition_words,
        rules=lambda facts: chain(
            checks_hold(facts), domains_hold(facts), limits_hold(facts), filters_hold(facts)
        ),
        is_ours=True,
        arguments={
            "condition": Argument(str, "a condition in Spark SQL"),
            "meaning": Argument(str, "the same in words, for the report"),
            **_MOSTLY,
        },
    ),
    RowKind(
        "expect_column_values_to_be_null",
        _COLUMN,
        lambda value, _: f"{value} is null",
        judges="all",
        of_nulls=null_condition,
        arguments=_OF_COLUMN,
    ),
    RowKind("expect_column_values_to_be_between", _COLUMN, _between, arguments=_BOUNDS),
    RowKind(
        "expect_column_values_to_not_be_in_set",
        _COLUMN,
        _in_set,
        is_negated=True,
        arguments=_SET,
    ),
    RowKind(MATCH_REGEX, _COLUMN, _regex, arguments=_REGEX),
    RowKind(
        "expect_column_values_to_not_match_regex",
        _COLUMN,
        _regex,
        is_negated=True,
        arguments=_REGEX,
    ),
    RowKind(LENGTHS_BETWEEN, _COLUMN, _between, is_of_lengths=True, arguments=_BOUNDS),
    RowKind(
        LENGTHS_EQUAL,
        _COLUMN,
        _equals,
        is_of_lengths=True,
        arguments=_OF_COLUMN | {"value": _VALUE},
    ),
    RowKind(
        "expect_column_pair_values_to_be_equal",
        _PAIR,
        lambda left, right, _: f"{left} <=> {right}",
        arguments=_OF_PAIR,
    ),
    RowKind(
        "expect_column_pair_values_a_to_be_greater_than_b",
        _PAIR,
        _greater,
        arguments=_OF_PAIR | {"or_equal": _SWITCH},
    ),
)
