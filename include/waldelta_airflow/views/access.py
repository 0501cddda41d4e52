"""Who may see what: a pipeline's pages are for those who may read its CDC DAG, whatever auth manager says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.configuration import conf
from airflow.models.dag import DagModel

from waldelta_airflow.views.pipelines import cdc_dag

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser


@dataclass(frozen=True, slots=True)
class Reader:
    """Whoever asks for a page, logged in."""

    user: BaseUser

    def may_read(self, pipeline: str) -> bool:
        """Whether Airflow shows them the pipeline's CDC DAG."""
        dag_id = cdc_dag(pipeline)
        teams = conf.getboolean("core", "multi_team", fallback=False)
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id) if teams else None)
        return bool(get_auth_manager().is_authorized_dag(method="GET", details=details, user=self.user))

    def may_trigger(self, dag_id: str) -> bool:
        """Whether Airflow lets them trigger a DAG."""
        teams = conf.getboolean("core", "multi_team", fallback=False)
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id) if teams else None)
        return bool(
            get_auth_manager().is_authorized_dag(
                method="POST", access_entity=DagAccessEntity.RUN, details=details, user=self.user
            )
        )

    def readable(self, pipelines: Iterable[str]) -> list[str]:
        """Those pipelines that they may read."""
        return [name for name in pipelines if self.may_read(name)]

    def may_see_refused_files(self) -> bool:
        """Whether Airflow shows them import errors, which is what a refused pipeline file is there."""
        return bool(get_auth_manager().is_authorized_view(access_view=AccessView.IMPORT_ERRORS, user=self.user))
