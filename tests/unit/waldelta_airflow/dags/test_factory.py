"""The DAGs of a folder of pipeline files, and what a wrong file does to others."""

import re
import textwrap
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from waldelta.errors import ConfigError
from waldelta_airflow.dags.factory import create_dags
from waldelta_airflow.settings import (
    ALERTS_DAG,
    ALERTS_VARIABLE,
    RETRY_DELAY_VARIABLE,
    alert_connections,
    retry_delay,
)

_REPOSITORY = Path(__file__).parents[4]

COPY = {"check": ["fail_the_run", "report"], "report": ["fail_the_run"], "fail_the_run": []}
COMPARE = {"report": ["fail_the_run"], "fail_the_run": []}
GRAPHS = {
    "setup": {"preflight": ["set_up"], "set_up": []},
    "initial_sync": {"sync": ["check", "fail_the_run", "report"]} | COPY,
    "resync": {"resync": ["check", "fail_the_run", "report"]} | COPY,
    "reconcile": {"reconcile": ["fail_the_run", "report"]} | COMPARE,
    "cdc": {"slot_has_changes": ["land"],
            "land": ["apply", "check", "copy_again", "fail_the_run", "report"],
            "apply": ["check", "copy_again", "fail_the_run"],
            "copy_again": ["fail_the_run"]} | COPY,
    "decide": {"decide": ["fail_the_run", "report"]} | COMPARE,
    "maintenance": {"maintain": []},
}  # fmt: skip


@pytest.fixture
def dags(write_pipeline):
    write_pipeline("shop", more="tags: [crm]\nowner: ada\nschedule: '*/10 * * * *'")
    return create_dags()


def dag_errors() -> tuple[dict[str, str], set[str]]:
    """Import errors and serialized DAGs, as Airflow's DAG processor finds them in dags/."""
    import structlog
    from airflow.dag_processing.dagbag import DagBag
    from airflow.dag_processing.processor import _serialize_dags

    bag = DagBag(dag_folder=str(_REPOSITORY / "dags"), bundle_path=_REPOSITORY / "dags")
    assert bag.import_errors == {}, "an error here would take all DAGs of the file down"
    serialized, errors = _serialize_dags(bag, structlog.get_logger())
    return errors, {dag.dag_id for dag in serialized}


def test_the_dag_of_alerts(write_pipeline, monkeypatch):
    """Only with a connection; then DAGs that people run report their own failures."""
    write_pipeline("shop")
    for nothing in ("", " , "):
        monkeypatch.setenv(ALERTS_VARIABLE, nothing)
        assert ALERTS_DAG not in create_dags()
    monkeypatch.setenv(ALERTS_VARIABLE, "slack, mail")
    assert alert_connections() == ["slack", "mail"]
    dags = create_dags()
    alerts = dags[ALERTS_DAG]
    expected = (False, False, 1)
    assert (alerts.is_paused_upon_creation, alerts.catchup, alerts.max_active_runs) == expected
    (task,) = alerts.tasks
    assert task.execution_timeout is not None
    assert "WALDELTA_ALERTS" in alerts.doc_md
    told = {name for name, dag in dags.items() if dag.tasks[0].on_failure_callback}
    assert told == {f"shop_{kind}" for kind in ("setup", "initial_sync", "resync", "decide")}
    assert dag_errors() == ({}, set(dags))


def test_the_dags_of_a_file(dags):
    """Exactly those of the stable surface, with their tasks, owner, tags, retries and limits."""
    graphs = {
        name: {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks}
        for name, dag in dags.items()
    }
    assert graphs == {f"shop_{kind}": graph for kind, graph in GRAPHS.items()}
    for kind in GRAPHS:
        dag = dags[f"shop_{kind}"]
        assert {"waldelta", "shop", kind, "crm"} <= set(dag.tags)
        assert "shop_cdc" in dag.doc_md
        assert "public.flights" in dag.doc_md
        assert (dag.max_active_runs, dag.catchup) == (1, False)
        for task in dag.tasks:
            assert task.owner == "ada"
            assert (task.retries >= 1) is (task.task_id != "fail_the_run")
            assert task.retry_delay > timedelta(0)
            assert task.execution_timeout is not None


