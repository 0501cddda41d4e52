"""The DAGs of one pipeline; each builder has its tasks in the order of the flow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import DAG, BaseOperator, Param, TriggerRule, chain, task
from airflow.timetables.interval import CronDataIntervalTimetable

from waldelta.config import DagKind, PipelineFile, dag_id_of
from waldelta.config.pipeline_file import Notification
from waldelta.decision_options import DECISIONS
from waldelta.error_catalog import ANY_ERROR
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import AirflowFailException
from waldelta_airflow.dags._dag_docs import dag_page
from waldelta_airflow.launchers.job_result import named_failures
from waldelta_airflow.operators.job_operator import (
    CopyAgainOperator,
    DecisionReportOperator,
    ReportOperator,
    WaldeltaJobOperator,
    job_of,
)
from waldelta_airflow.reporting.notify import (
    IDLE_CHECK,
    LAND,
    NotifyOn,
    NotifyTimeout,
    failure_callbacks,
    notify_critical,
)

log = logging.getLogger(__name__)


# Null is the value of an untouched field of the trigger form; an empty list or text would count as
# missing.
def _listed(description: str, pattern: str = r"^.+\..+$") -> Param:
    return Param(
        None,
        type=["null", "array"],
        items={"type": "string", "pattern": pattern},
        description=description,
    )


def _text(description: str) -> Param:
    return Param(None, type=["null", "string"], maxLength=200, description=description)


_REASON = "stored in the ledger"
# Runs whatever failed after the run's first stage, which is among its upstream tasks.
_ONCE_BEGUN = TriggerRule.ALL_DONE_MIN_ONE_SUCCESS
# A large table that needs a new copy is left to the DAG of the initial sync, while CDC runs
# continue.
_HAND_OVER = {"hand-over": "True"}
_BY_HAND = ("setup", "initial_sync", "resync", "quarantine")
# By its name, because its imports would slow down parsing.
_ALERT_NOTIFIER = "waldelta_airflow.alerts.sending.AlertNotifier"


@dataclass(frozen=True, slots=True)
class _Job:
    """A pipeline whose jobs the DAGs run."""

    path: Path
    pipeline: PipelineFile
    callbacks: list[NotifyOn]

    @property
    def on_timeout(self) -> list[NotifyTimeout] | None:
        """Returns the callbacks for a run that ends by dagrun_timeout."""
        return [NotifyTimeout(one) for one in self.callbacks if one.is_for("TimedOut")] or None

    def dag(self, kind: DagKind, schedule: str | None, **kwargs: Any) -> DAG:
        pipeline = self.pipeline
        return DAG(
            dag_id=dag_id_of(pipeline.pipeline, kind),
            schedule=None if schedule is None else CronDataIntervalTimetable(schedule, "UTC"),
            auto_register=False,
            catchup=False,
            max_active_runs=1,
            tags={"waldelta", pipeline.pipeline, kind, *pipeline.tags},
            doc_md=dag_page(pipeline, kind, self.path.name),
            default_args={
                "owner": pipeline.owner,
                "retries": settings.RETRIES,
                "retry_delay": settings.retry_delay(),
                "retry_exponential_backoff": True,
                "max_retry_delay": settings.LONGEST_RETRY_DELAY,
                "execution_timeout": settings.STAGE_TIMEOUT,
                "on_failure_callback": [*self.callbacks, *self.alerts(kind)],
            },
            **kwargs,
        )

    def alerts(self, kind: str) -> list[NotifyOn]:
        """Returns the callback of a DAG that people run; the DAG of alerts watches the others."""
        if kind not in _BY_HAND or not settings.alert_connections():
            return []
        entry = Notification(errors=(ANY_ERROR,), notifier=_ALERT_NOTIFIER, arguments={})
        return [NotifyOn(self.pipeline.pipeline, entry)]

    def task(self, task_id: str, verb: str, **kwargs: Any) -> WaldeltaJobOperator:
        return WaldeltaJobOperator(
            task_id=task_id, pipeline_path=self.path, pipeline=self.pipeline, verb=verb, **kwargs
        )

    def report(self, verb: str) -> ReportOperator:
        return ReportOperator(
            task_id="report",
            pipeline_path=self.path,
            pipeline=self.pipeline,
            verb=verb,
            trigger_rule=_ONCE_BEGUN,
        )


def build_dags(path: Path, pipeline: PipelineFile) -> list[DAG]:
    """Returns the DAGs of one pipeline file; opens no connection and imports no Spark.

    Raises ConfigError for its notifiers.
    """
    job = _Job(path, pipeline, failure_callbacks(path, pipeline))
    with job.dag("maintenance", pipeline.maintenance.schedule) as maintenance:
        job.task("maintain", "maintain")
    required_only = Param(
        False,
        type="boolean",
        description="of these, only tables that get no changes until they are copied",
    )
    accept_server = Param(
        None,
        type=["null", "string"],
        pattern=r"^\d+/\d+$",
        description=(
            "system identifier/timeline of the new source server, as the refused run names it"
        ),
    )
    return [
        _in_bounded_time(_setup(job)),
        _copies(job, "initial_sync", "sync", {"due": required_only}, {"due": "{{ params.due }}"}),
        _in_bounded_time(_cdc(job)),
        # Outside of the slot's pool, because changes must land while tables are compared. The
        # slot's lock excludes other runs while the slot is recreated.
        _copies(
            job,
            "resync",
            "resync",
            {"accept_server": accept_server},
            {"accept-server": "{{ params.accept_server or '' }}"},
        ),
        _reconcile(job),
        _quarantine(job),
        maintenance,
    ]


def _in_bounded_time(dag: DAG) -> DAG:
    """Returns a DAG with tasks in the slot's pool whose runs fail in the end.

    The scheduler never starts tasks in a pool that Airflow lacks, and only its log says so. A run
    that works ends within the limits of its tasks.
    """
    works = timedelta(0)
    for one in dag.tasks:
        limit = one.execution_timeout or settings.STAGE_TIMEOUT
        retries = one.retries or 0
        works += (retries + 1) * limit + retries * settings.LONGEST_RETRY_DELAY
    dag.dagrun_timeout = works + settings.QUEUE_TIMEOUT
    return dag


def _setup(job: _Job) -> DAG:
    dry_run = Param(False, type="boolean", description="show the plan and its SQL, change nothing")
    params = {"dry_run": dry_run}
    with job.dag("setup", None, params=params, on_failure_callback=job.on_timeout) as dag:
        preflight = job.task("preflight", "check", execution_timeout=settings.SETUP_TIMEOUT)
        set_up = job.task(
            "set_up",
            "setup",
            options={"dry-run": "{{ params.dry_run }}"},
            pool=job.pipeline.pool,
            execution_timeout=settings.SETUP_TIMEOUT,
        )
        chain(preflight, set_up)
    return dag


def _quarantine(job: _Job) -> DAG:
    params = {
        "action": Param(
            "retry",
            type="string",
            enum=list(DECISIONS),
            description=(
                "retry: read the rows from the source and evaluate their gates again; accept: write"
                " them even if they fail the gate; discard: leave them out; release: apply the"
                " changes that a gate stopped; skip: continue without unreadable messages"
            ),
        ),
        "tables": _listed(
            "tables, as schema.table; empty: all (retry), those of the rows (accept, discard)"
        ),
        "rows": _listed(
            "accept, discard and skip: the ids of rows and messages, as the page of the quarantine"
            " shows them",
            r"^[0-9a-f]{16}$",
        ),
        "reason": _text("stored with the user; every action but retry needs it"),
    }
    options = {action: f"{{{{ params.action == '{action}' }}}}" for action in DECISIONS}
    options |= {
        "tables": "{{ (params.tables or []) | join(',') }}",
        "row": "{{ (params.rows or []) | join(',') }}",
        "reason": "{{ params.reason or '' }}",
        "by": "{{ dag_run.triggering_user_name or '' }}",
    }
    with job.dag("quarantine", None, params=params) as dag:
        decide = job.task(
            "quarantine", "quarantine", options=options, execution_timeout=settings.SYNC_TIMEOUT
        )
        # One table's failed check doesn't prevent the events of the others.
        report = DecisionReportOperator(
            task_id="report",
            pipeline_path=job.path,
            pipeline=job.pipeline,
            trigger_rule=TriggerRule.ALL_DONE,
        )
        _close(decide, None, report)
    return dag


def _copies(
    job: _Job,
    kind: DagKind,
    verb: str,
    params: dict[str, Param],
    options: dict[str, str],
) -> DAG:
    """Returns a DAG whose first stage, named like its verb, copies tables.

    ``params`` are further params, and ``options`` are made of them.
    """
    params = {
        "tables": _listed(
            "tables to copy, as schema.table; empty: all that were never copied completely"
        ),
        "reason": _text(_REASON),
        **params,
    }
    with job.dag(kind, None, params=params) as dag:
        copy = job.task(
            verb,
            verb,
            stage=verb,
            first=True,
            options={
                "tables": "{{ (params.tables or []) | join(',') }}",
                "reason": "{{ params.reason or '' }}",
                **options,
            },
            execution_timeout=settings.SYNC_TIMEOUT,
        )
        # Tables that were copied are checked and reported, even if others failed, after the last
        # retry.
        check = job.task("check", verb, stage="check", trigger_rule=TriggerRule.ALL_DONE)
        _close(copy, check, job.report(verb))
    return dag


def _reconcile(job: _Job) -> DAG:
    """Returns the reconcile DAG, outside of the slot's pool, as for a resync.

    CDC runs continue during it, and it lands a little itself.
    """
    params = {
        "tables": _listed("tables to compare, as schema.table; empty: all that get changes"),
        "repair": Param(
            False,
            type="boolean",
            description="read the rows that differ again and correct them in the target",
        ),
        "reason": _text(_REASON),
    }
    with job.dag("reconcile", job.pipeline.quality.reconcile.schedule, params=params) as dag:
        compare = job.task(
            "reconcile",
            "reconcile",
            stage="reconcile",
            first=True,
            options={
                "tables": "{{ (params.tables or []) | join(',') }}",
                "repair": "{{ params.repair }}",
                "reason": "{{ params.reason or '' }}",
                "by": "{{ dag_run.triggering_user_name or 'Airflow' }}",
            },
            execution_timeout=settings.SYNC_TIMEOUT,
        )
        _close(compare, None, job.report("reconcile"))
    return dag


def _cdc(job: _Job) -> DAG:
    pipeline = job.pipeline
    with job.dag("cdc", pipeline.schedule, on_failure_callback=job.on_timeout) as dag:

        @task.short_circuit(
            task_id=IDLE_CHECK, pool=pipeline.pool, execution_timeout=settings.IDLE_CHECK_TIMEOUT
        )
        def slot_has_changes(**context: Any) -> bool:
            return _has_work(pipeline, context)

        # With spark-submit the first task's application runs all stages.

        land = job.task(
            LAND,
            "consume",
            stage=LAND,
            first=True,
            pool=pipeline.pool,
            options=_HAND_OVER,
            execution_timeout=settings.land_timeout(pipeline.batch.longest_timeout_s),
        )
        # The next run, and so landing, waits for this one.
        apply = job.task(
            "apply",
            "consume",
            stage="apply",
            options=_HAND_OVER,
            execution_timeout=timedelta(minutes=pipeline.batch.apply_timeout_minutes),
        )
        copy_again = CopyAgainOperator(
            task_id="copy_again",
            pipeline=pipeline,
            trigger_rule=_ONCE_BEGUN,
            execution_timeout=settings.IDLE_CHECK_TIMEOUT,
        )
        # A table that can't be applied doesn't prevent the checks of the others.
        check = job.task("check", "consume", stage="check", trigger_rule=_ONCE_BEGUN)
        chain(slot_has_changes(), land, apply)
        land >> check
        [land, apply] >> copy_again
        _close(apply, check, job.report("consume"), begun=land, other_tasks=[copy_again])
    return dag


def _close(
    last: BaseOperator,
    check: BaseOperator | None,
    report: BaseOperator,
    begun: BaseOperator | None = None,
    other_tasks: Sequence[BaseOperator] = (),
) -> None:
    """Add the end of a run: check and report run whatever failed after the first stage.

    Asset events count only if the report succeeds, so another task must fail the run.
    """
    begun = begun or last

    # The failed task has already sent the notifications.
    @task(
        trigger_rule=TriggerRule.ONE_FAILED,
        retries=0,
        execution_timeout=settings.IDLE_CHECK_TIMEOUT,
        on_failure_callback=[],
    )
    def fail_the_run() -> NoReturn:
        raise AirflowFailException(
            "a task of this run failed, and its log says why; tables that are behind or failed a"
            " check have no asset event"
        )

    checked = [check] if check is not None else []
    chain(last, *checked, report)
    begun >> report
    list(dict.fromkeys([begun, last, *checked, report, *other_tasks])) >> fail_the_run()


def _has_work(pipeline: PipelineFile, context: Any) -> bool:
    """Returns whether there is work for Spark; moves an idle slot without a JVM."""
    from waldelta.pipeline import waiting_for_locks
    from waldelta.stages.land.idle_check import check_idle
    from waldelta.stages.repair.replay.interval import is_replay, read_span
    from waldelta_airflow._connections import source_conninfo

    with named_failures():
        job = job_of(context, pipeline, *map(source_conninfo, pipeline.source.conn_ids))
        if is_replay(job):
            span = read_span(job)
            log.info("this run replays: %s", span)
            return not span.is_empty
        wait_s = settings.IDLE_CHECK_LOCK_WAIT.total_seconds()
        seen = waiting_for_locks(wait_s, lambda: check_idle(job))
    notify_critical(pipeline, seen.critical, context)
    log.info("%s (%s bytes of WAL behind)", seen.reason, seen.lag_bytes)
    return seen.has_work
