"""Evaluates every pipeline without Spark: its ledger, its slot, and its DAGs in Airflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from waldelta.config import PipelineFile, dag_id_of
from waldelta.config.pipeline_folder import PipelineFolder, pipelines_folder
from waldelta.errors import WaldeltaError, stack_without_values
from waldelta.monitoring import Glance, read_glance
from waldelta.monitoring.attention import KINDS, Attention, shortened, worst_first
from waldelta.monitoring.overview import (
    OVERVIEW_AT_ONCE,
    OVERVIEW_HOURS,
    OVERVIEW_REACH,
    AirflowRuns,
)
from waldelta_airflow._dag_attention import WATCHED, of_dags
from waldelta_airflow.alerts._dag_runs import DagRuns

if TYPE_CHECKING:
    from waldelta.lake import Lake
    from waldelta.lake.ledger import Ledger

log = logging.getLogger(__name__)

# The name under which refused pipeline files are reported.
FILES = "pipeline files"
_OF_DAGS = frozenset(
    {"paused", "overdue", "failed_dag_run", *(f"paused_{kind}" for kind in WATCHED)}
)
# A failure of these DAGs that the ledger already explains.
_EXPLAINED = {
    "maintenance": {"failed_maintenance"},
    "reconcile": {"failed_reconciliation", "different", "failed_comparison"},
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What needs attention in a pipeline; ``known`` are the kinds that could be evaluated."""

    pipeline: str
    found: tuple[Attention, ...]
    known: frozenset[str]


def evaluate(task: Any, at: datetime, since: datetime | None) -> list[Evaluation]:
    """Returns the evaluation of each pipeline file, and one of the refused files.

    ``task`` is the running task instance. Runs that failed after ``since`` are included, although
    a later run succeeded.
    """
    folder = PipelineFolder.read(pipelines_folder())
    refused = []
    for path, error in folder.refused.items():
        item = Attention(
            "failed",
            "pipeline_file",
            f"{path.name} can't be read: {shortened(str(error))}",
            objects=(path.name,),
        )
        refused.append(item)
    files = Evaluation(FILES, tuple(refused), frozenset({"pipeline_file"}))
    pipelines = folder.pipelines.values()
    with ThreadPoolExecutor(OVERVIEW_AT_ONCE) as pool:
        return [files, *pool.map(lambda pipeline: _evaluate(task, pipeline, at, since), pipelines)]


def _evaluate(
    task: Any, pipeline: PipelineFile, at: datetime, since: datetime | None
) -> Evaluation:
    from waldelta.lake.ledger import Ledger
    from waldelta_airflow._connections import pipeline_lake

    name = pipeline.pipeline
    runs = DagRuns.read(task, pipeline, at)
    airflow = AirflowRuns(active=runs.active if runs is not None else frozenset())
    try:
        lake = pipeline_lake(pipeline)
        ledger = Ledger(lake)
        glance = read_glance(pipeline, ledger, at, OVERVIEW_HOURS, airflow, OVERVIEW_REACH)
    except Exception as err:
        log.error("pipeline %s can't be evaluated: %s", name, stack_without_values(err))
        lacking = Attention(
            "failed",
            "lake",
            f"its lake can't be read from here: {_reason(err)}",
            cause=type(err).__name__,
        )
        return Evaluation(name, (lacking,), frozenset({"lake"}))
    if runs is not None and runs.dags.is_paused and _is_torn_down(ledger, pipeline):
        return Evaluation(name, (), frozenset(KINDS))
    slot = tuple(_of_slot(pipeline, lake)) if glance.is_set_up else ()
    found = [*of_dags(pipeline, glance, runs.dags if runs is not None else None, at)]
    if runs is not None:
        found += _of_failed_runs(name, glance, runs, since)
    unknown = set() if runs is not None else set(_OF_DAGS)
    if any(item.kind == "source" for item in slot):
        unknown.add("slot")
    # The server's answer about the slot replaces that of the latest run.
    found += [item for item in glance.attention if item.kind != "slot"]
    found += slot
    return Evaluation(name, worst_first(found), frozenset(KINDS) - unknown)


def _is_torn_down(ledger: Ledger, pipeline: PipelineFile) -> bool:
    """Returns whether the slot's last event was to be dropped, as teardown does."""
    lives = ledger.slot_lives(pipeline.source.slot)
    return bool(lives) and lives[-1].event == "dropped"


def _of_slot(pipeline: PipelineFile, lake: Lake) -> Iterator[Attention]:
    from waldelta.monitoring.slot_status import of_live_slot
    from waldelta.pipeline import Job, SourceConnections
    from waldelta_airflow._connections import source_conninfo

    try:
        source = SourceConnections(pipeline.source, *map(source_conninfo, pipeline.source.conn_ids))
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
    return f"{kind}: {shortened(str(err))}" if isinstance(err, WaldeltaError) else kind
