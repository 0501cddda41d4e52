"""The operators: one runs a verb of the job, or a stage of it; another reports what a run
changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import BaseHook, BaseOperator, Connection, Context

from waldelta.config import PipelineFile, dag_id_of
from waldelta.config.parse_text import parse_json
from waldelta.errors import StageTimeout
from waldelta.quantities import counted
from waldelta.spark.jars import check_java
from waldelta.spark.settings import NEEDS_SPARK, WITHOUT_SPARK_VARIABLE
from waldelta_airflow import _connections as connections
from waldelta_airflow._airflow_versions import AirflowSkipException, AirflowTaskTimeout
from waldelta_airflow.launchers.job_process import (
    JobResult,
    Launcher,
    TaskFailed,
    TaskFailedForGood,
    named_failures,
    process_of,
)
from waldelta_airflow.reporting.assets import (
    changed_targets,
    changed_without_event,
    pipeline_alias,
    target_asset,
)
from waldelta_airflow.reporting.metrics import differing_rows, emit, gauges_of, metrics_of
from waldelta_airflow.reporting.notify import LAND, notify_critical
from waldelta_airflow.settings import LOCK_WAIT

if TYPE_CHECKING:
    from waldelta.pipeline import Job

WITHOUT_SPARK = frozenset({"check", "setup", "status", "teardown"})
_PREFLIGHT = frozenset({"check", "setup"})
_RUN_TYPES = ("scheduled", "manual", "backfill")
# Options without a value; any other option's text may be "True" too.
_FLAGS = ("dry-run", "sql", "hand-over", "again", "repair", "due")
_NOTHING = ("", "None", "False", "[]")
# The one option that follows the file without its name.
_ACTION = "action"
_CHECK, _REPORT, _RECONCILE = "check", "report", "reconcile"


class WaldeltaJobOperator(BaseOperator):
    """Runs a verb of the job, or one stage of it, as the pipeline's Spark connection requires.

    - ``spark_connect``: a child process that is a thin client of a running Spark Connect server.
      Each stage is a separate client, except the report, which the check's client also makes.
    - ``spark``: spark-submit, at most one application per DAG run. A run begins in a process
      without Spark, and an application runs the rest if it needs Spark. The task of the first
      stage runs all stages, and the tasks of the others read their results from the pipeline's
      ledger. A stage that is retried or cleared runs alone.

    :param pipeline_path: the pipeline file
    :param pipeline: its content
    :param verb: what to do; ``check``, ``setup``, ``status`` and ``teardown`` need no Spark, but
        the first two use Spark to probe a lake in an object store and to evaluate own expectations
    :param stage: the stage of the verb that this task runs
    :param first: whether this is the verb's first stage
    :param options: further command line options by name; empty values are left out, ``True`` makes
        a flag
    """

    template_fields: Sequence[str] = ("options",)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        pipeline_path: str | Path,
        pipeline: PipelineFile,
        verb: str,
        stage: str | None = None,
        first: bool = False,
        options: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline_path, self.pipeline = str(pipeline_path), pipeline
        self.verb, self.stage, self.first = verb, stage, first
        self.options = dict(options or {})
        self._running: Launcher | None = None
        self._done: Mapping[str, Any] = {}

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job and return its summary; its failure is raised as this task's."""
        with named_failures(), self._once():
            result = self._run(context)
        if self.stage == LAND:
            notify_critical(self.pipeline, result.document.get("slot_critical", ()), context)
        self._done = result.document
        if self.stage in (None, _REPORT):
            # Airflow retries the task when it fails with a retryable error.
            is_retried = _try_number(context) <= int(context["ti"].max_tries)
            again = is_retried and isinstance(result.failure(self.stage), TaskFailed)
            emit(self.pipeline.pipeline, result.document, gauges_of if again else metrics_of)
        elif self.stage == _RECONCILE:  # There is no report when a target differs.
            emit(self.pipeline.pipeline, result.document, differing_rows)
        result.require(self.stage)
        return result.summary()

    @property
    def has_one_chance(self) -> bool:
        """Returns whether the task isn't retried after a timeout, as for stages after landing.

        The next run, which lands first, is the better retry.
        """
        return self.verb == "consume" and self.stage not in (None, LAND)

    @contextmanager
    def _once(self) -> Iterator[None]:
        """Fail permanently on a timeout if the task has one chance."""
        try:
            yield
        except AirflowTaskTimeout:
            if not self.has_one_chance:
                raise
            self.on_kill()
            minutes = self.execution_timeout.total_seconds() / 60 if self.execution_timeout else 0.0
            limit = int(minutes) if minutes.is_integer() else round(minutes, 1)
            raise StageTimeout(
                f"Airflow ended {self.stage} after {counted(limit, 'minute')}; what it committed"
                " stays, and the next run lands first and then continues: find out what the job"
                " waited for, in its last lines above and in Spark; the limit of apply is"
                " batch.apply_timeout_minutes"
            ) from None

    def announce(self, context: Context, summary: Mapping[str, Any]) -> None:
        """Emit an asset event for each target that the run changed and that is fine.

        The task must have the pipeline's alias as its outlet.
        """
        events = context["outlet_events"][pipeline_alias(self.pipeline)]
        for table, extra in changed_targets(summary).items():
            self.log.info(
                "%s: %s", table, ", ".join(f"{name} {value}" for name, value in extra.items())
            )
            events.add(target_asset(self.pipeline, table), extra=extra)
        for table in changed_without_event(summary):
            self.log.warning(
                "no asset event for %s: the table is behind, wasn't checked, or failed its check",
                table,
            )

    def on_kill(self) -> None:
        """End the job and everything it started: first with SIGTERM, then by killing it."""
        if self._running is not None:
            self.log.info("ending the job")
            self._running.end()

    def _run(self, context: Context) -> JobResult:
        if self.stage == _REPORT and (result := self._outcome_so_far(context)) is not None:
            return result
        source = connections.source_environment(*self.pipeline.source.conn_ids)
        target = self.pipeline.target
        source |= connections.store_environment(target.root, target.conn_id)
        if target.catalog is not None:
            source |= connections.catalog_environment(target.catalog.conn_id)
        if self.verb in WITHOUT_SPARK and not self._preflight_needs_spark():
            return self._run_child(context, source)
        spark = connections.spark_connection(self.pipeline.spark_conn_id)
        if spark.conn_type == "spark_connect":
            remote = connections.connect_environment(self.pipeline.spark_conn_id)
            return self._run_child(context, source | remote)
        return self._outcome_so_far(context) or self._run_application(context, spark, source)

    def _preflight_needs_spark(self) -> bool:
        """Returns whether preflight probes an object store or evaluates own expectations.

        It does both by Spark.
        """
        from waldelta.config.expectation_files import has_suites
        from waldelta.lake import local_path

        return self.verb in _PREFLIGHT and (
            local_path(self.pipeline.target.root) is None
            or has_suites(self.pipeline.quality.suites)
        )

    def _run_child(self, context: Context, environment: Mapping[str, str]) -> JobResult:
        # A check also makes the report, whose task then needs no process.
        stages = (_CHECK, _REPORT) if self.stage == _CHECK else filter(None, [self.stage])
        with tempfile.TemporaryDirectory(prefix="waldelta-") as folder:
            result = Path(folder) / "result.json"
            environment = connections.job_environment(environment)
            return JobResult.read(result, self._run_process(context, result, stages, environment))

    def _run_process(
        self,
        context: Context,
        result: Path,
        stages: Iterable[str],
        environment: Mapping[str, str],
    ) -> int:
        arguments = self.arguments(context, result, stages)
        self.log.info("running %s", " ".join(arguments))
        self._running = process_of(arguments, environment)
        return self._running.run()

    def _run_application(
        self, context: Context, spark: Connection, source: Mapping[str, str]
    ) -> JobResult:
        from waldelta_airflow.launchers.spark_submit import spark_submit

        # A process runs what needs no Spark. The application continues its result in the ledger.
        begins = not connections.pipeline_lake(self.pipeline).on_spark
        alone = not self.first or _try_number(context) > 1
        with tempfile.TemporaryDirectory(prefix="waldelta-") as folder:
            result = Path(folder) / "result.json"
            stages = (self.stage,) if alone and self.stage else ()
            arguments = self.arguments(context, result, stages, continues=begins)
            environment = connections.job_environment(source, {"WALDELTA_LAUNCHER": "SPARK_SUBMIT"})
            application = spark_submit(
                spark, context["ti"].dag_id, arguments, Path(folder), environment
            )
            code = NEEDS_SPARK
            if begins:
                without = connections.job_environment(source, {WITHOUT_SPARK_VARIABLE: "1"})
                code = self._run_process(context, result, stages, without)
            if code == NEEDS_SPARK:
                self._running = application
                code = application.run()
                if code and not result.exists():
                    check_java()
            return JobResult.read(result, code)

    def _outcome_so_far(self, context: Context) -> JobResult | None:
        """Returns what an earlier task's process recorded of this stage; None if it didn't reach
        it.
        """
        if self.first or self.stage is None or _try_number(context) > 1:
            return None
        run_id = context["dag_run"].run_id
        result = _recorded_result(self.pipeline, run_id, self.verb)
        if result is None or not result.knows(self.stage):
            self.log.info(
                "no process of run %s has reached stage %s: running it now", run_id, self.stage
            )
            return None
        self.log.info(
            "stage %s of run %s: %s", self.stage, run_id, result.document["stages"][self.stage]
        )
        return result

    def arguments(
        self, context: Context, result: Path, stages: Iterable[str], *, continues: bool = False
    ) -> list[str]:
        """Returns the job's command line, which has no secrets.

        ``continues``: another process has begun the run.
        """
        run = context["dag_run"]
        # A wait for another run that took all of the task's time would end as a timeout, which
        # names another cause.
        lock_wait = min(LOCK_WAIT, (self.execution_timeout or timedelta.max) / 2)
        options = {
            "run-id": run.run_id,
            "run-type": _run_type(run),
            "stage": ",".join(stages),
            "again": str(continues or _try_number(context) > 1),
            "lock-wait": f"{lock_wait.total_seconds():g}",
            "result": str(result),
        }
        if run.data_interval_start and run.data_interval_end:
            options["interval-start"] = run.data_interval_start.isoformat()
            options["interval-end"] = run.data_interval_end.isoformat()
        # name=value in one argument, so that no value can be taken for another option.
        options_of_run = {**options, **self.options}
        action = filter(None, [options_of_run.pop(_ACTION, "")])
        texts = [
            f"--{name}" if name in _FLAGS and value == "True" else f"--{name}={value}"
            for name, value in options_of_run.items()
            if value not in _NOTHING
        ]
        return [self.verb, self.pipeline_path, *action, *texts]


