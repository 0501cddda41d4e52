"""Judges own expectations before they judge: on the columns a target has or will have, and on rows
of it where there are some.

Names, arguments and columns are judged without Spark. Spark then analyses each condition, and
evaluates it on a made-up row and on the first rows of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from waldelta.config.expectation_files import OwnExpectation, OwnSuiteFile, TargetColumns
from waldelta.errors import WaldeltaError
from waldelta.findings import Finding, problem, warning
from waldelta.lake import READ_FAILURES
from waldelta.lake.ledger.records import SYNCED
from waldelta.pipeline import Job
from waldelta.spark import open_session
from waldelta.spark_sql import quote
from waldelta.stages.check.great_expectations.own_expectations import why_refused, why_unevaluable
from waldelta.stages.check.great_expectations.run_alone import judge_alone
from waldelta.stages.check.suite import PlannedExpectation, kind_of
from waldelta.stages.check.suite.row_kinds import RowKind
from waldelta.stages.setup.preflight.expectations import JudgeSuite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

# Enough rows to meet most values that a condition can't be evaluated on, at a bounded cost.
MOST_ROWS = 1_000
# A value of each type that any condition of a kind takes; null for the others.
_SAMPLES = {
    "string": "''",
    "boolean": "false",
    "date": "date'2000-01-01'",
    "timestamp": "timestamp'2000-01-01'",
    "timestamp_ntz": "timestamp_ntz'2000-01-01'",
    "binary": "X''",
}
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")


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
        yield _Judge(job, lambda: spark or opened.enter_context(open_session(name)))


@dataclass
class _Judge:
    job: Job
    open: Callable[[], SparkSession]
    _spark: SparkSession | None = None

    def __call__(self, table: str, file: OwnSuiteFile, columns: TargetColumns) -> Iterator[Finding]:
        refused = list(judge_names(table, file, columns))
        yield from refused
        if refused:  # Spark would only repeat some of it.
            return
        try:
            self._spark = self._spark or self.open()
        except WaldeltaError as err:
            yield warning(
                f"{file.path}: judged by its names and arguments only, since no Spark session can"
                f" be opened ({type(err).__name__}): run check where the jobs run"
            )
            return
        rows = self._rows(self._spark, table)
        for number, why in _unevaluable(self._spark, table, file, columns, rows):
            yield problem(f"{file.place(number)}: {why}")

    def _rows(self, spark: SparkSession, table: str) -> DataFrame | None:
        """Returns the first rows that a target has now; None where it can't be read."""
        try:
            state = self.job.read_state(table)
            target = self.job.lake.target(table)
            if state is None or state.status != SYNCED or (found := target.find()) is None:
                return None
            rows = state.kept_as.live_rows(target.frame(spark, found.version), state.key_columns)
            return rows.limit(MOST_ROWS)
        except (WaldeltaError, *READ_FAILURES) as err:
            log.info("expectations aren't judged on rows of %s: %s", table, type(err).__name__)
            return None


def _unevaluable(
    spark: SparkSession,
    table: str,
    file: OwnSuiteFile,
    columns: TargetColumns,
    rows: DataFrame | None,
) -> Iterator[tuple[int, str]]:
    """Yields the number of each expectation that Spark can't evaluate, and why."""
    sample = _sample(spark, columns.types)
    if rows is not None and rows.isEmpty():
        rows = None
    for number, item in enumerate(file.suite.expectations):
        try:
            _evaluate(item, sample, rows)
        except Exception as err:
            yield number, why_unevaluable(err)
            continue
        if rows is not None and not _is_of_rows(item):
            planned = PlannedExpectation(
                item.type, dict(item.kwargs), item.severity, "own", file.meaning(number)
            )
            if judge_alone(f"{table} {number}", table, planned, rows).success is None:
                yield number, "Great Expectations can't evaluate it on rows of the target"


def _is_of_rows(item: OwnExpectation) -> bool:
    return kind_of(item.type).row_condition(item.kwargs) is not None


def _evaluate(item: OwnExpectation, sample: DataFrame, rows: DataFrame | None) -> None:
    """Evaluate an expectation's condition; raises Spark's error when that isn't possible."""
    kind = kind_of(item.type)
    condition = kind.row_condition(item.kwargs)
    if condition is None:
        if isinstance(text := item.kwargs.get("row_condition"), str):
            sample.where(text).limit(0).collect()
        return
    # Whether other conditions can be evaluated depends on the row's values.
    takes_any_row = isinstance(kind, RowKind) and kind.columns == ("column",)
    for frame in (sample if takes_any_row else sample.limit(0), rows):
        if frame is not None:
            frame.agg(F.count(F.when(condition.unexpected, 1))).collect()


def _sample(spark: SparkSession, types: Mapping[str, str]) -> DataFrame:
    """Returns one made-up row of these columns."""
    values = [
        f"cast({_sample_of(type_name)} as {type_name}) as {quote(name)}"
        for name, type_name in types.items()
    ]
    return spark.range(1).selectExpr(*values)


def _sample_of(type_name: str) -> str:
    return "0" if type_name.startswith(_NUMBERS) else _SAMPLES.get(type_name, "null")
