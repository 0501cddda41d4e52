"""What a job is given, what its end means to Airflow, and that secrets stay hidden."""

import json
import logging
import os
import signal
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
    DagRunTriggerException,
)
from airflow.sdk.execution_time.timeout import TimeoutPosix

from tests.cases import cases
from tests.support.fixtures.airflow import PIPELINE
from tests.support.waiting import wait_until
from tests.unit.waldelta_airflow.conftest import PASSWORD, TOKEN
from waldelta.config import load_pipeline_file
from waldelta.lake import Lake
from waldelta.spark.settings import driver_settings
from waldelta_airflow.launchers import job_process
from waldelta_airflow.launchers.job_process import TaskFailed, TaskFailedForGood
from waldelta_airflow.operators.job_operator import (
    CopyAgainOperator,
    DecisionReportOperator,
    ReportOperator,
    WaldeltaJobOperator,
)

FAILED = {"status": "failed", "stages": {"land": {"status": "failed"}}}


@pytest.fixture
def make_task(write_pipeline):
    path = write_pipeline("shop")

    def make(verb: str = "consume", stage: str | None = None, **kwargs) -> WaldeltaJobOperator:
        pipeline = load_pipeline_file(path)
        return WaldeltaJobOperator(
            task_id=stage or verb, pipeline_path=path, pipeline=pipeline, verb=verb, stage=stage,
            **kwargs,
        )  # fmt: skip

    return make


