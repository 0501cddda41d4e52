"""Finds the local folder of a pipeline's Data Docs, if it has one, and checks it for setup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.findings import Finding, problem, warning
from waldelta.lake import bookkeeping_uri
from waldelta.lake.storage import local_path

ENTRIES_FOLDER = ".entries"


# Folder, below the reports' folder, of the validation results from which the reports are made.
RESULTS_FOLDER = ".results"


def docs_folder(pipeline: PipelineFile) -> Path | None:
    """Return the folder of the reports, or None.

    It is None where the lake is an object store, which takes no HTML pages, and no other folder is
    named.
    """
    chosen = pipeline.quality.data_docs
    place = chosen if chosen is not None else bookkeeping_uri(pipeline.target.root, "data_docs")
    return local_path(place) if "://" in place else Path(place).absolute()


def own_docs_folder(pipeline: PipelineFile) -> Path | None:
    """Return the folder of the reports for writing.

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
        held = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not held or not held.isdisjoint((ENTRIES_FOLDER, RESULTS_FOLDER))


def judge_docs(pipeline: PipelineFile) -> Iterator[Finding]:
    """Yield a problem where reports can't be written to the named folder.

    Yields a warning where checks have results but no pages.
    """
    if not pipeline.quality.enabled:
        return
    try:
        folder = own_docs_folder(pipeline)
    except ConfigError as err:
        yield problem(str(err))
        return
    if folder is None:
        yield warning(
            f"checks write no Data Docs, because pages can't be written to {pipeline.target.root};"
            " the results are in _waldelta/expectations, and Airflow's UI shows them. For pages"
            " set quality.data_docs to a local folder"
        )
