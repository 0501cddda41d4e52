"""The FastAPI application behind the plugin: routes, and their access rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from airflow.api_fastapi.core_api.security import requires_authenticated
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from waldelta.config import DagKind, dag_id_of
from waldelta.lake.ledger import now
from waldelta.monitoring.reconciliation_status import read_compared
from waldelta.monitoring.table_list import replicated_tables
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta_airflow.views import _overview, _pages, _waiting
from waldelta_airflow.views._access import (
    PageRequest,
    PageRequestDep,
    PipelineDep,
    pipeline_request,
)
from waldelta_airflow.views._installed_pipelines import (
    RUN_NOW,
    check_origin,
    pipeline_of,
    read_action_dag,
    trigger_run,
    unpause,
)
from waldelta_airflow.views._render import (
    HEADERS,
    REPORT_HEADERS,
    STYLE_HEADERS,
    add_headers,
    render,
    url,
)
from waldelta_airflow.views._waiting import decision, read_form, reason_of

_FILES = {
    "style.css": "text/css",
    "frame.js": "text/javascript",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "icon-dark.svg": "image/svg+xml",
}

_NOT_OURS = (
    "This DAG does not belong to a waldelta pipeline that you may see. Airflow shows this tab on"
    " every DAG."
)
_routes = APIRouter()


def _may_trigger(kind: DagKind) -> Callable[[Request, PageRequest, str], None]:
    """Returns the dependency of a route that triggers a DAG of this kind.

    It raises 403 or 404 for a user who may not, before the body is read.
    """

    def check(request: Request, page_request: PageRequestDep, name: str) -> None:
        dag_id = _dag_of(page_request, request, name, kind)
        if not page_request.reader.may_trigger(dag_id):
            raise HTTPException(403, f"You may not trigger the DAG {dag_id}.")

    return check


def create_app() -> FastAPI:
    """Returns the application; each route requires a login, then permission to read the DAG."""
    app = FastAPI(
        title="waldelta",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        default_response_class=HTMLResponse,
        dependencies=[Depends(requires_authenticated())],
    )
    app.middleware("http")(add_headers)
    for kind in (HTTPException, 404, 405):  # Addresses without a route raise another class.
        app.add_exception_handler(kind, _error_page)
    app.add_exception_handler(RequestValidationError, _invalid_request_page)
    app.add_exception_handler(Exception, _server_error_page)
    for name, media_type in _FILES.items():
        app.add_api_route(f"/{name}", partial(_file, name, media_type), methods=["GET"])
    for module in (_overview, _pages, _waiting):
        app.include_router(module.routes)
    app.include_router(_routes)
    return app


@_routes.post("/p/{name}/repair", dependencies=[Depends(_may_trigger("reconcile"))])
@_routes.post("/p/{name}/repair/{table:path}", dependencies=[Depends(_may_trigger("reconcile"))])
def repair(
    page_request: PageRequestDep, request: PipelineDep, name: str, table: str = ""
) -> Response:
    """Triggers a run that compares a table, or all that differ, again and repairs what differs."""
    compared = read_compared(request.ledger, replicated_tables(request.ledger))
    if not (tables := [table] if table else [*compared.different, *compared.copied]):
        raise HTTPException(409, "No table differs any more.")
    conf = {"tables": tables, "repair": True, "reason": "requested on the reconciliation page"}
    return _trigger(page_request, name, "reconcile", "repair", conf, "reconciliation")


@_routes.post("/p/{name}/waiting", dependencies=[Depends(_may_trigger("decide"))])
def decide(
    page_request: PageRequestDep,
    name: str,
    form: Annotated[dict[str, list[str]], Depends(read_form)],
) -> Response:
    """Triggers the run of a decision."""
    conf = decision(form)
    return _trigger(page_request, name, "decide", conf["action"], conf, "waiting")


@_routes.post("/p/{name}/dags/{kind}/run")
def run_now(
    page_request: PageRequestDep,
    request: Request,
    name: str,
    kind: DagKind,
    form: Annotated[dict[str, list[str]], Depends(read_form)],
    table: Annotated[list[str], Query(default_factory=list)],
) -> Response:
    """Triggers a run of a pipeline's DAG, for these tables or all, with Airflow's permissions."""
    dag_id = _dag_of(page_request, request, name, kind)
    if kind not in (*RUN_NOW, "resync") or not page_request.reader.may_trigger(dag_id):
        raise HTTPException(403, f"You may not trigger the DAG {dag_id} from here.")
    reason = reason_of(form) or ("requested on the pipeline's page" if table else "")
    if kind == "resync" and not reason:
        raise HTTPException(400, "A resync needs a reason.")
    params = {"tables": table, "reason": reason}
    conf = {param: value for param, value in params.items() if value}
    return _trigger(page_request, name, kind, "manual", conf)


@_routes.post("/p/{name}/dags/{kind}/unpause")
def unpause_dag(
    page_request: PageRequestDep,
    request: Request,
    name: str,
    kind: DagKind,
    to: Literal["waiting", "reconciliation"] | None = None,
) -> Response:
    """Unpauses a pipeline's DAG, with Airflow's permissions."""
    dag_id = _dag_of(page_request, request, name, kind)
    if not page_request.reader.may_unpause(dag_id):
        raise HTTPException(403, f"You may not unpause the DAG {dag_id}.")
    unpause(dag_id, page_request.reader.user.get_name())
    return _back(page_request, name, *filter(None, [to]))


@_routes.get("/docs/{name}/{path:path}")
def report(request: PipelineDep, path: str) -> Response:
    """Returns the page of a report that is listed for a pipeline."""
    request.check_values()
    page = DocsStore(request.pipeline, request.ledger.lake).read_page(path)
    if page is None:
        raise HTTPException(404, "There is no such report.")
    return HTMLResponse(page, headers=REPORT_HEADERS)


@_routes.get("/dag/{dag_id}")
@_routes.get("/dag/{dag_id}/run/{run_id:path}")
def of_dag(page_request: PageRequestDep, dag_id: str, run_id: str | None = None) -> Response:
    """Leads from Airflow's page of a DAG, or of one of its runs, to ours."""
    place = pipeline_of(dag_id, page_request.pipelines())
    if place is None:
        return HTMLResponse(render("error.html", page_request.base, title=dag_id, text=_NOT_OURS))
    name, verb = place
    if run_id is None:
        return RedirectResponse(url(page_request.base, "p", name))
    if verb == "consume":
        with contextmanager(pipeline_request)(page_request, name) as request:
            verb = _pages.consuming_verb(request.ledger, run_id)
    return RedirectResponse(url(page_request.base, "p", name, "run", verb, run_id))


