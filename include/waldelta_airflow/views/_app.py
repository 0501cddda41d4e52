"""The FastAPI application behind the plugin: routes, and their access rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from airflow.api_fastapi.core_api.security import GetUserDep, requires_authenticated
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.lake.ledger import Ledger
from waldelta.lake.ledger.records import now
from waldelta.monitoring.reconciliation_status import read_compared
from waldelta.monitoring.table_list import replicated_tables
from waldelta_airflow._connections import pipeline_lake
from waldelta_airflow.views import _pages as pages
from waldelta_airflow.views._access import Reader
from waldelta_airflow.views._dag_states import RUN_NOW, read_action_dag, unpause
from waldelta_airflow.views._decisions import decision, read_form
from waldelta_airflow.views._installed_pipelines import load_pipelines, pipeline_of
from waldelta_airflow.views._quarantine import Chosen, quarantine_page, row_page
from waldelta_airflow.views._reconciliation import reconciliation_page, repair_of
from waldelta_airflow.views._render import (
    FORM_HEADERS,
    HEADERS,
    INDEX_HEADERS,
    REPORT_HEADERS,
    STYLE_HEADERS,
    SecurityHeaders,
    render,
    url,
)
from waldelta_airflow.views._reports import reports_index, served_report
from waldelta_airflow.views._trigger import Button, DagPaused, check_origin, trigger_run

_FILES = {
    "style.css": "text/css",
    "frame.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "icon-dark.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A logged-in user's request: where the application is mounted, and what the user may see."""

    base: str
    reader: Reader

    def pipeline(self, name: str) -> PipelineFile:
        """Returns a pipeline; raises 404 also for one that the user may not see."""
        found = load_pipelines().get(name)
        if not isinstance(found, PipelineFile) or not self.reader.may_read(name):
            raise HTTPException(404, "There is no such pipeline, or you may not read its DAG.")
        return found

    def check_values(self, pipeline: PipelineFile) -> None:
        """Raise 403 for a page of row values that the user may not see."""
        if not self.reader.may_see_values(pipeline):
            raise HTTPException(
                403,
                f"This page shows values of rows: they are for users who may {pipeline.row_values}"
                f" the DAG {dag_id_of(pipeline.pipeline, 'cdc')}.",
            )

    def pipelines(self) -> dict[str, PipelineFile | str]:
        """Returns the pipelines that the user may see."""
        sees_refused = self.reader.may_see_refused_files()
        return {
            name: pipeline
            for name, pipeline in load_pipelines().items()
            if (sees_refused if isinstance(pipeline, str) else self.reader.may_read(name))
        }


def _page_request(request: Request, user: GetUserDep) -> PageRequest:
    return PageRequest(str(request.scope.get("root_path", "")), Reader(user))


def _chosen(page: int = 1, table: str | None = None, reason: str | None = None) -> Chosen:
    return Chosen(page, table, reason)


PageRequestDep = Annotated[PageRequest, Depends(_page_request)]
ChosenDep = Annotated[Chosen, Depends(_chosen)]


def _may_trigger(kind: DagKind) -> Callable[[Request, PageRequest, str], None]:
    """Returns the dependency of a route that triggers a DAG of this kind.

    It raises 403 or 404 for a user who may not, before the body is read.
    """

    def check(request: Request, page_request: PageRequestDep, name: str) -> None:
        dag_id = _dag_of(page_request, request, name, kind)
        if not page_request.reader.may_trigger(dag_id):
            raise HTTPException(403, f"You may not trigger the DAG {dag_id}.")

    return check


async def _form(
    request: Request, _: Annotated[None, Depends(_may_trigger("quarantine"))]
) -> dict[str, list[str]]:
    return await read_form(request)


FormDep = Annotated[dict[str, list[str]], Depends(_form)]


def create_app() -> FastAPI:
    """Returns the application; each route requires a login, then permission to read the DAG."""
    app = FastAPI(
        title="waldelta",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(requires_authenticated())],
    )
    app.add_middleware(SecurityHeaders)
    for kind in (HTTPException, 404, 405):  # Addresses without a route raise another class.
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
    def overview(page_request: PageRequestDep) -> HTMLResponse:
        return _page(
            pages.overview_page(page_request.base, page_request.pipelines(), page_request.reader)
        )

    @app.get("/p/{name}")
    def pipeline(page_request: PageRequestDep, name: str, hours: int = 24) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            text = pages.pipeline_page(page_request.base, found, ledger, hours, page_request.reader)
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.get("/p/{name}/runs")
    def runs(
        page_request: PageRequestDep, name: str, page: int = 1, *, failed: bool = False
    ) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            return _page(
                pages.runs_page(page_request.base, found, ledger, page, only_failed=failed)
            )

    @app.get("/p/{name}/run/{verb}/{run_id:path}")
    def run(page_request: PageRequestDep, name: str, verb: str, run_id: str) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            text, is_known = pages.run_page(
                page_request.base, found, ledger, verb, run_id, page_request.reader
            )
            return _page(text, 200 if is_known else 404)

    @app.get("/p/{name}/expectations")
    def expectations(page_request: PageRequestDep, name: str) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            return _page(pages.expectations_page(page_request.base, found, ledger))

    @app.get("/p/{name}/table/{table:path}")
    def table(page_request: PageRequestDep, name: str, table: str) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            text, is_known = pages.table_page(page_request.base, found, ledger, table)
            return _page(text, 200 if is_known else 404)