class ReportOperator(WaldeltaJobOperator):
    """Runs the last stage of a verb and emits an asset event for each changed target that is fine.

    A target is fine if it got all changes of the run and met its critical expectations. The task
    itself succeeds when other tasks of its run failed, because only a successful task's events
    count.
    """

    def __init__(self, *, pipeline: PipelineFile, verb: str, **kwargs: Any) -> None:
        super().__init__(
            pipeline=pipeline,
            verb=verb,
            stage=_REPORT,
            outlets=[pipeline_alias(pipeline)],
            **kwargs,
        )

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the stage; its result has what all stages of the run did."""
        summary = super().execute(context)
        self.announce(context, summary)
        self.log.info("report: %s", summary.get("report") or "none")
        return summary

    def get_openlineage_facets_on_complete(self, _: Any) -> Any:
        """Returns what the run read and wrote; called only by OpenLineage's provider."""
        from waldelta_airflow.reporting.lineage import lineage

        connection = BaseHook.get_connection(self.pipeline.source.conn_id)
        return lineage(self.pipeline, self._done, connection)


class DecisionReportOperator(WaldeltaJobOperator):
    """Emits an asset event for each target that an operator's decision changed and that is fine.

    It reads what the run recorded, and starts no job. Only a retry and accepted rows change
    targets; what was released comes with the next CDC run.
    """

    def __init__(self, *, pipeline: PipelineFile, **kwargs: Any) -> None:
        super().__init__(
            pipeline=pipeline, verb="decide", outlets=[pipeline_alias(pipeline)], **kwargs
        )

    def execute(self, context: Context) -> dict[str, Any]:
        """Emit the events and return the run's summary."""
        result = _recorded_result(self.pipeline, context["dag_run"].run_id, self.verb)
        summary = {} if result is None else result.summary()
        self.announce(context, summary)
        return summary


