"""Data Docs through Airflow: serves a pipeline's reports, and no other file or object."""

from __future__ import annotations

from waldelta.config import PipelineFile
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta.stages.check.reports.index import CheckedRun, ReportEntry, checked_runs
from waldelta.stages.check.reports.page import static_index
from waldelta_airflow._connections import pipeline_lake


def served_report(pipeline: PipelineFile, path: str) -> bytes | None:
    """Returns the page of a report that is listed for this pipeline; None for anything else.

    Raises the errors of the store that the lake is in.
    """
    return DocsStore(pipeline, pipeline_lake(pipeline)).read_page(path)


def reports_index(pipeline: PipelineFile) -> str:
    """Returns this pipeline's list of reports as a page, without other pipelines in the folder."""
    return static_index(pipeline.pipeline, read_reports(pipeline))


def read_reports(pipeline: PipelineFile, run_id: str | None = None) -> list[CheckedRun]:
    """Returns the runs with reports, newest first, or only those with this id.

    Raises the errors of the store that the lake is in.
    """
    entries = DocsStore(pipeline, pipeline_lake(pipeline)).read_entries(run_id)
    # A folder may serve several pipelines; links contain the pipeline.
    return checked_runs(entry for entry in entries if entry.pipeline == pipeline.pipeline)


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """Returns a run's latest report of each table; for a retried check its last result."""
    found: dict[str, ReportEntry] = {}
    for run in read_reports(pipeline, run_id):
        for entry in run.entries:
            found.setdefault(entry.table, entry)
    return found
