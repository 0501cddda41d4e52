"""The page of what reconciliations found, and its button: a run of the _reconcile DAG that repairs, as its reader may trigger one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from waldelta.ledger_rows import now
from waldelta.pipeline_file import PipelineFile
from waldelta.reconcile.reconciliations import DIFFERENT, Reconciliation, Reconciliations
from waldelta.review.bookkeeping import Bookkeeping
from waldelta_airflow.views.pipelines import reconcile_dag
from waldelta_airflow.views.render import render

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

_HISTORY = timedelta(days=30)
_MOST_TOLD = 200
_ROWS_SHOWN = 100


def reconciliation_page(
    base: str, pipeline: PipelineFile, lake: Bookkeeping, *, may_repair: bool, asked: str | None = None
) -> str:
    """What was found last of each table, those that differ first, and all that was found in 30 days."""
    at, kept = now(), Reconciliations(lake.root, lake.storage_options)
    latest = sorted(kept.latest().values(), key=lambda row: (row.status != DIFFERENT, row.table_name))
    history = kept.history(at - _HISTORY).to_pylist()[::-1][:_MOST_TOLD]
    return render(
        "reconciliation.html",
        base,
        at,
        name=pipeline.pipeline,
        here="reconciliation",
        latest=latest,
        different=[row for row in latest if row.status == DIFFERENT],
        history=history,
        may_repair=may_repair,
        asked=asked,
        dag=reconcile_dag(pipeline.pipeline),
        more=_more,
        rows_shown=_ROWS_SHOWN,
    )


def _more(row: Reconciliation) -> int:
    """Rows that differ and aren't shown."""
    return row.differing - sum(one.rows for one in row.differences[:_ROWS_SHOWN])


def check_origin(request: Request) -> None:
    """Raises 403 for a form that another site's page sent with the reader's login."""
    site = request.headers.get("sec-fetch-site")
    if site is None:
        origin = request.headers.get("origin")
        site = "same-origin" if origin and urlsplit(origin).netloc == request.headers.get("host") else "unknown"
    if site != "same-origin":
        raise HTTPException(403, "This was not asked for from waldelta's own page.")


def trigger_repair(pipeline: str, tables: Sequence[str], user: BaseUser) -> str:
    """Ask Airflow for a run of the DAG that compares these tables again and repairs what differs; its run id."""
    from airflow.api.common.trigger_dag import trigger_dag
    from airflow.exceptions import AirflowException
    from airflow.models.dag import DagModel
    from airflow.utils.types import DagRunTriggeredByType

    dag_id, run_id = reconcile_dag(pipeline), f"repair__{now().isoformat()}"
    dag = DagModel.get_current(dag_id)
    if dag is None or dag.is_stale:
        raise HTTPException(404, f"Airflow doesn't know the DAG {dag_id} (yet).")
    if dag.is_paused:
        raise HTTPException(409, f"The DAG {dag_id} is paused, so that its run would wait: unpause it first.")
    conf = {"tables": list(tables), "repair": True, "reason": "asked for on the page of what differs"}
    try:
        trigger_dag(
            dag_id,
            triggered_by=DagRunTriggeredByType.UI,
            triggering_user_name=user.get_name(),
            run_id=run_id,
            conf=conf,
        )
    except (AirflowException, ValueError) as err:
        raise HTTPException(400, f"Airflow doesn't take the run: {type(err).__name__}") from err
    return run_id
