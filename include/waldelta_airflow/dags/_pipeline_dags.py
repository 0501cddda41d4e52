"""The DAGs of one pipeline; each builder has its tasks in the order of the flow.

The DAGs' documentation in Airflow's UI (``doc_md``): purpose, params, what to do on failure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import DAG, BaseOperator, Param, TriggerRule, chain, task
from airflow.timetables.interval import CronDataIntervalTimetable

from waldelta.config import DagKind, PipelineFile, Publication, dag_id_of
from waldelta.config.pipeline_file import Notification
from waldelta.control_characters import visible
from waldelta.decision_kinds import ACTIONS
from waldelta.error_catalog import ANY_ERROR
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import AirflowFailException
from waldelta_airflow.launchers.job_process import named_failures
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
def _list_param(description: str, pattern: str = r"^.+\..+$") -> Param:
    return Param(
        None,
        type=["null", "array"],
        items={"type": "string", "pattern": pattern},
        description=description,
    )


def _text(description: str) -> Param:
    return Param(None, type=["null", "string"], maxLength=200, description=description)


_REASON = "stored in the ledger"
# The task runs even if others failed, once the run's first stage (one of its upstream tasks) has
# succeeded.
_ONCE_BEGUN = TriggerRule.ALL_DONE_MIN_ONE_SUCCESS
# A large table that needs a new copy is left to the DAG of the initial sync, while CDC runs
# continue.
_HAND_OVER = {"hand-over": "True"}
_BY_HAND = ("setup", "initial_sync", "resync", "decide")
# The notifier is given by its name, because its imports would slow down parsing.
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
        """Returns the failure callback of a DAG that operators trigger; the DAG of alerts watches
        the scheduled DAGs.
        """
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

    Raises ConfigError for an invalid notifier.
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
        _decide(job),
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


def _decide(job: _Job) -> DAG:
    params = {
        "action": Param(
            "retry",
            type="string",
            enum=list(ACTIONS),
            description="; ".join(f"{name}: {action.does}" for name, action in ACTIONS.items()),
        ),
        "tables": _list_param(
            "tables, as schema.table; empty: those of the ids, and all tables for retry"
        ),
        "ids": _list_param(
            "ids of what waits, as the page shows them; not for "
            + ", ".join(name for name, action in ACTIONS.items() if "ids" not in action.takes),
            r"^[0-9a-f]{16}$",
        ),
        "reason": _text(
            "stored with the user; needed by "
            + ", ".join(name for name, action in ACTIONS.items() if action.needs_reason)
        ),
    }
    options = {
        "action": "{{ params.action }}",
        "tables": "{{ (params.tables or []) | join(',') }}",
        "ids": "{{ (params.ids or []) | join(',') }}",
        "reason": "{{ params.reason or '' }}",
        "by": "{{ dag_run.triggering_user_name or '' }}",
    }
    with job.dag("decide", None, params=params) as dag:
        decide = job.task(
            "decide", "decide", options=options, execution_timeout=settings.SYNC_TIMEOUT
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
        "tables": _list_param(
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

    CDC runs continue during the reconciliation, which lands pending changes itself.
    """
    params = {
        "tables": _list_param("tables to compare, as schema.table; empty: all that get changes"),
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
        _close(apply, check, job.report("consume"), first=land, other_tasks=[copy_again])
    return dag


def _close(
    last: BaseOperator,
    check: BaseOperator | None,
    report: BaseOperator,
    first: BaseOperator | None = None,
    other_tasks: Sequence[BaseOperator] = (),
) -> None:
    """Add the end of a run: check and report run whatever failed after the first stage.

    Asset events count only if the report succeeds, so another task must fail the run.
    """
    first = first or last

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
    first >> report
    list(dict.fromkeys([first, last, *checked, report, *other_tasks])) >> fail_the_run()


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


_KINDS = {
    "setup": """\
Checks the source, then creates or alters publications and the slot. It refuses anything that would
break the source before it changes anything. A second run changes nothing.
It runs as the role of the pipeline's connection. If that role may not create publications, a DBA
creates them first (docs/reference/privileges.md).

- **dry_run**: show the plan and its SQL in the log of `set_up`, and change nothing.
- *If it fails*: `preflight` lists every problem with its remedy.
- Next: trigger `{name}_initial_sync` and unpause `{name}_cdc`. Until then the slot keeps the
  source's WAL.
""",
    "initial_sync": """\
Copies tables into the lake, through the publication's filter and columns, while the application
writes. `{name}_cdc` applies changes to a table as soon as its copy is complete.

- **tables**: the tables to copy, as `schema.table`. Empty: all tables without a complete copy.
- **reason**: stored in the ledger with the copy.
- **due**: of these, only tables that get no changes until they are copied.
- `{name}_cdc` triggers runs named `copy_again__…` for tables that need a new copy. Keep this DAG
  unpaused.
- *If it fails*: the next attempt copies the failed tables again, not the finished ones.
""",
    "cdc": """\
Brings the source's changes into the lake. `slot_has_changes` ends the run when there are none; it
still moves the slot, so that an idle table keeps no WAL. Otherwise: land → apply → check → report.

- **land**: makes changes durable in the lake, then moves the slot.
- **apply**: one commit per target and batch. A failing table does not delay the others.
- **check**: runs the expectations of changed targets. *If it fails*, the changes are applied; the
  log names the failed expectations and the report.
- **report**: emits one asset event per changed target that passed its critical expectations.
- **copy_again**: triggers `{name}_initial_sync` for large tables that need a new copy. *If it
  fails*, that DAG is paused.
- **fail_the_run**: fails the run when a stage failed, because check and report still run for the
  other tables.
- *If a run fails*, the next one continues. Clear a task to repeat its stage. Airflow does not retry
  errors that need an operator.
- **A backfill**, or a cleared run that had succeeded, *replays*: it brings the rows
  that its interval's runs changed to the source's present state. It can be repeated.
""",
    "resync": """\
Continues after the stream broke: the slot was lost, dropped or moved by another program, the source
was restored or replaced, or PostgreSQL cannot decode a change (`SlotLost`, `SlotMissing`,
`SlotGap`, `SourceChanged`, `SlotUnreadable`). It recreates the slot, compares each table with its
target by key, and writes only the rows that differ. It copies tables without a key completely.

- **tables**: the tables to repair, as `schema.table`. Empty: all that the new slot has no copy of.
- **reason**: stored in the ledger with the copy.
- With a healthy slot it only repairs the named or waiting tables.
- *If it fails*: run it again. It skips finished tables.
""",
    "decide": """\
Decides what happens to what waits: rows in quarantine, tables that an expectation with `gate: stop`
stopped, and unreadable messages. The user who triggered the run is recorded.

- **action**:
{actions}
- **tables**: the tables; `release` needs them.
- **ids**: of rows and messages, for `accept`, `discard` and `skip`.
- **reason**: stored with the user; every action but `retry` needs it.
- *If it fails*: nothing was decided, or the named tables could not be read; run it again.
  `QualityFailed` means that the rows were written and an expectation failed.
""",
    "reconcile": """\
Compares targets with the source, while the application writes and `{name}_cdc` runs. It compares
checksums of one snapshot with one version of the target. Rows that changed during the comparison
are skipped.

- **tables**: the tables to compare, as `schema.table`. Empty: all replicated tables.
- **repair**: read the rows that differ again and correct them in the target.
- **reason**: stored in the ledger with the repair.
- *If it fails* with `TargetDiffers`: the page "reconciliation" shows the rows, columns and both
  values. Find out who wrote to the target, then trigger this DAG with **repair**.
- A table that cannot be compared does not fail the run; a warning says why.
""",
    "maintenance": """\
Compacts and vacuums the targets and the pipeline's own tables, and removes old reports. The change
log keeps {days} days, time travel {hours} hours.
""",
}


def dag_page(pipeline: PipelineFile, kind: str, path: str) -> str:
    """Markdown of one DAG's page."""
    keep = pipeline.maintenance
    text = _KINDS[kind].format(
        name=pipeline.pipeline,
        days=keep.keep_changes_days,
        hours=keep.keep_versions_hours,
        actions="\n".join(f"  - `{name}`: {action.does}" for name, action in ACTIONS.items()),
    )
    return "\n".join(
        [f"# {pipeline.pipeline}: {kind.replace('_', ' ')}", "", text, *_facts(pipeline, path)]
    )


def _facts(pipeline: PipelineFile, path: str) -> Iterator[str]:
    yield from ("| | |", "| --- | --- |")
    yield f"| pipeline file | `{path}` |"
    read_from = (
        f" on the standby of connection `{pipeline.source.read_from}`"
        if pipeline.source.read_from
        else ""
    )
    yield (
        f"| source | connection `{pipeline.source.conn_id}`, slot"
        f" `{pipeline.source.slot}`{read_from} |"
    )
    yield f"| target | `{pipeline.target.written_root}` |"
    yield f"| Spark | connection `{pipeline.spark_conn_id}` |"
    yield f"| pool | `{pipeline.pool}` (one slot; without the pool, tasks wait forever) |"
    for publication in pipeline.source.publications:
        # Names may have any characters.
        published = visible(" ".join("<br>".join(_publication_lines(publication)).split()))
        escaped = published.replace("|", "\\|")
        yield f"| publication `{publication.name}` | {escaped} |"


def _publication_lines(publication: Publication) -> Iterator[str]:
    yield ", ".join(publication.publish)
    if publication.all_tables:
        yield "all tables"
    yield from (f"schema `{schema}`" for schema in publication.schemas)
    for table in publication.tables:
        where = f" where `{table.where}`" if table.where else ""
        columns = f" ({', '.join(table.columns)})" if table.columns else ""
        without = f" without `{'`, `'.join(table.exclude)}`" if table.exclude else ""
        yield f"`{table.name}`{without}{columns}{where}"
