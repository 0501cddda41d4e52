"""Who may see what: a pipeline's pages are for those who may read its CDC DAG, whatever auth
manager says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    DagAccessEntity,
    DagDetails,
)
from airflow.configuration import conf
from airflow.models.dag import DagModel

from waldelta_airflow.views._dag_states import RUN_NOW, DagState
from waldelta_airflow.views._installed_pipelines import cdc_dag

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

    from waldelta.config import PipelineFile


@dataclass(frozen=True, slots=True)
class DagLine:
    """A DAG of a pipeline, and what the reader may do to it: run it without params, and
    unpause it.
    """

    state: DagState
    may_run: bool
    may_unpause: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Whoever asks for a page, logged in."""

    user: BaseUser

    def may_read(self, pipeline: str) -> bool:
        """Whether Airflow shows them the pipeline's CDC DAG."""
        return self.may_read_dag(cdc_dag(pipeline))

    def may_read_dag(self, dag_id: str) -> bool:
        """Whether Airflow shows them a DAG."""
        return self._may("GET", dag_id)

    def may_trigger(self, dag_id: str) -> bool:
        """Whether Airflow lets them trigger a DAG."""
        return self._may("POST", dag_id, DagAccessEntity.RUN)

    def may_unpause(self, dag_id: str) -> bool:
        """Whether Airflow lets them pause and unpause a DAG."""
        return self._may("PUT", dag_id)

    def may_see_values(self, pipeline: PipelineFile) -> bool:
        """Whether pages show them values of rows, by the permission on the CDC DAG that the
        pipeline file names.
        """
        if pipeline.row_values == "edit":
            return self.may_unpause(cdc_dag(pipeline.pipeline))
        if pipeline.row_values == "trigger":
            return self.may_trigger(cdc_dag(pipeline.pipeline))
        return self.may_read(pipeline.pipeline)

    def lines(self, states: Iterable[DagState]) -> list[DagLine]:
        """Those of a pipeline's DAGs that Airflow shows them, with what they may do to each."""
        return [
            DagLine(
                state,
                state.kind in RUN_NOW and self.may_trigger(state.dag_id),
                self.may_unpause(state.dag_id),
            )
            for state in self.shown(states)
        ]

    def shown(self, states: Iterable[DagState]) -> tuple[DagState, ...]:
        """Those of a pipeline's DAGs that Airflow shows them."""
        return tuple(state for state in states if self.may_read_dag(state.dag_id))

    def _may(
        self, method: ResourceMethod, dag_id: str, entity: DagAccessEntity | None = None
    ) -> bool:
        teams = conf.getboolean("core", "multi_team", fallback=False)
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id) if teams else None)
        manager = get_auth_manager()
        return bool(
            manager.is_authorized_dag(
                method=method, access_entity=entity, details=details, user=self.user
            )
        )

    def readable(self, pipelines: Iterable[str]) -> list[str]:
        """Those pipelines that they may read."""
        return [name for name in pipelines if self.may_read(name)]

    def may_see_refused_files(self) -> bool:
        """Whether Airflow shows them import errors, which is what a refused pipeline file is
        there.
        """
        return bool(
            get_auth_manager().is_authorized_view(
                access_view=AccessView.IMPORT_ERRORS, user=self.user
            )
        )
