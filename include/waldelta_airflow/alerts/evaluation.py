"""Evaluates every pipeline without Spark: its ledger, its slot, and its DAGs in Airflow.

A task sees these through Airflow's Task SDK, not its database.

Compares what needs attention now with what a channel was sent: what began, lasts or ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from http import HTTPStatus
from typing import Any, Literal

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.comms import GetPreviousDagRun
from airflow.sdk.timezone import coerce_datetime
from airflow.timetables.base import TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable

from waldelta.config import PipelineFile, dag_id_of
from waldelta.config.pipeline_folder import PipelineFolder, pipelines_folder
from waldelta.errors import WaldeltaError, stack_without_values
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.attention import KINDS, Attention, shorten, worst_first
from waldelta.monitoring.check_results import read_failed
from waldelta.monitoring.overview import (
    OVERVIEW,
    OVERVIEW_AT_ONCE,
    AirflowRuns,
    Glance,
    read_glance,
)
from waldelta.monitoring.status import of_live_slot
from waldelta.pipeline import Job, SourceConnections
from waldelta_airflow import _connections as connections
from waldelta_airflow import settings
from waldelta_airflow._dag_attention import WATCHED, DagsOfPipeline, of_dags, schedule_of

log = logging.getLogger(__name__)

# The name under which refused pipeline files are reported.
FILES = "pipeline files"
_OF_DAGS = frozenset(
    {
        "paused",
        "overdue",
        "failed_dag_run",
        *(f"{state}_{kind}" for kind in WATCHED for state in ("paused", "overdue")),
    }
)
# Attention that expectations cause, and the verdict on these.
_OF_CHECKS = {"failed_expectations": "failed", "warned_expectations": "warning"}
# A failure of these DAGs that the ledger already explains.
_EXPLAINED = {
    "maintenance": {"failed_maintenance"},
    "reconcile": {"failed_reconciliation", "different", "failed_comparison"},
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What needs attention in a pipeline; ``kinds`` are the kinds of attention that could be
    evaluated.
    """

    pipeline: str
    attention: tuple[Attention, ...]
    kinds: frozenset[str]


def evaluate(task: Any, at: datetime, since: datetime | None) -> list[Evaluation]:
    """Returns the evaluation of each pipeline file, and one of the refused files.

    ``task`` is the running task instance. Runs that failed after ``since`` are included, although
    a later run succeeded.
    """
    folder = PipelineFolder.read(pipelines_folder())
    refused = tuple(
        Attention(
            "failed",
            "pipeline_file",
            f"{path.name} can't be read: {shorten(str(error))}",
            objects=(path.name,),
        )
        for path, error in folder.refused.items()
    )
    files = Evaluation(FILES, refused, frozenset({"pipeline_file"}))
    pipelines = folder.pipelines.values()
    with ThreadPoolExecutor(OVERVIEW_AT_ONCE) as pool:
        return [files, *pool.map(lambda pipeline: _evaluate(task, pipeline, at, since), pipelines)]


def _evaluate(
    task: Any, pipeline: PipelineFile, at: datetime, since: datetime | None
) -> Evaluation:
    name = pipeline.pipeline
    runs = DagRuns.read(task, pipeline, at)
    airflow = AirflowRuns(active=runs.active if runs is not None else frozenset())
    try:
        lake = connections.pipeline_lake(pipeline)
        ledger = Ledger(lake)
        glance = read_glance(pipeline, ledger, at, OVERVIEW, airflow)
    except Exception as err:
        log.error("pipeline %s can't be evaluated: %s", name, stack_without_values(err))
        lacking = Attention(
            "failed",
            "lake",
            f"its lake can't be read from here: {_reason(err)}",
            cause=type(err).__name__,
        )
        return Evaluation(name, (lacking,), frozenset({"lake"}))
    # Teardown drops the slot.
    events = ledger.slot_events(pipeline.source.slot)
    if runs is not None and runs.dags.is_paused and events and events[-1].event == "dropped":
        return Evaluation(name, (), frozenset(KINDS))
    slot = tuple(_of_slot(pipeline, lake)) if glance.is_set_up else ()
    unknown, items = _OF_DAGS, list[Attention]()
    if runs is not None:
        unknown = frozenset()
        items += of_dags(pipeline, glance, runs.dags, at)
        items += _of_failed_runs(name, glance, runs, since)
    if any(item.kind == "source" for item in slot):
        unknown |= {"slot"}
    # The server's answer about the slot replaces that of the latest run.
    items += [item for item in glance.attention if item.kind != "slot"]
    items = _with_details(pipeline, ledger, items)
    return Evaluation(name, worst_first([*items, *slot]), frozenset(KINDS) - unknown)


