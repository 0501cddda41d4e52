"""Judges own expectations before they judge: on the columns a target has or will have, and on rows
of it where there are some.

Names, arguments and columns are judged without Spark. Spark then analyses each condition, and
evaluates it on a made-up row and on the first rows of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from waldelta.config.expectation_files import OwnExpectation, OwnSuiteFile, TargetColumns, is_sql
from waldelta.errors import SlotMissing, WaldeltaError, class_and_text
from waldelta.findings import Finding, problem, warning
from waldelta.lake import READ_FAILURES
from waldelta.lake.ledger import SYNCED
from waldelta.pipeline import Job
from waldelta.spark import open_session
from waldelta.spark_sql import quote
from waldelta.stages.check.great_expectations.own_expectations import (
    NUMBERS,
    evaluate_each,
    judge_rows,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import kind_of
from waldelta.stages.check.suite.row_kinds import RowKind
from waldelta.stages.setup.preflight.targets import JudgeSuite

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
    """Judges targets' own expectations by a session that it opens once; without one, by names."""

    job: Job
    open: Callable[[], SparkSession]

    def __call__(self, table: str, file: OwnSuiteFile, columns: TargetColumns) -> Iterator[Finding]:
        """Yields what is wrong with a target's own expectations."""
        refused = list(judge_names(table, file, columns))
        yield from refused
        if refused:  # Spark would only repeat some of it.
            return
        session = self._session
        if isinstance(session, WaldeltaError):
            yield warning(
                "own expectations are judged by their names and arguments only, since no Spark"
                f" session can be opened ({type(session).__name__}): run check where the jobs run"
            )
            return
        rows = self._rows(session, table)
        for number, why in _unevaluable(session, table, file, columns, rows):
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
            if state is None or state.status != SYNCED or (found := target.find()) is None:
                return None
            rows = state.kept_as.live_rows(target.frame(spark, found.version), state.key_columns)
            return rows.limit(MOST_ROWS)
        except SlotMissing:  # Before the first setup there are no rows.
            return None
        except (WaldeltaError, *READ_FAILURES) as err:
            log.info("expectations aren't judged on rows of %s: %s", table, class_and_text(err))
            return None


def _unevaluable(
    spark: SparkSession,
    table: str,
    file: OwnSuiteFile,
    columns: TargetColumns,
    rows: DataFrame | None,
) -> Iterator[tuple[int, str]]:
    """Yields the number of each expectation that Spark can't evaluate, and why."""
    sample, items = _sample(spark, columns.types), dict(enumerate(file.suite.expectations))
    if rows is not None and rows.isEmpty():
        rows = None
    whys = failures(lambda some: _evaluate([items[n] for n in some], sample, rows), [*items])
    if rows is not None and (
        others := [
            n
            for n, item in items.items()
            if n not in whys and kind_of(item.type).row_condition(item.kwargs) is None
        ]
    ):
        planned = {
            n: PlannedExpectation(
                items[n].type, dict(items[n].kwargs), items[n].severity, "own", file.meaning(n)
            )
            for n in others
        }
        ours = [n for n in others if kind_of(items[n].type).arguments]
        whys |= failures(lambda some: judge_rows(table, [planned[n] for n in some], rows), ours)
        theirs = [n for n in others if n not in ours]
        outcomes = judge_rows(table, [planned[n] for n in theirs], rows)
        whys |= {
            n: "Great Expectations can't evaluate it on rows of the target"
            for n, outcome in zip(theirs, outcomes, strict=True)
            if outcome.success is None
        }
    yield from sorted(whys.items())


def failures(evaluate: Callable[[Sequence[int]], object], numbers: Sequence[int]) -> dict[int, str]:
    """Returns why some of these expectations can't be evaluated, by number."""

    def run(some: Sequence[int]) -> dict[int, object]:
        return dict.fromkeys(some, evaluate(some))

    _, errors = evaluate_each(run, numbers) if numbers else ({}, {})
    return {number: why_unevaluable(err) for number, err in errors.items()}


def _evaluate(items: Sequence[OwnExpectation], sample: DataFrame, rows: DataFrame | None) -> None:
    """Evaluate expectations' conditions; raises Spark's error when that isn't possible."""
    any_row: list[Column] = []
    other: list[Column] = []
    for item in items:
        kind = kind_of(item.type)
        condition = kind.row_condition(item.kwargs)
        if condition is None:
            text = item.kwargs.get("row_condition")
            if isinstance(text, str) and is_sql("row_condition", item.kwargs):
                sample.where(text).limit(0).collect()
            continue
        # Whether other conditions can be evaluated depends on the row's values.
        takes_any_row = isinstance(kind, RowKind) and kind.columns == ("column",)
        (any_row if takes_any_row else other).append(F.count(F.when(condition.unexpected, 1)))
    for frame, counts in ((sample, any_row), (sample.limit(0), other), (rows, any_row + other)):
        if frame is not None and counts:
            frame.agg(*counts).collect()


def _sample(spark: SparkSession, types: Mapping[str, str]) -> DataFrame:
    """Returns one made-up row of these columns."""
    values = []
    for name, type_name in types.items():
        value = "0" if type_name.startswith(NUMBERS) else _SAMPLES.get(type_name, "null")
        values.append(f"cast({value} as {type_name}) as {quote(name)}")
    return spark.range(1).selectExpr(*values)
