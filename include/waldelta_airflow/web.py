"""The Data Docs page in Airflow's UI: each pipeline's reports, for users who are logged in."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from waldelta.errors import ConfigError
from waldelta.pipeline_file import load_pipeline_file
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
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Data Docs</title>
<style>body{{font-family:sans-serif;margin:2rem}}td,th{{text-align:left;padding:.3rem 1.5rem .3rem 0}}
pre{{margin:0;white-space:pre-wrap}}</style></head>
<body><h1>Data Docs</h1><table><tr><th>pipeline</th><th>target</th><th>reports</th></tr>{rows}</table></body></html>"""


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
    """The application: an index by pipeline, and each pipeline's folder of reports below it."""
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
    def index() -> HTMLResponse:
        return HTMLResponse(_PAGE.format(rows="".join(_rows())), headers=_HEADERS)

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


def _folders() -> Mapping[str, Path | None]:
    return {name: data_docs_folder(p) for name, p in _pipelines().items() if not isinstance(p, str)}


def _rows() -> list[str]:
    rows = []
    for name, pipeline in _pipelines().items():
        shown = html.escape(name)
        if isinstance(pipeline, str):
            rows.append(f'<tr><td>{shown}</td><td colspan="2"><pre>{html.escape(pipeline)}</pre></td></tr>')
            continue
        rows.append(f"<tr><td>{shown}</td><td>{html.escape(pipeline.target.root)}</td><td>{_link(pipeline)}</td></tr>")
    return rows


def _link(pipeline: PipelineFile) -> str:
    folder = data_docs_folder(pipeline)
    if folder is None:
        return "not on this machine"
    if report_file(folder, "index.html") is None:
        return "none yet"
    # Relative, so that it holds under whatever path Airflow is served.
    return f'<a href="docs/{quote(pipeline.pipeline)}/index.html">open</a>'