def _add_quarantine(app: FastAPI) -> None:
    @app.get("/p/{name}/quarantine")
    def quarantine(
        page_request: PageRequestDep,
        name: str,
        chosen: ChosenDep,
        run: str | None = None,
        refused: str | None = None,
    ) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            button = _button(page_request, dag_id_of(name, "quarantine"), run, refused)
            shows_values = page_request.reader.may_see_values(found)
            text = quarantine_page(
                page_request.base, found, ledger, chosen, button, shows_values=shows_values
            )
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.get("/p/{name}/quarantine/row/{row_id}")
    def quarantined(page_request: PageRequestDep, name: str, row_id: str) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            page_request.check_values(found)
            text = row_page(page_request.base, found, ledger, row_id)
        if text is None:
            raise HTTPException(404, "There is no such row in quarantine (any more).")
        return _page(text)

    @app.post("/p/{name}/quarantine")
    def decide(page_request: PageRequestDep, name: str, form: FormDep) -> Response:
        conf = decision(form)
        return _trigger(
            page_request, name, "quarantine", dag_id_of(name, "quarantine"), conf["action"], conf
        )


def _add_dags(app: FastAPI) -> None:
    """Add the routes that run or unpause a pipeline's DAGs, with Airflow's permissions."""

    @app.post("/p/{name}/dags/{kind}/run")
    def run_now(
        page_request: PageRequestDep, request: Request, name: str, kind: DagKind
    ) -> Response:
        dag_id = _dag_of(page_request, request, name, kind)
        if kind not in RUN_NOW or not page_request.reader.may_trigger(dag_id):
            raise HTTPException(403, f"You may not trigger the DAG {dag_id} from here.")
        # The DAG's page shows that it is paused, and offers to unpause it.
        with suppress(DagPaused):
            trigger_run(dag_id, "manual", {}, page_request.reader.user)
        return _back(page_request, name)

    @app.post("/p/{name}/dags/{kind}/unpause")
    def unpause_dag(
        page_request: PageRequestDep,
        request: Request,
        name: str,
        kind: DagKind,
        to: Literal["quarantine", "reconciliation"] | None = None,
    ) -> Response:
        dag_id = _dag_of(page_request, request, name, kind)
        if not page_request.reader.may_unpause(dag_id):
            raise HTTPException(403, f"You may not unpause the DAG {dag_id}.")
        unpause(dag_id, page_request.reader.user.get_name())
        return _back(page_request, name, *filter(None, [to]))


def _dag_of(page_request: PageRequest, request: Request, name: str, kind: DagKind) -> str:
    """Returns the DAG that a form names; raises 403 and 404 as all forms do."""
    check_origin(request)
    page_request.pipeline(name)
    return dag_id_of(name, kind)


def _add_reconciliation(app: FastAPI) -> None:
    @app.get("/p/{name}/reconciliation")
    def reconciliation(
        page_request: PageRequestDep, name: str, run: str | None = None, refused: str | None = None
    ) -> HTMLResponse:
        with _lake(page_request, name) as (found, ledger):
            button = _button(page_request, dag_id_of(name, "reconcile"), run, refused)
            shows_values = page_request.reader.may_see_values(found)
            text = reconciliation_page(
                page_request.base, found, ledger, button, shows_values=shows_values
            )
            return HTMLResponse(text, headers=FORM_HEADERS)

    @app.post("/p/{name}/repair", dependencies=[Depends(_may_trigger("reconcile"))])
    def repair_all(page_request: PageRequestDep, name: str) -> Response:
        with _lake(page_request, name) as (_, ledger):
            compared = read_compared(ledger, replicated_tables(ledger))
        return _repair(page_request, name, [*compared.different, *compared.copied])

    @app.post("/p/{name}/repair/{table:path}", dependencies=[Depends(_may_trigger("reconcile"))])
    def repair(page_request: PageRequestDep, name: str, table: str) -> Response:
        return _repair(page_request, name, [table])


def _repair(page_request: PageRequest, name: str, tables: list[str]) -> Response:
    if not tables:
        raise HTTPException(409, "No table differs any more.")
    return _trigger(
        page_request,
        name,
        "reconciliation",
        dag_id_of(name, "reconcile"),
        "repair",
        repair_of(tables),
    )


def _button(page_request: PageRequest, dag_id: str, run: str | None, refused: str | None) -> Button:
    reader = page_request.reader
    return Button(
        read_action_dag(dag_id, run),
        run,
        refused,
        reader.may_trigger(dag_id),
        reader.may_unpause(dag_id),
    )


