"""A pipeline at a time: what its ledger and Airflow say, and which of that says nothing of now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.monitoring.attention import IN_DOUBT, Attention, concerning, worst_first
from waldelta.monitoring.decisions import Quarantine
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.run_details import CopyProgress
from waldelta.monitoring.status import LastSlot, last_slot
from waldelta.monitoring.table_list import TableLine
from waldelta_airflow.views._installed_pipelines import DagState, Schedule

LATE = frozenset({"behind", "overdue", "silent_run"})
# Kinds of attention (problems and others) after which a target may differ from the source although
# an earlier comparison found no difference.
_OUTDATES = IN_DOUBT | {"data_gap", "failed_dag_run", "failed_run", "paused", "source"}
# Kinds after which it may only because nothing compares them.
_NOT_COMPARED = frozenset({"overdue_reconcile", "paused_reconcile"})


@dataclass(frozen=True, slots=True)
class Situation:
    """A pipeline at a time, as a reader sees it: ``dags`` are those that the reader may read.

    ``attention`` is of the pipeline or of one of its tables, the worst first. ``progress`` is of
    the copy that is under way. ``has_slot``: setup has created the slot. ``quarantine`` has, by
    table, what waits there.
    """

    base: str
    pipeline: PipelineFile
    glance: Glance
    schedule: Schedule
    dags: Sequence[DagState]
    at: datetime
    attention: Sequence[Attention] = ()
    progress: CopyProgress | None = None
    has_slot: bool = True
    quarantine: Mapping[str, Quarantine] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.pipeline.pipeline

    @property
    def slot(self) -> LastSlot:
        schedule = self.schedule
        return last_slot(self.glance, self.at, schedule.idle_checked_at, schedule.failed)

    @property
    def is_scheduler_down(self) -> bool:
        """Returns whether no run starts, because the last heartbeat of a scheduler is old."""
        return self.schedule.is_scheduler_down(self.at)

    @property
    def is_past(self) -> bool:
        """Returns whether what runs did says nothing of the tables that the attention is about."""
        return any(map(_outdates, self.attention))

    @property
    def is_stale(self) -> bool:
        """Returns whether earlier results of comparisons say nothing of the lake now."""
        return self.is_past or any(item.kind in _NOT_COMPARED for item in self.attention)

    @property
    def is_late(self) -> bool:
        """Returns whether runs, and so their checks and the slot, say nothing of the lake now."""
        latest = self.glance.latest
        upto = latest.as_of if latest is not None else None
        return any(self._stops(item, upto) for item in self.attention)

    def of_table(self, line: TableLine) -> Situation:
        """Returns the situation of one table: the items about the table, and those that stop all
        tables or their comparison.
        """
        of_all = [
            item
            for item in self.attention
            if item.kind in _NOT_COMPARED or self._stops(item, line.complete_upto)
        ]
        of_this = concerning(line.table_name, self.attention)
        return replace(self, attention=worst_first([*of_this, *of_all]))

    def _stops(self, item: Attention, upto: datetime | None) -> bool:
        """Returns whether nothing comes after what is complete up to this time.

        A run that fails after it has brought a table up to date leaves it so.
        """
        latest = self.glance.latest
        as_of = latest.as_of if latest is not None else None
        is_served = upto is not None and as_of is not None and upto >= as_of
        is_general = not item.objects and _outdates(item)
        return is_general and not (is_served and item.kind == "failed_run")

    def dag(self, kind: DagKind) -> DagState | None:
        return next((dag for dag in self.dags if dag.kind == kind), None)

    def is_paused(self, kind: DagKind) -> bool:
        """Returns whether a DAG is paused, also one that the reader may not read."""
        return any(state.kind == kind and state.is_paused for state in self.schedule.dags)

    def has_run(self, *kinds: DagKind) -> bool:
        return any(dag.kind in kinds and dag.is_under_way for dag in self.dags)

    def next_run(self) -> tuple[str, datetime | None]:
        """Returns what the schedule does next, and when."""
        due, until = self.schedule.next_run_at, "" if self.glance.is_set_up else " until step 3"
        if self.schedule.is_paused:
            return f"no run starts: {dag_id_of(self.name, 'cdc')} is paused{until}", None
        if due is None:
            is_known = self.glance.is_set_up or self.schedule.dags
            return "nothing: runs are started by hand" if is_known else "", None
        if due < self.at:
            return "the next run was due", due
        down = "the scheduler is down; the next run is due"
        return down if self.is_scheduler_down else "the next run starts", due


def _outdates(item: Attention) -> bool:
    return item.kind in LATE or (item.severity == "failed" and item.kind in _OUTDATES)
