"""Data Docs through Airflow: serves a pipeline's reports, and no other file or object."""

from __future__ import annotations

from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.pipeline.report_folder import docs_folder
from waldelta.stages.check.reports.index import (
    CheckedRun,
    ReportEntry,
    checked_runs,
    entry_of,
    read_entries,
)
from waldelta.stages.check.reports.page import static_index
from waldelta.stages.check.reports.store_reports import StoreReports
from waldelta_airflow._connections import pipeline_lake


def served_report(pipeline: PipelineFile, path: str) -> Path | bytes | None:
    """Returns the page of a report that is listed for this pipeline, or None.

    It is a file, or the content of an object in the lake's store, which raises the store's errors.
    None is returned for any other file or object, and where a symbolic link leads outside.
    """
    folder = docs_folder(pipeline)
    if folder is None:
        return StoreReports(pipeline_lake(pipeline)).read_page(pipeline.pipeline, path)
    return _file_of(folder, pipeline.pipeline, path)


def _file_of(folder: Path, pipeline: str, path: str) -> Path | None:
    root = folder.resolve()
    try:
        file = (root / path).resolve()
    except (OSError, ValueError):
        return None
    if not file.is_relative_to(root) or file.suffix != ".html" or not file.is_file():
        return None
    entry = entry_of(folder, page := file.relative_to(root).as_posix())
    return file if entry is not None and (entry.pipeline, entry.page) == (pipeline, page) else None


def reports_index(pipeline: PipelineFile) -> str:
    """Returns this pipeline's list of reports as a page, without other pipelines in the folder."""
    return static_index(pipeline.pipeline, read_reports(pipeline))


def read_reports(pipeline: PipelineFile, run_id: str | None = None) -> list[CheckedRun]:
    """Returns the runs with reports, newest first, or only those with this id.

    Raises the errors of the store that the lake is in.
    """
    folder = docs_folder(pipeline)
    entries = (
        StoreReports(pipeline_lake(pipeline)).read_entries(run_id)
        if folder is None
        else read_entries(folder)
    )
    # A folder may serve several pipelines; links contain the pipeline.
    return checked_runs(
        entry
        for entry in entries
        if entry.pipeline == pipeline.pipeline and run_id in (None, entry.run_id)
    )


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """Returns a run's latest report of each table; for a retried check its last result."""
    found: dict[str, ReportEntry] = {}
    for run in read_reports(pipeline, run_id):
        for entry in run.entries:
            found.setdefault(entry.table, entry)
    return found
