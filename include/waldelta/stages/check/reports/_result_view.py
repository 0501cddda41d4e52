"""A check's result as a page: the descriptions by Great Expectations' renderers, in our own HTML.

Great Expectations' own view inserts names and values into its HTML without escaping, and needs
scripts, styles and fonts from the network. This module escapes every text, and the page needs no
network.
"""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from waldelta.control_characters import html_text
from waldelta.quantities import counted
from waldelta.stages.check.reports.page import fact_table, mark, page
from waldelta.stages.check.suite.kinds import kind_of

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )

log = logging.getLogger(__name__)

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


def check_page(result: ExpectationSuiteValidationResult) -> str:
    """Returns the page of one table's check, with the facts in ``batch_parameters``."""
    about: Mapping[str, Any] = result.meta.get("batch_parameters") or {}
    body = (
        f"<p>{mark(_verdict(result))} {html_text(_summary(result))}</p>"
        + fact_table((str(name), str(value)) for name, value in about.items())
        + "".join(_section(section) for section in _sections(result))
        + '<p class="dim">Great Expectations'
        f" {html_text(str(result.meta.get('great_expectations_version')))}</p>"
    )
    return page(f"Check of {about.get('table', result.suite_name)}", body)


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


def _section(section: Mapping[str, Any]) -> str:
    blocks = [
        b for b in section["content_blocks"] if not (isinstance(b, dict) and _kind(b) == "header")
    ]
    name = html_text(str(section["section_name"]))
    return f"<h2>{name}</h2>{''.join(_content(block) for block in blocks)}"


def _kind(block: Mapping[str, Any]) -> Any:
    return block.get("content_block_type")


def _content(content: Any) -> str:
    """Returns the HTML of a renderer's block, a list of blocks or a plain value, escaped."""
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "".join(f"<div>{_content(part)}</div>" for part in content)
    if not isinstance(content, dict):
        return _text(content)
    try:
        render = _BLOCKS[_kind(content)]
        return _headings(content) + render(content)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ):  # The block is of an unknown kind, or is a value that looks like a block.
        return _json(content)


def _headings(block: Mapping[str, Any]) -> str:
    parts = [block.get("header"), block.get("subheader")]
    return "".join(f"<p><b>{_content(part)}</b></p>" for part in parts if part)


def _text(value: Any) -> str:
    return html_text(str(value))


def _json(value: Any) -> str:
    return f"<pre>{html_text(json.dumps(value, indent=2, default=str, ensure_ascii=False))}</pre>"


def _sentence(block: Mapping[str, Any]) -> str:
    """Returns a renderer's template with its parameters marked as code."""
    given = block["string_template"]
    if not isinstance(given, dict):
        return _text(given)
    parameters: Mapping[str, Any] = given.get("params") or {}
    if (icon := parameters.get(_ICON)) is not None:
        return mark(_VERDICTS.get(icon, "warning"))
    text, parts, end, before = str(given.get("template", "")), [], 0, None
    for found in _PARAMETER.finditer(text):
        name = found[1] or found[2]
        if name in parameters:
            words = _words(_agreeing(before, text[end : found.start()]))
            parts += [words, _parameter(name, parameters[name])]
            end, before = found.end(), parameters[name]
    return "".join([*parts, _words(_agreeing(before, text[end:]))])


def _agreeing(value: Any, words: str) -> str:
    """Returns the words after a value, in the singular for a value of 1."""
    return _COUNTED.sub(r"\1", words) if str(value) == "1" else words


def _words(text: str) -> str:
    return "<br>".join(html_text(line) for line in _LINE_BREAK.split(text))


def _parameter(name: str, value: Any) -> str:
    if name == _SCHEMA:
        return f"<pre>{html_text(html.unescape(_AROUND_SCHEMA.sub('', str(value))))}</pre>"
    return f"<code>{_text(value)}</code>" if str(value) else ""


def _table(block: Mapping[str, Any]) -> str:
    heads = "".join(
        f'<th scope="col">{_content(head)}</th>' for head in block.get("header_row") or ()
    )
    rows = "".join(
        f"<tr>{''.join(f'<td>{_content(cell)}</td>' for cell in row)}</tr>"
        for row in block["table"]
    )
    return (
        f"<table>{f'<thead><tr>{heads}</tr></thead>' if heads else ''}<tbody>{rows}</tbody></table>"
    )


def _list(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda block: f"<ul>{''.join(f'<li>{_content(item)}</li>' for item in block[key])}</ul>"


def _paragraphs(key: str) -> Callable[[Mapping[str, Any]], str]:
    def render(block: Mapping[str, Any]) -> str:
        held = block[key]
        return "".join(
            f"<p>{_content(part)}</p>" for part in (held if isinstance(held, list) else [held])
        )

    return render


def _collapse(block: Mapping[str, Any]) -> str:
    link = _content(block.get("collapse_toggle_link")) or "more"
    return f"<details><summary>{link}</summary>{_content(block['collapse'])}</details>"


def _tabs(block: Mapping[str, Any]) -> str:
    tabs: Iterable[Mapping[str, Any]] = block["tabs"]
    return "".join(
        f"<h3>{_text(tab.get('tab_name', ''))}</h3>{_content(tab.get('tab_content'))}"
        for tab in tabs
    )


def _graph(block: Mapping[str, Any]) -> str:
    """Returns a chart's numbers as a table, because drawing it needs scripts."""
    chart = block["graph"]
    try:
        chart = json.loads(chart) if isinstance(chart, str) else chart
        (rows,) = chart["datasets"].values() if "datasets" in chart else [chart["data"]["values"]]
        columns = list(rows[0])
        return _table(
            {
                "header_row": columns,
                "table": [[str(row.get(name, "")) for name in columns] for row in rows],
            }
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _json(chart)


_BLOCKS: Mapping[Any, Callable[[Mapping[str, Any]], str]] = {
    "string_template": _sentence,
    "table": _table,
    "header": lambda block: "",  # noqa: ARG005 - _headings() has it all
    "bullet_list": _list("bullet_list"),
    "value_list": _list("value_list"),
    "text": _paragraphs("text"),
    "markdown": _paragraphs("markdown"),
    "content_block_container": _paragraphs("content_blocks"),
    "collapse": _collapse,
    "tabs": _tabs,
    "graph": _graph,
}
