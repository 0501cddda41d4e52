"""Where a pipeline's Data Docs lie: in a folder of this machine, or nowhere; what setup says in the latter case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waldelta.finding import Finding, warning
from waldelta.lake import bookkeeping_uri, local_path
from waldelta.pipeline_file import PipelineFile


def docs_folder(pipeline: PipelineFile) -> Path | None:
    """The folder of the reports; None where the lake is an object store, which takes no HTML pages, and no other is named."""
    chosen = pipeline.quality.data_docs
    place = chosen if chosen is not None else bookkeeping_uri(pipeline.target.root, "data_docs")
    return local_path(place) if "://" in place else Path(place).absolute()


def judge_docs(pipeline: PipelineFile) -> Iterator[Finding]:
    """A warning where checks have results but no pages."""
    if pipeline.quality.enabled and docs_folder(pipeline) is None:
        yield warning(
            f"checks make no Data Docs: pages can't be written to {pipeline.target.root}; their results stand in "
            "_waldelta/expectations, and Airflow's UI shows them. For pages set quality.data_docs to a local folder"
        )
