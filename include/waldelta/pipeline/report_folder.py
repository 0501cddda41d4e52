"""Where a pipeline's Data Docs are: in a folder of this machine, or nowhere; what setup says
of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.errors import ConfigError
from waldelta.findings import Finding, problem, warning
from waldelta.lake import bookkeeping_uri
from waldelta.lake.storage import local_path

ENTRIES_FOLDER = ".entries"


# In the folder of the reports: the validation results that they are made from.
RESULTS_FOLDER = ".results"


def docs_folder(pipeline: PipelineFile) -> Path | None:
    """The folder of the reports; None where the lake is an object store, which takes no HTML pages,
    and no other is named.
    """
    chosen = pipeline.quality.data_docs
    place = chosen if chosen is not None else bookkeeping_uri(pipeline.target.root, "data_docs")
    return local_path(place) if "://" in place else Path(place).absolute()


def own_docs_folder(pipeline: PipelineFile) -> Path | None:
    """The folder of the reports, to write into; raises ConfigError where a named one holds other
    files.

    What is written there replaces an ``index.html`` and makes the folder its owner's alone. A file
    that nobody meant to be a report must not end up among them either.
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
    """A problem where reports can't be put into the folder that is named, a warning where checks
    have results but no pages.
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
            f"checks make no Data Docs: pages can't be written to {pipeline.target.root}; their"
            " results stand in _waldelta/expectations, and Airflow's UI shows them. For pages set"
            " quality.data_docs to a local folder"
        )
