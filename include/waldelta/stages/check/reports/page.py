"""Reports and their index as HTML, by the templates, which escape every text: plain tables without
scripts or network resources.

Great Expectations' own index needs scripts from the network, and reads every stored result again.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from waldelta.control_characters import visible
from waldelta.lake.ledger.check_records import WORST_FIRST
from waldelta.lsn import Lsn
from waldelta.quantities import counted
from waldelta.stages.check.reports.entries import CheckedRun, ReportEntry

templates = Environment(
    loader=PackageLoader(__name__.rpartition(".")[0]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
)
templates.globals["counted"] = counted
templates.filters |= {"number": "{:,}".format, "lsn": Lsn}
# The looks of the pages in Airflow, by the reader's system: a page has no script that asks Airflow.
_STYLE = resources.files(__package__).joinpath("templates", "style.css").read_text("utf-8")
# A page opened from a disk has no HTTP headers. The policy allows only the page's own style, by its
# digest, and nothing else to load or run.
POLICY = (
    "default-src 'none'; style-src"
    f" 'sha256-{b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; base-uri 'none';"
    " form-action 'none'"
)
# The macros of parts.html, each of which returns HTML.
parts: Any = templates.get_template("parts.html").module
# The runs that the index by table shows.
_MOST_RUNS = 20


def render(template: str, **values: Any) -> str:
    """Returns a page by its template; values that are no Markup are escaped."""
    html = {"policy": Markup(POLICY), "style": Markup(_STYLE)}  # noqa: S704 - both are ours
    return templates.get_template(template).render(html, **values)


def static_index(pipeline: str, runs: list[CheckedRun]) -> str:
    """Returns the index of a pipeline's pages; it opens from a disk without network."""

    def link(entry: ReportEntry) -> str:
        return quote(entry.page)

    tables = table_index(runs, link)
    title = f"Data Docs of {pipeline}"
    return render("index.html", title=title, runs=runs, link=link, tables=tables)


def table_index(runs: Sequence[CheckedRun], link: Callable[[ReportEntry], str]) -> Markup:
    """Returns the tables with the reports of the last runs, worst first; ``runs`` are newest first.

    ``link`` returns the address of a report's page.
    """
    last = runs[:_MOST_RUNS][::-1]
    by_table: dict[str, list[tuple[str, str, str] | None]] = {}
    for number, run in enumerate(last):
        for entry in run.entries:
            title = f"{entry.at:%Y-%m-%d %H:%M} UTC, run {entry.run_id}"
            square = entry.verdict, title, link(entry) if entry.page else ""
            by_table.setdefault(entry.table, [None] * len(last))[number] = square

    def rank(table: str) -> tuple[int, str]:
        newest = next(square for square in reversed(by_table[table]) if square is not None)
        return WORST_FIRST.index(newest[0]), table

    rows = [(table, by_table[table]) for table in sorted(by_table, key=rank)]
    caption = f"reports of the last {counted(len(last), 'run')}, the newest at the right"
    return Markup.escape(parts.squares(rows, "table", caption))
