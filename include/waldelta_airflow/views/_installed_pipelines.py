"""The pipelines of this installation, from their files, and their DAGs in Airflow's database:
paused or not, the unfinished or latest run, its tasks; and what the buttons of the pages start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from airflow.api.common.trigger_dag import trigger_dag
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.configuration import conf
from airflow.jobs.job import Job
from airflow.models.asset import AssetModel, DagScheduleAssetReference
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.log import Log
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from fastapi import HTTPException, Request
from sqlalchemy import Select, String, cast, func, select, tuple_
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.config.pipeline_folder import (
    PipelineFolder,
    load_unchanged,
    pipelines_folder,
    refusal,
)
from waldelta.errors import class_and_text
from waldelta.lake.ledger import now
from waldelta.monitoring.attention import Attention
from waldelta_airflow._airflow_versions import AirflowException
from waldelta_airflow._dag_attention import WATCHED, DagsOfPipeline
from waldelta_airflow.airflow_entries import describe_missing, read_connections, read_pools
from waldelta_airflow.reporting.notify import IDLE_CHECK

log = logging.getLogger(__name__)


class PipelineDag(NamedTuple):
    """A kind of DAG: the verb of its runs in the ledger, their name on pages, and what it does."""

    verb: str
    run: str
    does: str


# A pipeline's DAGs in the order in which a new pipeline needs them.
PIPELINE_DAGS: dict[DagKind, PipelineDag] = {
    "setup": PipelineDag("setup", "setup", "checks the source, creates publications and the slot"),
    "initial_sync": PipelineDag("sync", "initial sync", "copies tables into the lake"),
    "cdc": PipelineDag("consume", "CDC", "lands, applies and checks changes"),
    "reconcile": PipelineDag("reconcile", "reconciliation", "compares the lake with its source"),
    "maintenance": PipelineDag(
        "maintain", "maintenance", "compacts, vacuums and prunes; checks all rows"
    ),
    "decide": PipelineDag("decide", "decide", "decides on what waits"),
    "resync": PipelineDag("resync", "resync", "recreates a lost slot and repairs the tables"),
}
# Kinds that are useful to run without params. A decision needs an action, and a resync needs a
# reason.
RUN_NOW: tuple[DagKind, ...] = ("setup", "initial_sync", "cdc", "reconcile", "maintenance")
_RUNNING, _QUEUED = "running", "queued"
_MOST_UNDER_WAY = 10


@dataclass(frozen=True, slots=True)
class DagState:
    """One DAG of a pipeline, and whether the reader may trigger and unpause it; ``run_id``,
    ``run_state``, ``run_at`` are of its unfinished or latest run.
    """

    kind: DagKind
    dag_id: str
    is_paused: bool = False
    run_id: str | None = None
    run_state: str | None = None
    run_at: datetime | None = None
    next_run_at: datetime | None = None
    is_stale: bool = False
    may_trigger: bool = False
    may_unpause: bool = False

    @property
    def is_under_way(self) -> bool:
        """Returns whether a run is running, or will as soon as it is scheduled."""
        return self.run_state == _RUNNING or (self.run_state == _QUEUED and not self.is_paused)


def dag_of_verb(pipeline: str, verb: str) -> str | None:
    """Returns the DAG whose runs have this verb in the ledger, or None."""
    kinds = {of.verb: kind for kind, of in PIPELINE_DAGS.items()} | {"replay": "cdc"}
    return dag_id_of(pipeline, kinds[verb]) if verb in kinds else None


def read_dags(session: Session, pipelines: Collection[str]) -> dict[str, tuple[DagState, ...]]:
    """Returns the DAGs of each pipeline that Airflow has parsed, in the order of PIPELINE_DAGS.

    Stale ones, whose file it doesn't find any more, are among them.
    """
    ids = {dag_id_of(name, kind): (name, kind) for name in pipelines for kind in PIPELINE_DAGS}
    model = DagModel
    columns = (model.next_dagrun_create_after, model.is_stale)
    query = select(model.dag_id, model.is_paused, *columns).where(model.dag_id.in_(ids))
    dags: dict[str, Any] = {dag_id: row for dag_id, *row in session.execute(query)}
    runs = {dag_id: run for dag_id, *run in _runs(session, dags)}
    states: dict[str, list[DagState]] = {name: [] for name in pipelines}
    for dag_id, (name, kind) in ids.items():
        if dag_id in dags:
            is_paused, *values = dags[dag_id]
            run = runs.get(dag_id, (None, None, None))
            states[name].append(DagState(kind, dag_id, bool(is_paused), *run, *values))
    return {name: tuple(of_pipeline) for name, of_pipeline in states.items()}


def _runs(session: Session, dag_ids: Collection[str]) -> Iterator[Any]:
    """Yields each DAG's latest run, then unfinished runs: queued ones before running ones.

    A later one replaces an earlier one.
    """
    began = func.coalesce(DagRun.start_date, DagRun.run_after)
    runs = select(DagRun.dag_id, DagRun.run_id, DagRun.state, began)
    runs = runs.where(DagRun.dag_id.in_(dag_ids))
    yield from session.execute(_latest(runs))
    for state in (_QUEUED, _RUNNING):
        under_way = runs.where(DagRun.state == state).order_by(DagRun.run_after.desc())
        yield from session.execute(under_way)


def _latest(runs: Select[Any]) -> Select[Any]:
    """Returns, of the runs that are selected, those of each DAG with the latest ``run_after``."""
    columns = (DagRun.dag_id, func.max(DagRun.run_after))
    latest = runs.with_only_columns(*columns).group_by(DagRun.dag_id)
    return runs.where(tuple_(DagRun.dag_id, DagRun.run_after).in_(latest))


@contextmanager
def _session(what: str) -> Iterator[Session]:
    """Yields a session of Airflow's database; its errors are logged, since a page is useful without
    ``what`` is asked for.
    """
    try:
        with create_session() as session:
            yield session
    except SQLAlchemyError as err:
        log.warning("Airflow's database can't be asked for %s: %s", what, class_and_text(err))


def read_consumers(pipeline: str) -> list[str]:
    """Returns the DAGs that are scheduled on a pipeline's assets."""
    with _session("readers of tables") as session:
        dags = select(DagScheduleAssetReference.dag_id).join(
            AssetModel, AssetModel.id == DagScheduleAssetReference.asset_id
        )
        of_pipeline = AssetModel.name.startswith(f"{pipeline}/", autoescape=True)
        return sorted(session.scalars(dags.where(of_pipeline).distinct()))
    return []


