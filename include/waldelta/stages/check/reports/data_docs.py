"""The HTML reports of one pipeline's checks: where they are stored, and how they are named, listed
and pruned.

A local folder has the pages, our own index of them and, in ``.results``, the validation results
they are made from. Only the owner can read the files, because a report may show values of failed
rows. For an object store see store_reports.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waldelta.config import PipelineFile, split_table_name
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation
from waldelta.lake.storage import encode_segment
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import RESULTS_FOLDER, docs_folder, own_docs_folder
from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.reports._reconciliation_page import prune_pages, write_pages
from waldelta.stages.check.reports._result_view import check_page
from waldelta.stages.check.reports.index import (
    ReportEntry,
    add_entry,
    checked_runs,
    drop_old_pageless,
    read_entries,
    remove_entry,
    write_whole,
)
from waldelta.stages.check.reports.page import static_index
from waldelta.stages.check.reports.store_reports import (
    CHECKS,
    RECONCILIATIONS,
    RunFolder,
    StoreReports,
)
from waldelta.stages.check.suite.expectation import TableVerdict

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )
    from great_expectations.core.run_identifier import RunIdentifier
    from great_expectations.data_context.data_context.ephemeral_data_context import (
        EphemeralDataContext,
    )
    from great_expectations.data_context.types.resource_identifiers import (
        ValidationResultIdentifier,
    )

log = logging.getLogger(__name__)

# The local folder of all reports, or one run's folder in an object store.
Place = Path | RunFolder
_KEPT = "kept_results"
_LONGEST_NAME = 100  # The file name of a page contains the name twice.


def page_name(table: str) -> str:
    """Returns a table's name as part of a file name, encoded so that no name can leave the
    folder.
    """
    encoded = ".".join(encode_segment(part) for part in split_table_name(table))
    if len(encoded) <= _LONGEST_NAME:
        return encoded
    # The name is cut before an escape sequence, not within one; the digest keeps names distinct.
    return (
        re.sub(r"%.?$", "", encoded[:_LONGEST_NAME])
        + "-"
        + hashlib.sha256(table.encode()).hexdigest()[:16]
    )


def open_place(pipeline: PipelineFile, lake: Lake, run_id: str, at: datetime) -> Place:
    """Returns where a check writes its pages: the local folder, or the run's own in a store.

    Raises ConfigError as own_docs_folder() does.
    """
    folder = own_docs_folder(pipeline)
    return StoreReports(lake).begin(CHECKS, run_id, at) if folder is None else folder


def run_identifier(pipeline: str, run_id: str, at: datetime) -> RunIdentifier:
    """Returns the run's name in the reports: pipeline, Airflow run id and time."""
    from great_expectations.core.run_identifier import RunIdentifier

    # The name becomes a folder's name.
    safe_id = re.sub(r"[^A-Za-z0-9_.:+@=-]", "_", run_id)[:150].strip(".") or "_"
    return RunIdentifier(run_name=f"{pipeline} {safe_id} {at:%Y-%m-%dT%H:%M:%SZ}", run_time=at)


def open_context(place: Place | None) -> EphemeralDataContext:
    """Returns a context that keeps results in a local folder, and else in memory.

    It writes nothing else and sends no data.
    """
    import_great_expectations()
    import great_expectations as gx
    from great_expectations.data_context.types.base import DataContextConfig

    folder = place if isinstance(place, Path) else None
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    config = DataContextConfig(
        config_version=4.0,
        analytics_enabled=False,
        # Great Expectations reads a dict, as from a file.
        progress_bars={"globally": False},  # type: ignore[arg-type]
        fluent_datasources={},
        expectations_store_name="expectations_store",
        validation_results_store_name="validation_results_store",
        checkpoint_store_name="checkpoint_store",
        stores=_stores(folder),
        data_docs_sites={},
    )
    context: EphemeralDataContext = gx.get_context(mode="ephemeral", project_config=config)
    return context


