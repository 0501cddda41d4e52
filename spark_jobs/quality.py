"""The check stage: run every target's expectations on the version the run has left, keep results and report.

Nothing here raises for a failed expectation; ``QualityReport.raise_if_critical`` does, after all is written.
Great Expectations is imported only when there is something to check.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException

from spark_jobs.data_docs import (
    build_site,
    docs_folder,
    drop_old_results,
    keep_result,
    open_context,
    page_name,
    page_path,
    private_files,
    run_identifier,
)
from spark_jobs.expectation_suite import PlannedExpectation, SuitePlan, plan_suite
from spark_jobs.merge import path
from spark_jobs.own_suites import OwnSuiteFile, assign_suites, read_own_suites, suites_folder
from waldelta.errors import QualityFailed, StateError
from waldelta.expectation_results import ExpectationResult, append_expectation_results
from waldelta.lake import target_uri
from waldelta.ledger import Ledger, TableState, now
from waldelta.pipeline_file import PipelineFile, split_table_name

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
        ExpectationValidationResult,
    )
    from great_expectations.data_context.data_context.ephemeral_data_context import EphemeralDataContext
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

# Counts only: fetching examples costs a query per expectation, so they are fetched for those that failed.
COUNTS_ONLY = {"result_format": "SUMMARY", "partial_unexpected_count": 0}
# Examples of values that failed; they show up in the reports only, never in logs.
WITH_EXAMPLES = {"result_format": "SUMMARY", "partial_unexpected_count": 5}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one expectation found; ``success`` is None when it could not be evaluated."""

    planned: PlannedExpectation
    success: bool | None
    observed: str | None
    unexpected_count: int | None

    def __str__(self) -> str:
        found = "could not be evaluated" if self.success is None else ""
        if self.unexpected_count:
            found = f"{self.unexpected_count} rows"
        kind = "" if self.planned.meaning == self.planned.type else f"{self.planned.type}: "
        column = self.planned.kwargs.get("column") if self.planned.origin == "own" else None
        subject = f" on {column}" if column else ""
        return f"{kind}{self.planned.meaning}{subject}" + (f" ({found})" if found else "")


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """A target's outcomes, the Delta version they hold for, and their page."""

    table: str
    version: int
    outcomes: tuple[Outcome, ...]
    left_out: tuple[str, ...]
    page: Path
    seconds: float

    def failed(self, severity: str) -> list[Outcome]:
        """The outcomes of one severity that weren't met."""
        return [o for o in self.outcomes if not o.success and o.planned.severity == severity]


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What a run's check found, and where its report is."""

    run_id: str
    tables: tuple[TableVerdict, ...]
    index: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """The critical expectations that weren't met, with their tables."""
        return self._failed("critical")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The expectations of severity warning that weren't met, with their tables."""
        return self._failed("warning")

    @property
    def location(self) -> str | None:
        """The page to open: the first failing table's, else the index of all reports."""
        for severity in ("critical", "warning"):
            for verdict in self.tables:
                if verdict.failed(severity):
                    return str(verdict.page)
        return None if self.index is None else str(self.index)

    @property
    def summary(self) -> str:
        """One line for logs."""
        count = sum(len(verdict.outcomes) for verdict in self.tables)
        missed = f"{len(self.failures)} critical and {len(self.warnings)} warnings not met"
        return f"{count} expectations on {len(self.tables)} tables, {missed}"

    def raise_if_critical(self) -> None:
        """Raise QualityFailed when a critical expectation wasn't met."""
        if not self.failures:
            return
        listed = "\n".join(f"  - {failure}" for failure in self.failures)
        raise QualityFailed(
            f"{len(self.failures)} critical expectations failed (the changes are applied and safe):\n{listed}\n"
            f"report: {self.location}"
        )

    def _failed(self, severity: str) -> tuple[str, ...]:
        return tuple(f"{v.table}: {outcome}" for v in self.tables for outcome in v.failed(severity))


