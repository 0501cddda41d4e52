"""Writes the Data Docs of checks and reconciliations: pages, their lists, and what is pruned.

The pages of reconciliations are plain tables without scripts or network resources, every text
escaped.
"""

from __future__ import annotations

import hashlib
import logging
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
from waldelta.pipeline.report_folder import CHECKS, RECONCILIATIONS
from waldelta.stages.check.reports._result_view import check_page
from waldelta.stages.check.reports.docs_store import DocsStore, RunFolder
from waldelta.stages.check.reports.page import ReportEntry
from waldelta.stages.check.suite.expectation import TableVerdict

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )


from collections.abc import Iterable

from waldelta.control_characters import html_text
from waldelta.lake.ledger import DIFFERENT, EQUAL, REPAIRED, RowDifference
from waldelta.lake.ledger.check_records import NOT_COMPARED
from waldelta.lsn import Lsn
from waldelta.quantities import counted
from waldelta.stages.check.reports.page import fact_table, mark, page

log = logging.getLogger(__name__)

_LONGEST_NAME = 100  # A file system takes no longer names than 255 bytes.


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


@contextmanager
def pages_may_be_missing() -> Iterator[None]:
    """Log that no page can be written: the check's results are in the ledger without them."""
    try:
        yield
    except TargetNotWritable as err:
        log.warning("no page was written: %s", err)


def write_page(
    place: RunFolder,
    run_id: str,
    at: datetime,
    table: str,
    result: ExpectationSuiteValidationResult,
) -> Path | str | None:
    """Write the page of a table's result; returns its path or URI, or None where it can't be
    written.
    """
    from great_expectations.core.expectation_validation_result import (
        expectationSuiteValidationResultSchema,
    )
    from great_expectations.core.run_identifier import RunIdentifier

    result.meta["run_id"] = RunIdentifier(run_name=run_id, run_time=at)
    # The renderers describe values as JSON has them.
    as_json = expectationSuiteValidationResultSchema.dumps(result.to_json_dict(), sort_keys=True)
    text = check_page(expectationSuiteValidationResultSchema.loads(as_json))
    with pages_may_be_missing():
        return place.write_page(page_name(table), text)
    return None


def list_reports(
    place: RunFolder, run_id: str, at: datetime, verdicts: Sequence[TableVerdict]
) -> Path | str | None:
    """Add a run's pages and uncheckable tables to the list, and remove old runs.

    Returns the index, or the run's folder in a store; None where they can't be written.
    """
    with pages_may_be_missing():
        place.docs.prune(CHECKS, place.docs.pipeline.quality.keep_reports)
    entries = []
    for verdict in verdicts:
        page = "" if verdict.page is None else place.page_of(verdict.page)
        critical, warning = (
            tuple(map(str, verdict.failed(severity))) for severity in ("critical", "warning")
        )
        entries.append(
            ReportEntry(
                at, place.docs.pipeline.pipeline, run_id, verdict.table, verdict.version,
                len(verdict.outcomes), critical, warning, page,
            )
        )  # fmt: skip
    with pages_may_be_missing():
        return place.write_list(entries)
    return None


def list_reconciliation(
    pipeline: PipelineFile, lake: Lake, found: Sequence[Reconciliation]
) -> Path | str:
    """Write and list the pages of a reconciliation; returns the index, or the run's folder in a
    store.
    """
    at = found[0].at
    place = DocsStore(pipeline, lake).begin(RECONCILIATIONS, found[0].run_id, at)
    with private_files(OWNER_ONLY):
        entries = []
        for row in found:
            page = place.page_of(place.write_page(page_name(row.table_name), table_page(row)))
            entries.append(entry_of(row, at, pipeline.pipeline, page))
        return place.write_list(entries)


def prune_reports(pipeline: PipelineFile, lake: Lake, keep: int | None = None) -> int:
    """Remove the reports of all but the last ``keep`` runs (default ``quality.keep_reports``).

    Returns the number of removed runs.
    """
    docs, keep = DocsStore(pipeline, lake), pipeline.quality.keep_reports if keep is None else keep
    with private_files(OWNER_ONLY):
        dropped = sum(docs.prune(kind, keep) for kind in (CHECKS, RECONCILIATIONS))
        if dropped:
            docs.write_index()
    return dropped


