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
from waldelta.lake.ledger.check_records import WORST_FIRST
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
    ordered = sorted(entries, key=lambda e: (WORST_FIRST.index(e.verdict), e.table))
    ordered.sort(key=_run_of, reverse=True)
    grouped = ((key, tuple(of_run)) for key, of_run in groupby(ordered, key=_run_of))
    return [CheckedRun(at, pipeline, run_id, of_run) for (at, pipeline, run_id), of_run in grouped]


def _run_of(entry: ReportEntry) -> tuple[datetime, str, str]:
    return entry.at, entry.pipeline, entry.run_id


# The looks of the pages in Airflow, by the reader's system: a page has no script that asks Airflow.
_STYLE = """\
:root{color-scheme:light dark;
--page:light-dark(#fff,#0f1115);--panel:light-dark(#f6f7f9,#181b21);
--rule:light-dark(#dfe3e9,#2d323b);--link:light-dark(#0a58ad,#86baf7);
--ink:light-dark(#18202b,#e7eaee);--dim:light-dark(#586374,#a2acba);
--failed:light-dark(#b3261e,#ff9a91);--failed-soft:light-dark(#fbe4e2,#43201e);
--warning:light-dark(#8a5300,#f2bd63);--warning-soft:light-dark(#fcefd6,#3e3013);
--passed:light-dark(#246b2c,#84d08b);--passed-soft:light-dark(#dff1e0,#1a3620);
--unknown:light-dark(#54606f,#b4bfcc);--unknown-soft:light-dark(#e8ebef,#292f38)}
body{margin:0 auto;max-width:92rem;padding:0 1.4rem 3rem;background:var(--page);color:var(--ink);
font:14px/1.45 Inter,ui-sans-serif,system-ui,"Segoe UI","DejaVu Sans",sans-serif}
a{color:var(--link);text-underline-offset:.25em}
nav{padding:.6rem 0;border-bottom:1px solid var(--rule)}
nav a{margin-right:1.2rem}
h1{font-size:1.5rem;line-height:1.25;margin:1.1rem 0 .8rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;margin-bottom:1rem}
caption{text-align:left;color:var(--dim);padding:0 0 .3rem;font-size:.88rem}
th,td{text-align:left;vertical-align:top;padding:.38rem .9rem .38rem 0}
td{overflow-wrap:anywhere;min-width:6rem}
th,td:first-child{overflow-wrap:break-word}
thead th{font-weight:600;font-size:.84rem;border-bottom:1px solid var(--rule);color:var(--dim)}
tbody th{font-weight:400}
tbody tr,tbody.run{border-bottom:1px solid var(--rule)}
tbody.run tr{border:0}
td.where{width:16rem}
.mark{display:inline-block;white-space:nowrap;border-radius:.3rem;padding:0 .45rem;
font-weight:600;font-size:.88rem;color:var(--unknown);background:var(--unknown-soft)}
.mark.failed{color:var(--failed);background:var(--failed-soft)}
.mark.warning{color:var(--warning);background:var(--warning-soft)}
.mark.passed{color:var(--passed);background:none;padding:0}
.facts,.squares{width:auto}
.facts th{color:var(--dim)}
.squares caption{width:max-content;max-width:80vw}
.squares td{padding:0;min-width:0;vertical-align:middle}
.squares td>*{display:block;width:1.1rem;height:1.25rem;margin:0 1px 1px 0;text-align:center;
font-size:.8rem;text-decoration:none;background:var(--panel)}
.squares .passed{background:var(--passed-soft);color:var(--passed)}
.squares .warning{background:var(--warning-soft);color:var(--warning);font-weight:700}
.squares .failed{background:var(--failed);color:var(--page);font-weight:700}
.squares .unknown{background:var(--unknown-soft);color:var(--unknown);font-weight:700}
.dim{color:var(--dim)}
ul{margin:.1rem 0 0;padding-left:1.1rem}
pre{margin:0;white-space:pre-wrap}
code,pre{font:.93em/1.5 ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
td>div+div{margin-top:.3rem}
td td,td th{padding:.1rem .8rem .1rem 0}
body:has(#failed:target) :is(tr:has(>td .passed):not(.squares *),
section:not(:has(.failed,.warning))){display:none}
@media print{nav{display:none}:root{color-scheme:light}}"""
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
<body>{nav}<h1>{title}</h1>{body}</body></html>
"""
_HEAD = (
    "<thead><tr>"
    + "".join(f'<th scope="col">{n}</th>' for n in ("run", "result", "table", "expectations"))
    + "</tr></thead>"
)


# From a page in its run's folder.
_UP = "../../index.html"


def page(title: str, body: str, nav: str = "") -> str:
    """Returns a complete page; ``body`` and ``nav`` must be HTML."""
    nav = f'<nav aria-label="pages">{nav}</nav>' if nav else ""
    return _PAGE.format(policy=POLICY, title=html_text(title), style=_STYLE, body=body, nav=nav)


def report_page(title: str, body: str) -> str:
    """Returns the page of a table in its run's folder; a link shows only what isn't met.

    The link needs no script: the style hides rows with a passed mark while the page's address ends
    with it.
    """
    links = (("All reports", _UP), ("only failed", "#failed"), ("all results", "#"))
    nav = "".join(f'<a href="{address}">{text}</a>' for text, address in links)
    return page(title, body, f'<span id="failed"></span>{nav}')


def fact_table(facts: Iterable[tuple[str, str]]) -> str:
    """Returns names and values as a table."""
    rows = (
        f'<tr><th scope="row">{html_text(name)}</th><td>{html_text(value)}</td></tr>'
        for name, value in facts
    )
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def run_table(runs: Iterable[CheckedRun], link: Callable[[ReportEntry], str]) -> str:
    """Returns the runs as a table, in the given order; ``link`` returns the address of a report's
    page.
    """
    bodies = (f'<tbody class="run">{"".join(_rows(run, link))}</tbody>' for run in runs)
    return f"<table>{_HEAD}{''.join(bodies)}</table>"


def static_index(pipeline: str, runs: list[CheckedRun]) -> str:
    """Returns the index of a pipeline's pages; it opens from a disk without network."""
    failed = sum(run.verdict == "failed" for run in runs)
    count = f"<p>{counted(len(runs), 'run')} kept, newest first; {failed} of them failed.</p>"

    def link(entry: ReportEntry) -> str:
        return quote(entry.page)

    tables = f"<h2>By table</h2>{table_index(runs, link)}" if runs else ""
    return page(
        f"Data Docs of {pipeline}", f"{tables}<h2>By time</h2>{count}{run_table(runs, link)}"
    )


