"""The HTML reports of one pipeline's checks: where they are stored, and how they are named, listed
and pruned.

A local folder has the pages and our own index of them. Only the owner can read the files, because a
report may show values of failed rows. For an object store see store_reports.
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
from typing import TYPE_CHECKING

from waldelta.config import PipelineFile, split_table_name
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation
from waldelta.lake.storage import encode_segment
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import ENTRIES_FOLDER, docs_folder, own_docs_folder
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

log = logging.getLogger(__name__)

# The local folder of all reports, or one run's folder in an object store.
Place = Path | RunFolder
# Below a local folder: <schema>/<table>/<run>/<time>/<name>.html.
_PAGES = "validations"
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


@contextmanager
def pages_may_be_missing() -> Iterator[None]:
    """Log that a store takes no pages: the check's results are in the ledger without them."""
    try:
        yield
    except TargetNotWritable as err:
        log.warning("no page was written: %s", err)


def write_page(
    place: Place,
    pipeline: str,
    run_id: str,
    at: datetime,
    table: str,
    result: ExpectationSuiteValidationResult,
) -> Path | str | None:
    """Write the page of a table's result, which appears as a whole.

    Returns its path or URI, or None where the store takes no pages.
    """
    from great_expectations.core.expectation_validation_result import (
        expectationSuiteValidationResultSchema,
    )
    from great_expectations.core.run_identifier import RunIdentifier

    # The name becomes a folder's name.
    safe_id = re.sub(r"[^A-Za-z0-9_.:+@=-]", "_", run_id)[:150].strip(".") or "_"
    run = RunIdentifier(run_name=f"{pipeline} {safe_id} {at:%Y-%m-%dT%H:%M:%SZ}", run_time=at)
    result.meta["run_id"] = run
    # The renderers describe values as JSON has them.
    as_json = expectationSuiteValidationResultSchema.dumps(result.to_json_dict(), sort_keys=True)
    text, name = check_page(expectationSuiteValidationResultSchema.loads(as_json)), page_name(table)
    with pages_may_be_missing():
        if isinstance(place, RunFolder):
            return place.write_page(name, text)
        # This folder shows that the reports' folder is ours, also before a report is listed.
        (place / ENTRIES_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        place.chmod(0o700)
        path = place.joinpath(_PAGES, *name.split("."), *run.to_tuple(), f"{name}.html")
        write_whole(path, text)
        return path
    return None


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
    return _list(place, pipeline, entries)


def _list(place: Place, pipeline: PipelineFile, entries: Sequence[ReportEntry]) -> Path | str:
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


def drop_old_pages(folder: Path, pipeline: str, keep: int) -> int:
    """Remove the pages and list entries of all but a pipeline's last ``keep`` checks.

    Returns the number of removed checks.
    """
    # Other pipelines may have pages in the same folder; a pipeline's name has no space.
    pages = [
        page
        for page in (folder / _PAGES).rglob("*.html")
        if page.parts[-3].startswith(f"{pipeline} ")
    ]
    runs = sorted({(page.parts[-2], page.parts[-3]) for page in pages}, reverse=True)
    old = set(runs[keep:])
    for page in pages:
        if (page.parts[-2], page.parts[-3]) in old:
            page.unlink(missing_ok=True)
            remove_entry(folder, page.relative_to(folder).as_posix())
    return len(old)


def drop_old_checks(place: Place, pipeline: PipelineFile, lake: Lake) -> None:
    """Remove the reports of all but a pipeline's last ``quality.keep_reports`` checks."""
    keep = pipeline.quality.keep_reports
    if isinstance(place, RunFolder):
        StoreReports(lake).prune(CHECKS, keep)
    else:
        drop_old_pages(place, pipeline.pipeline, keep)


def list_reconciliation(
    pipeline: PipelineFile, lake: Lake, found: Sequence[Reconciliation]
) -> Path | str:
    """Write and list the pages of a reconciliation; returns the index, or the run's folder in a
    store.
    """
    names = {row.table_name: page_name(row.table_name) for row in found}
    place: Place | None = own_docs_folder(pipeline)
    if place is None:
        place = StoreReports(lake).begin(RECONCILIATIONS, found[0].run_id, found[0].at)
    with private_files(OWNER_ONLY):
        return _list(place, pipeline, write_pages(place, pipeline.pipeline, names, found))


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
        dropped += drop_old_pages(folder, pipeline.pipeline, keep)
        if drop_old_pageless(folder, pipeline.pipeline, keep) or dropped:
            _write_index(folder, pipeline)
    return dropped