def _with_details(
    pipeline: PipelineFile, ledger: Ledger, items: Sequence[Attention]
) -> list[Attention]:
    """Returns the attention with the expectations that failed, by their tables.

    They have values of rows only if the installation and the pipeline file allow it.
    """
    tables = {name for item in items if item.kind in _OF_CHECKS for name in item.objects}
    if not tables:
        return list(items)
    shows_values = settings.alert_values() and pipeline.row_values == "read"
    failed = read_failed(ledger, tables)
    return [
        replace(
            item,
            details=tuple(
                (one.table_name, one.describe(shows_values=shows_values))
                for one in failed
                if one.verdict == _OF_CHECKS[item.kind] and one.table_name in item.objects
            ),
        )
        if item.kind in _OF_CHECKS
        else item
        for item in items
    ]


def _of_slot(pipeline: PipelineFile, lake: Lake) -> Iterator[Attention]:
    try:
        conninfos = map(connections.source_conninfo, pipeline.source.conn_ids)
        source = SourceConnections(pipeline.source, *conninfos)
        yield from of_live_slot(Job(pipeline, source, "alerts", lake=lake))
    except Exception as err:
        stack = stack_without_values(err)
        log.error("the slot of pipeline %s can't be read: %s", pipeline.pipeline, stack)
        kind = type(err).__name__
        yield Attention("failed", "source", f"its slot can't be read: {_reason(err)}", cause=kind)


def _of_failed_runs(
    name: str, glance: Glance, runs: DagRuns, since: datetime | None
) -> Iterator[Attention]:
    kinds = {item.kind for item in glance.attention}
    for kind in WATCHED:
        run_id = runs.failed.get(kind)
        if run_id is not None and not kinds & _EXPLAINED[kind]:
            yield Attention(
                "warning",
                "failed_dag_run",
                f"the latest run of {dag_id_of(name, kind)} failed ({run_id}): see its log in"
                " Airflow",
            )
    last = runs.last_failed_cdc
    if last is None or since is None or runs.dags.failed is not None or "failed_run" in kinds:
        return
    run_id, ended = last
    if ended > since:
        yield Attention(
            "warning",
            "failed_run",
            f"run {run_id} failed, and a later run succeeded",
            ("run", "any", run_id),
            cause=run_id,
        )


def _reason(err: BaseException) -> str:
    """Returns an error's class; its message only if it is waldelta's own."""
    kind = type(err).__name__
    return f"{kind}: {shorten(str(err))}" if isinstance(err, WaldeltaError) else kind


@dataclass(frozen=True, slots=True)
class DagRuns:
    """The states of a pipeline's DAGs and of their latest runs.

    ``dags`` is what the pages show, too. ``failed`` has, by kind of DAG in WATCHED, the id of its
    latest ended run if that failed. ``last_failed_cdc`` is the id and end of the last CDC run that
    failed. ``active`` are ids of unfinished CDC runs.
    """

    dags: DagsOfPipeline
    failed: Mapping[str, str] = field(default_factory=dict)
    last_failed_cdc: tuple[str, datetime] | None = None
    active: frozenset[str] = frozenset()

    @classmethod
    def read(cls, task: Any, pipeline: PipelineFile, at: datetime) -> DagRuns | None:
        """Returns the states of a pipeline's DAGs and runs at a time, from Airflow; None while
        Airflow doesn't have its DAGs.

        ``task`` is the running task instance, through which the Task SDK asks Airflow's API.
        """
        name = pipeline.pipeline
        try:
            cdc = task.get_dag(dag_id_of(name, "cdc"))
            other_dags = {kind: task.get_dag(dag_id_of(name, kind)) for kind in WATCHED}
        except AirflowRuntimeError as err:
            if (err.error.detail or {}).get("status_code") != HTTPStatus.NOT_FOUND:
                raise
            return None
        last, is_last = _last_failed(dag_id_of(name, "cdc"), at)
        dags = DagsOfPipeline(
            cdc.is_paused,
            last.run_id if is_last else None,
            _next_run_at(pipeline.schedule, cdc.next_dagrun),
            frozenset(kind for kind, dag in other_dags.items() if dag.is_paused),
            {
                kind: _next_run_at(schedule_of(pipeline, kind), dag.next_dagrun)
                for kind, dag in other_dags.items()
            },
        )
        runs = {kind: _last_failed(dag_id_of(name, kind), at) for kind in WATCHED}
        failed = {str(kind): run.run_id for kind, (run, is_failed) in runs.items() if is_failed}
        ended = (last.run_id, last.end_date) if last is not None and last.end_date else None
        running = _previous(dag_id_of(name, "cdc"), at, "running")
        return cls(dags, failed, ended, frozenset([running.run_id] if running is not None else []))


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
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    question = GetPreviousDagRun(dag_id=dag_id, logical_date=at, state=state)
    answer: Any = SUPERVISOR_COMMS.send(question)
    return answer.dag_run


