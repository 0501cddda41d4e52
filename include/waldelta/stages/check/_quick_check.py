"""Quick check: evaluates a planned suite without Great Expectations where that is possible.

Great Expectations costs half a second per table, whatever its size, and takes seconds to import.
The quick check evaluates all row conditions in one Spark aggregate, concurrently with the query for
duplicate keys. Arrow reads small targets without Spark when the suite only has conditions that
Arrow evaluates the same way. An expectation that is not met, or not known in this module, is left
to Great Expectations, and so is every table of a full check.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import codes_of
from waldelta.changes.merge.small_target import is_small
from waldelta.lake import files_of
from waldelta.lake.ledger.expectation_results import ALL_VALUES_KNOWN, IS_FRESH, REFERENCES_HOLD
from waldelta.lake.storage import SPARKS_TIMESTAMPS, row_count
from waldelta.metadata_columns import LSN
from waldelta.quantities import counted
from waldelta.stages.check.measure import Measured, Reference, RowCondition, row_condition
from waldelta.stages.check.measure.columns import column_differences, listed
from waldelta.stages.check.measure.profile import profile_in_driver
from waldelta.stages.check.measure.row_conditions import (
    LENGTHS_BETWEEN,
    LENGTHS_EQUAL,
    MATCH_REGEX,
    is_met,
    is_of_row_alone,
)
from waldelta.stages.check.measure.rows_without_parent import rows_without_parent_in_driver
from waldelta.stages.check.suite import Outcome, PlannedExpectation, SuitePlan
from waldelta.stages.check.suite.plan import (
    AS_BEFORE,
    COLUMNS_MATCH,
    KEY_UNIQUE,
    SourceRules,
    departures,
    is_judged,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyspark.sql import DataFrame

    from waldelta.stages.check.measure import DuplicateKeys

log = logging.getLogger(__name__)

# After few changes a foreign key is judged only when both of its targets together have at most this
# many rows.
_MOST_ROWS_REFERRED = 1_000_000
_NOT_MEASURED = "drift: left to the next full check, since only Spark can measure this target"
_NOT_NULL = "expect_column_values_to_not_be_null"
_IN_SET = "expect_column_values_to_be_in_set"
_OF_VALUES = frozenset({_IN_SET, LENGTHS_BETWEEN, LENGTHS_EQUAL, MATCH_REGEX})
# Expectations whose arguments already contain the result.
_FOUND_BEFORE = (IS_FRESH, ALL_VALUES_KNOWN)
_OF_NO_VALUES = (COLUMNS_MATCH, REFERENCES_HOLD, AS_BEFORE, *_FOUND_BEFORE)
_FOR_ARROW = frozenset({KEY_UNIQUE, *_OF_NO_VALUES, _NOT_NULL, *_OF_VALUES})


def affordable(rules: SourceRules, storage_options: Mapping[str, str] | None = None) -> SourceRules:
    """Returns the rules without the foreign keys that are too expensive to judge after few changes.

    A full check judges the omitted ones.
    """
    kept, omitted = [], list(rules.omitted)
    for reference in rules.references:
        try:
            sides = reference.referring, reference.referenced
            counts = [row_count(files_of(side.open(storage_options))) for side in sides]
        except (DeltaError, OSError, pa.ArrowException, KeyError):
            counts = [None]
        rows = sum(count for count in counts if count is not None)
        if None in counts or rows > _MOST_ROWS_REFERRED:
            omitted.append(
                f"foreign key {reference.name}: left to the next full check, since its targets are"
                " large"
            )
        else:
            kept.append(reference)
    return replace(rules, references=kept, omitted=omitted)


def quick_profile(table: DeltaTable, plan: SuitePlan) -> tuple[Measured | None, SuitePlan] | None:
    """Returns a mirror's profile measured without Spark, and the part of the plan still to judge.

    The profile is None when the plan has no profile expectation or the profile can't be measured.
    Returns None instead of a pair when the profile differs from earlier ones.
    """
    asked = [planned for planned in plan.expectations if planned.type == AS_BEFORE]
    if not asked:
        return None, plan
    try:
        found = profile_in_driver(table, asked[0].kwargs["columns"])
    except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
        log.info("table=%s can't be measured on the driver: %s", plan.table, type(err).__name__)
        found = None
    if found is not None:
        return None if any(departures(planned, found) for planned in asked) else (found, plan)
    kept = tuple(planned for planned in plan.expectations if planned.type != AS_BEFORE)
    told = [_NOT_MEASURED] if any(is_judged(planned) for planned in asked) else []
    return None, replace(plan, expectations=kept, omitted=(*plan.omitted, *told))


def quick_outcomes(
    frame: DataFrame,
    plan: SuitePlan,
    prefetched_duplicates: Mapping[tuple[str, ...], Future[DuplicateKeys]],
    since: int | None = None,
) -> tuple[Outcome, ...] | None:
    """Returns the outcome of each expectation when all are met; None when Great Expectations must
    run.

    ``since``: all rows that haven't changed from that position on are known to meet the suite
    (``changed_since``).
    """
    conditions = _conditions(plan)
    if conditions is None:
        return None
    if not _columns_match(frame, plan):
        return None
    try:
        if not _all_are_met(
            frame, conditions, None if since is None else (since, _of_rows_alone(plan))
        ):
            return None
        if any(asked.result().rows for asked in prefetched_duplicates.values()):
            return None
    except Exception as err:  # Great Expectations reports which expectation fails.
        log.info(
            "table=%s can't have a quick check, a full check follows: %s",
            plan.table,
            type(err).__name__,
        )
        return None
    return tuple(_met(planned) for planned in plan.expectations if is_judged(planned))


def rest_outcomes(
    plan: SuitePlan, prefetched_duplicates: Mapping[tuple[str, ...], Future[DuplicateKeys]]
) -> tuple[Outcome, ...] | None:
    """Returns the outcome, met or not, of each expectation of a plan made by ``rest_of``.

    All of them depend on more than the target's rows. Returns None when one couldn't be evaluated.
    """
    found = []
    for planned in plan.expectations:
        if planned.type in _FOUND_BEFORE:
            found.append(
                Outcome(planned, bool(planned.kwargs["is_met"]), planned.kwargs["observed"], None)
            )
            continue
        try:
            rows = prefetched_duplicates[tuple(planned.kwargs["columns"])].result().rows
        except Exception as err:  # Great Expectations reports the cause.
            log.info(
                "table=%s can't have a quick check, a full check follows: %s",
                plan.table,
                type(err).__name__,
            )
            return None
        found.append(
            Outcome(
                planned, not rows, f"{counted(rows, 'row has', 'rows have')} no parent row", rows
            )
        )
    return tuple(found)


def _conditions(plan: SuitePlan) -> dict[int, RowCondition] | None:
    """Returns the row conditions of a plan by expectation number.

    Returns None when an expectation is not known in this module, or fails whatever the rows are.
    """
    conditions: dict[int, RowCondition] = {}
    for number, planned in enumerate(plan.expectations):
        if planned.type in _FOUND_BEFORE and not planned.kwargs["is_met"]:
            return None
        if planned.type in (KEY_UNIQUE, *_OF_NO_VALUES):
            if planned.origin == "own":  # Only what the run itself planned was measured.
                return None
            continue
        condition = row_condition(planned.type, planned.kwargs)
        if condition is None:
            return None
        conditions[number] = condition
    return conditions


def is_known(plan: SuitePlan) -> bool:
    """Returns whether ``quick_outcomes`` can evaluate the plan; if not, nothing needs to be
    measured.
    """
    return _conditions(plan) is not None


def outcomes_in_driver(
    table: DeltaTable,
    plan: SuitePlan,
    references: Sequence[Reference] = (),
    storage_options: Mapping[str, str] | None = None,
) -> tuple[Outcome, ...] | None:
    """Does the same as ``quick_outcomes`` for a small target, by Arrow.

    Returns None also when Spark is needed. ``references`` are the plan's foreign keys.
    """
    if not all(_is_for_arrow(planned) for planned in plan.expectations):
        return None
    try:
        rows = _read_small(table, plan)
        if rows is not None and any(
            rows_without_parent_in_driver(reference, storage_options) != 0
            for reference in references
        ):
            return None
    except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
        log.info("table=%s can't be read on the driver: %s", plan.table, type(err).__name__)
        return None
    if rows is None:
        return None
    if not all(_is_met_by(rows, planned) for planned in plan.expectations):
        return None
    return tuple(_met(planned) for planned in plan.expectations if is_judged(planned))


def _read_small(table: DeltaTable, plan: SuitePlan) -> pa.Table | None:
    if not is_small(files_of(table)):
        return None
    held = {field.name: field.type for field in table.schema().fields}
    recorded = next(
        (p.kwargs["columns"] for p in plan.expectations if p.type == COLUMNS_MATCH), None
    )
    if recorded is not None and column_differences(
        recorded, {listed(n): _spark_name(t) for n, t in held.items()}
    ):
        return None
    wanted = {name for planned in plan.expectations for name in _read_for(planned)}
    return table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS).to_table(
        columns=sorted(wanted)
    )


def _spark_name(kind: object) -> str:
    """Returns the name of a Delta type in Spark's ``simpleString``.

    Nested types return "nested", which matches no recorded type, so that Spark checks the columns.
    """
    name = getattr(kind, "type", None)
    names = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
    return (
        names.get(name, name)
        if isinstance(name, str) and name not in ("array", "map", "struct")
        else "nested"
    )


def _is_for_arrow(planned: PlannedExpectation) -> bool:
    """Returns whether Arrow returns the same result as Spark, without Spark's details."""
    if planned.origin == "own":
        return False
    return planned.suffices is not None or planned.type in _FOR_ARROW


