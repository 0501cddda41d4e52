"""Reports and their index: what a list of reports has of each, and both as HTML, plain tables
without scripts or network resources, every text escaped.

Great Expectations' own index needs scripts from the network, and reads every stored result again.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Literal
from urllib.parse import quote

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from waldelta.control_characters import html_text
from waldelta.quantities import counted

_RunVerdict = Literal["failed", "warning", "passed"]


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One table's check in one run.

    ``page`` is its place among the docs, and empty for a table that couldn't be checked.
    ``version`` is None for a missing target. ``result`` is the result's text where that isn't a
    count of met expectations.
    """

    at: AwareDatetime
    pipeline: str
    run_id: str
    table: str
    version: int | None
    expectations: int
    failures: tuple[str, ...]  # Critical expectations that failed, in words without values.
    warnings: tuple[str, ...]
    page: str
    result: str | None = None

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst result."""
        return "failed" if self.failures else "warning" if self.warnings else "passed"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The tables of one check, failed ones first."""

    at: datetime
    pipeline: str
    run_id: str
    entries: tuple[ReportEntry, ...]

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst verdict of its tables."""
        return self.entries[0].verdict


_ENTRY = TypeAdapter(ReportEntry)


def dump_entry(entry: ReportEntry) -> Any:
    """Returns an entry for JSON."""
    return _ENTRY.dump_python(entry, mode="json")


def parse_entry(row: Any) -> ReportEntry | None:
    """Returns the entry of a JSON object that dump_entry() made; None for anything else."""
    try:
        return _ENTRY.validate_json(json.dumps(row), strict=True)
    except ValidationError:
        return None


def checked_runs(entries: Iterable[ReportEntry]) -> list[CheckedRun]:
    """Returns the reports by run, newest first; within a run failed ones come first, then by
    name.
    """
    worst: Sequence[_RunVerdict] = ("failed", "warning", "passed")
    ordered = sorted(entries, key=lambda e: (worst.index(e.verdict), e.table))
    ordered.sort(key=_run_of, reverse=True)
    grouped = ((key, tuple(of_run)) for key, of_run in groupby(ordered, key=_run_of))
    return [CheckedRun(at, pipeline, run_id, of_run) for (at, pipeline, run_id), of_run in grouped]


def _run_of(entry: ReportEntry) -> tuple[datetime, str, str]:
    return entry.at, entry.pipeline, entry.run_id


_STYLE = """\
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1.5rem}
h1{font-size:1.6rem;margin:0 0 1rem}
table{border-collapse:collapse;width:100%;margin-bottom:1.5rem}
th,td{text-align:left;vertical-align:top;padding:.35rem 1rem .35rem 0}
th{font-weight:600;border-bottom:2px solid #8886}
tbody.run{border-bottom:1px solid #8884}
tbody.run tr:first-child td{padding-top:.8rem}
tbody.run tr:last-child td{padding-bottom:.8rem}
td.where{width:27rem;overflow-wrap:anywhere}
.mark{display:inline-block;min-width:4.6rem;text-align:center;border-radius:.3rem;
padding:0 .5rem;color:#fff;font-size:.85rem;font-weight:600}
.failed{background:#b3261e}.warning{background:#8a5300}.passed{background:#2e7031}
.not-judged-yet{background:#5f6368}
.dim{opacity:.7}
ul{margin:.1rem 0 0;padding-left:1.1rem}
pre{margin:0;white-space:pre-wrap}
h2{font-size:1.2rem;margin:1.5rem 0 .5rem}
code,pre{font:.92em/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
td>div+div{margin-top:.3rem}
td td,td th{padding:.1rem .8rem .1rem 0}
nav a{margin-right:1.2rem}"""
# A page opened from a disk has no HTTP headers. The policy allows only the page's own style, by its
# digest, and nothing else to load or run.
POLICY = (
    "default-src 'none'; style-src"
    f" 'sha256-{b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; base-uri 'none';"
    " form-action 'none'"
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>{body}</body></html>
"""
_HEAD = (
    "<thead><tr>"
    + "".join(f'<th scope="col">{n}</th>' for n in ("run", "result", "table", "expectations"))
    + "</tr></thead>"
)


def page(title: str, body: str) -> str:
    """Returns a complete page; ``body`` must be HTML."""
    return _PAGE.format(policy=POLICY, title=html_text(title), style=_STYLE, body=body)


def fact_table(facts: Iterable[tuple[str, str]]) -> str:
    """Returns names and values as a table."""
    rows = (
        f'<tr><th scope="row">{html_text(name)}</th><td>{html_text(value)}</td></tr>'
        for name, value in facts
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def run_table(runs: Iterable[CheckedRun], link: Callable[[ReportEntry], str]) -> str:
    """Returns the runs as a table, in the given order; ``link`` returns the address of a report's
    page.
    """
    bodies = (f'<tbody class="run">{"".join(_rows(run, link))}</tbody>' for run in runs)
    return f"<table>{_HEAD}{''.join(bodies)}</table>"


def static_index(pipeline: str, runs: list[CheckedRun]) -> str:
    """Returns the index of a pipeline's pages; it opens from a disk without network."""
    failed = sum(run.verdict == "failed" for run in runs)
    told = f"<p>{counted(len(runs), 'run')} kept, newest first; {failed} of them failed.</p>"
    return page(f"Data Docs of {pipeline}", told + run_table(runs, lambda entry: quote(entry.page)))


def mark(verdict: str) -> str:
    """Returns a verdict as a coloured word."""
    return f'<span class="mark {verdict.replace(" ", "-")}">{verdict}</span>'


def _rows(run: CheckedRun, link: Callable[[ReportEntry], str]) -> Iterator[str]:
    at = f"{run.at:%Y-%m-%d %H:%M:%S} UTC"
    where = (
        f'<td class="where" rowspan="{len(run.entries)}"><b>{at}</b>'
        f' {html_text(run.pipeline)}<br><span class="dim">{html_text(run.run_id)}</span></td>'
    )
    for entry in run.entries:
        table = html_text(entry.table)
        name = f'<a href="{html_text(link(entry))}">{table}</a>' if entry.page else table
        yield (
            f"<tr>{where}<td>{mark(entry.verdict)}</td><td>{name}</td><td>{_text(entry)}</td></tr>"
        )
        where = ""


def _text(entry: ReportEntry) -> str:
    if entry.result is not None:
        return html_text(entry.result)
    missed = [*entry.failures, *(f"{text} (warning)" for text in entry.warnings)]
    version = "" if entry.version is None else f", Delta version {entry.version}"
    if not missed:
        return f"{entry.expectations} met{version}"
    listed = "".join(f"<li>{html_text(text)}</li>" for text in missed)
    return f"{len(missed)} of {entry.expectations} not met{version}<ul>{listed}</ul>"