def use_spark_submit(monkeypatch, host: str = "local[2]", **extra: str) -> None:
    connection = {"conn_type": "spark", "host": host, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", json.dumps(connection))


def ledger_says(pipeline, run_id: str, result: dict, verb: str = "consume") -> None:
    from waldelta.lake.ledger import Ledger, Run, now

    Ledger(Lake(pipeline.target.root)).append(
        Run(now(), run_id, verb, result["status"], result=json.dumps(result))
    )


@pytest.mark.parametrize("run_type", ["scheduled", "backfill"])
def test_the_job_gets_run_interval_and_stage(make_task, make_context, job, run_type):
    """Which run, which interval, which stage; a backfill's interval is replayed."""
    options = {"tables": "public.a,public.b", "reason": "", "dry-run": "True", "repair": "True"}
    task = make_task(stage="land", options=options | {"x": "None"})
    task.execute(make_context(run_type=run_type))
    assert job.seen["argv"][:2] == ["consume", task.pipeline_path]
    result = job.options.pop("result")
    assert {k: v for k, v in job.options.items() if k != "result"} == {
        "run-id": f"{run_type}__2026-01-01",
        "lock-wait": "600",
        "run-type": run_type,
        "stage": "land",
        "interval-start": "2026-01-01T00:00:00+00:00",
        "interval-end": "2026-01-01T00:05:00+00:00",
        "tables": "public.a,public.b",
        "dry-run": "",
        "repair": "",
    }
    assert not Path(result).exists(), "the result's folder is removed"


def test_what_differs_is_measured_where_it_is_found(make_task, make_context, job, monkeypatch):
    """That ends the task, and the report with all other metrics never comes."""
    sent = []
    monkeypatch.setattr(
        "airflow.sdk.observability.stats.gauge",
        lambda name, value, tags: sent.append((name, value)),
    )
    stages = {"reconcile": {"status": "failed", "seconds": 1.0}}
    result = {
        "verb": "reconcile",
        "status": "failed",
        "stages": stages,
        "tables": {"public.a": {"differing": 2}},
    }
    job.does(result=result, exit=1)
    with pytest.raises(TaskFailedForGood):
        make_task("reconcile", "reconcile").execute(make_context())
    assert sent == [("waldelta.shop.differing_rows.public_a", 2)]


UNMET = {"report": {"status": "failed", "error": {"class": "QualityFailed", "message": "m"}}}
TRIES = [
    ("it went well", {"report": {"status": "succeeded"}}, 1, [12]),
    ("it is tried again", {"report": {"status": "failed"}}, 2, []),
    ("that was the last try", {"report": {"status": "failed"}}, 3, [12]),
    ("trying again doesn't help", UNMET, 1, [12]),
]


@cases("stages, try_number, counted", TRIES)
def test_a_run_is_counted_once(
    make_task, make_context, job, monkeypatch, stages, try_number, counted
):
    """However often its report is tried; what it measured is told each time."""
    measured, added = {}, []
    monkeypatch.setattr(
        "airflow.sdk.observability.stats.gauge",
        lambda name, value, tags: measured.update({name: value}),
    )
    monkeypatch.setattr(
        "airflow.sdk.observability.stats.incr", lambda name, count, tags: added.append(count)
    )
    error = {"class": "SourceUnreachable", "message": "gone", "retryable": True}
    result = {"verb": "consume", "status": "failed", "stages": stages, "changes": 12}
    job.does(result=result | {"error": error})
    with suppress(TaskFailed, TaskFailedForGood):
        make_task("consume", "report").execute(make_context(try_number=try_number, max_tries=2))
    assert added == counted
    assert measured["waldelta.shop.consume.failed_expectations"] == 0


def test_secrets_travel_in_the_environment_only(make_task, make_context, job, caplog):
    """The environment holds the source and the Spark server's token, nothing else."""
    caplog.set_level(logging.DEBUG)
    task = make_task(stage="land")
    pushed = task.execute(make_context())
    environment = job.seen["environment"]
    assert json.loads(environment["AIRFLOW_CONN_SHOP_SOURCE"])["password"] == PASSWORD
    assert environment["SPARK_REMOTE"] == f"sc://localhost:15002/;token={TOKEN}"
    assert {k for k in environment if k.startswith("AIRFLOW_")} <= {
        "AIRFLOW_CONN_SHOP_SOURCE",
        "AIRFLOW_HOME",
    }
    shown = json.dumps([job.seen["argv"], pushed, task.options]) + caplog.text
    assert PASSWORD not in shown
    assert TOKEN not in shown


def test_a_standby_s_connection_travels_beside_the_primary_s(
    write_pipeline, make_context, job, caplog, monkeypatch
):
    """Both are in the job's environment, and neither password in its arguments or the log."""
    caplog.set_level(logging.DEBUG)
    standby = {"conn_type": "postgres", "host": "db2", "login": "cdc", "schema": "app"}
    standby["password"] = "0ther/of the+standby"
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_STANDBY", json.dumps(standby))
    path = write_pipeline("shop")
    path.write_text(path.read_text().replace("source:\n", "source:\n  read_from: shop_standby\n"))
    pipeline = load_pipeline_file(path)
    named = {"task_id": "land", "verb": "consume", "stage": "land"}
    task = WaldeltaJobOperator(pipeline_path=path, pipeline=pipeline, **named)
    pushed = task.execute(make_context())
    environment = job.seen["environment"]
    found = {name for name in environment if name.startswith("AIRFLOW_CONN_")}
    assert found == {"AIRFLOW_CONN_SHOP_SOURCE", "AIRFLOW_CONN_SHOP_STANDBY"}
    assert json.loads(environment["AIRFLOW_CONN_SHOP_STANDBY"])["password"] == standby["password"]
    shown = json.dumps([job.seen["argv"], pushed, task.options]) + caplog.text
    assert PASSWORD not in shown
    assert standby["password"] not in shown


def test_the_conninfo_read_back_is_the_connection():
    """A password with every special character survives the way through the environment."""
    from psycopg.conninfo import conninfo_to_dict

    from waldelta_airflow._connections import source_conninfo

    fields = conninfo_to_dict(source_conninfo("shop_source"))
    assert (fields["password"], fields["host"], fields["dbname"]) == (PASSWORD, "db", "app")


class _Elsewhere:
    """A launcher of another kind: what it runs is a line of its own."""

    def __init__(self, arguments, environment):
        self.arguments, self.environment, self.ends = arguments, environment, 0

    def run(self):
        path = next(a for a in self.arguments if a.startswith("--result=")).partition("=")[2]
        Path(path).write_text(json.dumps({"verb": "check", "status": "succeeded"}))
        return 0

    def end(self):
        self.ends += 1


def test_a_launcher_of_another_kind_runs_and_ends_a_job(make_task, make_context, monkeypatch):
    """The operator knows only the protocol."""
    launched = []

    def launch(*job):
        launched.append(_Elsewhere(*job))
        return launched[-1]

    monkeypatch.setattr("waldelta_airflow.operators.job_operator.process_of", launch)
    task = make_task("check")
    assert task.execute(make_context()) == {"verb": "check"}
    task.on_kill()
    assert [(job.arguments[0], job.ends) for job in launched] == [("check", 1)]


def test_verbs_without_spark_need_no_spark_connection(make_task, make_context, job, monkeypatch):
    """Setup and preflight run though the Spark connection doesn't exist."""
    monkeypatch.delenv("AIRFLOW_CONN_WALDELTA_SPARK")
    make_task("check").execute(make_context())
    assert "SPARK_REMOTE" not in job.seen["environment"]


@pytest.mark.parametrize("verb", ["check", "setup"])
@pytest.mark.parametrize("accepts", [False, True])
def test_a_lake_on_s3_is_probed_by_the_session_that_jobs_get(
    write_pipeline, make_context, job, verb, accepts
):
    """Spark finds the store by settings that are where the connection leads."""
    on_s3(write_pipeline, verb, accepts=accepts).execute(make_context())
    assert "SPARK_REMOTE" in job.seen["environment"]


def test_the_store_s_connection_travels_in_the_environment_only(
    write_pipeline, make_context, job, monkeypatch, caplog
):
    """As the source's does."""
    caplog.set_level(logging.DEBUG)
    stored = {"conn_type": "aws", "login": "key", "password": PASSWORD, "extra": "{}"}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_LAKE", json.dumps(stored))
    on_s3(write_pipeline, "check", "conn_id: shop_lake").execute(make_context())
    given = json.loads(job.seen["environment"]["AIRFLOW_CONN_SHOP_LAKE"])
    assert (given["conn_type"], given["password"]) == ("aws", PASSWORD)
    assert PASSWORD not in json.dumps(job.seen["argv"]) + caplog.text


def test_a_missing_connection_of_the_store_is_named(write_pipeline, make_context, job):
    with pytest.raises(TaskFailedForGood, match="no connection 'shop_lake' for target"):
        on_s3(write_pipeline, "check", "conn_id: shop_lake").execute(make_context())


def test_a_lake_on_s3_is_probed_by_the_application_that_jobs_are(
    write_pipeline, make_context, job, spark_submit_program, monkeypatch
):
    """spark-submit's settings are known in its application only."""
    use_spark_submit(monkeypatch)
    on_s3(write_pipeline, "check").execute(make_context())
    assert job.seen["environment"]["WALDELTA_LAUNCHER"] == "SPARK_SUBMIT"
    submitted = spark_submit_program.read_text().splitlines()
    verb = submitted.index("check")
    assert submitted[verb - 1].endswith("/waldelta/cli/submitted/waldelta_job.py")


def on_s3(
    write_pipeline, verb: str, target: str = "", *, accepts: bool = False
) -> WaldeltaJobOperator:
    text = PIPELINE.replace("{root}", "s3a://lake/shop")
    settings = ["accept_unsafe_store: true" if accepts else "", target]
    path = write_pipeline("shop", "\n".join(f"  {one}" for one in settings if one), text)
    return WaldeltaJobOperator(
        task_id=verb, pipeline_path=path, pipeline=load_pipeline_file(path), verb=verb
    )


def test_the_output_is_logged_line_by_line(make_task, make_context, job, caplog):
    """Each line of standard output and error is a line of the task's log."""
    caplog.set_level(logging.INFO)
    job.does(lines=["landed 10 changes", "stderr: a warning"], result={"status": "succeeded"})
    make_task().execute(make_context())
    logged = [
        r.getMessage() for r in caplog.records if r.name == "waldelta_airflow.launchers.job_process"
    ]
    assert sorted(logged) == ["landed 10 changes", "stderr: a warning"]


def test_the_summary_goes_to_xcom(make_task, make_context, job):
    """Counts and positions go on to later tasks; errors and stage details don't."""
    tables = {"public.flights": {"inserted": 3}}
    job.does(
        result={
            "status": "succeeded",
            "run_id": "r",
            "tables": tables,
            "changes": 3,
            "stages": {},
            "error": None,
        }
    )
    assert make_task().execute(make_context()) == {"run_id": "r", "tables": tables, "changes": 3}


@pytest.mark.parametrize("retryable, kind", [(True, TaskFailed), (False, TaskFailedForGood)])
def test_only_errors_that_can_go_away_are_retried(make_task, make_context, job, retryable, kind):
    """The error's class and its whole message, of several lines, are the task's failure."""
    error = {
        "class": "PreflightFailed",
        "message": "refused:\n  - a\n  - b",
        "retryable": retryable,
    }
    job.does(result=FAILED | {"error": error}, exit=1)
    with pytest.raises(kind) as failure:
        make_task(stage="land").execute(make_context())
    assert type(failure.value) is kind
    assert str(failure.value) == "PreflightFailed: refused:\n  - a\n  - b"


def test_a_failed_check_says_where_the_report_is(make_task, make_context, job):
    """Failed expectations by name, and the path of the report."""
    error = {
        "class": "QualityFailed",
        "message": "1 critical expectation failed",
        "retryable": False,
    }
    job.does(
        result={
            "status": "failed",
            "stages": {"check": {"status": "failed", "error": error}},
            "error": error,
            "failed_expectations": ["public.flights: expect_column_values_to_not_be_null(origin)"],
            "report": "/lake/_waldelta/data_docs/index.html",
        },
        exit=1,
    )
    with pytest.raises(AirflowFailException) as failure:
        make_task(stage="check").execute(make_context())
    assert str(failure.value).splitlines() == [
        "QualityFailed: 1 critical expectation failed",
        "  failed: public.flights: expect_column_values_to_not_be_null(origin)",
        "report: /lake/_waldelta/data_docs/index.html",
    ]


def test_another_stages_error_leads_to_no_report(make_task, make_context, job):
    """The report is about the tables that were checked. Each task shows its own stage's error."""
    error = {"class": "SchemaChanged", "message": "public.a: retyped", "retryable": False}
    own = {"class": "SourceUnreachable", "message": "gone", "retryable": True}
    stages = {
        "apply": {"status": "failed", "error": error},
        "check": {"status": "succeeded"},
        "report": {"status": "failed", "error": own},
    }
    result = {"status": "failed", "stages": stages, "error": error}
    more = {"report": "/docs/public.b.html", "failed_expectations": ["public.b: id has no nulls"]}
    job.does(result=result | more, exit=1)
    for stage in ("apply", None):
        with pytest.raises(AirflowFailException) as failure:
            make_task(stage=stage).execute(make_context())
        assert str(failure.value) == "SchemaChanged: public.a: retyped"
    with pytest.raises(AirflowException, match=r"^SourceUnreachable: gone$"):
        make_task(stage="report").execute(make_context())


@pytest.mark.parametrize(
    "plan, kind, text",
    [
        ({"exit": 2}, AirflowFailException, "the job refused its arguments"),
        ({"exit": 1}, AirflowException, "the job ended with exit code 1 before it could report"),
        ({"signal": signal.SIGKILL}, AirflowException,
         "the job was ended by signal 9 before it could report"),
        ({"exit": 0}, AirflowException, "the job ended with exit code 0 before it could report"),
    ],
)  # fmt: skip
def test_a_job_without_a_result_failed(make_task, make_context, job, plan, kind, text):
    """A job that leaves no result failed, whatever its exit code."""
    job.does(**plan)
    with pytest.raises(kind, match=text) as failure:
        make_task().execute(make_context())
    assert type(failure.value) is kind


def test_a_connection_of_another_type_is_refused(make_task, make_context, job, monkeypatch):
    """Neither a wrong Spark connection nor a wrong source starts the job."""
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", "http://x")
    with pytest.raises(
        AirflowFailException, match="'waldelta_spark' has type 'http': give spark_conn_id"
    ):
        make_task().execute(make_context())
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", "mysql://x:secret@y/z")
    with pytest.raises(
        AirflowFailException,
        match="'shop_source' has type 'mysql': choose a connection of type postgres",
    ):
        make_task().execute(make_context())
    assert not job.ran


@pytest.mark.parametrize("stubborn", [False, True])
def test_kill_ends_the_job_and_what_it_started(make_task, make_context, job, stubborn, monkeypatch):
    """SIGTERM for the group, SIGKILL before Airflow kills the task, which it does after 5 s."""
    assert job_process.KILL_JOB_AFTER_S < 5
    monkeypatch.setattr(job_process, "KILL_JOB_AFTER_S", 0.2)
    job.does(sleep_s=60, stubborn=stubborn, lines=[])
    task, started, ended = make_task(), job.folder / "started", []

    def run() -> None:
        with pytest.raises(AirflowException):
            task.execute(make_context())
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: started.exists() and started.read_text().count(" "))
    task.on_kill()
    thread.join(timeout=60)
    assert ended, "the task ended"
    for pid in map(int, started.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))


