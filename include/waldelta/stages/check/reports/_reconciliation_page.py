"""Reconciliations as report pages: plain tables without scripts or network resources, every text
escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from waldelta.control_characters import html_text
from waldelta.lake.ledger import DIFFERENT, EQUAL, REPAIRED, Reconciliation, RowDifference
from waldelta.lake.ledger.reconciliations import NOT_COMPARED
from waldelta.lsn import Lsn
from waldelta.quantities import counted
from waldelta.stages.check.reports.page import ReportEntry, fact_table, mark, page


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
        told=summary_of(row) + version,
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
    if row.left_out:
        yield "columns not compared", ", ".join(row.left_out)
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
