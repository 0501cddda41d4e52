"""Plans which expectations a target must meet: derived from its ledger record, plus own ones.

Pure: the plan names Great Expectations' types and arguments; ``waldelta.stages.check.check`` runs
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from waldelta.config.expectation_files import OwnSuiteFile, Severity
from waldelta.errors import ConfigError, FilterNotTranslatable
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.lake.ledger.expectation_results import (
    ALL_VALUES_KNOWN,
    IS_FRESH,
    REFERENCES_HOLD,
    VALUES_KNOWN,
    recorded_unknown,
)
from waldelta.metadata_columns import RAW
from waldelta.pipeline.drift.drift import EVERYTHING
from waldelta.pipeline.targets.target_filter import filter_of
from waldelta.row_filter import RowFilter, published_filter
from waldelta.row_filter.domain_constraint import of_column
from waldelta.row_filter.spark import spark_condition
from waldelta.row_filter.spark.values import UNJUDGED
from waldelta.row_filter.typed_tree import column_type
from waldelta.spark_sql import quote
from waldelta.stages.check.constraints import CheckConstraint, DeclaredType
from waldelta.stages.check.constraints.declared_types import base_columns
from waldelta.stages.check.measure import Measured, Reference
from waldelta.stages.check.measure.kept_rows import KEPT_ROWS
from waldelta.stages.check.measure.profile import profiled_columns
from waldelta.stages.check.measure.row_conditions import (
    ROWS_SATISFY,
    asks_for_nulls,
    null_condition,
    value_condition,
    with_raw,
)
from waldelta.stages.check.suite._declared_limits import limits
from waldelta.stages.check.suite._freshness import FreshnessLimit
from waldelta.stages.check.suite.profile_drift import Before, find_departures

KEY_UNIQUE = "expect_target_key_to_be_unique"
COLUMNS_MATCH = "expect_target_columns_to_match"
KEPT_ROWS_HOLD = "expect_kept_rows_to_hold"
AS_BEFORE = "expect_target_to_be_as_before"
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
    suffices: str | None = None


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
class SuitePlan:
    """A target's expectations, the rules that could not be planned, and the error for refused own
    ones.
    """

    table: str
    expectations: tuple[PlannedExpectation, ...]
    omitted: tuple[str, ...] = ()
    refused: ConfigError | None = None


def plan_suite(
    state: TableState,
    held_columns: Sequence[str],
    own: OwnSuiteFile | None = None,
    sure: SourceRules | None = None,
    before: Before | None = None,
) -> SuitePlan:
    """Plan the suite of one target.

    ``held_columns`` are the columns its Delta table has now, which show whether ``_wd_raw`` exists.
    ``sure`` are the source's guarantees, ``before`` earlier measurements (None: not judged).
    """
    sure = sure or SourceRules()
    omitted: list[str] = list(sure.omitted)
    planned = [
        _columns_match(state),
        *_key_unique(state, omitted),
        *_kept_rows(state),
        *_not_null(state, held_columns, omitted),
        *_labels_only(state, sure),
        *_checks_hold(state, held_columns, sure.checks, omitted),
        *_domains_hold(state, held_columns, sure.declared, omitted),
        *_limits_hold(state, sure.declared),
        *_filters_hold(state, held_columns, omitted),
        *_references_hold(sure.references),
        *_all_values_known(state, sure.unknown_rows),
        *_is_fresh(sure.freshness),
        *_is_as_before(state, before),
        *_own(state, held_columns, own, omitted),
    ]
    return SuitePlan(state.table_name, tuple(planned), tuple(omitted))


def _columns_match(state: TableState) -> PlannedExpectation:
    columns = {column.name: column.spark_type for column in state.columns}
    return PlannedExpectation(
        COLUMNS_MATCH,
        {"columns": columns},
        "critical",
        "catalog",
        "columns and types match the ones recorded",
    )


def _key_unique(state: TableState, omitted: list[str]) -> Iterator[PlannedExpectation]:
    if not state.key_columns:
        omitted.append("unique key: the table has none, so duplicate rows are allowed")
        return
    yield PlannedExpectation(
        KEY_UNIQUE,
        {"columns": list(state.key_columns)},
        "critical",
        "catalog",
        f"key ({', '.join(state.key_columns)}) is unique",
    )


def _kept_rows(state: TableState) -> Iterator[PlannedExpectation]:
    for rule in state.kept_as.invariants:
        kwargs = {"columns": [KEPT_ROWS, rule.label], "meaning": rule.meaning}
        yield PlannedExpectation(KEPT_ROWS_HOLD, kwargs, rule.severity, "pipeline", rule.title)


def _not_null(
    state: TableState, held: Sequence[str], omitted: list[str]
) -> Iterator[PlannedExpectation]:
    keys = set(state.key_columns)
    for column in state.columns:
        if not (column.not_null or column.name in keys):
            continue
        meaning = (
            f"{'key' if column.name in keys else 'NOT NULL'} column {column.name} has no nulls"
        )
        if column_type(column.type_name, column.spark_type).may_be_raw:
            yield from _has_value(column, held, meaning, omitted)
        elif _nameable(column.name):
            kwargs = {"column": _gx_name(column.name)}
            yield PlannedExpectation(
                "expect_column_values_to_not_be_null", kwargs, "critical", "catalog", meaning
            )
        else:
            condition = f"{quote(column.name)} is not null"
            yield PlannedExpectation(
                ROWS_SATISFY,
                _satisfy(condition, meaning),
                "critical",
                "catalog",
                meaning,
                suffices=column.name,
            )


def _has_value(
    column: ColumnState, held: Sequence[str], meaning: str, omitted: list[str]
) -> Iterator[PlannedExpectation]:
    """Plan a not-null expectation for a column whose NaN, infinity or BC dates are in ``_wd_raw``.

    Such values are null in the column itself.
    """
    if RAW not in held:
        omitted.append(
            f"{meaning}: without metadata columns a null may be a value that {column.spark_type}"
            " can't hold"
        )
        return
    kwargs = _satisfy(value_condition(column.name), meaning)
    yield PlannedExpectation(
        ROWS_SATISFY, kwargs, "critical", "catalog", meaning, suffices=column.name
    )


def _labels_only(state: TableState, sure: SourceRules) -> Iterator[PlannedExpectation]:
    for column in state.columns:
        labels = sure.labels.get(column.name)
        if labels and column.spark_type == "string" and _nameable(column.name):
            kwargs = {"column": _gx_name(column.name), "value_set": list(labels)}
            meaning = f"{column.name} has labels of {column.type_name} only"
            yield PlannedExpectation(
                "expect_column_values_to_be_in_set", kwargs, "critical", "catalog", meaning
            )


def _checks_hold(
    state: TableState, held: Sequence[str], checks: Sequence[CheckConstraint], omitted: list[str]
) -> Iterator[PlannedExpectation]:
    for check in checks:
        meaning = f"CHECK constraint {check.name} holds: {check.expression}"
        # A row meets a constraint that is null, so the condition searches for rows where its
        # negation is true.
        read = partial(published_filter, f"(NOT {check.expression})")
        found = _translated(state, held, f"CHECK constraint {check.name}", read, omitted)
        if found is not None:
            condition = f"not coalesce({found}, false)"
            yield PlannedExpectation(
                ROWS_SATISFY, _satisfy(condition, meaning), "critical", "catalog", meaning
            )


def _domains_hold(
    state: TableState, held: Sequence[str], declared: Sequence[DeclaredType], omitted: list[str]
) -> Iterator[PlannedExpectation]:
    # Expressions on VALUE see the base type of the domain.
    plain = replace(state, columns=base_columns(state, declared))
    for one in declared:
        column = next(c for c in state.columns if c.name == one.column)
        is_null = _is_null(column, held)
        for check in one.checks:
            what = f"domain constraint {check.name} of column {one.column}"
            read = partial(_value_filter, check, one.column)
            found = _translated(plain, held, what, read, omitted)
            if found is not None:
                # A stored null may have bypassed the domain (see ``CREATE DOMAIN``).
                condition = f"({is_null} or not coalesce({found}, false))"
                meaning = f"{what} holds: {check.expression}"
                yield PlannedExpectation(
                    ROWS_SATISFY, _satisfy(condition, meaning), "critical", "catalog", meaning
                )
        if one.not_null and not column.not_null and column.name not in state.key_columns:
            meaning = f"column {one.column} has no nulls, as its domain {one.not_null[0]} says"
            condition = f"not {is_null}"
            yield PlannedExpectation(
                ROWS_SATISFY,
                _satisfy(condition, meaning),
                "warning",
                "catalog",
                meaning,
                suffices=one.column,
            )


def _value_filter(check: CheckConstraint, column: str) -> RowFilter:
    return published_filter(f"(NOT {of_column(check.expression, column)})")


def _is_null(column: ColumnState, held: Sequence[str]) -> str:
    """Returns the condition that a row has no value; "false" where that is unknown.

    Values that the column's type can't store are in ``_wd_raw``.
    """
    name = quote(column.name)
    if not column_type(column.type_name, column.spark_type).may_be_raw:
        return f"{name} is null"
    if RAW not in held:
        return "false"
    return null_condition(column.name)


def _limits_hold(
    state: TableState, declared: Sequence[DeclaredType]
) -> Iterator[PlannedExpectation]:
    types = {column.name: column.spark_type for column in state.columns}
    for one in declared:
        for limit in limits(one, types[one.column]):
            if limit.kind is not None and _nameable(one.column):
                kwargs = {"column": _gx_name(one.column), **(limit.arguments or {})}
                yield PlannedExpectation(limit.kind, kwargs, "critical", "catalog", limit.meaning)
            else:
                kwargs = _satisfy(limit.condition or "true", limit.meaning)
                yield PlannedExpectation(ROWS_SATISFY, kwargs, "critical", "catalog", limit.meaning)


def _references_hold(references: Sequence[Reference]) -> Iterator[PlannedExpectation]:
    # A warning: triggers that enforce a key can be disabled on the source, and the key remains
    # "validated".
    for reference in references:
        kwargs = {"columns": list(reference.lookup_key), "meaning": reference.meaning}
        yield PlannedExpectation(REFERENCES_HOLD, kwargs, "warning", "catalog", reference.meaning)


def _all_values_known(state: TableState, rows: int | None) -> Iterator[PlannedExpectation]:
    if rows is not None and state.kept_as.completes_rows:
        kwargs = {"meaning": VALUES_KNOWN, "is_met": not rows, "observed": recorded_unknown(rows)}
        yield PlannedExpectation(ALL_VALUES_KNOWN, kwargs, "warning", "pipeline", VALUES_KNOWN)


def _is_fresh(limits: Sequence[FreshnessLimit]) -> Iterator[PlannedExpectation]:
    for limit in limits:
        kwargs = {"meaning": limit.meaning, "is_met": limit.is_met, "observed": limit.observed}
        yield PlannedExpectation(IS_FRESH, kwargs, limit.severity, "pipeline", limit.meaning)


def _is_as_before(state: TableState, before: Before | None) -> Iterator[PlannedExpectation]:
    """Plan the profile expectations, also without bounds, so that a full check measures.

    ``is_judged`` distinguishes them.
    """
    if before is None:
        return
    columns = [list(column) for column in profiled_columns(state)]
    for part, meaning, bounds in (
        ("rows", "the number of rows is as in earlier runs", {"rows": before.rows}),
        ("columns", "columns are distributed as in earlier runs", dict(before.columns)),
    ):
        kwargs = {
            "part": part,
            "meaning": meaning,
            "columns": columns,
            "bounds": bounds if any(bounds.values()) else {},
        }
        yield PlannedExpectation(AS_BEFORE, kwargs, "warning", "pipeline", meaning)


def is_judged(planned: PlannedExpectation) -> bool:
    """Returns whether the expectation has a result.

    A profile expectation has none before enough runs have measured the target.
    """
    return planned.type != AS_BEFORE or bool(planned.kwargs["bounds"])


def departures(planned: PlannedExpectation, measured: Measured) -> list[str]:
    """Returns where the measured profile departs from the bounds of a profile expectation."""
    return find_departures(measured, planned.kwargs["part"], planned.kwargs["bounds"])


def _filters_hold(
    state: TableState, held: Sequence[str], omitted: list[str]
) -> Iterator[PlannedExpectation]:
    # Rows that an earlier filter admitted stay, so each row passes one of the filters.
    filters = [state.row_filter or EVERYTHING, *state.later_filters]
    if EVERYTHING not in filters:
        text = filters[0] if len(filters) == 1 else " OR ".join(f"({f})" for f in filters)
        meaning = f"publication's row filter holds: {text}"
        read = partial(published_filter, text)
        yield from _meets_filter(state, held, ("row filter", read, meaning, "publication"), omitted)
    if (own := filter_of(state)) is not None:
        meaning = f"target's filter holds: {own.text}"
        yield from _meets_filter(
            state, held, ("target's filter", lambda: own, meaning, "pipeline"), omitted
        )


def _meets_filter(
    state: TableState,
    held: Sequence[str],
    described: tuple[str, Callable[[], RowFilter], str, Origin],
    omitted: list[str],
) -> Iterator[PlannedExpectation]:
    what, read, meaning, origin = described
    condition = _translated(state, held, what, read, omitted)
    if condition is not None:
        yield PlannedExpectation(
            ROWS_SATISFY, _satisfy(condition, meaning), "critical", origin, meaning
        )


def _translated(
    state: TableState,
    held: Sequence[str],
    what: str,
    read: Callable[[], RowFilter],
    omitted: list[str],
) -> str | None:
    """Returns a PostgreSQL condition as Spark SQL.

    Returns None, and adds to ``omitted``, where there is no certain equivalent.
    """
    try:
        # Without metadata columns there is no map of values that are stored raw.
        names: dict[str, str] | None = None if RAW in held else {}
        row_filter = read()
        if absent := set(row_filter.columns) - {column.name for column in state.columns}:
            omitted.append(
                f"{what}: not checked, because the target has no column"
                f" {', '.join(sorted(absent))} yet"
            )
            return None
        condition = spark_condition(row_filter, state.columns, names)
    except FilterNotTranslatable as err:
        omitted.append(f"{what}: not checked, because of its part at {err.where}: {err.reason}")
        return None
    if UNJUDGED in condition:
        omitted.append(
            f"{what}: not checked, because it computes with columns that may hold infinity or"
            " years BC"
        )
        return None
    return condition


def _satisfy(condition: str, meaning: str) -> dict[str, Any]:
    return {"condition": condition, "meaning": meaning}


def _own(
    state: TableState, held: Sequence[str], own: OwnSuiteFile | None, omitted: list[str]
) -> Iterator[PlannedExpectation]:
    if own is None:
        return
    types = {
        column.name: column_type(column.type_name, column.spark_type) for column in state.columns
    }
    raw = [name for name, kind in types.items() if kind.may_be_raw and RAW in held]
    # Expectations with a gate are included, because the gate never judged rows of a copy or
    # released rows.
    for number, item in enumerate(own.suite.expectations):
        meaning = own.meaning(number)
        kind, kwargs = with_raw(item.type, item.kwargs, raw, meaning)
        if kind == item.type and (column := asks_for_nulls(kind, kwargs, raw)) is not None:
            told = (
                f"values of {column} that only {RAW} has count as null: use no argument but mostly"
            )
            omitted.append(f"{meaning}: {told}")
        yield PlannedExpectation(kind, kwargs, item.severity, "own", meaning, own.place(number))


def _nameable(column: str) -> bool:
    return "`" not in column


def _gx_name(column: str) -> str:
    """Returns a column's name as Great Expectations lists it: in backticks when it has a dot."""
    return f"`{column}`" if "." in column else column
