"""Quick check: judges targets without Great Expectations where that is possible.

Great Expectations costs half a second per table, whatever its size, and takes seconds to import.
The quick check finds out whether a planned suite is met, first in the driver, then by Spark. Arrow
reads small targets when the suite only has conditions that it evaluates the same way. Spark
evaluates all row conditions in one aggregate, concurrently with the query for duplicate keys. The
kinds of expectations say how they are evaluated. An expectation that is not met, or that only Great
Expectations evaluates, is left to it, and so is every table of a full check.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.errors import class_and_text
from waldelta.lake import READ_FAILURES, TargetVersion, by_row_group, row_count
from waldelta.lake.driver_limits import MOST_DRIVER_ROWS
from waldelta.metadata_columns import LSN
from waldelta.spark import Runner
from waldelta.stages.check.check_run import (
    CheckRun,
    changed_since,
    is_unchanged_since_full_check,
    met_at,
    refused,
    rest_of,
    suite_of,
)
from waldelta.stages.check.gate.release import is_decided
from waldelta.stages.check.measure.columns import listed
from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys, IntegerKey
from waldelta.stages.check.measure.profile import Measured, profile_by_values, profile_in_driver
from waldelta.stages.check.measure.references import Reference, rows_without_parent_in_driver
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation, TableVerdict
from waldelta.stages.check.suite.kind import RowCondition
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, depends_on, kind_of
from waldelta.stages.check.suite.profile_drift import find_departures
from waldelta.stages.check.suite.row_kinds import count_rows, is_met
from waldelta.stages.check.suite.target_facts import CheckedTarget, SourceRules
from waldelta.stages.check.suite.target_kinds import CountedKind, KeyUnique
from waldelta.target_modes import Feature

log = logging.getLogger(__name__)

# After few changes a foreign key is judged only when both of its targets together have at most this
# many rows.
_MOST_ROWS_REFERRED = 1_000_000
# A merge rewrites whole files, of whose rows few have changed. Up to this many are read.
_MOST_REWRITTEN_ROWS = 50 * MOST_DRIVER_ROWS
_ROWS_AT_ONCE = 1 << 16
_NOT_MEASURED = "drift: left to the next full check, since only Spark can measure this target"


def check_quickly(run: CheckRun, targets: Sequence[CheckedTarget]) -> list[TableVerdict]:
    """Returns the verdicts on targets for which a quick check suffices; the others need a full one.

    A target has a quick verdict when it meets its whole suite, or when it is unchanged since a full
    check found the suite met.
    """

    def judge(runner: Runner, target: CheckedTarget) -> TableVerdict | None:
        if not run.outcome.is_upkeep:
            return _judge(run, runner, target)
        unchanged = _judge_rest(run, runner, target)
        if unchanged is not None or not target.state.kept_as.supports(Feature.QUICK_CHECKS):
            return unchanged
        # Of a larger target, upkeep judges all rows anew.
        return _judge(run, runner, target) if target.open().is_small else None

    def check_one(runner: Runner, target: CheckedTarget) -> TableVerdict | None:
        started = time.monotonic()
        try:
            found = judge(runner, target)
        except Exception as err:  # The full check reports the cause.
            log.info(
                "table=%s can't have a quick check, a full check follows: %s",
                target.state.table_name,
                class_and_text(err),
            )
            return None
        return found and replace(found, seconds=time.monotonic() - started)

    chosen = [target for target in targets if run.outcome.is_quick(target.state)]
    return [verdict for verdict in run.pool.map(check_one, chosen) if verdict is not None]


def measure_early(
    background: ThreadPoolExecutor,
    runner: Runner,
    target: CheckedTarget,
    references: Sequence[Reference],
    met: int | None = None,
    types: Iterable[str] = KINDS,
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    """Have Spark count rows that don't meet expectations of these types, in the background.

    ``met`` is a version whose rows are known to meet the suite.
    """
    return {
        lookup_key: count
        for kind in map(kind_of, types)
        if isinstance(kind, CountedKind)
        for lookup_key, count in kind.start_counts(
            background=background, runner=runner, target=target, references=references, met=met
        ).items()
    }


def _judge(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict | None:
    """Returns the verdict on a target; None when Great Expectations must evaluate the suite."""
    table, upkeep = target.open(), run.outcome.is_upkeep
    is_full = upkeep or target.state.table_name in run.outcome.paged
    rules = run.rules_of(target) if is_full else affordable(run.rules_of(target))
    columns = table.schema.names
    suite = run.suite_of(target, columns, rules)
    profiled = quick_profile(table, suite, is_full=is_full)
    if profiled is None:
        return None
    measured, plan = profiled
    # Upkeep also finds rows that went bad without a run's change.
    met = None if upkeep else met_at(run.known, target, suite)

    in_driver = _by_arrow(plan, lambda: is_met_in_driver(table, plan, rules.references))

    def of_changes() -> bool:
        if met is None or rules.references:
            return False
        return _by_arrow(plan, lambda: are_changes_met(target, table, plan, met))

    def by_spark() -> bool:
        # Conditions can be built only where there is a session.
        frame = target.frame(runner)
        if (conditions := row_conditions(plan)) is None:
            return False
        counts = measure_early(run.background, runner, target, rules.references, met)
        if LSN in columns and (positions := run.decided.get(plan.table)):
            conditions = _without_decided(plan, conditions, is_decided(positions))
        since = None if upkeep else changed_since(run.known, target, suite, columns)
        return is_met_by_spark(frame, plan, conditions, counts, since)

    found = quick_outcomes(table, plan, lambda: in_driver, of_changes, by_spark)
    if found is None:
        return None
    return TableVerdict(
        plan.table,
        target.version,
        (*found, *refused(plan.refused)),
        plan.omitted,
        measured=measured,
        suite=suite_of(suite) if plan.refused is None else None,
        # Without an earlier result the check covers all rows, as Arrow's of a small target does.
        whole=in_driver or met is None,
    )


def _by_arrow(plan: SuitePlan, judge: Callable[[], bool]) -> bool:
    """Returns what ``judge`` finds; False where this process can't read the target."""
    try:
        return judge()
    except (*READ_FAILURES, KeyError) as err:
        log.info("table=%s can't be read on the driver: %s", plan.table, class_and_text(err))
        return False


