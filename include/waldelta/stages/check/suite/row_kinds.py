"""Kinds of expectations that judge each row by itself, by a condition in Spark SQL that rows meet;
and what the source's catalogs, publications and pipeline guarantee for rows, by these kinds.

They count what Great Expectations counts on Spark (tests compare the two): a null value meets every
expectation except "not null", and so does a condition that evaluates to null. Only for expectations
on nulls, with_raw() makes both consider values stored in ``_wd_raw``. Great Expectations runs a
query per expectation to count failing rows; a check counts those of all in one. Arrow evaluates the
same condition where it certainly means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Literal

from waldelta.config.expectation_files import Severity
from waldelta.errors import FilterNotTranslatable
from waldelta.lake.ledger import ColumnState
from waldelta.metadata_columns import RAW
from waldelta.pipeline.drift import EVERYTHING
from waldelta.pipeline.targets import filter_of
from waldelta.postgres import BIT_OID, any_filter
from waldelta.row_filter import RowFilter, published_filter
from waldelta.row_filter.parse import of_column
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.row_filter.spark.values import UNJUDGED
from waldelta.spark_sql import literal, quote, string
from waldelta.stages.check.constraints.constraints import (
    DeclaredType,
    base_columns,
)
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import (
    ALL_ROWS,
    Argument,
    DependsOn,
    ExpectationKind,
    Origin,
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
    listed,
    null_condition,
    value_condition,
)
from waldelta.types import TargetType
from waldelta.types.numeric import Decimal

NOT_NULL = "expect_column_values_to_not_be_null"
IN_SET = "expect_column_values_to_be_in_set"
ROWS_SATISFY = "expect_target_rows_to_satisfy"
LENGTHS_BETWEEN = "expect_column_value_lengths_to_be_between"
LENGTHS_EQUAL = "expect_column_value_lengths_to_equal"
MATCH_REGEX = "expect_column_values_to_match_regex"
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

    def outcome(self, planned: PlannedExpectation, failing_rows: FailingRows) -> Outcome:
        """Returns the outcome by the rows that fail, with details as Great Expectations' own."""
        names = self._names(planned.kwargs)
        values = [
            tuple(_without_zone(row[name]) for name in names) for row in failing_rows.examples
        ]
        details = {
            "element_count": failing_rows.total,
            "nonnull_count": None if self.judges == "all" else failing_rows.judged,
            "unexpected_count": failing_rows.rows,
            "partial_unexpected_list": [*(v[0] if len(names) == 1 else v for v in values)],
        }
        mostly = float(planned.kwargs.get("mostly", 1))
        return Outcome(
            planned, failing_rows.are_few(mostly), None, failing_rows.rows, details=details
        )


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

    def outcome(self, planned: PlannedExpectation, failing_rows: FailingRows) -> Outcome:
        """Returns the outcome by the rows that don't make the condition true."""
        # The report shows no values of the columns that a condition reads.
        return ExpectationKind.outcome(self, planned, replace(failing_rows, examples=()))

    def own_scope(self, kwargs: Mapping[str, Any]) -> DependsOn:
        """Returns "row" if the condition is known to depend only on the row."""
        is_of_row = is_fixed(str(kwargs.get("condition")))
        return super().own_scope(kwargs) if is_of_row else "anything"


def is_of_column(kind: ExpectationKind) -> bool:
    """Returns whether a kind judges each value of one column."""
    return isinstance(kind, RowKind) and kind.columns == _COLUMN


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


def _greater(first: str, second: str, kwargs: Mapping[str, Any]) -> str:
    or_equal = f" or {first} = {second} or {first} <=> {second}" if kwargs.get("or_equal") else ""
    return f"{first} > {second}{or_equal}"


def _condition_words(kwargs: Mapping[str, Any]) -> Words:
    share = " for a share of $mostly" if kwargs.get("mostly", 1) < 1 else ""
    return f"$meaning{share}; in Spark SQL: $condition", kwargs