class CopyAgainOperator(TriggerDagRunOperator):
    """Triggers the DAG of the initial sync for large tables of this run that need a new copy.

    It is skipped when there are none, and while a run of that DAG is unfinished: the next CDC run
    requests again what that run doesn't copy. So there is one such run at a time, however often a
    copy fails.
    """

    def __init__(self, *, pipeline: PipelineFile, **kwargs: Any) -> None:
        super().__init__(
            trigger_dag_id=dag_id_of(pipeline.pipeline, "initial_sync"),
            skip_when_already_exists=True,
            **kwargs,
        )
        self.pipeline = pipeline

    def execute(self, context: Context) -> None:
        """Trigger the run; raises TaskFailedForGood when the DAG is paused and would copy
        nothing.
        """
        result = _recorded_result(self.pipeline, context["dag_run"].run_id, "consume")
        tables = result.document.get("needs_sync", []) if result is not None else []
        if not tables:
            raise AirflowSkipException("no table needs a new copy any more")
        listed, dag, task = ", ".join(tables), self.trigger_dag_id, context["ti"]
        if task.get_dag(dag).is_paused:
            text = (
                f"tables that need a new copy: {listed}; their changes wait in the change log, but"
                f" {dag} is paused: unpause it"
            )
            raise TaskFailedForGood(text, ["NeedsSync"])
        if task.get_dr_count(dag, states=["queued", "running"]):
            raise AirflowSkipException(
                f"tables that need a new copy: {listed}; a run of {dag} is already active"
            )
        self.log.info("tables that need a new copy: %s", listed)
        # Another run may have copied some of them before that run begins.
        self.conf = {"tables": tables, "due": True}
        self.trigger_run_id = f"copy_again__{context['dag_run'].run_id}"
        super().execute(context)


