"""Which expectations a target must meet: derived from the ledger's record of it, plus the engineer's own.

Pure: the plan names Great Expectations' types and arguments, ``quality.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_jobs.identifier import quote
from spark_jobs.own_suites import OwnSuiteFile, Severity
from spark_jobs.row_filter import spark_condition
from spark_jobs.row_filter_value import UNJUDGED
from waldelta.column_names import RAW
from waldelta.errors import FilterNotTranslatable
from waldelta.ledger import ColumnState, TableState
from waldelta.row_filter import published_filter
from waldelta.row_filter.typed import column_type

KEY_UNIQUE = "expect_target_key_to_be_unique"
COLUMNS_MATCH = "expect_target_columns_to_match"
ROWS_SATISFY = "expect_target_rows_to_satisfy"


@dataclass(frozen=True, slots=True)
class PlannedExpectation:
    """One expectation: its type and arguments as Great Expectations knows them, and where it comes from."""

    type: str
    kwargs: dict[str, Any] = field(hash=False)
    severity: Severity
    origin: Literal["catalog", "publication", "own"]
    meaning: str
    place: str | None = None  # of the engineer's own: file and number


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A target's expectations, and what could not be made one."""

    table: str
    expectations: tuple[PlannedExpectation, ...]
    left_out: tuple[str, ...] = ()


def plan_suite(state: TableState, held_columns: Sequence[str], own: OwnSuiteFile | None = None) -> SuitePlan:
    """Plan the suite of one target.

    ``held_columns`` are the columns its Delta table has now: they tell whether ``_wd_raw`` is kept.
    """
    left_out: list[str] = []
    planned = [
        _columns_match(state),
        *_key_unique(state, left_out),
        *_not_null(state, held_columns, left_out),
        *_filter_holds(state, held_columns, left_out),
        *_own(own, left_out),
    ]
    return SuitePlan(state.table_name, tuple(planned), tuple(left_out))


def _columns_match(state: TableState) -> PlannedExpectation:
    columns = {column.name: column.spark_type for column in state.columns}
    return PlannedExpectation(
        COLUMNS_MATCH, {"columns": columns}, "critical", "catalog", "columns and types match the ones recorded"
    )


def _key_unique(state: TableState, left_out: list[str]) -> Iterator[PlannedExpectation]:
    if not state.key_columns:
        left_out.append("unique key: the table has none, its rows are a multiset")
        return
    yield PlannedExpectation(
        KEY_UNIQUE,
        {"columns": list(state.key_columns)},
        "critical",
        "catalog",
        f"key ({', '.join(state.key_columns)}) is unique",
    )


def _not_null(state: TableState, held: Sequence[str], left_out: list[str]) -> Iterator[PlannedExpectation]:
    keys = set(state.key_columns)
    for column in state.columns:
        if not (column.not_null or column.name in keys):
            continue
        meaning = f"{'key' if column.name in keys else 'NOT NULL'} column {column.name} has no nulls"
        if column_type(column.type_name, column.spark_type).may_be_raw:
            yield from _held_somewhere(column, held, meaning, left_out)
        elif _nameable(column.name):
            kwargs = {"column": _gx_name(column.name)}
            yield PlannedExpectation("expect_column_values_to_not_be_null", kwargs, "critical", "catalog", meaning)
        else:
            condition = f"{quote(column.name)} is not null"
            yield PlannedExpectation(ROWS_SATISFY, _satisfy(condition, meaning), "critical", "catalog", meaning)


def _held_somewhere(
    column: ColumnState, held: Sequence[str], meaning: str, left_out: list[str]
) -> Iterator[PlannedExpectation]:
    """Not null, where NaN, infinity or BC dates are null in their column and stand in ``_wd_raw``."""
    if RAW not in held:
        left_out.append(
            f"{meaning}: without metadata columns a null may be a value that {column.spark_type} can't hold"
        )
        return
    key = column.name.replace("\\", "\\\\").replace("'", "\\'")
    condition = f"({quote(column.name)} is not null or coalesce(map_contains_key({RAW}, '{key}'), false))"
    yield PlannedExpectation(ROWS_SATISFY, _satisfy(condition, meaning), "critical", "catalog", meaning)


def _filter_holds(state: TableState, held: Sequence[str], left_out: list[str]) -> Iterator[PlannedExpectation]:
    if state.row_filter is None:
        return
    try:
        # Without metadata columns there is no map of the values that stand verbatim.
        names = None if RAW in held else {}
        condition = spark_condition(published_filter(state.row_filter), state.columns, names)
    except FilterNotTranslatable as err:
        left_out.append(f"row filter: not checked, because of its part at {err.where}: {err.reason}")
        return
    if UNJUDGED in condition:
        left_out.append("row filter: not checked, because it computes with columns that may hold infinity or years BC")
        return
    meaning = f"publication's row filter holds: {state.row_filter}"
    yield PlannedExpectation(ROWS_SATISFY, _satisfy(condition, meaning), "critical", "publication", meaning)


def _satisfy(condition: str, meaning: str) -> dict[str, Any]:
    return {"condition": condition, "meaning": meaning}


def _own(own: OwnSuiteFile | None, left_out: list[str]) -> Iterator[PlannedExpectation]:
    if own is None:
        return
    for number, item in enumerate(own.suite.expectations):
        if item.gate != "warn":
            left_out.append(f"{own.place(number)}: gate {item.gate} isn't in effect yet: judged after the merge")
        meaning = item.notes or item.type
        yield PlannedExpectation(item.type, dict(item.kwargs), item.severity, "own", meaning, own.place(number))


def _nameable(column: str) -> bool:
    return "`" not in column


def _gx_name(column: str) -> str:
    """A column's name as Great Expectations lists it: with backticks when it has a dot."""
    return f"`{column}`" if "." in column else column