@dataclass(frozen=True, slots=True)
class DagRunTasks:
    """A run of a DAG, its tasks, whose logs Airflow stores, and when the running ones began."""

    state: str
    tasks: frozenset[str]
    running: Mapping[str, datetime] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """Returns whether the run hasn't ended."""
        return self.state in (_RUNNING, _QUEUED)


def read_dag_run(dag_id: str, run_id: str) -> DagRunTasks | None:
    """Returns a run of a DAG, or None when Airflow has no such run (any more)."""

    with _session("the tasks of a DAG run") as session:
        state = session.scalar(
            select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        )
        of_run = (TaskInstance.dag_id == dag_id) & (TaskInstance.run_id == run_id)
        columns = (TaskInstance.task_id, TaskInstance.state, TaskInstance.start_date)
        tasks = session.execute(select(*columns).where(of_run)).all()
        if state is not None:
            running = {task: at for task, s, at in tasks if s == _RUNNING and at is not None}
            return DagRunTasks(str(state), frozenset(task for task, *_ in tasks), running)
    return None


def read_runs_named(
    text: str, dag_ids: Collection[str], most: int, may_read: Callable[[str], bool]
) -> list[tuple[str, str, str, datetime]]:
    """Returns DAG, id, state and time of the latest runs of these DAGs whose id has this text.

    ``may_read`` is asked only for DAGs that have such runs.
    """
    matches = DagRun.run_id.icontains(text, autoescape=True)
    columns = (DagRun.dag_id, DagRun.run_id, DagRun.state, DagRun.run_after)
    with _session("runs by their ids") as session:
        dags = select(DagRun.dag_id).where(matches & DagRun.dag_id.in_(dag_ids)).distinct()
        readable = [dag_id for dag_id in session.scalars(dags) if may_read(dag_id)]
        matches &= DagRun.dag_id.in_(readable)
        runs = select(*columns).where(matches).order_by(DagRun.run_after.desc()).limit(most)
        return [(dag, run_id, str(state), at) for dag, run_id, state, at in session.execute(runs)]
    return []


