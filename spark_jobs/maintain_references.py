"""References in maintenance: every foreign key between targets by all of its rows, what runs with few changes leave to it.

They judge the rows that they touched, and none of large targets (``quick_check.affordable``).
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

from spark_jobs.orphans import ask_reference
from spark_jobs.references import Reference
from spark_jobs.session_pool import SessionPool
from spark_jobs.source_rules import read_rules
from waldelta.expectation_results import REFERENCES_HOLD, ExpectationResult, append_expectation_results
from waldelta.ledger_rows import now
from waldelta.watermark import synced_states

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.duplicate_keys import DuplicateKeys
    from spark_jobs.result import RunResult, StageResult
    from waldelta.job import Job

log = logging.getLogger(__name__)


def check_references(spark: SparkSession, job: Job, result: RunResult, stage: StageResult) -> None:
    """Judge them as of the newest cut, several at once; rows that refer to none are a warning of the run."""
    if not job.pipeline.quality.enabled:
        stage.detail = "switched off"
        return
    rules = read_rules(job, result, [state.table_name for state in synced_states(job)])
    references = [reference for of in rules.values() for reference in of.references]
    for name, of in rules.items():
        for reason in of.left_out:
            log.info("not checked table=%s: %s", name, reason)

    def ask(session: SparkSession, reference: Reference) -> DuplicateKeys | None:
        try:
            return ask_reference(session, reference, job.storage_options)
        except Exception:  # a page of the UI says so; what maintenance is for has been done
            log.exception("foreign key %s of %s couldn't be checked", reference.name, reference.referring.table)
            return None

    with SessionPool(spark, len(references)) as pool:
        found = pool.map(ask, references)
    at = now()  # one, by which the pages know a table's foreign keys as one maintenance found them
    results = [_result(job, at, reference, orphans) for reference, orphans in zip(references, found, strict=True)]
    append_expectation_results(job.pipeline.target.root, results, job.storage_options)
    result.warnings += [f"{r.table_name}: {r.meaning} ({r.observed})" for r in results if not r.success]
    stage.detail = f"{len(references)} foreign keys checked, {sum(not r.success for r in results)} not met"


def _result(job: Job, at: datetime, reference: Reference, orphans: DuplicateKeys | None) -> ExpectationResult:
    count = None if orphans is None else orphans.rows
    return ExpectationResult(
        at, job.run_id, reference.told_of, REFERENCES_HOLD, reference.meaning, "warning", "catalog",
        None if count is None else not count,
        "could not be evaluated" if count is None else f"{count} rows refer to none", count, reference.referring.version,
    )  # fmt: skip
