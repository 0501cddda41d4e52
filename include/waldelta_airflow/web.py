"""The Data Docs page in Airflow's UI: all pipelines' reports as one list, for users who are logged in."""

from __future__ import annotations

import html
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from waldelta.errors import ConfigError
from waldelta.pipeline_file import load_pipeline_file
from waldelta.report_list import CheckedRun, checked_runs, read_entries
from waldelta.report_page import mark, page, run_table
from waldelta_airflow.settings import pipelines_folder

if TYPE_CHECKING:
    from fastapi import FastAPI

    from waldelta.pipeline_file import PipelineFile

PREFIX = "/waldelta"
_SERVED = {".html", ".css", ".js", ".json", ".svg", ".png", ".jpg", ".gif", ".ico", ".woff", ".woff2", ".ttf"}
# Reports show values from the source: none of them may run as a script with the reader's Airflow login.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline' https:; font-src 'self' https:; "
    "img-src 'self' data: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_OVERVIEW_HEAD = "<thead><tr><th>pipeline</th><th>latest</th><th></th></tr></thead>"
# A screenful or two; older runs are a click away.
_RUNS_PER_PAGE = 30


class DeferredApp:
    """An ASGI application that is made by its first request.

    Airflow loads plugins in every process, tasks included, and importing FastAPI with Airflow's security takes
    longer than a run with nothing to do.
    """

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if self._app is None:
            self._app = create_app()
        await self._app(scope, receive, send)


def create_app() -> FastAPI:
    """The application: a list of all reports, and each pipeline's folder of reports below it."""
    from airflow.api_fastapi.core_api.security import requires_authenticated
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import FileResponse, HTMLResponse

    app = FastAPI(
        title="waldelta",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(requires_authenticated())],
    )

    @app.get("/")
    def index(page: int = 1, *, failed: bool = False) -> HTMLResponse:
        return HTMLResponse(index_page(page, only_failed=failed), headers=_HEADERS)

    @app.get("/docs/{name}/{path:path}")
    def report(name: str, path: str) -> FileResponse:
        folder = _folders().get(name)
        file = report_file(folder, path or "index.html") if folder is not None else None
        if file is None:
            raise HTTPException(404, "no such report")
        return FileResponse(file, headers=_HEADERS)

    return app


def data_docs_folder(pipeline: PipelineFile) -> Path | None:
    """The folder of a pipeline's reports on this machine; None when they are in an object store."""
    place = pipeline.quality.data_docs or f"{pipeline.target.root}/_waldelta/data_docs"
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if "://" in place else Path(place)


def report_file(folder: Path, path: str) -> Path | None:
    """The file of a report; None when it doesn't exist, isn't one, or lies outside the folder."""
    root = folder.resolve()
    try:
        file = (root / path).resolve()
    except (OSError, ValueError):
        return None
    inside = file.is_relative_to(root)
    return file if inside and file.suffix.lower() in _SERVED and file.is_file() else None


def _pipelines() -> dict[str, PipelineFile | str]:
    """Each pipeline file's content, or what is wrong with it, by name."""
    found: dict[str, PipelineFile | str] = {}
    for path in sorted([*pipelines_folder().glob("*.yml"), *pipelines_folder().glob("*.yaml")]):
        try:
            pipeline = load_pipeline_file(path)
            found[pipeline.pipeline] = pipeline
        except ConfigError as err:
            found[path.name] = str(err)
    return found


def index_page(number: int = 1, *, only_failed: bool = False) -> str:
    """The pipelines, then a page of the runs of all of them, newest first; pages count from 1."""
    pipelines = _pipelines()
    runs = {name: _runs(p) for name, p in pipelines.items() if not isinstance(p, str)}
    listed = sorted(chain.from_iterable(runs.values()), key=lambda run: run.at, reverse=True)
    if only_failed:
        listed = [run for run in listed if run.verdict == "failed"]
    first = (max(1, number) - 1) * _RUNS_PER_PAGE
    shown = listed[first : first + _RUNS_PER_PAGE]
    overview = "".join(_overview(name, pipeline, runs.get(name, [])) for name, pipeline in pipelines.items())
    body = f"<table>{_OVERVIEW_HEAD}{overview}</table>" if overview else "<p>There are no pipeline files.</p>"
    body += _turning(max(1, number), len(listed), only_failed=only_failed)
    if shown:
        body += run_table(shown, lambda entry: f"docs/{quote(entry.pipeline)}/{quote(entry.page)}")
    return page("Data Docs", body)


def _folders() -> Mapping[str, Path | None]:
    return {name: data_docs_folder(p) for name, p in _pipelines().items() if not isinstance(p, str)}


def _runs(pipeline: PipelineFile) -> list[CheckedRun]:
    folder = data_docs_folder(pipeline)
    if folder is None:
        return []
    # A folder may serve several pipelines; the links go by pipeline.
    return checked_runs(entry for entry in read_entries(folder) if entry.pipeline == pipeline.pipeline)


def _overview(name: str, pipeline: PipelineFile | str, runs: list[CheckedRun]) -> str:
    shown = html.escape(name)
    if isinstance(pipeline, str):
        cells = f"<td>{mark('failed')}</td><td><pre>{html.escape(pipeline)}</pre></td>"
    elif data_docs_folder(pipeline) is None:
        cells = "<td></td><td>the reports aren't on this machine</td>"
    elif not runs:
        cells = "<td></td><td>no reports yet</td>"
    else:
        failed = sum(entry.verdict == "failed" for entry in runs[0].entries)
        told = f"{failed} of {len(runs[0].entries)} tables failed" if failed else f"{len(runs[0].entries)} tables"
        cells = f"<td>{mark(runs[0].verdict)}</td><td>{told}, {runs[0].at:%Y-%m-%d %H:%M} UTC</td>"
    return f"<tr><td>{shown}</td>{cells}</tr>"


def _turning(number: int, count: int, *, only_failed: bool) -> str:
    """What is listed, and links to the rest of it."""
    last = max(1, -(-count // _RUNS_PER_PAGE))
    kept = "&failed=true" if only_failed else ""
    links = [f'<a href="?page={number - 1}{kept}">newer</a>'] if number > 1 else []
    links += [f'<a href="?page={number + 1}{kept}">older</a>'] if number < last else []
    links.append('<a href="?">all runs</a>' if only_failed else '<a href="?failed=true">failed runs only</a>')
    what = "failed runs" if only_failed else "runs"
    return f"<nav><p>{count} {what}, newest first, page {number} of {last} {' '.join(links)}</p></nav>"
