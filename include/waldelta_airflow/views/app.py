"""The FastAPI application behind the plugin: routes, and who may follow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from airflow.api_fastapi.core_api.security import GetUserDep, requires_authenticated
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from waldelta.ledger_rows import now
from waldelta.pipeline_file import PipelineFile
from waldelta.review.bookkeeping import Bookkeeping, bookkeeping_of
from waldelta.review.compared import read_compared
from waldelta.review.freshness import fed_tables
from waldelta_airflow.views import pages
from waldelta_airflow.views.access import Reader
from waldelta_airflow.views.dags import RUN_NOW, Kind, dag_id_of, unpause
from waldelta_airflow.views.decisions import decision, quarantine_dag, read_form
from waldelta_airflow.views.pipelines import load_pipelines, pipeline_of, reconcile_dag
from waldelta_airflow.views.quarantine import Chosen, quarantine_page, row_page
from waldelta_airflow.views.reconciliation import reconciliation_page, repair_of
from waldelta_airflow.views.render import (
    FORM_HEADERS,
    HEADERS,
    INDEX_HEADERS,
    REPORT_HEADERS,
    STYLE_HEADERS,
    SecurityHeaders,
    render,
    url,
)
from waldelta_airflow.views.reports import reports_index, served_report
from waldelta_airflow.views.trigger import check_origin, trigger_run

_FILES = {
    "style.css": "text/css",
    "frame.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "icon-dark.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request by somebody who is logged in: where the application is mounted, and what they may see."""

    base: str
    reader: Reader

    def pipeline(self, name: str) -> PipelineFile:
        """A pipeline; 404 also for one that they may not see."""
        found = load_pipelines().get(name)
        if not isinstance(found, PipelineFile) or not self.reader.may_read(name):
            raise HTTPException(404, "There is no such pipeline, or you may not read its DAG.")
        return found

    def pipelines(self) -> dict[str, PipelineFile | str]:
        """Those that they may see."""
        sees_refused = self.reader.may_see_refused_files()
        return {
            name: pipeline
            for name, pipeline in load_pipelines().items()
            if (sees_refused if isinstance(pipeline, str) else self.reader.may_read(name))
        }


def _asked(request: Request, user: GetUserDep) -> Asked:
    return Asked(str(request.scope.get("root_path", "")), Reader(user))


def _chosen(page: int = 1, table: str | None = None, reason: str | None = None) -> Chosen:
    return Chosen(page, table, reason)


AskedDep = Annotated[Asked, Depends(_asked)]
ChosenDep = Annotated[Chosen, Depends(_chosen)]


def _may_decide(request: Request, asked: AskedDep, name: str) -> None:
    """Raise 403 or 404 for a request that may not trigger the DAG, before its body is read."""
    check_origin(request)
    asked.pipeline(name)
    if not asked.reader.may_trigger(quarantine_dag(name)):
        raise HTTPException(403, f"You may not trigger the DAG {quarantine_dag(name)}.")


async def _form(request: Request, _: Annotated[None, Depends(_may_decide)]) -> dict[str, list[str]]:
    return await read_form(request)


FormDep = Annotated[dict[str, list[str]], Depends(_form)]


def create_app() -> FastAPI:
    """The application; each route first asks for a login, then whether the DAG may be read."""
    app = FastAPI(
        title="waldelta",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(requires_authenticated())],
    )
    app.add_middleware(SecurityHeaders)
    for kind in (HTTPException, 404, 405):  # addresses that no route has raise another class
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(Exception, _broke_off)
    _add_pages(app)
    _add_reconciliation(app)
    _add_quarantine(app)
    _add_dags(app)
    _add_reports(app)
    _add_entrances(app)
    return app