def limit_of(declared: DeclaredType, kind: TargetType) -> tuple[str, dict[str, Any], str] | None:
    """Returns the limit that a column stored as ``kind`` doesn't enforce; null meets it.

    It is the type and arguments of an expectation on the column, and the same as a condition in
    Spark SQL on a value ``{}``; that alone where the type is ROWS_SATISFY.
    """
    if (most := declared.length) is not None and kind.is_text:
        if declared.base_oid == BIT_OID:
            return LENGTHS_EQUAL, {"value": most}, f"length({{}}) = {most}"
        # char(n) too: a database of encoding SQL_ASCII counts bytes where the lake counts
        # characters.
        return LENGTHS_BETWEEN, {"max_value": most}, f"length({{}}) <= {most}"
    if declared.precision is None:
        return None
    precision, scale = declared.precision
    if kind.is_text:
        regex = printed_numeric(precision, scale)
        return MATCH_REGEX, {"regex": regex}, f"rlike({{}}, {string(regex)})"
    if not isinstance(kind, Decimal) or 0 <= scale <= precision:
        return None
    least = f"0.{'0' * (scale - precision - 1)}1BD"
    condition = f"{{}} % 1{'0' * -scale} = 0" if scale < 0 else f"abs({{}}) < {least}"
    return ROWS_SATISFY, {}, condition


def printed_numeric(precision: int, scale: int) -> str:
    """Returns a regular expression for what a numeric of this precision prints.

    >>> printed_numeric(5, 2)
    '^(NaN|-?[0-9]{1,3}[.][0-9]{2})$'
    """
    if scale < 0:
        digits = f"(0|[0-9]{{1,{precision}}}0{{{-scale}}})"
    elif scale == 0:
        digits = f"[0-9]{{1,{precision}}}"
    elif scale >= precision:
        digits = f"0[.]0{{{scale - precision}}}[0-9]{{{precision}}}"
    else:
        digits = f"[0-9]{{1,{precision - scale}}}[.][0-9]{{{scale}}}"
    return f"^(NaN|-?{digits})$"


