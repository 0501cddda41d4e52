"""Judges own expectations before they judge: on the columns a target has or will have, and on rows
of it where there are some.

Names, arguments and columns are judged without Spark, and so are conditions that Arrow certainly
evaluates. Spark then analyses each of the others, and evaluates it on a made-up row and on the
first rows of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from waldelta.config.expectation_files import OwnSuiteFile, TargetColumns, is_sql
from waldelta.errors import SlotMissing, WaldeltaError, class_and_text
from waldelta.findings import Finding, problem, warning
from waldelta.lake import READ_FAILURES
from waldelta.lake.ledger import SYNCED
from waldelta.pipeline import Job
from waldelta.spark import open_session
from waldelta.spark_sql import quote
from waldelta.stages.check.great_expectations.own_expectations import (
    NUMBERS,
    Numbered,
    arrow_conditions,
    count_by_arrow,
    count_by_spark,
    judge_each,
    judge_rows,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.suite.expectation import RowCondition
from waldelta.stages.check.suite.kinds import kind_of, plan_own, row_conditions
from waldelta.stages.check.suite.row_kinds import is_of_column
from waldelta.stages.setup.preflight.targets import JudgeSuite
from waldelta.types import stored_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

# Enough rows to meet most values that a condition can't be evaluated on, at a bounded cost.
MOST_ROWS = 1_000
# Spark compiles each condition, so of a target it evaluates no more expectations than these.
MOST_BY_SPARK = 1_000
# One value for each type of column, valid for conditions of any kind; null for other types.
_SAMPLES = {
    "string": "''",
    "boolean": "false",
    "date": "date'2000-01-01'",
    "timestamp": "timestamp'2000-01-01'",
    "timestamp_ntz": "timestamp_ntz'2000-01-01'",
    "binary": "X''",
}


def judge_names(_: str, file: OwnSuiteFile, columns: TargetColumns) -> Iterator[Finding]:
    """Yields what is wrong with a target's own expectations, as far as that shows without Spark."""
    for number, item in enumerate(file.suite.expectations):
        for why in why_refused(item, columns):
            yield problem(f"{file.place(number)}: {why}")


@contextmanager
def judging(job: Job, spark: SparkSession | None = None) -> Iterator[JudgeSuite]:
    """Yields the function that judges a target's own expectations, also by Spark.

    It opens a session when it first needs one, unless ``spark`` is given.
    """
    with ExitStack() as opened:
        name = f"waldelta check {job.pipeline.pipeline}"
        yield SuiteJudge(job, lambda: spark or opened.enter_context(open_session(name)))


@dataclass
class SuiteJudge:
    """Judges targets' own expectations; opens a session once, where one of them needs Spark."""

    job: Job
    open: Callable[[], SparkSession]

    def __call__(self, table: str, file: OwnSuiteFile, columns: TargetColumns) -> Iterator[Finding]:
        """Yields what is wrong with a target's own expectations."""
        refused = list(judge_names(table, file, columns))
        yield from refused
        if refused:  # Spark would report some of these errors again.
            return
        planned = {n: expectation for n, (_, expectation) in enumerate(plan_own(file))}
        uncertain = _uncertain(planned, columns.types)
        if not uncertain:
            return
        session = self._session
        if isinstance(session, WaldeltaError):
            yield warning(
                "own expectations are judged by their names and arguments only, since no Spark"
                f" session can be opened ({type(session).__name__}): run check where the jobs run"
            )
            return
        if len(uncertain) > MOST_BY_SPARK:
            yield warning(
                f"expectations of {table}: the last {len(uncertain) - MOST_BY_SPARK:,} that need"
                " Spark are judged by their names and arguments only, since it takes long to"
                " compile so many: write one condition for several columns"
            )
            uncertain = dict([*uncertain.items()][:MOST_BY_SPARK])
        rows = self._rows(session, table)
        for number, why in _unevaluable(session, table, uncertain, columns, rows):
            yield problem(f"{file.place(number)}: {why}")

    @cached_property
    def _session(self) -> SparkSession | WaldeltaError:
        """Returns the session, or why there is none: an attempt to open one takes seconds."""
        try:
            return self.open()
        except WaldeltaError as err:
            return err

    def _rows(self, spark: SparkSession, table: str) -> DataFrame | None:
        """Returns the first rows that a target has now; None where it can't be read."""
        try:
            state = self.job.read_state(table)
            target = self.job.lake.target(table)
            if state is None or state.status != SYNCED or (version := target.find()) is None:
                return None
            rows = state.target_mode.live_rows(
                target.frame(spark, version.version), state.key_columns
            )
            return rows.limit(MOST_ROWS)
        except SlotMissing:  # Before the first setup there are no rows.
            return None
        except (WaldeltaError, *READ_FAILURES) as err:
            log.info("expectations aren't judged on rows of %s: %s", table, class_and_text(err))
            return None