@dataclass(frozen=True, slots=True)
class _Target:
    """A target to check, as one Delta version."""

    plan: SuitePlan
    version: int
    uri: str
    frame: DataFrame


def check(
    spark: SparkSession, pipeline: PipelineFile, ledger: Ledger, run_id: str, tables: Iterable[str] | None = None
) -> QualityReport:
    """Check the given targets, or all that have been synced, and write results and report.

    Raises ConfigError for expectation files that are refused, before anything is checked.
    """
    folder = docs_folder(pipeline)
    states = {name: state for name, state in ledger.table_states().items() if state.status == "synced"}
    own, unused = assign_suites(read_own_suites(suites_folder(pipeline)), states)
    wanted = [name for name in states if tables is None or name in set(tables)]
    if not wanted:
        return QualityReport(run_id, (), notes=tuple(unused))
    versions = _recorded_versions(ledger)
    targets = [_read_target(spark, ledger, states[name], versions, own.get(name)) for name in sorted(wanted)]
    with private_files():
        report = _run(folder, pipeline, run_id, targets, tuple(unused))
    _record(ledger, report)
    _log(report)
    return report


def _recorded_versions(ledger: Ledger) -> dict[tuple[str, int], int]:
    """The version of each target and sync generation in the latest cut that has it."""
    return {(cut.table_name, cut.generation): cut.version for batch in ledger.batches() for cut in batch.targets}


def _read_target(
    spark: SparkSession,
    ledger: Ledger,
    state: TableState,
    versions: dict[tuple[str, int], int],
    own: OwnSuiteFile | None,
) -> _Target:
    uri = target_uri(ledger.root, *split_table_name(state.table_name))
    version = versions.get((state.table_name, state.generation))
    if version is None:
        version = _latest_version(spark, state.table_name, uri)
    frame = spark.read.format("delta").option("versionAsOf", version).load(uri)
    return _Target(plan_suite(state, frame.columns, own), version, uri, frame)


def _latest_version(spark: SparkSession, table: str, uri: str) -> int:
    """The version a target is at that no cut has yet: it has only been copied."""
    try:
        return int(spark.sql(f"describe history {path(uri)} limit 1").collect()[0]["version"])
    except AnalysisException as err:
        raise StateError(f"the target of {table} isn't at {uri}: run the initial sync again") from err


def _run(
    folder: Path, pipeline: PipelineFile, run_id: str, targets: list[_Target], notes: tuple[str, ...]
) -> QualityReport:
    from spark_jobs.build_expectations import build_suite

    context = open_context(folder)
    run = run_identifier(pipeline.pipeline, run_id, now())
    # All suites are built first, so that a mistake in a file is told before any table is scanned.
    suites = [build_suite(page_name(target.plan.table), target.plan) for target in targets]
    verdicts: list[TableVerdict] = []
    identifiers = []
    for target, suite in zip(targets, suites, strict=True):
        started = time.monotonic()
        result = _validate(context, suite, target.frame)
        result.meta["run_id"] = run
        result.meta["batch_parameters"] = _about(pipeline, run_id, target)
        identifier = keep_result(context, suite.name, result, run)
        identifiers.append(identifier)
        outcomes = tuple(_outcome(item, target.plan) for item in _in_order(result))
        page = page_path(folder, identifier)
        seconds = time.monotonic() - started
        verdicts.append(TableVerdict(target.plan.table, target.version, outcomes, target.plan.left_out, page, seconds))
    drop_old_results(context, pipeline.quality.keep_reports)
    build_site(context, identifiers)
    return QualityReport(run_id, tuple(verdicts), folder / "index.html", notes)


