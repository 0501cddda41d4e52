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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import UndefinedError
from markupsafe import Markup

from waldelta.config import PipelineFile, split_table_name
from waldelta.control_characters import visible
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import DIFFERENT, EQUAL, REPAIRED, Reconciliation
from waldelta.lake.ledger.check_records import NOT_COMPARED
from waldelta.lake.storage import encode_segment
from waldelta.permissions import OWNER_ONLY, private_files
from waldelta.pipeline.report_folder import CHECKS, RECONCILIATIONS
from waldelta.quantities import counted
from waldelta.stages.check.reports.docs_store import DocsStore, RunFolder
from waldelta.stages.check.reports.page import ReportEntry, parts, render, templates
from waldelta.stages.check.suite.expectation import TableVerdict
from waldelta.stages.check.suite.kinds import kind_of

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


def write_page(
    place: RunFolder,
    run_id: str,
    at: datetime,
    table: str,
    result: ExpectationSuiteValidationResult,
    trend: str = "",
) -> Path | str | None:
    """Write the page of a table's result, with the trend as HTML.

    Returns its path or URI, or None where it can't be written.
    """
    from great_expectations.core.expectation_validation_result import (
        expectationSuiteValidationResultSchema,
    )
    from great_expectations.core.run_identifier import RunIdentifier

    result.meta["run_id"] = RunIdentifier(run_name=run_id, run_time=at)
    # The renderers describe values as JSON has them.
    as_json = expectationSuiteValidationResultSchema.dumps(result.to_json_dict(), sort_keys=True)
    text = check_page(expectationSuiteValidationResultSchema.loads(as_json), trend)
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
# The renderers mark an expectation with an icon: this parameter has it as a character.
_ICON = "markdown_status_icon"
_VERDICTS = {"✅": "passed", "❌": "failed", "❗": "failed", "⏳": "not judged yet"}
# The renderer class of the result tables, in Great Expectations' configuration format.
_TABLE_RENDERER = {
    "class_name": "ValidationResultsColumnSectionRenderer",
    "table_renderer": {
        "module_name": "waldelta.stages.check.great_expectations.run_suite",
        "class_name": "SeverityTableRenderer",
    },
}
# This parameter is already HTML: an escaped JSON schema between these tags.
_SCHEMA, _AROUND_SCHEMA = "formatted_json", re.compile(r"</?pre>")
_LINE_BREAK = re.compile(r"<br\s*/?>")
# Nouns after a number, which the renderers always write in the plural.
_COUNTED = re.compile(r"^( unexpected value| character| row)s\b")


def check_page(result: ExpectationSuiteValidationResult, trend: str = Markup()) -> str:
    """Returns the page of one table's check, with the facts in ``batch_parameters`` and the trend
    of its expectations as HTML.
    """
    about: Mapping[str, Any] = result.meta.get("batch_parameters") or {}
    return render(
        "check.html",
        title=f"Check of {about.get('table', result.suite_name)}",
        verdict=_verdict(result),
        summary=_summary(result),
        facts=about,
        trend=trend,
        sections=[(section["section_name"], _blocks_of(section)) for section in _sections(result)],
        version=result.meta.get("great_expectations_version"),
    )


def _summary(result: ExpectationSuiteValidationResult) -> str:
    """Returns how many expectations are met, as in the list of reports, and how many aren't judged
    yet.
    """
    configured = [(one, one.expectation_config) for one in result.results if one.expectation_config]
    judged = [one for one, own in configured if kind_of(own.type).is_judged(own.kwargs)]
    met = sum(bool(one.success) for one in judged)
    waiting = len(configured) - len(judged)
    told = f"{met} of {counted(len(judged), 'expectation')} met"
    return f"{told}, {waiting} not judged yet" if waiting else told


def _verdict(result: ExpectationSuiteValidationResult) -> str:
    """Returns the check's verdict in one word, as in the list of reports.

    An unmet expectation of severity warning doesn't fail the check.
    """
    missed = {
        one.expectation_config.severity
        for one in result.results
        if not one.success and one.expectation_config
    }
    return "failed" if missed - {"warning"} else "warning" if missed else "passed"


