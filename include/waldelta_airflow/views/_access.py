"""Access rules: a pipeline's pages are for users who may read its CDC DAG, by any auth manager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.configuration import conf
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, Request

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.errors import ConfigError, LakeError, WaldeltaError
from waldelta.lake import READ_FAILURES, local_path
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.attention import shorten
from waldelta.monitoring.decisions import count_waiting
from waldelta_airflow._connections import pipeline_lake
from waldelta_airflow.views._installed_pipelines import (
    ActionDag,
    DagState,
    load_pipelines,
    read_action_dag,
)
from waldelta_airflow.views._render import render

# Errors raised by a store, a file, or a table that isn't waldelta's.
READ_ERRORS = (*READ_FAILURES, ConfigError, LakeError)


@dataclass(frozen=True, slots=True)
class Reader:
    """The logged-in user who requests a page."""

    user: BaseUser

    def may_read(self, pipeline: str) -> bool:
        """Returns whether Airflow lets the user read the pipeline's CDC DAG."""
        return self.may_read_dag(dag_id_of(pipeline, "cdc"))

    def may_read_dag(self, dag_id: str) -> bool:
        return self._may("GET", dag_id)

    def may_trigger(self, dag_id: str) -> bool:
        return self._may("POST", dag_id, DagAccessEntity.RUN)

    def may_unpause(self, dag_id: str) -> bool:
        return self._may("PUT", dag_id)

    def dags(self, states: Iterable[DagState]) -> tuple[DagState, ...]:
        """Returns the DAGs that the user may read, with the permissions on each."""
        return tuple(
            replace(
                state,
                may_trigger=self.may_trigger(state.dag_id),
                may_unpause=self.may_unpause(state.dag_id),
            )
            for state in states
            if self.may_read_dag(state.dag_id)
        )

    def _may(
        self, method: ResourceMethod, dag_id: str, entity: DagAccessEntity | None = None
    ) -> bool:
        teams = conf.getboolean("core", "multi_team", fallback=False)
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id) if teams else None)
        return bool(
            get_auth_manager().is_authorized_dag(
                method=method, access_entity=entity, details=details, user=self.user
            )
        )

    def may_see_refused_files(self) -> bool:
        """Returns whether Airflow shows the user import errors, such as rejected pipeline files."""
        return bool(
            get_auth_manager().is_authorized_view(
                access_view=AccessView.IMPORT_ERRORS, user=self.user
            )
        )


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A logged-in user's request: where the application is mounted, and what the user may see."""

    base: str
    reader: Reader

    def find_pipeline(self, name: str) -> PipelineFile:
        """Returns a pipeline; raises 404 also for one that the user may not see."""
        found = load_pipelines().get(name)
        if not isinstance(found, PipelineFile) or not self.reader.may_read(name):
            raise HTTPException(404, "There is no such pipeline, or you may not read its DAG.")
        return found

    def pipelines(self) -> dict[str, PipelineFile | str]:
        """Returns the pipelines that the user may see, by name; a text is why a pipeline's file was
        refused.
        """
        sees_refused = self.reader.may_see_refused_files()
        return {
            name: pipeline
            for name, pipeline in load_pipelines().items()
            if (sees_refused if isinstance(pipeline, str) else self.reader.may_read(name))
        }


def _page_request(request: Request, user: GetUserDep) -> PageRequest:
    return PageRequest(str(request.scope.get("root_path", "")), Reader(user))


PageRequestDep = Annotated[PageRequest, Depends(_page_request)]


@dataclass(frozen=True, slots=True)
class PipelineRequest(PageRequest):
    """A reader's request for a page of one pipeline."""

    pipeline: PipelineFile
    ledger: Ledger

    @property
    def shows_values(self) -> bool:
        """Returns whether pages show the user values of rows.

        The pipeline file names the required permission on the CDC DAG.
        """
        checks = {"edit": self.reader.may_unpause, "trigger": self.reader.may_trigger}
        may = checks.get(self.pipeline.row_values, self.reader.may_read_dag)
        return may(dag_id_of(self.pipeline.pipeline, "cdc"))

    def check_values(self) -> None:
        """Raise 403 for a page of row values that the user may not see."""
        if not self.shows_values:
            raise HTTPException(
                403,
                "This page shows values of rows: they are for users who may"
                f" {self.pipeline.row_values} the DAG {dag_id_of(self.pipeline.pipeline, 'cdc')}.",
            )

    def action_dag(self, kind: DagKind, run: str | None, refused: str | None) -> ActionDag:
        """Returns the DAG of a page's buttons, of which the reader may have requested a ``run``."""
        dag_id, reader = dag_id_of(self.pipeline.pipeline, kind), self.reader
        return replace(
            read_action_dag(dag_id, run),
            refused=refused,
            may_trigger=reader.may_trigger(dag_id),
            may_unpause=reader.may_unpause(dag_id),
        )

    def render(self, template: str, at: datetime | None = None, **values: Any) -> str:
        """Returns a page, as render() of _render does, which may show values of rows.

        With a ``situation``, the page's time and number of waiting decisions are the situation's.
        """
        name = self.pipeline.pipeline
        if (situation := values.get("situation")) is not None:
            at, values["waits"] = situation.at, situation.glance.waiting
        elif "waits" not in values:
            values["waits"] = count_waiting(self.pipeline, self.ledger)
        return render(
            template,
            self.base,
            at,
            name=name,
            shows_values=self.shows_values,
            permission=(self.pipeline.row_values, dag_id_of(name, "cdc")),
            **values,
        )


def pipeline_request(page_request: PageRequestDep, name: str) -> Iterator[PipelineRequest]:
    """Yields a pipeline and its lake, whose errors, which aren't Airflow's, become status 502."""
    pipeline = page_request.find_pipeline(name)
    try:
        ledger = Ledger(pipeline_lake(pipeline))
        yield PipelineRequest(page_request.base, page_request.reader, pipeline, ledger)
    except READ_ERRORS as err:
        raise HTTPException(
            502,
            f"The lake of {name} can't be read from Airflow's API server: {reason(err, pipeline)}",
        ) from err


PipelineDep = Annotated[PipelineRequest, Depends(pipeline_request)]


def reason(err: BaseException, pipeline: PipelineFile) -> str:
    """Returns an error in one line, with file names relative to the lake.

    For an error without a waldelta class, only the first line is used, without a store's additions.
    """
    message = str(err) if isinstance(err, WaldeltaError) else str(err).partition("\n")[0]
    message = message.replace(f"{local_path(pipeline.target.root) or pipeline.target.root}/", "")
    return f"{type(err).__name__}: {shorten(message)}"
