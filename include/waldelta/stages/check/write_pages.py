"""Writes the pages of a check's targets, and their list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from waldelta.lake.ledger import Ledger
from waldelta.stages.check.check_run import CheckRun
from waldelta.stages.check.measure.references import CheckedTarget
from waldelta.stages.check.reports.data_docs import (
    Trend,
    check_page,
    list_reports,
    page_name,
    pages_may_be_missing,
    read_trends,
)
from waldelta.stages.check.reports.docs_store import RunFolder
from waldelta.stages.check.suite.expectation import TableVerdict


def write_pages(
    run: CheckRun,
    ledger: Ledger,
    place: RunFolder,
    targets: Sequence[CheckedTarget],
    verdicts: Sequence[TableVerdict],
) -> tuple[list[TableVerdict], Path | str | None]:
    """Write the pages of verdicts that have one, and list them with the targets that can't be
    judged; returns the verdicts with their pages, and the index as list_reports() does.
    """
    by_name = {target.state.table_name: target for target in targets}
    paged = [verdict.table for verdict in verdicts if run.outcome.has_page(verdict)]
    trends = read_trends(ledger, paged, run.began) if paged else {}
    written = [
        replace(
            verdict,
            page=_write_page(run, place, by_name[verdict.table], verdict, trends[verdict.table]),
        )
        if run.outcome.has_page(verdict)
        else verdict
        for verdict in verdicts
    ]
    listed = [each for each in written if each.version is None or run.outcome.has_page(each)]
    return written, list_reports(place, run.run_id, run.began, listed)


def _write_page(
    run: CheckRun,
    place: RunFolder,
    target: CheckedTarget,
    verdict: TableVerdict,
    trend: Trend,
) -> Path | str | None:
    """Write a verdict's page; returns where it is, or None where nothing could be judged."""
    if all(outcome.error is not None for outcome in verdict.outcomes):
        return None
    from waldelta.stages.check.great_expectations.run_suite import suite_result

    errors = [str(outcome.error) for outcome in verdict.outcomes if outcome.error is not None]
    facts = {
        "pipeline": run.pipeline.pipeline,
        "table": verdict.table,
        "Airflow run": run.run_id,
        "Delta version": str(target.version),
        "location": target.table.uri,
    }
    if omitted := (*verdict.omitted, *errors):
        facts["not checked"] = "; ".join(omitted)
    result = suite_result(verdict, page_name(verdict.table), facts)
    page = check_page(result, trend.with_outcomes(verdict.outcomes, run.began))
    with pages_may_be_missing():
        return place.write_page(page_name(verdict.table), page)
    return None