@dataclass(frozen=True, slots=True)
class ActionDag:
    """A DAG that a page's buttons trigger, its unfinished runs, and whether the reader may trigger
    and unpause it; the run that this reader just requested with its state, or why none was started.
    """

    dag_id: str
    is_paused: bool = False
    under_way: Sequence[DagRun] = ()
    requested: str | None = None
    requested_state: str | None = None
    refused: str | None = None
    may_trigger: bool = False
    may_unpause: bool = False

    @property
    def is_ready(self) -> bool:
        """Returns whether a button may trigger a run: it would start at once, as the only one."""
        return not (self.is_paused or self.under_way)

    @property
    def is_under_way(self) -> bool:
        """Returns whether a run is running, or will as soon as it is scheduled."""
        return any(run.state == _RUNNING or not self.is_paused for run in self.under_way)


def read_action_dag(dag_id: str, requested: str | None = None) -> ActionDag:
    """Returns a DAG's state in Airflow's database; without one, nothing is paused or unfinished."""

    with _session("unfinished runs of a DAG") as session:
        is_paused = session.scalar(select(DagModel.is_paused).where(DagModel.dag_id == dag_id))
        of_dag = select(DagRun).where(DagRun.dag_id == dag_id)
        active = of_dag.where(DagRun.state.in_([_QUEUED, _RUNNING])).order_by(DagRun.id)
        under_way = session.scalars(active.limit(_MOST_UNDER_WAY)).all()
        own = session.scalar(of_dag.where(DagRun.run_id == requested))
        return ActionDag(
            dag_id, bool(is_paused), tuple(under_way), requested, own and str(own.state)
        )
    return ActionDag(dag_id, requested=requested)


def unpause(dag_id: str, user_name: str) -> None:
    """Unpause a DAG, and record it in Airflow's audit log as Airflow's own page does.

    Raises 404 for a DAG that Airflow lacks.
    """
    with create_session() as session:
        dag = session.get(DagModel, dag_id)
        if dag is None or dag.is_stale:
            raise HTTPException(404, f"Airflow doesn't know the DAG {dag_id} (yet).")
        dag.is_paused = False
        session.add(
            Log(event="patch_dag", dag_id=dag_id, owner=user_name, extra='{"is_paused": false}')
        )


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
    if not (address := urlsplit(origin).netloc) or address not in (host, own):
        raise HTTPException(
            403,
            f"{refused} The page's address is {origin}; Airflow's is {host!r} by the request and"
            f" {own!r} by its setting base_url of [api]: set that to the address that browsers"
            " see.",
        )


def trigger_run(dag_id: str, prefix: str, params: Mapping[str, Any], user: BaseUser) -> str:
    """Trigger a run of a DAG in the reader's name; returns its run id."""
    run_id = f"{prefix}__{now().isoformat()}"
    dag = DagModel.get_current(dag_id)
    if dag is None or dag.is_stale:
        raise HTTPException(404, f"Airflow doesn't know the DAG {dag_id} (yet).")
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


def load_pipelines() -> dict[str, PipelineFile | str]:
    """Returns each pipeline file by its pipeline's name, or its error by the file's name."""
    folder = PipelineFolder.read(pipelines_folder(), load_unchanged)
    pipelines = {pipeline.pipeline: pipeline for pipeline in folder.pipelines.values()}
    return pipelines | {path.name: refusal(error) for path, error in folder.refused.items()}


def pipeline_of(dag_id: str, pipelines: Collection[str]) -> tuple[str, str] | None:
    """Returns a DAG's pipeline, and the verb of its runs in the ledger; None for other DAGs."""
    places = {
        dag_id_of(name, kind): (name, dag.verb)
        for name in pipelines
        for kind, dag in PIPELINE_DAGS.items()
    }
    return places.get(dag_id)


