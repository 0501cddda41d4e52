"""Writes the Data Docs of checks and reconciliations: pages, their lists, and what is pruned.

The page of a check has the descriptions by Great Expectations' renderers, in our own HTML. Great
Expectations' own view inserts names and values without escaping, and needs scripts, styles and
fonts from the network. All pages are plain HTML without scripts or network resources, every text
escaped.
"""

from __future__ import annotations

import hashlib
import html
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from jinja2 import UndefinedError
from markupsafe import Markup

from waldelta.config import PipelineFile, split_table_name
from waldelta.control_characters import visible
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    DIFFERENT,
    EQUAL,
    REPAIRED,
    ExpectationResult,
    Ledger,
    Reconciliation,
    of_tables,
)
from waldelta.lake.ledger.check_records import NOT_COMPARED, WORST_FIRST, Verdict, verdict_of
from waldelta.lake.storage import encode_segment
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import CHECKS, RECONCILIATIONS
from waldelta.quantities import counted
from waldelta.stages.check.reports.docs_store import DocsStore, RunFolder
from waldelta.stages.check.reports.entries import ReportEntry
from waldelta.stages.check.reports.page import parts, render, templates
from waldelta.stages.check.suite.expectation import Outcome, TableVerdict

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )

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
        log.warning("no report page was written: %s", err)


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
    pipeline: PipelineFile, lake: Lake, rows: Sequence[Reconciliation]
) -> Path | str:
    """Write and list the pages of a reconciliation; returns the index, or the run's folder in a
    store.
    """
    at = rows[0].at
    place = DocsStore(pipeline, lake).begin(RECONCILIATIONS, rows[0].run_id, at)
    with private_files(OWNER_ONLY):
        pages = [place.write_page(page_name(row.table_name), table_page(row)) for row in rows]
        listed = zip(rows, map(place.page_of, pages), strict=True)
        return place.write_list([entry_of(row, at, pipeline.pipeline, of) for row, of in listed])


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
    return render(
        "reconciliation.html",
        title=f"Reconciliation of {row.table_name}",
        verdict={EQUAL: "passed", REPAIRED: "passed", DIFFERENT: "failed"}.get(
            row.status, "warning"
        ),
        summary=summary_of(row),
        row=row,
        more=row.differing - sum(one.rows for one in row.differences),
    )


