"""Attention that only Airflow causes: a DAG is paused, overdue, or failed before it wrote to the
ledger. Pages and alerts show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from waldelta.config import DagKind, PipelineFile
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.overview import Glance
from waldelta.pipeline.lag import Lag
from waldelta.quantities import duration

# DAGs other than the CDC DAG that run by a schedule; what is said of each that is paused or
# overdue, and what isn't done then.
WATCHED: dict[DagKind, tuple[tuple[str, str], tuple[str, str], str]] = {
    "maintenance": (
        ("paused_maintenance", "the maintenance DAG is paused"),
        ("overdue_maintenance", "the next run of the maintenance DAG is overdue by {}"),
        "no compaction, no pruning, no full checks",
    ),
    "reconcile": (
        ("paused_reconcile", "the reconcile DAG is paused"),
        ("overdue_reconcile", "the next run of the reconcile DAG is overdue by {}"),
        "the lake is not compared with its source",
    ),
}


@dataclass(frozen=True, slots=True)
class DagsOfPipeline:
    """What Airflow, but not the ledger, knows of a pipeline's DAGs; the CDC DAG's unless stated.

    ``failed``: the id of the latest ended run, if it failed. ``next_run_at``: when the scheduler
    should create the next run, perhaps in the past. ``paused``: those of WATCHED that are paused,
    and ``next_of``: when it should create the next run of each.
    """

    is_paused: bool = False
    failed: str | None = None
    next_run_at: datetime | None = None
    paused: frozenset[str] = frozenset()
    next_of: Mapping[str, datetime | None] = field(default_factory=dict)

    def is_scheduler_down(self, at: datetime) -> bool:  # noqa: ARG002 - Schedule's reads it
        """Returns whether the last heartbeat of a scheduler is old; without any it isn't known."""
        # A task that asks was started by a scheduler.
        return False


def of_dags(
    pipeline: PipelineFile, glance: Glance, dags: DagsOfPipeline, at: datetime
) -> Iterator[Attention]:
    """Yields attention for a DAG that doesn't run, or fails before it writes to the ledger.

    It is a problem that nothing brings changes into the lake: the CDC DAG is paused, or no run of
    it is active and none starts. A run that only comes late is a warning, and so is a DAG of
    WATCHED that doesn't run.
    """
    if dags.is_paused and glance.is_set_up:
        yield Attention(
            "failed", "paused", "the CDC DAG is paused: no changes are read, and the slot keeps WAL"
        )
    elif (lag := Lag.since(dags.next_run_at, at)).is_overdue:
        comes_late = glance.active and not dags.is_scheduler_down(at)
        yield Attention(
            "warning" if comes_late else "failed",
            "overdue",
            f"the next run is overdue by {duration(lag.seconds or 0)}: an earlier run is still"
            " active, or the scheduler is down",
        )
    recorded = {run.run_id for run in glance.runs if run.status == "failed"}
    # An open gap explains why the run failed, and its attention has the way back.
    if dags.failed is not None and dags.failed not in recorded and not glance.gaps:
        yield Attention(
            "failed",
            "failed_dag_run",
            f"the latest DAG run failed ({dags.failed}): see its log in Airflow",
        )
    if not glance.is_set_up:
        return
    for dag, (paused, overdue, omitted) in WATCHED.items():
        late = Lag.since(dags.next_of.get(dag), at)
        if schedule_of(pipeline, dag) is None or not (dag in dags.paused or late.is_overdue):
            continue
        kind, text = paused if dag in dags.paused else overdue
        delay = duration(late.seconds or 0)
        yield Attention("warning", kind, f"{text.format(delay)}: {omitted}")


def schedule_of(pipeline: PipelineFile, kind: str) -> str | None:
    """Returns the schedule of a kind of DAG; None for one that is triggered by hand."""
    schedules: dict[str, str | None] = {
        "cdc": pipeline.schedule,
        "reconcile": pipeline.quality.reconcile.schedule,
        "maintenance": pipeline.maintenance.schedule,
    }
    return schedules.get(kind)