@dataclass(frozen=True, slots=True)
class Schedule(DagsOfPipeline):
    """What Airflow's database has about a pipeline's DAGs; a field is about the CDC DAG unless
    stated.

    ``idle_checked_at`` is the start of the latest run that found nothing to do, which the ledger
    doesn't store. ``succeeded_at`` is the start of the latest run that succeeded, or that a user
    marked as success. ``dags`` are all DAGs of the pipeline. ``lacks`` are missing pools and
    connections. ``scheduler_at`` is the last heartbeat of any scheduler.
    """

    idle_checked_at: datetime | None = None
    succeeded_at: datetime | None = None
    dags: tuple[DagState, ...] = ()
    lacks: tuple[Attention, ...] = ()
    scheduler_at: datetime | None = None

    @property
    def active(self) -> frozenset[str]:
        """Returns the ids of unfinished runs that land changes."""
        runs = (state for state in self.dags if state.kind == "cdc" and state.is_under_way)
        return frozenset(state.run_id for state in runs if state.run_id is not None)

    def is_scheduler_alive(self, at: datetime) -> bool:
        """Returns whether a scheduler has sent a heartbeat lately, by Airflow's own limit."""
        limit = conf.getint("scheduler", "scheduler_health_check_threshold")
        return self.scheduler_at is not None and at - self.scheduler_at <= timedelta(seconds=limit)

    def is_scheduler_down(self, at: datetime) -> bool:
        return self.scheduler_at is not None and not self.is_scheduler_alive(at)

    @property
    def under_way(self) -> tuple[DagState, ...]:
        return tuple(state for state in self.dags if state.is_under_way)


def read_schedules(pipelines: Collection[PipelineFile]) -> dict[str, Schedule]:
    """Returns what Airflow knows by pipeline, without pipelines whose DAGs it lacks (yet)."""
    with _session("DAG runs") as session:
        dags = read_dags(session, [one.pipeline for one in pipelines])
        of_cdc = {name: dag for name, of in dags.items() for dag in of if dag.kind == "cdc"}
        ended, succeeded, idle = _ended_runs(session, [dag.dag_id for dag in of_cdc.values()])
        # Workers may have connections in their own environment. So once a run has succeeded,
        # connections aren't searched.
        tried = {name for name, dag in of_cdc.items() if dag.dag_id not in succeeded}
        new = [one for one in pipelines if one.pipeline in tried]
        pools, connections = read_pools(session, pipelines), read_connections(session, new)
        lacks = describe_missing(pools, connections)
        heartbeats = select(func.max(Job.latest_heartbeat)).where(Job.job_type == "SchedulerJob")
        scheduler_at = session.scalar(heartbeats)
        # Idle checks of a standby don't count: it may have lagged behind.
        standbys = {one.pipeline for one in pipelines if one.source.read_from is not None}
        schedules = {}
        for name, cdc in of_cdc.items():
            run = ended.get(cdc.dag_id)
            watched = [dag for dag in dags[name] if dag.kind in WATCHED]
            schedules[name] = Schedule(
                cdc.is_paused,
                run.run_id if run is not None and run.state == DagRunState.FAILED else None,
                cdc.next_run_at,
                frozenset(dag.kind for dag in watched if dag.is_paused),
                {dag.kind: dag.next_run_at for dag in watched},
                None if name in standbys else _begin_of(idle.get(cdc.dag_id)),
                _begin_of(succeeded.get(cdc.dag_id)),
                tuple(dag for dag in dags[name] if not dag.is_stale),
                tuple(lacks.get(name, ())),
                scheduler_at,
            )
        return schedules
    return {}


def _begin_of(run: DagRun | None) -> datetime | None:
    return None if run is None else run.start_date


def _ended_runs(session: Session, dag_ids: Collection[str]) -> Iterator[dict[str, DagRun]]:
    """Yields by DAG the latest runs that ended, that succeeded, and that found nothing to do."""
    # A backfill, and a run that was cleared after it succeeded, are replays: they land nothing.
    runs = select(DagRun).where(
        DagRun.dag_id.in_(dag_ids), DagRun.run_type != DagRunType.BACKFILL_JOB
    )
    # An unfinished run shows nothing yet: while it is retried, all runs before it may have failed.
    ended = runs.where(DagRun.state.in_([DagRunState.SUCCESS, DagRunState.FAILED]))
    succeeded = runs.where(DagRun.state == DagRunState.SUCCESS, DagRun.clear_number == 0)
    # A run that was marked as successful has no result of its idle check.
    answers = (
        (XComModel.dag_run_id == DagRun.id)
        & (XComModel.task_id == IDLE_CHECK)
        & (XComModel.key == "return_value")
        & (cast(XComModel.value, String) == "false")
    )
    for query in (ended, succeeded, succeeded.join(XComModel, answers)):
        yield {run.dag_id: run for run in session.scalars(_latest(query))}