# A parameter in a renderer's template; two or more dollar signs don't begin one.
_PARAMETER = re.compile(r"(?<!\$)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
# This parameter is already HTML: an escaped JSON schema between these tags.
_SCHEMA, _AROUND_SCHEMA = "formatted_json", re.compile(r"</?pre>")
_LINE_BREAK = re.compile(r"<br\s*/?>")
# Nouns after a number, which the renderers always write in the plural.
_COUNTED = re.compile(r"^( unexpected value| character| row)s\b")


def check_page(result: ExpectationSuiteValidationResult, trend: str = Markup()) -> str:
    """Returns the page of one table's check, with the facts in ``batch_parameters`` and the trend
    of its expectations as HTML.

    Its verdict and number of met expectations are those of the list of reports.
    """
    from waldelta.stages.check.great_expectations.run_suite import described

    about: Mapping[str, Any] = result.meta.get("batch_parameters") or {}
    rows = [described(item) for item in result.results]
    marks = Counter(row.mark for row in rows)
    waiting = marks.pop("not judged yet", 0)
    summary = f"{marks['passed']} of {counted(marks.total(), 'expectation')} met"
    return render(
        "check.html",
        title=f"Check of {about.get('table', result.suite_name)}",
        verdict=next((mark for mark in ("failed", "warning") if mark in marks), "passed"),
        summary=f"{summary}, {waiting} not judged yet" if waiting else summary,
        facts=about,
        trend=trend,
        rows=rows,
        version=result.meta.get("great_expectations_version"),
    )


def _content(content: Any) -> Markup:
    """Returns the HTML of a renderer's block, a list of blocks or a plain value, escaped."""
    if content is None:
        return Markup()
    if isinstance(content, list | tuple):
        return Markup.escape(_blocks.each(content))
    if not isinstance(content, dict):
        return _text(content)
    try:
        return _BLOCKS[content.get("content_block_type")](content)
    except (
        AttributeError,
        LookupError,
        TypeError,
        UndefinedError,
        ValueError,
    ):  # The block is of an unknown kind, or is a value that looks like a block.
        text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
        return Markup("<pre>{}</pre>").format(_text(text))


def _text(value: Any) -> Markup:
    return Markup.escape(visible(str(value)))


def _sentence(block: Mapping[str, Any]) -> Markup:
    """Returns a renderer's template with its parameters marked as code."""
    template = block["string_template"]
    if not isinstance(template, dict):
        return _text(template)
    parameters: Mapping[str, Any] = template.get("params") or {}
    text, pieces, end, value = str(template.get("template", "")), [], 0, None
    for match in _PARAMETER.finditer(text):
        name = match[1] or match[2]
        if name in parameters:
            pieces += [_words(value, text[end : match.start()]), _value(name, parameters[name])]
            end, value = match.end(), parameters[name]
    return Markup().join([*pieces, _words(value, text[end:])])


def _words(value: Any, text: str) -> Markup:
    """Returns the words after a value, in the singular for a value of 1."""
    text = _COUNTED.sub(r"\1", text) if str(value) == "1" else text
    return Markup("<br>").join(map(_text, _LINE_BREAK.split(text)))


def _value(name: str, value: Any) -> Markup:
    if name == _SCHEMA:
        schema = html.unescape(_AROUND_SCHEMA.sub("", str(value)))
        return Markup("<pre>{}</pre>").format(_text(schema))
    return Markup("<code>{}</code>").format(_text(value)) if str(value) else Markup()


def _graph(block: Mapping[str, Any]) -> Markup:
    """Returns a chart's numbers as a table, because drawing it needs scripts."""
    chart = block["graph"]
    chart = json.loads(chart) if isinstance(chart, str) else chart
    (rows,) = chart["datasets"].values() if "datasets" in chart else [chart["data"]["values"]]
    cells = [[str(row.get(name, "")) for name in rows[0]] for row in rows]
    return Markup.escape(_blocks.table({"header_row": [*rows[0]], "table": cells}))


templates.filters.update(content=_content)
# The macros of blocks.html, by the kind of block.
_blocks: Any = templates.get_template("blocks.html").module
_BLOCKS: Mapping[Any, Callable[[Mapping[str, Any]], Markup]] = {
    "string_template": _sentence,
    "graph": _graph,
    "table": _blocks.table,
    "content_block_container": _blocks.content_block_container,
    "collapse": _blocks.collapse,
}


# Checks further back aren't searched, and no more than so many are shown.
_REACH = timedelta(days=8)
_MOST_RUNS = 20


@dataclass
class Trend:
    """The verdicts on a table's expectations, by their meaning and by the time of the check."""

    verdicts: dict[str, dict[datetime, Verdict]] = field(default_factory=dict)

    def add(self, meaning: str, at: datetime, severity: str, *, success: bool | None) -> None:
        """Add a result; of several at one time the worst counts."""
        verdict = verdict_of(severity, success=success)
        verdicts_of_meaning = self.verdicts.setdefault(meaning, {})
        verdicts_of_meaning[at] = min(
            verdicts_of_meaning.get(at, verdict), verdict, key=WORST_FIRST.index
        )

    def with_outcomes(self, outcomes: Iterable[Outcome], at: datetime) -> Markup:
        """Returns the trend as a table that ends with the outcomes of this check; empty for one."""
        last = [one for one in outcomes if one.error is None]
        for one in last:
            self.add(one.planned.meaning, at, one.planned.severity, success=one.success)
        times = sorted({at for by_time in self.verdicts.values() for at in by_time})[-_MOST_RUNS:]
        if len(times) < 2:
            return Markup()
        meanings = dict.fromkeys(one.planned.meaning for one in last)
        titles = [(time, f"{time:%Y-%m-%d %H:%M} UTC") for time in times]
        rows = []
        for name in sorted(meanings, key=lambda name: WORST_FIRST.index(self.verdicts[name][at])):
            by_time = self.verdicts[name]
            squares = [
                (by_time[time], title, "") if time in by_time else None for time, title in titles
            ]
            rows.append((name, squares))
        caption = f"the last {counted(len(times), 'check')}, the newest at the right"
        squares = parts.squares(rows, "expectation", caption)
        return Markup("<h2>Trend</h2>{}").format(squares)


def read_trends(ledger: Ledger, tables: Collection[str], at: datetime) -> dict[str, Trend]:
    """Returns the trend of each table before a check at this time."""
    trends = {name: Trend() for name in tables}
    columns = ("at", "table_name", "meaning", "severity", "success", "version")
    condition = of_tables(tables) & pc.is_valid(pc.field("version"))
    rows = ledger.table(ExpectationResult).scan(columns, at - _REACH, condition)
    for row in rows.to_pylist() if trends else ():
        trend = trends[row["table_name"]]
        trend.add(row["meaning"], row["at"], row["severity"], success=row["success"])
    return trends
