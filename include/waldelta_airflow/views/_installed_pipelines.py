"""The pipelines of this installation, from their files, and their CDC DAGs in Airflow's
database.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from sqlalchemy import Select, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.config.pipeline_folder import PipelineFolder, pipelines_folder, refusal
from waldelta.errors import class_and_text
from waldelta.monitoring.attention import Attention
from waldelta_airflow._dag_attention import WATCHED, DagsOfPipeline
from waldelta_airflow.airflow_entries import describe_missing, read_connections, read_pools
from waldelta_airflow.reporting.notify import IDLE_CHECK
from waldelta_airflow.views._dag_states import DAG_VERBS, DagState, read_dags

log = logging.getLogger(__name__)

# How many runs are searched for an idle check's result.
_ANSWERS = 50


def load_pipelines() -> dict[str, PipelineFile | str]:
    """Returns each pipeline file by its pipeline's name, or its error by the file's name."""
    folder = PipelineFolder.read(pipelines_folder())
    pipelines = {pipeline.pipeline: pipeline for pipeline in folder.pipelines.values()}
    return pipelines | {path.name: refusal(error) for path, error in folder.refused.items()}


def pipeline_of(dag_id: str, pipelines: Collection[str]) -> tuple[str, str] | None:
    """Returns a DAG's pipeline, and the verb of its runs in the ledger; None for other DAGs."""
    for kind, verb in DAG_VERBS.items():
        for name in pipelines:
            if dag_id == dag_id_of(name, kind):
                return name, verb
    return None


@dataclass(frozen=True, slots=True)
class Schedule(DagsOfPipeline):
    """What Airflow's database has of a pipeline's DAGs; the CDC DAG's unless stated.

    ``idle_checked_at``: when the latest run began that found nothing to do, which the ledger
    doesn't store. ``well``: when the latest run began that succeeded, or was marked so. ``dags``:
    all DAGs of the pipeline. ``lacks``: missing pools and connections.
    """

    idle_checked_at: datetime | None = None
    well: datetime | None = None
    dags: tuple[DagState, ...] = ()
    lacks: tuple[Attention, ...] = ()

    @property
    def active(self) -> frozenset[str]:
        """Returns the ids of unfinished runs that land changes."""
        runs = (state for state in self.dags if state.kind == "cdc" and state.is_under_way)
        return frozenset(state.run_id for state in runs if state.run_id is not None)

    @property
    def under_way(self) -> tuple[DagState, ...]:
        """Returns the DAGs with an unfinished run."""
        return tuple(state for state in self.dags if state.is_under_way)


def read_schedules(
    pipelines: Collection[PipelineFile], *, finds_lacks: bool = True
) -> dict[str, Schedule]:
    """Returns what Airflow knows, by pipeline; without pipelines whose DAGs it doesn't know (yet).

    Without ``finds_lacks`` no pools and connections are searched.
    """

    names = [pipeline.pipeline for pipeline in pipelines]
    kinds: tuple[DagKind, ...] = ("cdc", *WATCHED)
    asked = [dag_id_of(name, kind) for name in names for kind in kinds]
    try:
        with create_session() as session:
            dags = session.execute(
                select(
                    DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after
                ).where(DagModel.dag_id.in_(asked))
            ).all()
            known = {dag_id: (bool(is_paused), due) for dag_id, is_paused, due in dags}
            states = read_dags(session, names)
            schedules = {
                name: replace(_schedule(session, name, known), dags=states[name])
                for name in names
                if dag_id_of(name, "cdc") in known
            }
            lacks = _lacks(session, pipelines, schedules) if finds_lacks else {}
            return {
                name: replace(schedule, lacks=tuple(lacks.get(name, ())))
                for name, schedule in schedules.items()
            }
    except SQLAlchemyError as err:
        # The pages are useful without it.
        log.warning("Airflow's database can't be queried for DAG runs: %s", class_and_text(err))
        return {}


def _lacks(
    session: Session, pipelines: Collection[PipelineFile], schedules: Mapping[str, Schedule]
) -> dict[str, list[Attention]]:
    """Returns the missing pools and connections by pipeline.

    Workers may have connections in their own environment. So once a run has succeeded, connections
    aren't searched.
    """
    new = [one for one in pipelines if (s := schedules.get(one.pipeline)) and s.well is None]
    return describe_missing(read_pools(session, pipelines), read_connections(session, new))


def _last_idle_check(session: Session, well: Select[tuple[DagRun]]) -> datetime | None:
    """Returns when the newest of these runs with nothing to do began, by its idle check's result.

    A run that was marked as successful has no such result.
    """

    own = (
        (XComModel.dag_run_id == DagRun.id)
        & (XComModel.task_id == IDLE_CHECK)
        & (XComModel.key == "return_value")
    )
    answers = (
        well.join(XComModel, own)
        .with_only_columns(DagRun.start_date, XComModel.value)
        .limit(_ANSWERS)
    )
    return next(
        (began for began, found_any in session.execute(answers) if found_any is False), None
    )


def _schedule(
    session: Session, name: str, known: Mapping[str, tuple[bool, datetime | None]]
) -> Schedule:

    dag_id = dag_id_of(name, "cdc")
    is_paused, due = known[dag_id]
    # A backfill, and a run that was cleared after it succeeded, are replays: they land nothing.
    of_dag = select(DagRun).where(
        DagRun.dag_id == dag_id, DagRun.run_type != DagRunType.BACKFILL_JOB
    )
    newest = of_dag.order_by(DagRun.run_after.desc())
    # An unfinished run shows nothing yet: while it is retried, all runs before it may have failed.
    ended = newest.where(DagRun.state.in_([DagRunState.SUCCESS, DagRunState.FAILED])).limit(1)
    latest = session.scalar(ended)
    failed = latest is not None and latest.state == DagRunState.FAILED
    well = newest.where(DagRun.state == DagRunState.SUCCESS, DagRun.clear_number == 0)
    last = session.scalar(well.limit(1))
    return Schedule(
        is_paused,
        latest.run_id if latest is not None and failed else None,
        due,
        frozenset(kind for kind in WATCHED if known.get(dag_id_of(name, kind), (False, None))[0]),
        _last_idle_check(session, well),
        last.start_date if last is not None else None,
    )
