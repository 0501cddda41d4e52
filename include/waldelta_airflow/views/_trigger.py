"""What the pages' buttons do: trigger a run of a DAG in the name of the user, from our own page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from airflow.api.common.trigger_dag import trigger_dag
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.utils.types import DagRunTriggeredByType
from fastapi import HTTPException, Request

from waldelta.lake.ledger import now
from waldelta_airflow._airflow_versions import AirflowException
from waldelta_airflow.views._dag_states import ActionDag


@dataclass(frozen=True, slots=True)
class Button:
    """A page's buttons: their DAG, the run just requested or why it was refused, and
    permissions.
    """

    dag: ActionDag
    requested: str | None
    refused: str | None
    may_trigger: bool
    may_unpause: bool

    @property
    def is_under_way(self) -> bool:
        """Returns whether the requested run is among the unfinished ones."""
        return any(run.run_id == self.requested for run in self.dag.under_way)


def check_origin(request: Request) -> None:
    """Raise 403 for a form that another site's page sent with the reader's login.

    For a browser without the header Sec-Fetch-Site, the page's address (Origin) is compared. A
    proxy in between may not pass that address on as Host.
    """
    site = request.headers.get("sec-fetch-site")
    if site == "same-origin":
        return
    refused = "This request did not come from waldelta's own page."
    if site is not None:
        raise HTTPException(403, refused)
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    own = urlsplit(conf.get("api", "base_url", fallback="") or "").netloc
    if origin is None:
        raise HTTPException(403, refused)
    if not (asked := urlsplit(origin).netloc) or asked not in (host, own):
        raise HTTPException(
            403,
            f"{refused} The page's address is {origin}; Airflow's is {host!r} by the request and"
            f" {own!r} by its setting base_url of [api]: set that to the address that browsers"
            " see.",
        )


class DagPaused(HTTPException):
    """A requested run would wait, because its DAG is paused."""

    def __init__(self, dag_id: str) -> None:
        super().__init__(
            409, f"The DAG {dag_id} is paused, so that its run would wait: unpause it first."
        )


def trigger_run(dag_id: str, prefix: str, params: Mapping[str, Any], user: BaseUser) -> str:
    """Trigger a run of a DAG in the reader's name; returns its run id."""

    run_id = f"{prefix}__{now().isoformat()}"
    dag = DagModel.get_current(dag_id)
    if dag is None or dag.is_stale:
        raise HTTPException(404, f"Airflow doesn't know the DAG {dag_id} (yet).")
    if dag.is_paused:
        raise DagPaused(dag_id)
    try:
        trigger_dag(
            dag_id,
            triggered_by=DagRunTriggeredByType.UI,
            triggering_user_name=user.get_name(),
            run_id=run_id,
            conf=dict(params),
        )
    except (AirflowException, ValueError) as err:
        raise HTTPException(400, f"Airflow doesn't take the run: {type(err).__name__}") from err
    return run_id
