"""A pipeline's DAGs as a task may see them: through Airflow's Task SDK, not its database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Any

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.timezone import coerce_datetime
from airflow.timetables.base import TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable

from waldelta.config import PipelineFile, dag_id_of
from waldelta_airflow._dag_attention import WATCHED, DagsOfPipeline


@dataclass(frozen=True, slots=True)
class DagRuns:
    """``dags`` is what pages know, too. ``failed``: the latest ended runs of WATCHED that failed.
    ``last_failed_cdc``: id and end of the last CDC run that failed. ``active``: unfinished ones.
    """

    dags: DagsOfPipeline
    failed: Mapping[str, str] = field(default_factory=dict)
    last_failed_cdc: tuple[str, datetime] | None = None
    active: frozenset[str] = frozenset()

    @classmethod
    def read(cls, task: Any, pipeline: PipelineFile, at: datetime) -> DagRuns | None:
        """Returns None when Airflow doesn't know the pipeline's DAGs (yet)."""
        name = pipeline.pipeline
        try:
            cdc = task.get_dag(dag_id_of(name, "cdc"))
            others = {kind: task.get_dag(dag_id_of(name, kind)) for kind in WATCHED}
        except AirflowRuntimeError as err:
            if (err.error.detail or {}).get("status_code") != HTTPStatus.NOT_FOUND:
                raise
            return None
        last, is_last = _last_failed(dag_id_of(name, "cdc"), at)
        dags = DagsOfPipeline(
            cdc.is_paused,
            last.run_id if is_last else None,
            _next_run_at(pipeline.schedule, cdc.next_dagrun),
            frozenset(kind for kind, dag in others.items() if dag.is_paused),
        )
        failed: dict[str, str] = {}
        for kind in WATCHED:
            run, is_failed = _last_failed(dag_id_of(name, kind), at)
            if is_failed:
                failed[kind] = run.run_id
        ended = (last.run_id, last.end_date) if last is not None and last.end_date else None
        running = _previous(dag_id_of(name, "cdc"), at, "running")
        active = frozenset([running.run_id] if running is not None else [])
        return cls(dags, failed, ended, active)


def _next_run_at(schedule: str | None, next_dagrun: datetime | None) -> datetime | None:
    """Returns when the scheduler should create the next run: at the end of its interval."""
    if schedule is None or next_dagrun is None:
        return None
    following = CronDataIntervalTimetable(schedule, "UTC").next_dagrun_info(
        last_automated_data_interval=None,
        restriction=TimeRestriction(coerce_datetime(next_dagrun), None, catchup=True),
    )
    return following.run_after if following is not None else None


def _last_failed(dag_id: str, at: datetime) -> tuple[Any, bool]:
    """Returns the last run that failed, or None, and whether no later one succeeded.

    A backfill replays and lands nothing, so it doesn't count.
    """
    failed, well = (_previous(dag_id, at, state) for state in ("failed", "success"))
    if failed is None or failed.run_type == "backfill":
        return None, False
    return failed, well is None or failed.logical_date > well.logical_date


def _previous(dag_id: str, at: datetime, state: str) -> Any:
    # A task instance asks for runs of its own DAG only.
    from airflow.sdk.execution_time.comms import GetPreviousDagRun
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    question = GetPreviousDagRun(dag_id=dag_id, logical_date=at, state=state)
    answer: Any = SUPERVISOR_COMMS.send(question)
    return answer.dag_run