def _dag_of(page_request: PageRequest, request: Request, name: str, kind: DagKind) -> str:
    check_origin(request)
    page_request.find_pipeline(name)
    return dag_id_of(name, kind)


def _trigger(
    page_request: PageRequest,
    name: str,
    kind: DagKind,
    action: str,
    conf: dict[str, Any],
    *page: str,
) -> Response:
    """Trigger a run that would start at once as the only one, and lead to the page of its state."""
    dag = read_action_dag(dag_id_of(name, kind))
    query = {"refused": "another run" if dag.under_way else "paused"}
    if dag.is_ready:
        query = {"run": trigger_run(dag.dag_id, action, conf, page_request.reader.user)}
    return _back(page_request, name, *page, **(query if page else {}))


def _back(page_request: PageRequest, name: str, *page: str, **query: str) -> Response:
    # 303: reloading the page repeats no request.
    return RedirectResponse(url(page_request.base, "p", name, *page, **query), 303)


def _file(name: str, media_type: str) -> Response:
    return FileResponse(
        Path(__file__).with_name(name), media_type=media_type, headers=STYLE_HEADERS
    )


def _error_page(request: Request, err: Any) -> Response:
    base = str(request.scope.get("root_path", ""))
    text = render("error.html", base, now(), title=err.status_code, text=err.detail)
    # The middleware doesn't see the answer to an error of our own code.
    return HTMLResponse(text, err.status_code, headers=HEADERS)


def _invalid_request_page(request: Request, err: Any) -> Response:
    named = sorted({str(one["loc"][-1]) for one in err.errors() if one.get("loc")})
    text = f"The address can't be read: {', '.join(named)} has no value that fits."
    return _error_page(request, HTTPException(422, text))


def _server_error_page(request: Request, _: Any) -> Response:
    text = "The page could not be made: the API server's log has the error."
    return _error_page(request, HTTPException(500, text))