def _read_for(planned: PlannedExpectation) -> list[str]:
    """Returns the columns that are read to judge the expectation."""
    if planned.type in _OF_NO_VALUES:
        return []
    if planned.type == KEY_UNIQUE:
        return list(planned.kwargs["columns"])
    return [planned.suffices or _unlisted(planned.kwargs["column"])]


def _is_met_by(rows: pa.Table, planned: PlannedExpectation) -> bool:
    if planned.type in _OF_NO_VALUES:  # Those without ``is_met`` were evaluated before.
        return bool(planned.kwargs.get("is_met", True))
    if planned.type == KEY_UNIQUE:
        return not _has_duplicates(rows, planned.kwargs["columns"])
    (name,) = _read_for(planned)
    if planned.type in _OF_VALUES:
        return bool(pc.all(_meets(rows[name].drop_null(), planned), min_count=0).as_py())
    return not rows[name].null_count


def _meets(values: pa.ChunkedArray, planned: PlannedExpectation) -> pa.ChunkedArray:
    """Returns which values meet the rules of the source's types, with arguments as
    ``suite.plan`` plans them.
    """
    kwargs = planned.kwargs
    if planned.type == _IN_SET:
        return pc.is_in(values, value_set=pa.array(kwargs["value_set"], values.type))
    if planned.type == MATCH_REGEX:
        return pc.match_substring_regex(values, kwargs["regex"])
    lengths = pc.utf8_length(values)
    return (
        pc.less_equal(lengths, kwargs["max_value"])
        if planned.type == LENGTHS_BETWEEN
        else pc.equal(lengths, kwargs["value"])
    )