def _add_pages(app: FastAPI) -> None:
    for name, media_type in _FILES.items():
        app.add_api_route(f"/{name}", partial(_file, name, media_type), methods=["GET"])

    @app.get("/")
    def overview(asked: AskedDep) -> HTMLResponse:
        return _page(pages.overview_page(asked.base, asked.pipelines()))

    @app.get("/p/{name}")
    def pipeline(asked: AskedDep, name: str, hours: int = 24) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            text = pages.pipeline_page(asked.base, found, lake, hours, asked.reader)
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.get("/p/{name}/runs")
    def runs(asked: AskedDep, name: str, page: int = 1, *, failed: bool = False) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            return _page(pages.runs_page(asked.base, found, lake, page, only_failed=failed))

    @app.get("/p/{name}/run/{verb}/{run_id:path}")
    def run(asked: AskedDep, name: str, verb: str, run_id: str) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            text, is_known = pages.run_page(asked.base, found, lake, verb, run_id)
            return _page(text, 200 if is_known else 404)

    @app.get("/p/{name}/expectations")
    def expectations(asked: AskedDep, name: str) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            return _page(pages.expectations_page(asked.base, found, lake))

    @app.get("/p/{name}/table/{table:path}")
    def table(asked: AskedDep, name: str, table: str) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            text, is_known = pages.table_page(asked.base, found, lake, table)
            return _page(text, 200 if is_known else 404)


def _add_quarantine(app: FastAPI) -> None:
    @app.get("/p/{name}/quarantine")
    def quarantine(asked: AskedDep, name: str, chosen: ChosenDep, run: str | None = None) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            may_decide = asked.reader.may_trigger(quarantine_dag(name))
            text = quarantine_page(asked.base, found, lake, chosen, may_decide=may_decide, asked=run)
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.get("/p/{name}/quarantine/row/{row_id}")
    def quarantined(asked: AskedDep, name: str, row_id: str) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            text = row_page(asked.base, found, lake, row_id)
        if text is None:
            raise HTTPException(404, "There is no such row in quarantine (any more).")
        return _page(text)

    @app.post("/p/{name}/quarantine")
    def decide(asked: AskedDep, name: str, form: FormDep) -> Response:
        dag_id = quarantine_dag(name)
        run_id = trigger_run(dag_id, (conf := decision(form))["action"], conf, asked.reader.user)
        # 303: reading the page again asks for nothing.
        return RedirectResponse(url(asked.base, "p", name, "quarantine", run=run_id), 303, headers=FORM_HEADERS)


def _add_dags(app: FastAPI) -> None:
    """What readers do to a pipeline's DAGs from its page, as Airflow's own pages let them."""

    @app.post("/p/{name}/dags/{kind}/run")
    def run_now(asked: AskedDep, request: Request, name: str, kind: Kind) -> Response:
        dag_id = _dag_of(asked, request, name, kind)
        if kind not in RUN_NOW or not asked.reader.may_trigger(dag_id):
            raise HTTPException(403, f"You may not trigger the DAG {dag_id} from here.")
        trigger_run(dag_id, "manual", {}, asked.reader.user)
        return RedirectResponse(url(asked.base, "p", name), 303, headers=FORM_HEADERS)

    @app.post("/p/{name}/dags/{kind}/unpause")
    def unpause_dag(asked: AskedDep, request: Request, name: str, kind: Kind) -> Response:
        dag_id = _dag_of(asked, request, name, kind)
        if not asked.reader.may_unpause(dag_id):
            raise HTTPException(403, f"You may not unpause the DAG {dag_id}.")
        unpause(dag_id, asked.reader.user.get_name())
        return RedirectResponse(url(asked.base, "p", name), 303, headers=FORM_HEADERS)


def _dag_of(asked: Asked, request: Request, name: str, kind: Kind) -> str:
    """The DAG that a form names; raises 403 and 404 as all forms do."""
    check_origin(request)
    asked.pipeline(name)
    return dag_id_of(name, kind)


def _add_reconciliation(app: FastAPI) -> None:
    @app.get("/p/{name}/reconciliation")
    def reconciliation(asked: AskedDep, name: str, run: str | None = None) -> HTMLResponse:
        with _lake(asked, name) as (found, lake):
            may_repair = asked.reader.may_trigger(reconcile_dag(name))
            text = reconciliation_page(asked.base, found, lake, may_repair=may_repair, asked=run)
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.post("/p/{name}/repair")
    def repair_all(asked: AskedDep, request: Request, name: str) -> Response:
        with _lake(asked, name) as (_, lake):
            compared = read_compared(lake, fed_tables(lake))
        return _repair(asked, request, name, [*compared.different, *compared.copied])

    @app.post("/p/{name}/repair/{table:path}")
    def repair(asked: AskedDep, request: Request, name: str, table: str) -> Response:
        asked.pipeline(name)
        return _repair(asked, request, name, [table])