def _trigger(
    page_request: PageRequest,
    name: str,
    page: str,
    dag_id: str,
    action: str,
    conf: dict[str, Any],
) -> Response:
    """Trigger a run and redirect to the page, which shows its state.

    The page also shows that the DAG is paused, or that another run is unfinished.
    """
    if read_action_dag(dag_id).under_way:
        return _back(page_request, name, page, refused="another run")
    try:
        run_id = trigger_run(dag_id, action, conf, page_request.reader.user)
    except DagPaused:
        return _back(page_request, name, page, refused="paused")
    return _back(page_request, name, page, run=run_id)


def _back(page_request: PageRequest, name: str, *page: str, **query: str) -> Response:
    # 303: reloading the page repeats no request.
    return RedirectResponse(
        url(page_request.base, "p", name, *page, **query), 303, headers=FORM_HEADERS
    )


def _add_reports(app: FastAPI) -> None:
    @app.get("/docs/")
    def reports(
        page_request: PageRequestDep, page: int = 1, *, failed: bool = False
    ) -> HTMLResponse:
        return _page(
            pages.reports_page(
                page_request.base, page_request.pipelines(), page, only_failed=failed
            )
        )

    @app.get("/docs/{name}/")
    @app.get("/docs/{name}/index.html")
    def reports_of(page_request: PageRequestDep, name: str) -> HTMLResponse:
        found = page_request.pipeline(name)
        with _lake_errors(found):
            return HTMLResponse(reports_index(found), headers=INDEX_HEADERS)

    @app.get("/docs/{name}/{path:path}")
    def report(page_request: PageRequestDep, name: str, path: str) -> Response:
        found = page_request.pipeline(name)
        page_request.check_values(found)
        with _lake_errors(found):
            served = served_report(found, path)
        if served is None:
            raise HTTPException(404, "There is no such report.")
        if isinstance(served, Path):
            return FileResponse(served, headers=REPORT_HEADERS)
        return HTMLResponse(served, headers=REPORT_HEADERS)


def _add_entrances(app: FastAPI) -> None:
    """Add the routes from Airflow's pages of a DAG and of a run."""

    @app.get("/dag/{dag_id}")
    def of_dag(page_request: PageRequestDep, dag_id: str) -> Response:
        found = pipeline_of(dag_id, page_request.pipelines())
        if found is None:
            return _page(pages.stranger_page(page_request.base, dag_id))
        return RedirectResponse(url(page_request.base, "p", found[0]), headers=HEADERS)

    @app.get("/dag/{dag_id}/run/{run_id:path}")
    def of_run(page_request: PageRequestDep, dag_id: str, run_id: str) -> Response:
        found = pipeline_of(dag_id, page_request.pipelines())
        if found is None:
            return _page(pages.stranger_page(page_request.base, dag_id))
        name, verb = found
        if verb == "consume":
            with _lake(page_request, name) as (_, ledger):
                verb = pages.consuming_verb(ledger, run_id)
        return RedirectResponse(
            url(page_request.base, "p", name, "run", verb, run_id), headers=HEADERS
        )


@contextmanager
def _lake(page_request: PageRequest, name: str) -> Iterator[tuple[PipelineFile, Ledger]]:
    """Yields a pipeline and its lake, with _lake_errors()."""
    found = page_request.pipeline(name)
    with _lake_errors(found):
        yield found, Ledger(pipeline_lake(found))


@contextmanager
def _lake_errors(pipeline: PipelineFile) -> Iterator[None]:
    """Turns an error of the lake into status 502, which isn't an error of Airflow."""
    try:
        yield
    except pages.READ_ERRORS as err:
        raise HTTPException(
            502,
            f"The lake of {pipeline.pipeline} can't be read from Airflow's API server:"
            f" {pages.reason(err, pipeline)}",
        ) from err


def _file(name: str, media_type: str) -> Response:
    return FileResponse(
        Path(__file__).with_name(name), media_type=media_type, headers=STYLE_HEADERS
    )


def _page(text: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(text, status, headers=HEADERS)


def _failed(request: Request, err: Any) -> Response:
    base = str(request.scope.get("root_path", ""))
    return _page(
        render("error.html", base, now(), status=err.status_code, text=err.detail), err.status_code
    )


def _not_understood(request: Request, err: Any) -> Response:
    """Returns the names of invalid parts of the address, without their values."""
    named = sorted({str(one["loc"][-1]) for one in err.errors() if one.get("loc")})
    return _failed(
        request,
        HTTPException(
            422, f"The address can't be read: {', '.join(named)} has no value that fits."
        ),
    )


def _broke_off(request: Request, _: Any) -> Response:
    """Returns the page for an error in the pages' own code, which Airflow's API server logs."""
    return _failed(
        request,
        HTTPException(500, "The page could not be made: the API server's log has the error."),
    )