@dataclass(frozen=True, slots=True)
class Square:
    """A verdict in a table of verdicts; ``link`` is an address, or empty."""

    verdict: str
    title: str
    link: str = ""


_SIGNS = {"passed": "✓", "warning": "!", "failed": "✕", "unknown": "?"}
# The runs that the index by table shows.
_MOST_RUNS = 20


def square_table(
    rows: Iterable[tuple[str, Sequence[Square | None]]], head: str, caption: str
) -> str:
    """Returns names with their verdicts, the newest at the right."""
    bodies = "".join(
        f'<tr><th scope="row">{html_text(name)}</th>{"".join(map(_square, squares))}</tr>'
        for name, squares in rows
    )
    return (
        f'<table class="squares"><caption>{caption}</caption><thead><tr><th scope="col">{head}</th>'
        f"</tr></thead><tbody>{bodies}</tbody></table>"
    )


def _square(square: Square | None) -> str:
    if square is None:
        return "<td></td>"
    known = f'class="{square.verdict}" title="{html_text(square.title)}"'
    sign = _SIGNS[square.verdict]
    if not square.link:
        return f"<td><span {known}>{sign}</span></td>"
    label = f'aria-label="{square.verdict}, {html_text(square.title)}"'
    return f'<td><a {known} {label} href="{html_text(square.link)}">{sign}</a></td>'


def table_index(runs: Sequence[CheckedRun], link: Callable[[ReportEntry], str]) -> str:
    """Returns the tables with the reports of the last runs, worst first; ``runs`` are newest first.

    ``link`` returns the address of a report's page.
    """
    last = runs[:_MOST_RUNS][::-1]
    by_table: dict[str, list[ReportEntry | None]] = {}
    for number, run in enumerate(last):
        for entry in run.entries:
            by_table.setdefault(entry.table, [None] * len(last))[number] = entry

    def rank(table: str) -> tuple[int, str]:
        newest = next(entry for entry in reversed(by_table[table]) if entry is not None)
        return WORST_FIRST.index(newest.verdict), table

    def square(entry: ReportEntry | None) -> Square | None:
        if entry is None:
            return None
        title = f"{entry.at:%Y-%m-%d %H:%M} UTC, run {entry.run_id}"
        return Square(entry.verdict, title, link(entry) if entry.page else "")

    tables = sorted(by_table, key=rank)
    rows = [(table, [square(entry) for entry in by_table[table]]) for table in tables]
    caption = f"reports of the last {counted(len(last), 'run')}, the newest at the right"
    return square_table(rows, "table", caption)


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
            f"<tr>{where}<td>{mark(entry.verdict)}</td>"
            f'<th scope="row">{name}</th><td>{_text(entry)}</td></tr>'
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