def entry_of(row: Reconciliation, at: datetime, pipeline: str, page: str) -> ReportEntry:
    """Returns what the list of reports says of a table's comparison."""
    version = f", Delta version {row.version}" if row.version is not None else ""
    return ReportEntry(
        at,
        pipeline,
        row.run_id,
        row.table_name,
        row.version or 0,
        1,
        failures=() if row.status != DIFFERENT else (summary_of(row),),
        warnings=() if row.status in (EQUAL, REPAIRED, DIFFERENT) else (summary_of(row),),
        page=page,
        result=summary_of(row) + version,
    )


def summary_of(row: Reconciliation) -> str:
    """Returns the result in a line without values."""
    if row.status == NOT_COMPARED or row.source_rows is None:
        return f"reconciliation: {row.status}: {row.reason}"
    counts = ", ".join(
        f"{count:,} {word}"
        for count, word in (
            (row.missing, "missing"),
            (row.extra, "extra"),
            (row.different, "different"),
            (row.doubled, "with duplicate keys"),
        )
        if count
    )
    least = "" if row.is_complete else "at least "
    return f"reconciliation of {counted(row.source_rows, 'row')}: {row.status}" + (
        f": {least}{counts}" if counts else ""
    )


def table_page(row: Reconciliation) -> str:
    """Returns one table's page."""
    verdict = {EQUAL: "passed", REPAIRED: "passed", DIFFERENT: "failed"}.get(row.status, "warning")
    body = f"<p>{mark(verdict)} {html_text(summary_of(row))}</p>{fact_table(_facts(row))}"
    if row.differences:
        body += f"<h2>Rows that differ</h2>{_rows(row.differences)}"
    if (more := row.differing - sum(one.rows for one in row.differences)) > 0:
        body += f"<p>and {more:,} more</p>"
    return page(f"Reconciliation of {row.table_name}", body)


def _facts(row: Reconciliation) -> Iterator[tuple[str, str]]:
    yield "run", row.run_id
    yield "at", f"{row.at:%Y-%m-%d %H:%M:%S} UTC"
    if row.by:
        yield "requested by", row.by
    if row.position is not None:
        yield (
            "source",
            (
                f"as of {Lsn(row.position)} (snapshot {row.snapshot}),"
                f" {counted(row.source_rows or 0, 'row')}"
            ),
        )
        yield (
            "target",
            (
                f"Delta version {row.version}, which has batch {row.batch},"
                f" {counted(row.target_rows or 0, 'row')}"
            ),
        )
        yield (
            "skipped (changing)",
            f"{counted(row.in_flight, 'key')} changed during the comparison",
        )
        yield "quarantined or discarded", f"{counted(row.lacking, 'row')}, not compared"
        yield "buckets", f"{row.differing_buckets:,} of {row.buckets:,} with differences"
        yield "duration", f"{row.seconds:.1f} s, the source {row.source_seconds:.1f} s of it"
    if row.skipped_columns:
        yield "columns not compared", ", ".join(row.skipped_columns)
    if row.repaired:
        yield "repaired", counted(row.repaired, "row")
    if row.reason:
        yield "reason", row.reason


def _rows(rows: Iterable[RowDifference]) -> str:
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("row", "key", "column", "source", "target")
    )
    return f"<table><thead><tr>{heads}</tr></thead>{''.join(_row(one) for one in rows)}</table>"


def _row(one: RowDifference) -> str:
    lines = [(c.name, c.source, c.target) for c in one.columns] or [("", "", "")]
    span = f' rowspan="{len(lines)}"'
    times = f" ×{one.rows:,}" if one.rows > 1 else ""
    first = f"<td{span}>{one.kind}{times}</td><td{span}><code>{html_text(one.key)}</code></td>"
    cells = ["".join(f"<td>{_value(value)}</td>" for value in line) for line in lines]
    return f'<tbody class="run"><tr>{first}{"</tr><tr>".join(cells)}</tr></tbody>'


def _value(text: str | None) -> str:
    return '<span class="dim">null</span>' if text is None else html_text(text)