def _validate(context: EphemeralDataContext, suite: Any, frame: DataFrame) -> ExpectationSuiteValidationResult:
    """Validate one table; what failed is evaluated again for examples."""
    import great_expectations as gx

    # Caching would pay for many scans; the aggregates of a suite are one.
    source = context.data_sources.add_spark(suite.name, persist=False)
    batch = source.add_dataframe_asset(suite.name).add_batch_definition_whole_dataframe("version")
    definition = gx.ValidationDefinition(name=suite.name, data=batch, suite=context.suites.add(suite))
    checkpoint = gx.Checkpoint(
        name=suite.name,
        validation_definitions=[context.validation_definitions.add(definition)],
        result_format=COUNTS_ONLY,
    )
    ran = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
    (result,) = ran.run_results.values()
    if numbers := {_number(item) for item in result.results if not item.success and _has_examples(item)}:
        examples = batch.get_batch({"dataframe": frame}).validate(_part(suite, numbers), result_format=WITH_EXAMPLES)
        better = {_number(item): item for item in examples.results}
        result.results = [better.get(_number(item), item) for item in result.results]
    return result


def _part(suite: Any, numbers: set[int]) -> Any:
    import great_expectations as gx

    from spark_jobs.build_expectations import META

    # An expectation belongs to one suite; its copy belongs to none.
    chosen = [copy.copy(e) for e in suite.expectations if e.meta[META] in numbers]
    return gx.ExpectationSuite(name=f"{suite.name} examples", expectations=chosen)


def _has_examples(item: ExpectationValidationResult) -> bool:
    return "partial_unexpected_list" in item.result


def _number(item: ExpectationValidationResult) -> int:
    from spark_jobs.build_expectations import META

    configuration = item.expectation_config
    if configuration is None:  # never so for results of a suite
        raise KeyError(META)
    return int(configuration.meta[META])


def _in_order(result: ExpectationSuiteValidationResult) -> list[ExpectationValidationResult]:
    return sorted(result.results, key=_number)


def _outcome(item: ExpectationValidationResult, plan: SuitePlan) -> Outcome:
    observed, unexpected = item.result.get("observed_value"), item.result.get("unexpected_count")
    raised = not item.success and _raised(item.exception_info or {})
    return Outcome(
        plan.expectations[_number(item)],
        None if raised else bool(item.success),
        None if observed is None else str(observed)[:200],
        None if unexpected is None else int(unexpected),
    )


def _raised(info: dict[str, Any]) -> bool:
    """Whether evaluation failed; the information is of the expectation, or of each of its metrics."""
    if "raised_exception" in info:
        return bool(info["raised_exception"])
    return any(isinstance(part, dict) and part.get("raised_exception") for part in info.values())


def _about(pipeline: PipelineFile, run_id: str, target: _Target) -> dict[str, str]:
    """What the page says about the data it judges."""
    about = {
        "pipeline": pipeline.pipeline,
        "table": target.plan.table,
        "Airflow run": run_id,
        "Delta version": str(target.version),
        "location": target.uri,
    }
    if target.plan.left_out:
        about["not checked"] = "; ".join(target.plan.left_out)
    return about


def _record(ledger: Ledger, report: QualityReport) -> None:
    at = now()
    rows = [
        ExpectationResult(
            at,
            report.run_id,
            verdict.table,
            outcome.planned.type,
            outcome.planned.meaning,
            outcome.planned.severity,
            outcome.planned.origin,
            outcome.success,
            outcome.observed,
            outcome.unexpected_count,
            verdict.version,
        )
        for verdict in report.tables
        for outcome in verdict.outcomes
    ]
    append_expectation_results(ledger.root, rows, ledger.storage_options)


def _log(report: QualityReport) -> None:
    for verdict in report.tables:
        failed = len(verdict.failed("critical")) + len(verdict.failed("warning"))
        log.info(
            "checked table=%s version=%s expectations=%s failed=%s seconds=%.1f",
            verdict.table, verdict.version, len(verdict.outcomes), failed, verdict.seconds,
        )  # fmt: skip
        for reason in verdict.left_out:
            log.warning("not checked table=%s: %s", verdict.table, reason)
    for note in report.notes:
        log.warning("%s", note)
    for warning in report.warnings:
        log.warning("expectation not met (warning): %s", warning)