def keep_result(
    context: EphemeralDataContext,
    suite_name: str,
    result: ExpectationSuiteValidationResult,
    run: RunIdentifier,
) -> ValidationResultIdentifier:
    """Store a result for its page, and return its identifier."""
    from great_expectations.data_context.types.resource_identifiers import (
        ExpectationSuiteIdentifier,
        ValidationResultIdentifier,
    )

    suite = ExpectationSuiteIdentifier(name=suite_name)
    identifier = ValidationResultIdentifier(suite, run_id=run, batch_identifier=suite_name)
    context.stores[_KEPT].store_validation_results(
        suite_validation_result=result,
        suite_validation_result_identifier=identifier,
        expectation_suite_identifier=suite,
    )
    return identifier


@contextmanager
def pages_may_be_missing() -> Iterator[None]:
    """Log that a store takes no pages: the check's results are in the ledger without them."""
    try:
        yield
    except TargetNotWritable as err:
        log.warning("no page was written: %s", err)


def write_page(
    context: EphemeralDataContext,
    place: Place,
    table: str,
    result: ExpectationSuiteValidationResult,
    run: RunIdentifier,
) -> Path | str | None:
    """Store a table's result and write its page; returns its path or URI, or None where the store
    takes no pages.
    """
    kept = keep_result(context, page_name(table), result, run)
    with pages_may_be_missing():
        return write_check_page(context, place, kept)
    return None


def write_check_page(
    context: EphemeralDataContext, place: Place, identifier: ValidationResultIdentifier
) -> Path | str:
    """Write the page of a stored result, which appears as a whole; returns its path or URI."""
    text = check_page(context.stores[_KEPT].get(identifier))
    if isinstance(place, RunFolder):
        return place.write_page(str(identifier.batch_identifier), text)
    path = page_path(place, identifier)
    write_whole(path, text)
    return path


def list_reports(
    place: Place,
    pipeline: PipelineFile,
    run_id: str,
    at: datetime,
    verdicts: Sequence[TableVerdict],
) -> Path | str:
    """Add a run's pages and uncheckable tables to the list; returns the index, or the run's folder
    in a store.
    """
    entries = [_entry(place, pipeline.pipeline, run_id, at, verdict) for verdict in verdicts]
    if isinstance(place, RunFolder):
        place.write_list(entries)
        return place.uri
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in entries:
        add_entry(place, entry)
    drop_old_pageless(place, pipeline.pipeline, pipeline.quality.keep_reports)
    return _write_index(place, pipeline)


def _entry(
    place: Place, pipeline: str, run_id: str, at: datetime, verdict: TableVerdict
) -> ReportEntry:
    if verdict.page is None:
        page = ""
    elif isinstance(place, RunFolder):
        page = place.page_of(str(verdict.page))
    else:
        page = Path(verdict.page).relative_to(place).as_posix()
    missed = {
        severity: tuple(map(str, verdict.failed(severity))) for severity in ("critical", "warning")
    }
    return ReportEntry(
        at, pipeline, run_id, verdict.table, verdict.version, len(verdict.outcomes),
        missed["critical"], missed["warning"], page,
    )  # fmt: skip


def _write_index(folder: Path, pipeline: PipelineFile) -> Path:
    index = folder / "index.html"
    draft = folder / f".index.{os.getpid()}"
    draft.write_text(
        static_index(pipeline.pipeline, checked_runs(read_entries(folder))), encoding="utf-8"
    )
    return draft.replace(index)


def page_path(folder: Path, identifier: ValidationResultIdentifier) -> Path:
    """Returns the path of a result's page, in Great Expectations' folder layout."""
    suite, run = identifier.expectation_suite_identifier, identifier.run_id
    parts = [*suite.to_tuple(), *run.to_tuple(), f"{identifier.batch_identifier}.html"]
    return folder.joinpath("validations", *parts)