def _uncertain(planned: Numbered, types: Mapping[str, str]) -> Numbered:
    """Returns the expectations that Arrow doesn't certainly evaluate on columns of these types."""
    # Arrow has variants as texts, and Spark compares them with none.
    kinds = {name: stored_type(kind).arrow for name, kind in types.items() if kind != "variant"}
    row = pa.table({name: pa.nulls(1, kind) for name, kind in kinds.items()})
    certain = count_by_arrow([row], arrow_conditions(row_conditions(planned), kinds))
    return {n: each for n, each in planned.items() if n not in certain}


def _unevaluable(
    spark: SparkSession,
    table: str,
    planned: Numbered,
    columns: TargetColumns,
    rows: DataFrame | None,
) -> Iterator[tuple[int, str]]:
    """Yields the number of each expectation that Spark can't evaluate, and why."""
    sample = _sample(spark, columns.types)
    if rows is not None and rows.isEmpty():
        rows = None
    conditions = row_conditions(planned)
    other_expectations = {n: p for n, p in planned.items() if n not in conditions}
    filters = {
        n: RowCondition(condition, ())
        for n, p in other_expectations.items()
        if isinstance(condition := p.kwargs.get("row_condition"), str)
        and is_sql("row_condition", p.kwargs)
    }
    # Whether other conditions can be evaluated depends on the row's values.
    any_row = {n: c for n, c in conditions.items() if is_of_column(kind_of(planned[n].type))}
    errors: dict[int, Exception] = {}
    for frame, frame_conditions in (
        (sample, any_row),
        (sample.limit(0), {n: c for n, c in conditions.items() if n not in any_row} | filters),
        (rows, conditions),
    ):
        if frame is not None:
            errors |= count_by_spark(
                frame, {n: frame_conditions[n] for n in frame_conditions.keys() - errors.keys()}
            )[1]
    whys = {n: why_unevaluable(err) for n, err in errors.items()}
    if rows is not None:
        whys |= _whys_on_rows(
            table, {n: p for n, p in other_expectations.items() if n not in whys}, rows
        )
    yield from sorted(whys.items())


def _whys_on_rows(table: str, planned: Numbered, rows: DataFrame) -> dict[int, str]:
    """Returns why some expectations can't be evaluated on rows of the target."""
    outcomes, errors = judge_each(lambda of: judge_rows(table, of, rows), planned)
    unjudged = [n for n, outcome in outcomes.items() if outcome.success is None]
    why = "Great Expectations can't evaluate it on rows of the target"
    return dict.fromkeys(unjudged, why) | {n: why_unevaluable(err) for n, err in errors.items()}


def _sample(spark: SparkSession, types: Mapping[str, str]) -> DataFrame:
    """Returns one made-up row of these columns."""
    values = []
    for name, type_name in types.items():
        value = "0" if type_name.startswith(NUMBERS) else _SAMPLES.get(type_name, "null")
        values.append(f"cast({value} as {type_name}) as {quote(name)}")
    return spark.range(1).selectExpr(*values)
