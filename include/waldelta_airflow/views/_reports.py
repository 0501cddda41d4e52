"""Data Docs through Airflow: the folder of a pipeline's reports, and nothing but reports out
of it.
"""

from __future__ import annotations

from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.pipeline.report_folder import docs_folder
from waldelta.stages.check.reports import CheckedRun, ReportEntry, checked_runs
from waldelta.stages.check.reports.index import entry_of, read_entries
from waldelta.stages.check.reports.page import static_index


def served_report(pipeline: PipelineFile, path: str) -> Path | None:
    """The page of a report that the folder's list has of this pipeline; None of everything else
    that may be in the folder.

    Nor is it served where a symbolic link leads elsewhere.
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
    """The list of this pipeline's reports, as a page; of others that share its folder it says
    nothing.
    """
    return static_index(pipeline.pipeline, read_reports(pipeline))


def read_reports(pipeline: PipelineFile) -> list[CheckedRun]:
    """The runs that left reports, newest first."""
    folder = docs_folder(pipeline)
    if folder is None:
        return []
    # A folder may serve several pipelines; the links go by pipeline.
    return checked_runs(
        entry for entry in read_entries(folder) if entry.pipeline == pipeline.pipeline
    )


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """A run's latest report of each table: of a check that was tried again, how it ended."""
    found: dict[str, ReportEntry] = {}
    for run in read_reports(pipeline):
        if run.run_id == run_id:
            for entry in run.entries:
                found.setdefault(entry.table, entry)
    return found