def drop_old_results(context: EphemeralDataContext, folder: Path, pipeline: str, keep: int) -> int:
    """Remove the results, pages and list entries of all but a pipeline's last ``keep`` runs.

    Returns the number of removed runs.
    """
    store, identifiers = context.stores[_KEPT], _kept_of(context, pipeline)
    runs = sorted({(i.run_id.run_time, i.run_id.run_name) for i in identifiers}, reverse=True)
    old = set(runs[keep:])
    for identifier in identifiers:
        if (identifier.run_id.run_time, identifier.run_id.run_name) in old:
            page = page_path(folder, identifier)
            page.unlink(missing_ok=True)
            remove_entry(folder, page.relative_to(folder).as_posix())
            store.remove_key(identifier)
    return len(old)


def drop_old_checks(
    context: EphemeralDataContext, place: Place, pipeline: PipelineFile, lake: Lake
) -> None:
    """Remove the reports of all but a pipeline's last ``quality.keep_reports`` checks."""
    keep = pipeline.quality.keep_reports
    if isinstance(place, RunFolder):
        StoreReports(lake).prune(CHECKS, keep)
    else:
        drop_old_results(context, place, pipeline.pipeline, keep)


def _kept_of(context: EphemeralDataContext, pipeline: str) -> list[ValidationResultIdentifier]:
    # Other pipelines may have results in the same folder; a pipeline's name has no space.
    return [
        i
        for i in context.stores[_KEPT].list_keys()
        if str(i.run_id.run_name).startswith(f"{pipeline} ")
    ]


def list_reconciliation(
    pipeline: PipelineFile, lake: Lake, found: Sequence[Reconciliation]
) -> Path | str:
    """Write and list the pages of a reconciliation; returns the index, or the run's folder in a
    store.
    """
    names = {row.table_name: page_name(row.table_name) for row in found}
    folder = own_docs_folder(pipeline)
    if folder is None:
        run = StoreReports(lake).begin(RECONCILIATIONS, found[0].run_id, found[0].at)
        write_pages(run, pipeline.pipeline, names, found)
        return run.uri
    with private_files(OWNER_ONLY):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_pages(folder, pipeline.pipeline, names, found)
        return _write_index(folder, pipeline)


def prune_reports(pipeline: PipelineFile, lake: Lake, keep: int | None = None) -> int:
    """Remove the reports of all but the last ``keep`` runs (default ``quality.keep_reports``).

    Returns the number of removed runs.
    """
    folder, keep = docs_folder(pipeline), pipeline.quality.keep_reports if keep is None else keep
    if folder is None:
        reports = StoreReports(lake)
        return sum(reports.prune(kind, keep) for kind in (CHECKS, RECONCILIATIONS))
    if not folder.is_dir():
        return 0
    with private_files(OWNER_ONLY):
        dropped = prune_pages(folder, pipeline.pipeline, keep)
        if (folder / RESULTS_FOLDER).is_dir():
            context = open_context(folder)
            dropped += drop_old_results(context, folder, pipeline.pipeline, keep)
        if drop_old_pageless(folder, pipeline.pipeline, keep) or dropped:
            _write_index(folder, pipeline)
    return dropped


def _stores(folder: Path | None) -> dict[str, Any]:
    memory = {"class_name": "InMemoryStoreBackend"}
    files = (
        memory
        if folder is None
        else {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(folder / RESULTS_FOLDER),
        }
    )
    return {
        "expectations_store": {"class_name": "ExpectationsStore", "store_backend": memory},
        "validation_results_store": {
            "class_name": "ValidationResultsStore",
            "store_backend": memory,
        },
        "validation_definition_store": {
            "class_name": "ValidationDefinitionStore",
            "store_backend": memory,
        },
        "checkpoint_store": {"class_name": "CheckpointStore", "store_backend": memory},
        _KEPT: {"class_name": "ValidationResultsStore", "store_backend": files},
    }
