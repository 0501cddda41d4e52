"""Finds where a pipeline's Data Docs are, and checks a named folder for setup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.findings import Finding, problem
from waldelta.lake import bookkeeping_uri, local_path

# The folders of the two kinds of reports.
CHECKS, RECONCILIATIONS = "checks", "reconciliations"


def docs_uri(root: str) -> str:
    """Returns where a lake has its reports, unless the pipeline file names another folder."""
    return bookkeeping_uri(root, "data_docs")


def docs_folder(pipeline: PipelineFile) -> Path | None:
    """Returns the local folder of the reports; None where they are in the lake's object store."""
    folder = pipeline.quality.data_docs
    place = folder if folder is not None else docs_uri(pipeline.target.root)
    return local_path(place) if "://" in place else Path(place).absolute()


def own_docs_folder(pipeline: PipelineFile) -> Path | None:
    """Returns the folder of the reports for writing; None for the lake's object store.

    Raises ConfigError when a named folder has other files. Writing reports replaces an
    ``index.html`` and makes the folder readable by its owner alone. A file that isn't a report must
    not end up among the reports either.
    """
    folder = docs_folder(pipeline)
    if folder is not None and pipeline.quality.data_docs is not None and not _is_ours(folder):
        raise ConfigError(
            f"quality.data_docs names {folder}, which holds other files than reports: name a new or"
            " an empty folder"
        )
    return folder


def _is_ours(folder: Path) -> bool:
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not names or not names.isdisjoint((CHECKS, RECONCILIATIONS))


def judge_docs(pipeline: PipelineFile) -> Iterator[Finding]:
    """Yields a problem where reports can't be written to the named folder."""
    if not pipeline.quality.enabled:
        return
    try:
        own_docs_folder(pipeline)
    except ConfigError as err:
        yield problem(str(err))