def _repair(asked: Asked, request: Request, name: str, tables: list[str]) -> Response:
    check_origin(request)
    if not asked.reader.may_trigger(reconcile_dag(name)):
        raise HTTPException(403, f"You may not trigger the DAG {reconcile_dag(name)}.")
    if not tables:
        raise HTTPException(409, "No table differs any more.")
    run_id = trigger_run(reconcile_dag(name), "repair", repair_of(tables), asked.reader.user)
    # 303: reading the page again asks for nothing.
    return RedirectResponse(url(asked.base, "p", name, "reconciliation", run=run_id), 303, headers=FORM_HEADERS)


def _add_reports(app: FastAPI) -> None:
    @app.get("/docs/")
    def reports(asked: AskedDep, page: int = 1, *, failed: bool = False) -> HTMLResponse:
        return _page(pages.reports_page(asked.base, asked.pipelines(), page, only_failed=failed))

    @app.get("/docs/{name}/")
    @app.get("/docs/{name}/index.html")
    def reports_of(asked: AskedDep, name: str) -> HTMLResponse:
        return HTMLResponse(reports_index(asked.pipeline(name)), headers=INDEX_HEADERS)

    @app.get("/docs/{name}/{path:path}")
    def report(asked: AskedDep, name: str, path: str) -> FileResponse:
        file = served_report(asked.pipeline(name), path)
        if file is None:
            raise HTTPException(404, "There is no such report.")
        return FileResponse(file, headers=REPORT_HEADERS)


def _add_entrances(app: FastAPI) -> None:
    """From Airflow's pages of a DAG and of a run."""

    @app.get("/dag/{dag_id}")
    def of_dag(asked: AskedDep, dag_id: str) -> Response:
        found = pipeline_of(dag_id, asked.pipelines())
        if found is None:
            return _page(pages.stranger_page(asked.base, dag_id))
        return RedirectResponse(url(asked.base, "p", found[0]), headers=HEADERS)

    @app.get("/dag/{dag_id}/run/{run_id:path}")
    def of_run(asked: AskedDep, dag_id: str, run_id: str) -> Response:
        found = pipeline_of(dag_id, asked.pipelines())
        if found is None:
            return _page(pages.stranger_page(asked.base, dag_id))
        name, verb = found
        if verb == "consume":
            with _lake(asked, name) as (_, lake):
                verb = pages.consuming_verb(lake, run_id)
        return RedirectResponse(url(asked.base, "p", name, "run", verb, run_id), headers=HEADERS)


@contextmanager
def _lake(asked: Asked, name: str) -> Iterator[tuple[PipelineFile, Bookkeeping]]:
    """A pipeline and its lake; what goes wrong there is told with 502, not as an error of Airflow's."""
    found = asked.pipeline(name)
    try:
        yield found, bookkeeping_of(found)
    except pages.UNREADABLE as err:
        raise HTTPException(
            502, f"The lake of {name} can't be read from Airflow's API server: {pages.reason(err)}"
        ) from err


def _file(name: str, media_type: str) -> Response:
    return FileResponse(Path(__file__).with_name(name), media_type=media_type, headers=STYLE_HEADERS)


def _page(text: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(text, status, headers=HEADERS)


def _failed(request: Request, err: Any) -> Response:
    base = str(request.scope.get("root_path", ""))
    return _page(render("error.html", base, now(), status=err.status_code, told=err.detail), err.status_code)


def _not_understood(request: Request, err: Any) -> Response:
    """The parts of the address that can't be read, without their values."""
    named = sorted({str(one["loc"][-1]) for one in err.errors() if one.get("loc")})
    return _failed(
        request, HTTPException(422, f"The address can't be read: {', '.join(named)} has no value that fits.")
    )


def _broke_off(request: Request, _: Any) -> Response:
    """An error of the pages' own code, which Airflow's API server logs."""
    return _failed(request, HTTPException(500, "The page could not be made: the API server's log has the error."))