@pytest.mark.parametrize(
    "timeout_s, calls_s",
    [(600, 10800), (30000, 30000)],
    ids=["as far as it is raised", "the file's own"],
)
def test_landing_outlasts_the_longest_call(write_pipeline, timeout_s, calls_s):
    """A window of that length is read twice: a shorter limit would kill every run there."""
    write_pipeline("shop", more=f"batch: {{statement_timeout_s: {timeout_s}}}")
    limit = create_dags()["shop_cdc"].get_task("land").execution_timeout
    assert limit == timedelta(seconds=2 * calls_s, hours=2)


def test_what_the_file_says_is_in_its_dags(write_pipeline, monkeypatch):
    """Landing waits for apply. Whoever may read the DAG reads its page; a variable's value may say
    more than they may know. Parsing requests nothing of the source, so patterns are as written.
    """
    monkeypatch.setenv("WALDELTA_LAKE", "file:///srv/inner/lake")
    more = "batch: {apply_timeout_minutes: 7}\nquality: {reconcile: {schedule: '0 5 * * *'}}"
    path = write_pipeline("shop", more=more)
    text = re.sub("root: .*", "root: ${WALDELTA_LAKE}/shop", path.read_text())
    planes = "- {name: public.planes, columns: [tailnum, year]}"
    path.write_text(text.replace(planes, "- {name: sales.*, exclude: [sales.tmp_*]}"))
    dags = create_dags()
    page = dags["shop_cdc"].doc_md
    assert "`sales.*` without `sales.tmp_*`" in page
    assert "${WALDELTA_LAKE}/shop" in page
    assert "inner" not in page
    assert dags["shop_cdc"].get_task("apply").execution_timeout == timedelta(minutes=7)
    assert dags["shop_reconcile"].timetable.summary == "0 5 * * *"


RULES = {
    # Once changes have landed, a failing table keeps no other from being checked and reported.
    "cdc": {"apply": "all_success", "check": "one", "copy_again": "one", "report": "one"},
    # Nothing comes before the sync that could have skipped it: its failure doesn't end the run.
    "initial_sync": {"sync": "all_success", "check": "all_done", "report": "one"},
    "resync": {"resync": "all_success", "check": "all_done", "report": "one"},
}


@pytest.mark.parametrize("kind", RULES)
def test_which_tasks_run_though_something_failed(dags, kind):
    rules = {t.task_id: t.trigger_rule.value for t in dags[f"shop_{kind}"].tasks}
    expected = RULES[kind] | {"fail_the_run": "one_failed"}
    assert {task: rules[task] for task in expected} == {
        task: "all_done_min_one_success" if rule == "one" else rule
        for task, rule in expected.items()
    }


def test_the_page_has_each_tasks_limit(dags):
    """And what becomes of a task that runs out of it."""
    page = (_REPOSITORY / "docs/reference/dags.md").read_text()
    section = page.split("## Time limits")[1].split("\n## ")[0]
    told = {}
    for tasks, of, number, unit, then in re.findall(
        r"^\| (.*?) \| (.*?) \| (\d+) (min|h)\b.*? \| (.*?) \|$", section, re.MULTILINE
    ):
        limit = timedelta(minutes=int(number) * (60 if unit == "h" else 1))
        named = set(re.findall(r"`_(\w+)`", of)) or set(GRAPHS)
        told |= {
            (kind, task): (limit, then)
            for task in re.findall(r"`(\w+)`", tasks)
            for kind in named & set(GRAPHS)
            if task in GRAPHS[kind]
        }
    assert told == {
        (kind, t.task_id): (t.execution_timeout, _then(t))
        for kind in GRAPHS
        for t in dags[f"shop_{kind}"].tasks
    }


def _then(task) -> str:
    if not task.retries:
        return "not retried"
    return "`StageTimeout`" if getattr(task, "has_one_chance", False) else "retried"