def _without_decided(
    plan: SuitePlan, conditions: Mapping[int, RowCondition], decided: Column
) -> dict[int, RowCondition]:
    """Returns the conditions, of which gates don't judge rows that an operator let in."""
    return {
        number: replace(condition, unexpected=condition.unexpected & ~decided)
        if plan.expectations[number].is_gate
        else condition
        for number, condition in conditions.items()
    }


def _judge_rest(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict | None:
    """Returns the verdict of the expectations that depend on other data, met or not.

    Returns None when the target has changed since its last full check.
    """
    suite = run.suite_of(target, target.open().schema.names)
    if not is_unchanged_since_full_check(run.known, target, suite):
        return None
    plan = rest_of(suite)
    references, types = run.rules_of(target).references, {p.type for p in plan.expectations}
    counts = measure_early(run.background, runner, target, references, types=types)
    return TableVerdict(plan.table, target.version, rest_outcomes(plan, counts), plan.omitted)


def affordable(rules: SourceRules) -> SourceRules:
    """Returns the rules without the foreign keys that are too expensive to judge after few changes.

    A full check judges the omitted ones.
    """
    kept, omitted = [], list(rules.omitted)
    for reference in rules.references:
        try:
            sides = reference.referring, reference.referenced
            counts = [row_count(side.open().files) for side in sides]
        except (*READ_FAILURES, KeyError):
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
    table: TargetVersion, plan: SuitePlan, *, is_full: bool = False
) -> tuple[Measured | None, SuitePlan] | None:
    """Returns a mirror's profile measured without Spark, and the part of the plan still to judge.

    The profile is None when the plan has no profile expectation or the profile can't be measured.
    Returns None instead of a pair when the profile differs from earlier ones, or when Spark must
    measure what a check of all rows (``is_full``) has to measure.
    """
    asked = [planned for planned in plan.expectations if kind_of(planned.type).needs_profile]
    if not asked:
        return None, plan
    try:
        measure = profile_by_values if is_full else profile_in_driver
        found = measure(table, asked[0].kwargs["columns"])
    except (*READ_FAILURES, KeyError) as err:
        log.info("table=%s can't be measured on the driver: %s", plan.table, class_and_text(err))
        found = None
    if found is not None:
        departs = (find_departures(found, p.kwargs["part"], p.kwargs["bounds"]) for p in asked)
        return None if any(departs) else (found, plan)
    if is_full:
        return None
    kept = tuple(planned for planned in plan.expectations if planned not in asked)
    told = [_NOT_MEASURED] if any(kind_of(p.type).is_judged(p.kwargs) for p in asked) else []
    return None, replace(plan, expectations=kept, omitted=(*plan.omitted, *told))