@pytest.mark.parametrize(
    "stage, kind", [("apply", TaskFailedForGood), ("land", AirflowTaskTimeout)]
)
def test_only_landing_is_tried_again_when_it_ran_out_of_time(
    make_task, make_context, job, stage, kind, monkeypatch
):
    """The next run lands before it applies the rest: retrying apply would prevent that."""
    monkeypatch.setattr(job_process, "KILL_JOB_AFTER_S", 0.2)
    job.does(sleep_s=60, lines=[])
    task = make_task(stage=stage, first=stage == "land", execution_timeout=timedelta(seconds=90))
    started = job.folder / "started"

    def run_out() -> None:
        wait_until(lambda: started.exists() and started.read_text().count(" "))
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=run_out).start()
    with pytest.raises(kind) as ended, TimeoutPosix(90):
        task.execute(make_context())
    if stage == "land":
        task.on_kill()  # as Airflow does
    else:
        assert ended.value.kinds == ("StageTimeout",)
        assert str(ended.value).startswith("StageTimeout: Airflow ended apply after 1.5 minutes")
    for pid in map(int, started.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))


@pytest.mark.parametrize("submits", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_task_takes_its_job_along(
    make_task, make_context, job, request, monkeypatch, submits
):
    """kill -9 leaves a task no time; its job, and what that started, end all the same."""
    if submits:
        request.getfixturevalue("spark_submit_program")
        use_spark_submit(monkeypatch)
    job.does(sleep_s=60, lines=[])
    task, context, started = make_task(stage="apply"), make_context(), job.folder / "started"
    pid = os.fork()
    if pid == 0:
        try:
            task.execute(context)
        finally:
            os._exit(1)
    wait_until(lambda: started.exists() and started.read_text().count(" "))
    wait_until(lambda: len(psutil.Process(pid).children()) == 2)  # the job and its watcher
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for process in map(int, started.read_text().split()):
        wait_until(lambda process=process: not alive(process))


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_spark_submit_runs_all_stages_in_one_application(
    make_task, make_context, job, spark_submit_program, monkeypatch
):
    """The first stage's task submits without --stage; it is judged by its own stage only."""
    use_spark_submit(monkeypatch)
    stages = {"land": {"status": "succeeded"}, "apply": {"status": "failed"}}
    error = {"class": "ApplyError", "message": "no", "retryable": False}
    job.does(result={"status": "failed", "stages": stages, "error": error}, exit=1)
    make_task(stage="land", first=True).execute(make_context())
    assert "stage" not in job.options
    assert "again" in job.options  # It continues what a process has begun.
    assert "WALDELTA_WITHOUT_SPARK" not in job.seen["environment"]
    assert spark_submit_program.stat().st_mode & 0o077 == 0
    submitted = spark_submit_program.read_text().splitlines()
    assert submitted[:2] == ["--master", "local[2]"]
    assert "--py-files" not in submitted
    assert submitted[submitted.index("--jars") + 1].endswith("delta.jar")
    assert {f"{key}={value}" for key, value in driver_settings().items()} <= set(submitted)
    environment = job.seen["environment"]
    assert json.loads(environment["AIRFLOW_CONN_SHOP_SOURCE"])["password"] == PASSWORD
    assert environment["WALDELTA_LAUNCHER"] == "SPARK_SUBMIT"
    assert "SPARK_REMOTE" not in environment
    assert PASSWORD not in spark_submit_program.read_text()


WHOLE = {
    "consume": {"stage": "land", "first": True},
    "sync": {"verb": "sync", "stage": "sync", "first": True},
    "resync": {"verb": "resync", "stage": "resync", "first": True},
    "reconcile": {"verb": "reconcile", "stage": "reconcile", "first": True},
    "decide": {"verb": "decide"},
    "maintain": {"verb": "maintain"},
}


@pytest.mark.parametrize("task", WHOLE.values(), ids=WHOLE)
def test_a_small_run_submits_nothing(
    make_task, make_context, job, spark_submit_program, monkeypatch, task
):
    """Its process ends it without Spark, or with an error of its own: no application follows."""
    use_spark_submit(monkeypatch)
    job.does(result={"status": "succeeded", "changes": 7}, small=True)
    assert make_task(**task).execute(make_context()) == {"changes": 7}
    assert job.seen["environment"]["WALDELTA_WITHOUT_SPARK"] == "1"
    assert job.options.keys().isdisjoint({"stage", "again"})
    job.does(exit=1, small=True)
    with pytest.raises(AirflowException, match="ended with exit code 1"):
        make_task(**task).execute(make_context())
    assert not spark_submit_program.exists()


@pytest.mark.parametrize("task", WHOLE.values(), ids=WHOLE)
def test_an_application_continues_what_a_process_has_left(
    make_task, make_context, job, spark_submit_program, monkeypatch, task
):
    """It is told so, and submitted once."""
    use_spark_submit(monkeypatch)
    job.does(result={"status": "succeeded", "changes": 7})
    assert make_task(**task).execute(make_context()) == {"changes": 7}
    assert spark_submit_program.exists()
    assert "again" in job.options
    assert "stage" not in job.options


def test_with_runner_spark_no_process_comes_before_the_application(
    write_pipeline, make_context, job, spark_submit_program, monkeypatch
):
    """Spark does all work, however small it is."""
    use_spark_submit(monkeypatch)
    monkeypatch.setenv("WALDELTA_WITHOUT_SPARK", "of the worker")
    job.does(result={"status": "succeeded", "changes": 7}, small=True)
    path = write_pipeline("shop", "runner: spark")
    operator = WaldeltaJobOperator(
        task_id="t", pipeline_path=path, pipeline=load_pipeline_file(path), verb="consume",
        stage="land", first=True,
    )  # fmt: skip
    assert operator.execute(make_context()) == {"changes": 7}
    assert spark_submit_program.exists()
    assert "again" not in job.options
    assert "WALDELTA_WITHOUT_SPARK" not in job.seen["environment"]


def test_later_stages_read_how_theirs_went(
    make_task, make_context, job, spark_submit_program, monkeypatch
):
    """No second application: apply's outcome and error come from the ledger, by run id."""
    use_spark_submit(monkeypatch)
    context, task = make_context(), make_task(stage="apply")
    error = {"class": "LateWriter", "message": "too late", "retryable": True}
    stages = {"land": {"status": "succeeded"}, "apply": {"status": "failed"}}
    ledger_says(
        task.pipeline,
        context["dag_run"].run_id,
        {"status": "failed", "stages": stages, "error": error},
    )
    with pytest.raises(AirflowException, match="LateWriter: too late"):
        task.execute(context)
    assert not job.ran
    stages["apply"] = {"status": "succeeded"}
    document = {"status": "succeeded", "stages": stages, "changes": 7}
    ledger_says(task.pipeline, context["dag_run"].run_id, document)
    assert task.execute(context) == {"changes": 7}
    assert not job.ran


@pytest.mark.usefixtures("spark_submit_program")
@pytest.mark.parametrize("try_number, reported", [(2, "apply"), (1, "land")])
def test_a_stage_tried_again_or_never_reached_is_submitted_alone(
    make_task, make_context, job, monkeypatch, try_number, reported
):
    """A retry, or a stage behind a dead application, has an application of its own."""
    use_spark_submit(monkeypatch)
    context, task = make_context(try_number=try_number), make_task(stage="apply")
    document = {"status": "failed", "stages": {reported: {"status": "failed"}}, "error": None}
    ledger_says(task.pipeline, context["dag_run"].run_id, document)
    job.does(result={"status": "succeeded", "stages": {"apply": {"status": "succeeded"}}})
    task.execute(context)
    assert job.options["stage"] == "apply"


def test_executors_elsewhere_get_our_packages(
    make_task, make_context, job, spark_submit_program, monkeypatch, tmp_path
):
    """On a cluster waldelta's zip goes along, from a folder of this user alone."""
    import zipfile

    from waldelta_airflow.launchers.spark_submit import shipped_packages

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (forged := tmp_path / "forged").mkdir(mode=0o777)
    name = shipped_packages(forged).name
    (forged / name).write_text("forged")
    (tmp_path / "tmp" / f"waldelta-{os.getuid()}").symlink_to(forged)
    use_spark_submit(monkeypatch, host="spark://master:7077")
    make_task(stage="land", first=True).execute(make_context())
    submitted = spark_submit_program.read_text().splitlines()
    archive = Path(submitted[submitted.index("--py-files") + 1])
    expected = (name, False, True)
    assert (archive.name, archive.exists(), archive.is_relative_to(tmp_path / "tmp")) == expected
    shipped = tmp_path / "shipped" / name
    names = zipfile.ZipFile(shipped).namelist()
    assert {
        "waldelta/__init__.py",
        "waldelta/pgoutput/__init__.py",
        "waldelta/spark/session.py",
    } <= set(names)
    assert not [name for name in names if not name.startswith("waldelta/")]
    assert shipped.parent.stat().st_mode & 0o077 == 0
    assert "spark.driver.host=127.0.0.1" not in submitted


UNSUBMITTED = [
    # The password would have to travel as an argument.
    ("cluster mode", "yarn", {"deploy-mode": "cluster"}, {}, "set deploy-mode to client"),
    ("no jars", "local[2]", {}, {"WALDELTA_JARS": "/absent"}, "ConfigError: no Delta jars in"),
]


@pytest.mark.usefixtures("spark_submit_program")
@cases("host, extra, environment, text", UNSUBMITTED)
def test_what_cant_be_submitted_is_refused(
    make_task, make_context, job, monkeypatch, host, extra, environment, text
):
    use_spark_submit(monkeypatch, host=host, **extra)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AirflowFailException, match=text):
        make_task(stage="land", first=True).execute(make_context())
    assert not job.ran


