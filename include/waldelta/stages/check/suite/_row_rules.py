"""Rules on rows: what the source's catalogs, the publications and the pipeline guarantee for each
row, as expectations. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from waldelta.config.expectation_files import Severity
from waldelta.errors import FilterNotTranslatable
from waldelta.lake.ledger import ColumnState
from waldelta.metadata_columns import RAW
from waldelta.pipeline.drift import EVERYTHING
from waldelta.pipeline.targets import filter_of
from waldelta.postgres import BIT_OID, any_filter
from waldelta.row_filter import EnumType, RowFilter, published_filter
from waldelta.row_filter.parse import of_column
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.row_filter.spark.values import UNJUDGED
from waldelta.spark_sql import quote, string
from waldelta.stages.check.constraints.constraints import (
    CheckConstraint,
    DeclaredType,
    base_columns,
)
from waldelta.stages.check.suite.expectation import Origin, PlannedExpectation, TargetFacts
from waldelta.stages.check.suite.sql_conditions import listed, null_condition, value_condition
from waldelta.types import TargetType
from waldelta.types.numeric import Decimal

LENGTHS_BETWEEN = "expect_column_value_lengths_to_be_between"
LENGTHS_EQUAL = "expect_column_value_lengths_to_equal"
MATCH_REGEX = "expect_column_values_to_match_regex"


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


NOT_NULL = "expect_column_values_to_not_be_null"
IN_SET = "expect_column_values_to_be_in_set"
ROWS_SATISFY = "expect_target_rows_to_satisfy"


def not_null(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that key columns and NOT NULL columns have no nulls."""
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


def enum_labels(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that enum columns have only labels of their type."""
    for column in facts.state.columns:
        enum = facts.rules.enums.get(column.name_on_source)
        if enum and column.stored_as.is_text:
            meaning = f"{column.name} has labels of {column.type_name} only"
            labels = [*enum.labels]
            condition = f"{{}} in ({', '.join(map(string, labels))})"
            yield _of_column(IN_SET, column.name, {"value_set": labels}, condition, meaning)


def checks_hold(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that CHECK constraints hold."""
    for check in facts.rules.checks:
        what = f"CHECK constraint {check.name}"
        # A row meets a constraint that is null, so the condition searches for rows where its
        # negation is true.
        read = partial(published_filter, f"(NOT {check.expression})", facts.rules.enums)
        for condition in _translated(facts, what, read):
            yield _satisfies(
                f"not coalesce({condition}, false)", f"{what} holds: {check.expression}"
            )


def domains_hold(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that the constraints of domains hold."""
    state, declared = facts.state, facts.rules.declared
    # Expressions on VALUE see the base type of the domain.
    plain = replace(facts, state=replace(state, columns=base_columns(state, declared)))
    for one in declared:
        column = next(c for c in state.columns if c.name_on_source == one.column)
        is_null = _is_null(facts, column)
        for check in one.checks:
            what = f"domain constraint {check.name} of column {one.column}"
            read = partial(_value_filter, check, one.column, facts.rules.enums)
            for condition in _translated(plain, what, read):
                # A stored null may have bypassed the domain (see ``CREATE DOMAIN``).
                holds = f"({is_null} or not coalesce({condition}, false))"
                yield _satisfies(holds, f"{what} holds: {check.expression}")
        if one.not_null and not column.not_null and column.name not in state.key_columns:
            meaning = f"column {one.column} has no nulls, as its domain {one.not_null[0]} says"
            yield _satisfies(f"not {is_null}", meaning, severity="warning", suffices=column.name)


def _value_filter(check: CheckConstraint, column: str, enums: Mapping[str, EnumType]) -> RowFilter:
    return published_filter(f"(NOT {of_column(check.expression, column)})", enums)


def _is_null(facts: TargetFacts, column: ColumnState) -> str:
    """Returns the condition that a row has no value; "false" where that is unknown.

    Values that the column's type can't store are in ``_wd_raw``.
    """
    if not column.stored_as.may_be_raw:
        return f"{quote(column.name)} is null"
    return null_condition(column.name) if RAW in facts.columns else "false"


def limits_hold(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that values fit their declared types."""
    columns = {column.name_on_source: column for column in facts.state.columns}
    for one in facts.rules.declared:
        column = columns[one.column]
        limit = limit_of(one, column.stored_as)
        if limit is not None:
            kind, arguments, condition = limit
            meaning = f"{column.name} fits {one.base_type}"
            yield _of_column(kind, column.name, arguments, condition, meaning)


def filters_hold(facts: TargetFacts) -> Iterator[PlannedExpectation]:
    """Yields that the filters of publication and target hold."""
    # Rows that an earlier filter admitted stay, so each row passes one of the filters.
    filters = [facts.state.row_filter or EVERYTHING, *facts.state.later_filters]
    if EVERYTHING not in filters:
        text = any_filter(filters)
        for condition in _translated(facts, "row filter", partial(published_filter, text)):
            meaning = f"publication's row filter holds: {text}"
            yield _satisfies(condition, meaning, origin="publication")
    if (own := filter_of(facts.state)) is not None:
        for condition in _translated(facts, "target's filter", lambda: own):
            meaning = f"target's filter holds: {own.text}"
            yield _satisfies(condition, meaning, origin="pipeline")


def _translated(facts: TargetFacts, what: str, read: Callable[[], RowFilter]) -> Iterator[str]:
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
        either = f"({name} is null or {condition.replace('{}', name)})"
        return _satisfies(either if "{}" in condition else condition, meaning, suffices=suffices)
    kwargs = {"column": listed(column), **arguments}
    return PlannedExpectation(kind, kwargs, "critical", "catalog", meaning, suffices=suffices)
