"""Data Docs through Airflow: serves the reports in a pipeline's folder, and no other file."""

from __future__ import annotations

from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.pipeline.report_folder import docs_folder
from waldelta.stages.check.reports import CheckedRun, ReportEntry, checked_runs
from waldelta.stages.check.reports.index import entry_of, read_entries
from waldelta.stages.check.reports.page import static_index


def served_report(pipeline: PipelineFile, path: str) -> Path | None:
    """Returns the page of a report that is listed for this pipeline, or None.

    None is returned for any other file in the folder, and where a symbolic link leads outside.
    """
    folder = docs_folder(pipeline)
    if folder is None:
        return None
    root = folder.resolve()
    try:
        file = (root / path).resolve()
    except (OSError, ValueError):
        return None
    if not file.is_relative_to(root) or file.suffix != ".html" or not file.is_file():
        return None
    entry = entry_of(folder, page := file.relative_to(root).as_posix())
    return (
        file
        if entry is not None and (entry.pipeline, entry.page) == (pipeline.pipeline, page)
        else None
    )


def reports_index(pipeline: PipelineFile) -> str:
    """Returns this pipeline's list of reports as a page, without other pipelines in the folder."""
    return static_index(pipeline.pipeline, read_reports(pipeline))


def read_reports(pipeline: PipelineFile) -> list[CheckedRun]:
    """Returns the runs with reports, newest first."""
    folder = docs_folder(pipeline)
    if folder is None:
        return []
    # A folder may serve several pipelines; links contain the pipeline.
    return checked_runs(
        entry for entry in read_entries(folder) if entry.pipeline == pipeline.pipeline
    )


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """Returns a run's latest report of each table; for a retried check its last result."""
    found: dict[str, ReportEntry] = {}
    for run in read_reports(pipeline):
        if run.run_id == run_id:
            for entry in run.entries:
                found.setdefault(entry.table, entry)
    return found