def test_an_asset_event_per_changed_target(write_pipeline, make_context, job):
    """Only targets with changes that passed their check get an event, with counts and LSN range."""
    path = write_pipeline("shop")
    pipeline = load_pipeline_file(path)
    zero = {"inserted": 0, "updated": 0, "deleted": 0, "skipped": 0, "truncated": False}
    none = zero | {"version": None, "rows": None}
    tables = {
        "public.flights": none | {"inserted": 2, "updated": 1, "skipped": 1, "version": 4},
        "public.planes": none | {"skipped": 3},
        'public."Odd name"': none | {"truncated": True},
        "public.copied": none | {"rows": 0},
        "public.failed": none | {"inserted": 1},
        "public.behind": none | {"inserted": 1},
    }
    passed = sorted(set(tables) - {"public.failed"})
    bounds = {"run_id": "r", "start_lsn": "0/1", "end_lsn": "0/2"}
    done = {"status": "failed", "stages": {"report": {"status": "succeeded"}}, "tables": tables}
    done |= {"passed": passed, "not_applied": ["public.behind"]}
    job.does(result=done | {"report": "/d/index.html", **bounds})
    context = make_context()
    task = ReportOperator(task_id="report", pipeline_path=path, pipeline=pipeline, verb="consume")
    assert task.execute(context)["report"] == "/d/index.html"
    assert job.options["stage"] == "report"
    (events,) = context["outlet_events"].values()
    zero |= bounds
    assert {asset.name: extra for asset, extra in events.added} == {
        "shop/public.flights": zero | {"inserted": 2, "updated": 1, "skipped": 1, "version": 4},
        'shop/public."Odd name"': zero | {"truncated": True},
        "shop/public.copied": zero | {"rows": 0},
    }
    assert [asset.uri for asset, _ in events.added] == [
        f"{pipeline.target.root}/public/{name}" for name in ("Odd~20name", "copied", "flights")
    ]
    assert [alias.name for alias in task.outlets] == ["waldelta/shop"]


