"""Attention that only Airflow causes: a DAG is paused, overdue, or failed before it wrote to the
ledger. Pages and alerts show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from waldelta.config import DagKind, PipelineFile
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.overview import Glance
from waldelta.pipeline.lag import Lag
from waldelta.quantities import duration

# DAGs other than the CDC DAG that run by a schedule.
WATCHED: tuple[DagKind, ...] = ("maintenance", "reconcile")


@dataclass(frozen=True, slots=True)
class DagsOfPipeline:
    """What Airflow, but not the ledger, knows of a pipeline's DAGs; the CDC DAG's unless stated.

    ``failed``: the id of the latest ended run, if it failed. ``next_run_at``: when the scheduler
    should create the next run, perhaps in the past. ``paused``: those of WATCHED that are paused.
    """

    is_paused: bool = False
    failed: str | None = None
    next_run_at: datetime | None = None
    paused: frozenset[str] = frozenset()


def of_dags(
    pipeline: PipelineFile, glance: Glance, dags: DagsOfPipeline, at: datetime
) -> Iterator[Attention]:
    """Yields attention for a DAG that doesn't run, or fails before it writes to the ledger."""
    if dags.is_paused and glance.is_set_up:
        yield Attention(
            "failed", "paused", "the CDC DAG is paused: no changes are read, and the slot keeps WAL"
        )
    elif (lag := Lag.since(dags.next_run_at, at)).is_overdue:
        yield Attention(
            "warning",
            "overdue",
            f"the next run is overdue by {duration(lag.seconds or 0)}: an earlier run is still"
            " active, or the scheduler is down",
        )
    recorded = {run.run_id for run in glance.runs if run.status == "failed"}
    if dags.failed is not None and dags.failed not in recorded:
        yield Attention(
            "failed",
            "failed_dag_run",
            f"the latest DAG run failed ({dags.failed}): see its log in Airflow",
        )
    paused = dags.paused if glance.is_set_up else ()
    if "maintenance" in paused and pipeline.maintenance.schedule is not None:
        yield Attention(
            "warning",
            "paused_maintenance",
            "the maintenance DAG is paused: no compaction, no pruning, no full checks",
        )
    if "reconcile" in paused and pipeline.quality.reconcile.schedule is not None:
        yield Attention(
            "warning",
            "paused_reconcile",
            "the reconcile DAG is paused: the lake is not compared with its source",
        )
