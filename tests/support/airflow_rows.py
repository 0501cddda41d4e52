"""Rows of Airflow's own database: DAGs, and their runs an hour apart."""

from datetime import timedelta
from typing import Any

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.utils.types import DagRunType
from sqlalchemy import insert
from sqlalchemy.orm import Session

from tests.support.bookkeeping import NOON

_LIMITS = {"max_active_runs": 1, "max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0}
_UNSET = dict.fromkeys(("log_template_id", "triggered_by", "backfill_id"))


def add_dag(session: Session, dag_id: str, *, paused: bool = False, stale: bool = False) -> None:
    told = {"is_paused": paused, "is_stale": stale}
    more = {"bundle_name": "b", "fileloc": "", "has_task_concurrency_limits": False}
    session.execute(insert(DagModel).values(dag_id=dag_id, **told, **more, **_LIMITS))


def add_run(session: Session, dag_id: str, n: int, state: str, **more: Any) -> None:
    at = NOON + timedelta(hours=n)
    told = {"dag_id": dag_id, "run_id": f"run-{n}", "run_type": DagRunType.MANUAL, "state": state}
    times = {"run_after": at, "start_date": at, "clear_number": 0}
    session.execute(insert(DagRun).values(**told | times | _UNSET | more))
    session.commit()