def test_the_report_that_the_check_made_is_not_made_again(
    write_pipeline, make_task, make_context, job
):
    """The check's client runs both; the report's task starts a process only if it didn't."""
    context = make_context()
    make_task(stage="check").execute(context)
    assert job.options["stage"] == "check,report"
    (job.folder / "seen.json").unlink()
    path = write_pipeline("shop")
    pipeline = load_pipeline_file(path)
    report = ReportOperator(task_id="report", pipeline_path=path, pipeline=pipeline, verb="consume")
    tables = {"public.flights": {"inserted": 1}}
    document = {"status": "failed", "stages": {"report": {"status": "succeeded"}}, "tables": tables}
    ledger_says(pipeline, context["dag_run"].run_id, document | {"passed": ["public.flights"]})
    report.execute(context)
    assert not job.ran
    (events,) = context["outlet_events"].values()
    assert [asset.name for asset, _ in events.added] == ["shop/public.flights"]
    ledger_says(
        pipeline, context["dag_run"].run_id, document | {"stages": {"apply": {"status": "failed"}}}
    )
    job.does(result={"status": "succeeded", "stages": {"report": {"status": "succeeded"}}})
    report.execute(make_context())
    assert job.options["stage"] == "report"


def test_a_failed_check_after_a_decision_prevents_only_its_own_event(
    write_pipeline, make_context, job
):
    """The report emits the events of the other tables; a release records no run and has none."""
    pipeline, context = load_pipeline_file(write_pipeline("shop")), make_context()
    report = DecisionReportOperator(task_id="report", pipeline_path="shop.yml", pipeline=pipeline)
    assert report.execute(context) == {}
    tables = {f"public.{name}": {"inserted": 1} for name in ("flights", "planes")}
    done = {"status": "failed", "tables": tables, "passed": ["public.flights"]}
    ledger_says(pipeline, context["dag_run"].run_id, done, "decide")
    report.execute(context)
    assert not job.ran
    (events,) = context["outlet_events"].values()
    assert [asset.name for asset, _ in events.added] == ["shop/public.flights"]