AlertState = Literal["new", "lasting", "recovered"]

# A copy that is in progress is no problem; one that was killed is started again by the next run.
# Nor is an attempt at a run that goes on.
_NO_ALERT = frozenset({"copying", "failed_attempt"})
# Airflow stores what was sent, and warns above 64 KB.
_MOST_STORED = 120


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to report; ``since`` is when the alerts saw it first."""

    state: AlertState
    attention: Attention
    since: datetime


@dataclass(frozen=True, slots=True)
class Changes:
    """What to send to a channel, and what to store as sent afterwards: JSON by kind and object."""

    alerts: tuple[Alert, ...]
    entries: dict[str, Any]


def compare(
    items: Sequence[Attention],
    kinds: frozenset[str],
    former_entries: Mapping[str, Any],
    at: datetime,
) -> Changes:
    """Returns the alerts to send to a channel, by comparing what needs attention now with what the
    channel was sent.

    ``kinds`` are the kinds of attention that could be evaluated; alerts of other kinds neither
    begin nor end.
    """
    now: dict[str, Any] = {}
    alerts: list[Alert] = []
    for item in _merge_items(items):
        due: dict[AlertState, dict[str, datetime]] = {"new": {}, "lasting": {}}
        for name in item.objects or ("",):
            former = former_entries.get(_key(item.kind, name))
            state = _state(item, former, at)
            since = datetime.fromisoformat(former["since"]) if former else at
            if state is not None:
                due[state][name] = since
            now[_key(item.kind, name)] = {
                "since": since.isoformat(),
                "at": former["at"] if former and state is None else at.isoformat(),
                "severity": item.severity,
                "cause": item.cause,
                "text": shorten(item.only([name] if name else []).text, _MOST_STORED),
            }
        alerts += [
            Alert(state, item.only(list(filter(None, times))), min(times.values()))
            for state, times in due.items()
            if times
        ]
    alerts += _ended_alerts(
        {k: v for k, v in former_entries.items() if k not in now and k.partition(":")[0] in kinds}
    )
    unknown = {
        k: v for k, v in former_entries.items() if k not in now and k.partition(":")[0] not in kinds
    }
    return Changes(tuple(alerts), now | unknown)


def _merge_items(items: Sequence[Attention]) -> Iterator[Attention]:
    """Yields each kind once, unless its items are about different tables."""
    alone: dict[str, Attention] = {}
    for item in items:
        if item.kind in _NO_ALERT:
            continue
        if item.objects:
            yield item
        elif (first := alone.get(item.kind)) is None:
            alone[item.kind] = item
        else:
            worse = item if item.severity == "failed" else first
            alone[item.kind] = replace(
                first,
                severity=worse.severity,
                text=f"{first.text}; {item.text}",
                cause=",".join(filter(None, (first.cause, item.cause))),
            )
    yield from alone.values()


def _state(item: Attention, former: Mapping[str, Any] | None, at: datetime) -> AlertState | None:
    """Returns why an object of the item must be reported now; None if it was lately."""
    if (
        former is None
        or former["cause"] != item.cause
        or (item.severity == "failed" and former["severity"] != "failed")
    ):
        return "new"
    is_due = at - datetime.fromisoformat(former["at"]) >= settings.ALERT_AGAIN
    return "lasting" if is_due else None


def _key(kind: str, name: str) -> str:
    return f"{kind}:{name}"


def _ended_alerts(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Alert]:
    """Yields an alert for each kind that ended; tables of one kind together."""
    by_kind: dict[str, dict[str, Mapping[str, Any]]] = {}
    for key, former in entries.items():
        kind, _, name = key.partition(":")
        by_kind.setdefault(kind, {})[name] = former
    for kind, of in by_kind.items():
        first, objects = next(iter(of.values())), tuple(filter(None, of))
        attention = Attention(first["severity"], kind, first["text"], objects=objects[:1])
        since = min(datetime.fromisoformat(former["since"]) for former in of.values())
        yield Alert("recovered", attention.only(objects), since)
