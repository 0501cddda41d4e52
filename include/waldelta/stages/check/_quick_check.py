"""Quick check: evaluates a planned suite without Great Expectations where that is possible.

Great Expectations costs half a second per table, whatever its size, and takes seconds to import.
The quick check evaluates all row conditions in one Spark aggregate, concurrently with the query for
duplicate keys. Arrow reads small targets without Spark when the suite only has conditions that
Arrow evaluates the same way. The kinds of expectations say how they are evaluated. An expectation
that is not met, or that only Great Expectations evaluates, is left to it, and so is every table of
a full check.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError
from pyspark.sql import functions as F

from waldelta.changes.merge.small_target import is_small
from waldelta.lake import TargetVersion
from waldelta.lake.storage import row_count
from waldelta.metadata_columns import LSN
from waldelta.stages.check.measure import Measured, Reference
from waldelta.stages.check.measure.columns import listed, simple_type
from waldelta.stages.check.measure.profile import profile_in_driver
from waldelta.stages.check.measure.rows_without_parent import rows_without_parent_in_driver
from waldelta.stages.check.suite import Outcome, SourceRules, SuitePlan, kind_of
from waldelta.stages.check.suite.kind import RowCondition
from waldelta.stages.check.suite.kinds import depends_on
from waldelta.stages.check.suite.profile_drift import find_departures
from waldelta.stages.check.suite.row_kinds import is_met
from waldelta.stages.check.suite.target_kinds import AsBefore

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyspark.sql import DataFrame

    from waldelta.stages.check.measure import DuplicateKeys

log = logging.getLogger(__name__)

# After few changes a foreign key is judged only when both of its targets together have at most this
# many rows.
_MOST_ROWS_REFERRED = 1_000_000
_NOT_MEASURED = "drift: left to the next full check, since only Spark can measure this target"


def affordable(rules: SourceRules) -> SourceRules:
    """Returns the rules without the foreign keys that are too expensive to judge after few changes.

    A full check judges the omitted ones.
    """
    kept, omitted = [], list(rules.omitted)
    for reference in rules.references:
        try:
            sides = reference.referring, reference.referenced
            counts = [row_count(side.open().files) for side in sides]
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


def quick_profile(
    table: TargetVersion, plan: SuitePlan
) -> tuple[Measured | None, SuitePlan] | None:
    """Returns a mirror's profile measured without Spark, and the part of the plan still to judge.

    The profile is None when the plan has no profile expectation or the profile can't be measured.
    Returns None instead of a pair when the profile differs from earlier ones.
    """
    asked = [planned for planned in plan.expectations if planned.type == AsBefore.type]
    if not asked:
        return None, plan
    try:
        found = profile_in_driver(table, asked[0].kwargs["columns"])
    except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
        log.info("table=%s can't be measured on the driver: %s", plan.table, type(err).__name__)
        found = None
    if found is not None:
        departs = (find_departures(found, p.kwargs["part"], p.kwargs["bounds"]) for p in asked)
        return None if any(departs) else (found, plan)
    kept = tuple(planned for planned in plan.expectations if planned.type != AsBefore.type)
    told = [_NOT_MEASURED] if any(kind_of(p.type).is_judged(p) for p in asked) else []
    return None, replace(plan, expectations=kept, omitted=(*plan.omitted, *told))


def quick_outcomes(
    frame: DataFrame,
    plan: SuitePlan,
    conditions: Mapping[int, RowCondition],
    prefetched_duplicates: Mapping[tuple[str, ...], Future[DuplicateKeys]],
    since: int | None = None,
) -> tuple[Outcome, ...] | None:
    """Returns the outcome of each expectation when all are met; None when Great Expectations must
    run.

    ``conditions`` are those of the plan (``row_conditions``). ``since``: all rows that haven't
    changed from that position on are known to meet the suite (``changed_since``).
    """
    held = {listed(field.name): field.dataType.simpleString() for field in frame.schema.fields}
    if not _fit(held, plan):
        return None
    if not _all_are_met(frame, plan, conditions, since):
        return None
    if any(asked.result().rows for asked in prefetched_duplicates.values()):
        return None
    return _all_met(plan)


def rest_outcomes(
    plan: SuitePlan, prefetched_duplicates: Mapping[tuple[str, ...], Future[DuplicateKeys]]
) -> tuple[Outcome, ...]:
    """Returns the outcome, met or not, of each expectation of a plan made by ``rest_of``.

    All of them depend on more than the target's rows.
    """
    found = []
    for planned in plan.expectations:
        # Of a result that the run knew before, no rows were counted.
        key = tuple(planned.kwargs.get("columns", ()))
        rows = prefetched_duplicates[key].result().rows if key else 0
        found.append(kind_of(planned.type).outcome(planned, rows))
    return tuple(found)


def row_conditions(plan: SuitePlan) -> dict[int, RowCondition] | None:
    """Returns the row conditions of a plan by expectation number.

    Returns None when only Great Expectations can evaluate one, or one fails whatever the rows are.
    """
    conditions: dict[int, RowCondition] = {}
    for number, planned in enumerate(plan.expectations):
        kind = kind_of(planned.type)
        if kind.is_measured_early(planned):
            continue
        condition = kind.row_condition(planned.kwargs)
        if condition is None:
            return None
        conditions[number] = condition
    return conditions


def outcomes_in_driver(
    table: TargetVersion,
    plan: SuitePlan,
    references: Sequence[Reference] = (),
) -> tuple[Outcome, ...] | None:
    """Does the same as ``quick_outcomes`` for a small target, by Arrow.

    Returns None also when Spark is needed. ``references`` are the plan's foreign keys.
    """
    # The arguments of own expectations may be any that Great Expectations takes.
    read = [
        None if p.origin == "own" else kind_of(p.type).columns_read(p) for p in plan.expectations
    ]
    if None in read:
        return None
    columns = {name for names in read for name in names or ()}
    try:
        rows = _read_small(table, plan, columns)
        if rows is not None and any(
            rows_without_parent_in_driver(reference) != 0 for reference in references
        ):
            return None
    except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
        log.info("table=%s can't be read on the driver: %s", plan.table, type(err).__name__)
        return None
    if rows is None:
        return None
    if not all(kind_of(p.type).is_met_by(rows, p) for p in plan.expectations):
        return None
    return _all_met(plan)


def _read_small(table: TargetVersion, plan: SuitePlan, columns: Collection[str]) -> pa.Table | None:
    if not is_small(table.files):
        return None
    held = {listed(field.name): _spark_name(field.type) for field in table.table.schema().fields}
    if not _fit(held, plan):
        return None
    return table.dataset().to_table(columns=sorted(columns))


def _fit(columns: Mapping[str, str], plan: SuitePlan) -> bool:
    """Returns whether a target with these columns (Spark types by name) may meet the plan."""
    return all(kind_of(p.type).fits(columns, p.kwargs) for p in plan.expectations)


def _spark_name(kind: object) -> str:
    """Returns the name of a Delta type in Spark's ``simpleString``.

    Nested types return "nested", which matches no recorded type, so that Spark checks the columns.
    """
    name = getattr(kind, "type", None)
    is_plain = isinstance(name, str) and name not in ("array", "map", "struct")
    return simple_type(str(name)) if is_plain else "nested"


def _all_are_met(
    frame: DataFrame, plan: SuitePlan, conditions: Mapping[int, RowCondition], since: int | None
) -> bool:
    """Returns whether all conditions are met.

    Conditions that depend on the row alone are evaluated on rows that changed since the given
    position. Conditions on a share of rows or on the current date are evaluated on all rows.
    """
    of_changed: dict[int, RowCondition] = {}
    if since is not None:
        of_changed = {
            number: condition
            for number, condition in conditions.items()
            if condition.mostly == 1 and depends_on(plan.expectations[number]) == "row"
        }
        if of_changed and not _are_met(frame.where(F.col(LSN) >= since), of_changed):
            return False
    of_all = {n: c for n, c in conditions.items() if n not in of_changed}
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


def _all_met(plan: SuitePlan) -> tuple[Outcome, ...]:
    kinds = ((kind_of(planned.type), planned) for planned in plan.expectations)
    return tuple(kind.outcome(planned) for kind, planned in kinds if kind.is_judged(planned))