@pytest.mark.parametrize(
    "minutes, seconds", [(None, "600"), (60, "600"), (20, "600"), (5, "150"), (1, "30")]
)
def test_a_wait_for_another_run_leaves_time_to_work(make_task, make_context, minutes, seconds):
    """Otherwise Airflow ended the task with StageTimeout, and the lock would be shown nowhere."""
    limit = None if minutes is None else timedelta(minutes=minutes)
    task = make_task(stage="apply", execution_timeout=limit)
    assert f"--lock-wait={seconds}" in task.arguments(make_context(), Path("r.json"), ())


# Tables left to a copy; whether the other DAG is paused, its runs; what becomes of the task.
COPIES = {
    "none": ([], True, 0, AirflowSkipException, "no table"),
    "one": (["public.a"], False, 0, DagRunTriggerException, ""),
    "a run is under way": (["public.a"], False, 1, AirflowSkipException, "is already active"),
    "the DAG is paused": (["public.a"], True, 1, AirflowFailException,
     r"public\.a.* shop_initial_sync is paused"),
}  # fmt: skip


@pytest.mark.parametrize("case", COPIES)
def test_tables_left_to_a_copy_trigger_one_run(write_pipeline, make_context, case):
    """Of the initial sync, unless one is under way; a paused DAG is a failure."""
    tables, paused, runs, kind, text = COPIES[case]
    pipeline, context = load_pipeline_file(write_pipeline("shop")), make_context()
    run_id = context["dag_run"].run_id
    ledger_says(pipeline, run_id, {"status": "failed", "needs_sync": tables})
    seen = []
    context["ti"].get_dag = lambda dag_id: SimpleNamespace(dag_id=dag_id, is_paused=paused)
    context["ti"].get_dr_count = lambda dag_id, states: seen.append((dag_id, states)) or runs
    task = CopyAgainOperator(task_id="copy_again", pipeline=pipeline)
    with pytest.raises(kind, match=text or None) as end:
        task.execute(context)
    assert seen in ([], [("shop_initial_sync", ["queued", "running"])])
    if isinstance(end.value, DagRunTriggerException):
        assert end.value.trigger_dag_id == "shop_initial_sync"
        assert end.value.dag_run_id == f"copy_again__{run_id}"
        assert end.value.conf == {"tables": ["public.a"], "due": True}


def test_a_run_that_recorded_nothing_leaves_nothing_to_copy(write_pipeline, make_context):
    """Its first stage may have been killed."""
    task = CopyAgainOperator(
        task_id="copy_again", pipeline=load_pipeline_file(write_pipeline("shop"))
    )
    with pytest.raises(AirflowSkipException):
        task.execute(make_context())