def _recorded_result(pipeline: PipelineFile, run_id: str, verb: str) -> JobResult | None:
    """Returns the result so far of a run's processes, from the ledger; None without one.

    A CDC run that was cleared, or is a backfill, is a replay: the newest result of both counts.
    """

    from waldelta.lake.ledger import Ledger

    ledger = Ledger(connections.pipeline_lake(pipeline))
    verbs = (verb, "replay") if verb == "consume" else (verb,)
    runs = filter(None, (ledger.run_result(run_id, name) for name in verbs))
    newest = max(runs, key=lambda run: run.at, default=None)
    return JobResult(parse_json(newest.result)) if newest is not None else None


def job_of(
    context: Context, pipeline: PipelineFile, conninfo: str = "", read_conninfo: str | None = None
) -> Job:
    """Returns the run as the job's functions need it: its id, type and interval."""
    from waldelta.pipeline import Job, SourceConnections

    run = context["dag_run"]
    bounds = (run.data_interval_start, run.data_interval_end)
    return Job(
        pipeline,
        SourceConnections(pipeline.source, conninfo, read_conninfo),
        run.run_id,
        _run_type(run),
        *(bounds if all(bounds) else (None, None)),
        again=_try_number(context) > 1,
        lake=connections.pipeline_lake(pipeline),
    )


def _run_type(run: Any) -> str:
    run_type = str(getattr(run.run_type, "value", run.run_type))
    return run_type if run_type in _RUN_TYPES else "manual"


def _try_number(context: Context) -> int:
    return int(context["ti"].try_number)