def quick_outcomes(
    table: TargetVersion, plan: SuitePlan, *are_met: Callable[[], bool]
) -> tuple[Outcome, ...] | None:
    """Returns the outcome of each expectation when all are met.

    ``are_met`` find out, in this order, until one returns True. Returns None when Great
    Expectations must run.
    """
    columns = {listed(name): kind for name, kind in table.spark_types.items()}
    kinds = [(kind_of(planned.type), planned) for planned in plan.expectations]
    if not all(kind.fits(columns, planned.kwargs) for kind, planned in kinds):
        return None
    if not any(find_out() for find_out in are_met):
        return None
    return tuple(kind.outcome(planned) for kind, planned in kinds if kind.is_judged(planned.kwargs))


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


def is_met_in_driver(
    table: TargetVersion,
    plan: SuitePlan,
    references: Sequence[Reference] = (),
) -> bool:
    """Returns whether a small target certainly meets the plan, by Arrow.

    ``references`` are the plan's foreign keys. Raises what delta-rs and Arrow raise.
    """
    columns = _arrow_columns(plan.expectations)
    if columns is None or not table.is_small:
        return False
    rows = table.dataset().to_table(columns=columns)
    if any(rows_without_parent_in_driver(reference) != 0 for reference in references):
        return False
    return all(kind_of(p.type).is_met_by(rows, p) for p in plan.expectations)


def are_changes_met(target: CheckedTarget, table: TargetVersion, plan: SuitePlan, met: int) -> bool:
    """Returns whether a target certainly meets the plan after few changes, by Arrow.

    ``met`` is a version of which all rows met it. All other rows are in files that were written
    since. Raises what delta-rs and Arrow raise.
    """
    keys = [p for p in plan.expectations if p.type == KeyUnique.type]
    others = [p for p in plan.expectations if p.type != KeyUnique.type]
    columns = _arrow_columns(others)
    if columns is None or (dataset := written_since(table, met)) is None:
        return False
    scanner = by_row_group(dataset).scanner(
        columns, batch_size=_ROWS_AT_ONCE, batch_readahead=2, fragment_readahead=1
    )
    for batch in scanner.to_batches() if columns else ():
        rows = pa.Table.from_batches([batch])
        if not all(kind_of(p.type).is_met_by(rows, p) for p in others):
            return False
    return all(is_key_unique(target, planned.kwargs["columns"], met) for planned in keys)


def _arrow_columns(expectations: Iterable[PlannedExpectation]) -> list[str] | None:
    """Returns the columns that Arrow reads to judge expectations; None when it can't."""
    # The arguments of own expectations may be any that Great Expectations takes.
    read = [None if p.origin == "own" else kind_of(p.type).columns_read(p) for p in expectations]
    return None if None in read else sorted({name for names in read for name in names or ()})


def written_since(table: TargetVersion, met: int) -> ds.Dataset | None:
    """Returns the rows of files that a version lacks; None where Spark must read them."""
    if not table.is_writable or table.place.lake.on_spark:
        return None
    new = table.files_since(met)
    rows = row_count(new)
    if rows is None or rows > _MOST_REWRITTEN_ROWS:
        return None
    dataset, paths = table.dataset(), {*new["path"].to_pylist()}
    parts = [part for part in dataset.get_fragments() if part.path in paths]
    if len(parts) != len(paths):
        return None
    return ds.FileSystemDataset(parts, dataset.schema, dataset.format, dataset.filesystem)


def is_key_unique(target: CheckedTarget, columns: Sequence[str], met: int) -> bool:
    """Returns whether Arrow finds that no row written since a version shares its key.

    All keys of that version must differ.
    """
    if len(columns) != 1 or target.state.kept_as.keeps_rows:
        return False
    key = IntegerKey.open(target.table, target.version, columns[0])
    return key is not None and key.written_since(met).is_unique()


def is_met_by_spark(
    frame: DataFrame,
    plan: SuitePlan,
    conditions: Mapping[int, RowCondition],
    prefetched_duplicates: Mapping[tuple[str, ...], Future[DuplicateKeys]],
    since: int | None = None,
) -> bool:
    """Returns whether a target meets the plan, by Spark.

    ``conditions`` are those of the plan (``row_conditions``). ``since``: all rows that haven't
    changed from that position on are known to meet the suite (``changed_since``). Conditions that
    depend on the row alone are evaluated on rows that changed since then. Conditions on a share of
    rows or on the current date are evaluated on all rows.
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
    if of_all and not _are_met(frame, of_all):
        return False
    return not any(count.result().rows for count in prefetched_duplicates.values())


def _are_met(frame: DataFrame, conditions: Mapping[int, RowCondition]) -> bool:
    counts = count_rows(frame, [*conditions.values()])
    return all(is_met(*of, c.mostly) for of, c in zip(counts, conditions.values(), strict=True))