def _has_duplicates(rows: pa.Table, columns: Sequence[str]) -> bool:
    codes = codes_of([rows[name] for name in columns])
    return len(np.unique(codes)) < len(codes)


def _unlisted(column: str) -> str:
    return (
        column[1:-1]
        if "." in column and column.startswith("`") and column.endswith("`")
        else column
    )


def _columns_match(frame: DataFrame, plan: SuitePlan) -> bool:
    held = {listed(field.name): field.dataType.simpleString() for field in frame.schema.fields}
    recorded = [
        planned.kwargs["columns"] for planned in plan.expectations if planned.type == COLUMNS_MATCH
    ]
    return not any(column_differences(columns, held) for columns in recorded)


def _of_rows_alone(plan: SuitePlan) -> set[int]:
    """Returns the numbers of the expectations that an unchanged row meets for ever once it met
    them.
    """
    return {
        number
        for number, planned in enumerate(plan.expectations)
        if planned.origin != "own" or is_of_row_alone(planned.type, planned.kwargs)
    }


def _all_are_met(
    frame: DataFrame,
    conditions: Mapping[int, RowCondition],
    changed: tuple[int, set[int]] | None = None,
) -> bool:
    """Returns whether all conditions are met.

    Conditions that depend on the row alone are evaluated on rows that changed since the given
    position. Conditions on a share of rows or on the current date are evaluated on all rows.
    """
    if changed is None:
        return not conditions or _are_met(frame, conditions)
    since, alone = changed
    of_changed = {n: c for n, c in conditions.items() if n in alone and c.mostly == 1}
    of_all = {n: c for n, c in conditions.items() if n not in of_changed}
    if of_changed and not _are_met(frame.where(F.col(LSN) >= since), of_changed):
        return False
    return not of_all or _are_met(frame, of_all)


def _are_met(frame: DataFrame, conditions: Mapping[int, RowCondition]) -> bool:
    asked = []
    for number, condition in conditions.items():
        asked.append(F.count(F.when(condition.unexpected, 1)).alias(f"f{number}"))
        if condition.mostly < 1:
            asked.append(F.count(F.when(condition.judged, 1)).alias(f"j{number}"))
    row = frame.agg(*asked).first()
    if row is None:
        return False
    found = row.asDict()
    return all(
        not found[f"f{n}"] or (c.mostly < 1 and is_met(found[f"f{n}"], found[f"j{n}"], c.mostly))
        for n, c in conditions.items()
    )


def _met(planned: PlannedExpectation) -> Outcome:
    observed = (
        planned.kwargs["observed"] if planned.type in _FOUND_BEFORE else _OBSERVED.get(planned.type)
    )
    count = None if planned.type in (COLUMNS_MATCH, AS_BEFORE, *_FOUND_BEFORE) else 0
    return Outcome(planned, success=True, observed=observed, unexpected_count=count)


_OBSERVED = {
    COLUMNS_MATCH: "as recorded",
    KEY_UNIQUE: "0 rows share their key",
    REFERENCES_HOLD: "0 rows have no parent row",
    AS_BEFORE: "as before",
}