def expect_not_null(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that key columns and NOT NULL columns have no nulls."""
    keys = set(facts.state.key_columns)
    for column in facts.state.columns:
        name = column.name
        if not (column.not_null or name in keys):
            continue
        meaning = f"{'key' if name in keys else 'NOT NULL'} column {name} has no nulls"
        if column.stored_as.may_be_raw:
            # NaN, infinity or BC dates are null in the column itself, and are in ``_wd_raw``.
            if RAW in facts.columns:
                yield _satisfies(value_condition(name), meaning, suffices=name)
            else:
                facts.omitted.append(
                    f"{meaning}: without metadata columns a null may be a value that"
                    f" {column.spark_type} can't hold"
                )
        else:
            condition = f"{quote(name)} is not null"
            yield _of_column(NOT_NULL, name, {}, condition, meaning, suffices=name)


def expect_enum_labels(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that enum columns have only labels of their type."""
    for column in facts.state.columns:
        enum = facts.rules.enums.get(column.name_on_source)
        if enum and column.stored_as.is_text:
            meaning = f"{column.name} has labels of {column.type_name} only"
            labels = [*enum.labels]
            condition = f"{{}} in ({', '.join(map(string, labels))})"
            yield _of_column(IN_SET, column.name, {"value_set": labels}, condition, meaning)


def expect_checks(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that the rows meet the CHECK constraints of the source."""
    for check in facts.rules.checks:
        what = f"CHECK constraint {check.name}"
        # A row meets a constraint that is null, so the condition searches for rows where its
        # negation is true.
        read = partial(published_filter, f"(NOT {check.expression})", facts.rules.enums)
        for condition in _translate_condition(facts, what, read):
            yield _satisfies(
                f"not coalesce({condition}, false)", f"{what} holds: {check.expression}"
            )


def expect_domains(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that values meet the constraints of their columns' domains."""
    state, declared = facts.state, facts.rules.declared
    # Expressions on VALUE see the base type of the domain.
    plain = replace(facts, state=replace(state, columns=base_columns(state, declared)))
    for one in declared:
        column = next(c for c in state.columns if c.name_on_source == one.column)
        is_null = _is_null(facts, column)
        for check in one.checks:
            what = f"domain constraint {check.name} of column {one.column}"
            text = f"(NOT {of_column(check.expression, one.column)})"
            read = partial(published_filter, text, facts.rules.enums)
            for condition in _translate_condition(plain, what, read):
                # A stored null may have bypassed the domain (see ``CREATE DOMAIN``).
                holds = f"({is_null} or not coalesce({condition}, false))"
                yield _satisfies(holds, f"{what} holds: {check.expression}")
        if one.not_null and not column.not_null and column.name not in state.key_columns:
            meaning = f"column {one.column} has no nulls, as its domain {one.not_null[0]} says"
            yield _satisfies(f"not {is_null}", meaning, severity="warning", suffices=column.name)


def _is_null(facts: TargetFacts, column: ColumnState) -> str:
    """Returns the condition that a row has no value; "false" where that is unknown.

    Values that the column's type can't store are in ``_wd_raw``.
    """
    if not column.stored_as.may_be_raw:
        return f"{quote(column.name)} is null"
    return null_condition(column.name) if RAW in facts.columns else "false"


def expect_limits(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that values fit the length or the digits that their types declare."""
    columns = {column.name_on_source: column for column in facts.state.columns}
    for one in facts.rules.declared:
        column = columns[one.column]
        limit = limit_of(one, column.stored_as)
        if limit is not None:
            kind, arguments, condition = limit
            meaning = f"{column.name} fits {one.base_type}"
            yield _of_column(kind, column.name, arguments, condition, meaning)


def expect_filters(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields expectations that the rows pass the row filters of publication and target."""
    # Rows that an earlier filter admitted stay, so each row passes one of the filters.
    filters = [facts.state.row_filter or EVERYTHING, *facts.state.later_filters]
    if EVERYTHING not in filters:
        text = any_filter(filters)
        for condition in _translate_condition(facts, "row filter", partial(published_filter, text)):
            meaning = f"publication's row filter holds: {text}"
            yield _satisfies(condition, meaning, origin="publication")
    if (target_filter := filter_of(facts.state)) is not None:
        for condition in _translate_condition(facts, "target's filter", lambda: target_filter):
            meaning = f"target's filter holds: {target_filter.text}"
            yield _satisfies(condition, meaning, origin="pipeline")


def _translate_condition(
    facts: TargetFacts, what: str, read: Callable[[], RowFilter]
) -> Iterator[str]:
    """Yields a PostgreSQL condition as Spark SQL; adds to ``omitted`` instead where there is no
    certain equivalent.
    """
    columns = [column for column in facts.state.columns if not column.stopped]
    # Without metadata columns there is no map of values that are stored raw.
    names: dict[str, str] | None = None if RAW in facts.columns else {}
    try:
        row_filter = read()
        absent = set(row_filter.columns) - {column.name_on_source for column in columns}
        condition = "" if absent else spark_condition(row_filter, columns, names)
    except FilterNotTranslatable as err:
        why = f"because of its part at {err.where}: {err.reason}"
    else:
        if absent:
            of_columns = ", ".join(sorted(absent))
            why = f"because the target has no column {of_columns} yet, or only its last values"
        elif UNJUDGED in condition:
            why = "because it computes with columns that may hold infinity or years BC"
        else:
            yield condition
            return
    facts.omitted.append(f"{what}: not checked, {why}")


def _satisfies(
    condition: str,
    meaning: str,
    severity: Severity = "critical",
    origin: Origin = "catalog",
    suffices: str | None = None,
) -> PlannedExpectation:
    kwargs = {"condition": condition, "meaning": meaning}
    return PlannedExpectation(ROWS_SATISFY, kwargs, severity, origin, meaning, suffices=suffices)


def _of_column(
    kind: str,
    column: str,
    arguments: Mapping[str, Any],
    condition: str,
    meaning: str,
    suffices: str | None = None,
) -> PlannedExpectation:
    """Returns an expectation of a kind on a column, or its condition where Great Expectations can't
    name the column.
    """
    if kind == ROWS_SATISFY or "`" in column:
        name = quote(column)
        null_or_met = f"({name} is null or {condition.replace('{}', name)})"
        return _satisfies(
            null_or_met if "{}" in condition else condition, meaning, suffices=suffices
        )
    kwargs = {"column": listed(column), **arguments}
    return PlannedExpectation(kind, kwargs, "critical", "catalog", meaning, suffices=suffices)


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
        rules=expect_not_null,
        of_nulls=value_condition,
        arguments=_OF_COLUMN,
    ),
    RowKind(IN_SET, _COLUMN, _in_set, rules=expect_enum_labels, arguments=_SET),
    RowsSatisfy(
        ROWS_SATISFY,
        (),
        lambda kwargs: kwargs["condition"],
        judges="all",
        null_meets=False,
        words=_condition_words,
        rules=lambda facts: chain(
            expect_checks(facts), expect_domains(facts), expect_limits(facts), expect_filters(facts)
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
