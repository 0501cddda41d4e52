"""Data Docs through Airflow: the folder of a pipeline's reports, and nothing but reports out of it."""

from __future__ import annotations

from pathlib import Path

from waldelta.docs_folder import docs_folder
from waldelta.pipeline_file import PipelineFile
from waldelta.report_list import CheckedRun, ReportEntry, checked_runs, entry_of, read_entries

_SERVED = {".html", ".css", ".js", ".json", ".svg", ".png", ".jpg", ".gif", ".ico", ".woff", ".woff2", ".ttf"}


def report_file(folder: Path, path: str) -> Path | None:
    """The file of a report; None when it doesn't exist, isn't one, or lies outside the folder.

    Nor are the kept results and the list (``.results``, ``.entries``): they tell of all who share the folder.
    """
    root = folder.resolve()
    try:
        file = (root / path).resolve()
    except (OSError, ValueError):
        return None
    if not file.is_relative_to(root) or any(part.startswith(".") for part in file.relative_to(root).parts):
        return None
    return file if file.suffix.lower() in _SERVED and file.is_file() else None


def served_report(pipeline: PipelineFile, path: str) -> Path | None:
    """The file of a report, as report_file() finds it; None for what others have in a folder that several pipelines share."""
    folder = docs_folder(pipeline)
    file = report_file(folder, path) if folder is not None else None
    if folder is None or file is None or file.suffix.lower() != ".html":
        return file
    entry = entry_of(folder, file.relative_to(folder.resolve()).as_posix())
    # Lists and suites are of all who share the folder.
    owners = {entry.pipeline} if entry is not None else {other.pipeline for other in read_entries(folder)}
    return file if owners <= {pipeline.pipeline} else None


def read_reports(pipeline: PipelineFile) -> list[CheckedRun]:
    """The runs that left reports, newest first."""
    folder = docs_folder(pipeline)
    if folder is None:
        return []
    # A folder may serve several pipelines; the links go by pipeline.
    return checked_runs(entry for entry in read_entries(folder) if entry.pipeline == pipeline.pipeline)


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """A run's latest report of each table: of a check that was tried again, how it ended."""
    found: dict[str, ReportEntry] = {}
    for run in read_reports(pipeline):
        if run.run_id == run_id:
            for entry in run.entries:
                found.setdefault(entry.table, entry)
    return found
