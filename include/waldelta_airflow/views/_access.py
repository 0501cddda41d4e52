"""Access rules: a pipeline's pages are for users who may read its CDC DAG, by any auth manager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    DagAccessEntity,
    DagDetails,
)
from airflow.configuration import conf
from airflow.models.dag import DagModel

from waldelta.config import PipelineFile, dag_id_of
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.decisions import count_waiting
from waldelta_airflow.views._installed_pipelines import DagState
from waldelta_airflow.views._render import render


@dataclass(frozen=True, slots=True)
class DagLine:
    """A DAG of a pipeline, and whether the reader may trigger and unpause it."""

    state: DagState
    may_trigger: bool
    may_unpause: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """The logged-in user who requests a page."""

    user: BaseUser

    def may_read(self, pipeline: str) -> bool:
        """Returns whether Airflow lets the user read the pipeline's CDC DAG."""
        return self.may_read_dag(dag_id_of(pipeline, "cdc"))

    def may_read_dag(self, dag_id: str) -> bool:
        """Returns whether Airflow lets the user read a DAG."""
        return self._may("GET", dag_id)

    def may_trigger(self, dag_id: str) -> bool:
        """Returns whether Airflow lets the user trigger a DAG."""
        return self._may("POST", dag_id, DagAccessEntity.RUN)

    def may_unpause(self, dag_id: str) -> bool:
        """Returns whether Airflow lets the user pause and unpause a DAG."""
        return self._may("PUT", dag_id)

    def may_see_values(self, pipeline: PipelineFile) -> bool:
        """Returns whether pages show the user values of rows.

        The pipeline file names the required permission on the CDC DAG.
        """
        if pipeline.row_values == "edit":
            return self.may_unpause(dag_id_of(pipeline.pipeline, "cdc"))
        if pipeline.row_values == "trigger":
            return self.may_trigger(dag_id_of(pipeline.pipeline, "cdc"))
        return self.may_read(pipeline.pipeline)

    def lines(self, states: Iterable[DagState]) -> list[DagLine]:
        """Returns the DAGs that the user may read, with the permissions on each."""
        return [
            DagLine(
                state,
                self.may_trigger(state.dag_id),
                self.may_unpause(state.dag_id),
            )
            for state in self.shown(states)
        ]

    def shown(self, states: Iterable[DagState]) -> tuple[DagState, ...]:
        """Returns the DAGs that the user may read."""
        return tuple(state for state in states if self.may_read_dag(state.dag_id))

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
class PipelineRequest:
    """A reader's request for a page of one pipeline; ``base`` is where the pages are mounted."""

    base: str
    reader: Reader
    pipeline: PipelineFile
    ledger: Ledger

    def render(self, template: str, at: datetime | None = None, **values: Any) -> str:
        """Returns a page, as render() of _render does, which may show values of rows.

        A page of a ``situation`` is of its time, and has its number of what waits.
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
            shows_values=self.reader.may_see_values(self.pipeline),
            permission=(self.pipeline.row_values, dag_id_of(name, "cdc")),
            **values,
        )