@pytest.mark.parametrize(
    "given, seconds",
    [(None, 20), ("", 20), ("1.5", 1.5), ("600", 600)]
    + [(given, None) for given in ("soon", "0", "-1", "601", "nan")],
)
def test_the_environment_says_how_long_a_first_retry_waits(monkeypatch, given, seconds):
    monkeypatch.delenv(RETRY_DELAY_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(RETRY_DELAY_VARIABLE, given)
    if seconds is None:
        with pytest.raises(ConfigError, match="WALDELTA_RETRY_DELAY"):
            retry_delay()
    else:
        assert retry_delay() == timedelta(seconds=seconds)


def test_runs_of_the_cdc_dag_leave_large_copies_to_the_initial_sync(dags):
    """The first two tasks say so to the job; a run of that DAG follows."""
    tasks = {t.task_id: t for t in dags["shop_cdc"].tasks}
    handing_over = {
        name for name, t in tasks.items() if getattr(t, "options", {}).get("hand-over") == "True"
    }
    assert handing_over == {"land", "apply"}
    assert tasks["copy_again"].trigger_dag_id == "shop_initial_sync"


def test_schedules(dags):
    """CDC and maintenance run over data intervals in UTC; the others only by hand."""
    from airflow.timetables.interval import CronDataIntervalTimetable

    kinds = {kind: dags[f"shop_{kind}"].timetable for kind in GRAPHS}
    assert kinds["cdc"].summary == "*/10 * * * *"
    for kind in ("cdc", "maintenance"):
        assert isinstance(kinds[kind], CronDataIntervalTimetable)
    for kind in ("setup", "initial_sync", "resync", "reconcile"):
        assert not kinds[kind].can_be_scheduled


def test_tasks_that_touch_the_slot_are_in_its_pool(dags):
    """The slot's own pool for what reads or makes the slot, the default pool for the rest."""
    pooled = {
        t.task_id for dag in dags.values() for t in dag.tasks if t.pool == "waldelta_shop_cdc"
    }
    assert pooled == {"slot_has_changes", "land", "set_up"}


def test_a_run_that_waits_for_a_missing_pool_fails_in_the_end(dags):
    """A day after its tasks' own limits, which end a run that works."""
    limited = {dag_id for dag_id, dag in dags.items() if dag.dagrun_timeout is not None}
    assert limited == {"shop_setup", "shop_cdc"}
    minutes = 2 * (4 * 15 + 3 * 10)  # two tasks, each with four attempts and three delays
    assert dags["shop_setup"].dagrun_timeout == timedelta(days=1, minutes=minutes)
    longest = max(task.execution_timeout for task in dags["shop_cdc"].tasks)
    assert dags["shop_cdc"].dagrun_timeout > timedelta(days=1) + 4 * longest
    assert dags["shop_cdc"].on_failure_callback is None  # the file names no notifier


PARAMS = {
    "setup": {"dry_run": False},
    "initial_sync": {"tables": None, "reason": None, "due": False},
    "decide": {"action": "retry", "tables": None, "ids": None, "reason": None},
    "resync": {"tables": None, "reason": None, "accept_server": None},
    "reconcile": {"tables": None, "repair": False, "reason": None},
}


def test_params(dags):
    """Params are typed, with defaults that are valid."""
    assert {kind: dags[f"shop_{kind}"].params.dump() for kind in PARAMS} == PARAMS


ASKED = [
    ({"tables": None, "repair": False, "reason": None}, None,
     {"tables": "", "repair": "False", "reason": "", "by": "Airflow"}),
    ({"tables": ["public.a", "public.b"], "repair": True, "reason": "a foreign writer"}, "mia",
     {"tables": "public.a,public.b", "repair": "True", "reason": "a foreign writer", "by": "mia"}),
]  # fmt: skip


@pytest.mark.parametrize("params, user, options", ASKED, ids=["as scheduled", "as pressed"])
def test_a_reconciliation_says_who_asked_for_it(dags, params, user, options):
    """The job's options, from the params and the user who triggered the run."""
    task = dags["shop_reconcile"].get_task("reconcile")
    task.render_template_fields(
        {"params": params, "dag_run": SimpleNamespace(triggering_user_name=user)}
    )
    assert task.options == options


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ("shcedule: '@daily'", "shcedule: unknown key: did you mean schedule?"),
        ("schedule: every day", "schedule: not a cron expression (Exactly 5, 6 or 7"),
        ("batch: {max_changes: 0}", "batch.max_changes"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_refused_file_is_an_import_error_of_its_own(write_pipeline, wrong, expected):
    """It is filed under the file, and names it; the other file's DAGs are all there."""
    write_pipeline("shop")
    bad = write_pipeline("crm", more=wrong)
    errors, dag_ids = dag_errors()
    assert list(errors) == [str(bad)]
    assert f"{bad} " in errors[str(bad)]
    assert expected in errors[str(bad)]
    assert dag_ids == {f"shop_{kind}" for kind in GRAPHS}


DOUBLES = [
    ("pipeline: b", "pipeline: a", "pipeline 'a' is also in {first}: rename one"),
    ("slot: b_cdc", "slot: a_cdc",
     "slot 'a_cdc' of connection 'a_source' is also in {first}: give each its own slot"),
    ("lake/b", "lake/a", "target.root '{lake}/a' is also in {first}: give each a root of its own"),
]  # fmt: skip


@pytest.mark.parametrize("own, other, expected", DOUBLES, ids=["name", "slot", "root"])
def test_two_files_with_one_pipeline_slot_or_lake_are_refused(
    write_pipeline, lake, own, other, expected
):
    """The second is an import error that names both; the first's DAGs are all there."""
    first, second = write_pipeline("a"), write_pipeline("b")
    second.write_text(second.read_text().replace(own, other).replace("b_source", "a_source"))
    errors, dag_ids = dag_errors()
    assert list(errors) == [str(second)]
    assert f"pipeline file {second} is refused: " in errors[str(second)]
    assert expected.format(first=first, lake=lake) in errors[str(second)]
    assert dag_ids == {f"a_{kind}" for kind in GRAPHS}


def test_tasks_get_a_relative_folder_as_an_absolute_one(write_pipeline, monkeypatch):
    """A task runs in another folder than the DAG processor."""
    path = write_pipeline("shop")
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("WALDELTA_PIPELINES", ".")
    assert create_dags()["shop_cdc"].get_task("land").pipeline_path == str(path)


def test_a_folder_without_pipeline_files(tmp_path, monkeypatch):
    """An empty one has no DAGs. One that is absent is an import error: it may be misspelt."""
    monkeypatch.setenv("WALDELTA_PIPELINES", str(tmp_path))
    assert create_dags() == {}
    monkeypatch.setenv("WALDELTA_PIPELINES", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"no folder .*absent of .*: set WALDELTA_PIPELINES"):
        create_dags()


@pytest.mark.parametrize(
    "page, dags",
    [("run-in-airflow", {f"shop_{kind}" for kind in GRAPHS}), ("read-a-cut", {"revenue"})],
)
def test_a_page_has_a_dag_file(write_pipeline, tmp_path, page, dags):
    """Airflow's safe mode finds it by its words."""
    from airflow.dag_processing.dagbag import DagBag

    write_pipeline("shop")
    text = (_REPOSITORY / f"docs/how-to/{page}.md").read_text()
    *_, code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (folder := tmp_path / "only_this").mkdir()
    (folder / "pipelines.py").write_text(textwrap.dedent(code))
    bag = DagBag(dag_folder=str(folder), bundle_path=folder, safe_mode=True)
    assert bag.import_errors == {}
    assert set(bag.dags) == dags


@pytest.mark.parametrize(
    ("params", "given"),
    [
        ({"action": "retry"}, ["retry"]),
        ({"action": "retry", "tables": ["public.a"], "reason": "it is back"},
         ["retry", "--tables=public.a", "--reason=it is back"]),
        ({"action": "discard", "ids": ["0123456789abcdef"], "reason": "noise"},
         ["discard", "--ids=0123456789abcdef", "--reason=noise"]),
        ({"action": "accept", "ids": ["0123456789abcdef"], "reason": "known"},
         ["accept", "--ids=0123456789abcdef", "--reason=known"]),
        ({"action": "release", "tables": ["public.a", "public.b"], "reason": "known"},
         ["release", "--tables=public.a,public.b", "--reason=known"]),
    ],
)  # fmt: skip
def test_the_decide_dag_hands_decisions_on(dags, params, given):
    """What was chosen, and who triggered the run."""
    from jinja2 import Environment

    run = SimpleNamespace(
        run_id="r",
        run_type="manual",
        data_interval_start=None,
        data_interval_end=None,
        triggering_user_name="ann",
    )
    task_instance = SimpleNamespace(try_number=1)
    chosen = {"tables": None, "ids": None, "reason": None} | params
    context = {"params": chosen, "dag_run": run, "ti": task_instance}
    task = dags["shop_decide"].get_task("decide")
    task.render_template_fields(context, Environment())
    arguments = task.arguments(context, Path("r.json"), ())
    assert (arguments[0], arguments[2]) == ("decide", given[0])
    assert sorted(arguments[2:]) == sorted(
        [
            *given,
            "--by=ann",
            "--run-id=r",
            "--run-type=manual",
            "--lock-wait=600",
            "--result=r.json",
        ]
    )