def _sections(result: ExpectationSuiteValidationResult) -> list[dict[str, Any]]:
    """Returns the expectations by column as the renderers describe them, those of the table
    first.
    """
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer

    try:
        document = ValidationResultsPageRenderer(_TABLE_RENDERER).render(result).to_json_dict()
    except Exception as err:
        # A renderer's failure doesn't fail the check: the results are in the lake, and the page
        # links there.
        log.exception("Great Expectations can't describe the results of %s", result.suite_name)
        reason = (
            f"Great Expectations can't describe these results ({type(err).__name__}): see"
            " _waldelta/expectations"
        )
        return [{"section_name": "Expectations", "content_blocks": [reason]}]
    found: list[dict[str, Any]] = document["sections"]
    # The first section is an overview of the check, which check_page() writes itself.
    return found[1:]


def _blocks_of(section: Mapping[str, Any]) -> Markup:
    blocks = [
        b for b in section["content_blocks"] if not (isinstance(b, dict) and _kind(b) == "header")
    ]
    return Markup().join(map(_content, blocks))


def _kind(block: Mapping[str, Any]) -> Any:
    return block.get("content_block_type")


def _content(content: Any) -> Markup:
    """Returns the HTML of a renderer's block, a list of blocks or a plain value, escaped."""
    if content is None:
        return Markup()
    if isinstance(content, list | tuple):
        return Markup.escape(_blocks.each(content))
    if not isinstance(content, dict):
        return _text(content)
    try:
        return Markup.escape(_blocks.headings(content) + _BLOCKS[_kind(content)](content))
    except (
        AttributeError,
        KeyError,
        TypeError,
        UndefinedError,
        ValueError,
    ):  # The block is of an unknown kind, or is a value that looks like a block.
        return _json(content)


def _text(value: Any) -> Markup:
    return Markup.escape(visible(str(value)))


def _json(value: Any) -> Markup:
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return Markup("<pre>{}</pre>").format(_text(text))


def _sentence(block: Mapping[str, Any]) -> Markup:
    """Returns a renderer's template with its parameters marked as code."""
    given = block["string_template"]
    if not isinstance(given, dict):
        return _text(given)
    parameters: Mapping[str, Any] = given.get("params") or {}
    if (icon := parameters.get(_ICON)) is not None:
        return Markup.escape(parts.mark(_VERDICTS.get(icon, "warning")))
    text, pieces, end, before = str(given.get("template", "")), [], 0, None
    for found in _PARAMETER.finditer(text):
        name = found[1] or found[2]
        if name in parameters:
            words = _words(_agreeing(before, text[end : found.start()]))
            pieces += [words, _parameter(name, parameters[name])]
            end, before = found.end(), parameters[name]
    return Markup().join([*pieces, _words(_agreeing(before, text[end:]))])


def _agreeing(value: Any, words: str) -> str:
    """Returns the words after a value, in the singular for a value of 1."""
    return _COUNTED.sub(r"\1", words) if str(value) == "1" else words


def _words(text: str) -> Markup:
    return Markup("<br>").join(map(_text, _LINE_BREAK.split(text)))


def _parameter(name: str, value: Any) -> Markup:
    if name == _SCHEMA:
        schema = html.unescape(_AROUND_SCHEMA.sub("", str(value)))
        return Markup("<pre>{}</pre>").format(_text(schema))
    return Markup("<code>{}</code>").format(_text(value)) if str(value) else Markup()


def _graph(block: Mapping[str, Any]) -> Markup:
    """Returns a chart's numbers as a table, because drawing it needs scripts."""
    chart = block["graph"]
    try:
        chart = json.loads(chart) if isinstance(chart, str) else chart
        (rows,) = chart["datasets"].values() if "datasets" in chart else [chart["data"]["values"]]
        columns = list(rows[0])
        cells = [[str(row.get(name, "")) for name in columns] for row in rows]
        return Markup.escape(_blocks.table({"header_row": columns, "table": cells}))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _json(chart)


templates.filters.update(content=_content)
# The macros of blocks.html, by the kind of block.
_blocks: Any = templates.get_template("blocks.html").module
_BLOCKS: Mapping[Any, Callable[[Mapping[str, Any]], Markup]] = {
    "string_template": _sentence,
    "graph": _graph,
    "table": _blocks.table,
    "header": _blocks.header,
    "bullet_list": _blocks.bullet_list,
    "value_list": _blocks.value_list,
    "text": _blocks.text,
    "markdown": _blocks.markdown,
    "content_block_container": _blocks.content_block_container,
    "collapse": _blocks.collapse,
}
