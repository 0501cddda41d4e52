"""Who is told of a failure, by its class, and what templates see of it."""

import re
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from airflow.sdk import BaseNotifier
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from waldelta.error_catalog import REMEDIES
from waldelta.errors import (
    ApplyError,
    PrivilegeMissing,
    SlotGap,
    SnapshotLost,
    SyncFailed,
    WaldeltaError,
)
from waldelta.stages.land.idle_check import IdleCheck
from waldelta_airflow.dags.factory import create_dags
from waldelta_airflow.launchers.job_process import JobResult, TaskFailed, named_failures
from waldelta_airflow.reporting.notify import describe_failure

NOTIFY = """\
notify:
  - errors: {errors}
    notifier: {notifier}
    arguments: {arguments}
"""
HERE = f"{__name__}.Noted"
TEXT = (
    "{text: '{{ failure.pipeline }} {{ failure.error_class }}: {{ failure.message }} | {{"
    " failure.remedy }}'}"
)


class Noted(BaseNotifier):
    """Keeps what it was to send."""

    template_fields = ("text",)
    sent: ClassVar[list[str]] = []

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def notify(self, context) -> None:
        self.sent.append(self.text)


@pytest.fixture(autouse=True)
def _nothing_sent():
    Noted.sent.clear()


@pytest.fixture
def dags_with(write_pipeline):
    """The DAGs of a pipeline that tells failures of these classes."""

    def make(errors: str, notifier: str = HERE, arguments: str = TEXT):
        more = NOTIFY.format(errors=errors, notifier=notifier, arguments=arguments)
        write_pipeline("shop", more=more)
        return create_dags()

    return make


def fail(error: Exception) -> Exception:
    """As the task that looks at the slot fails by it."""
    with pytest.raises(AirflowException) as caught, named_failures():
        raise error
    return caught.value


def fail_job(error: dict, stage: str = "apply") -> Exception:
    """As a task fails by what its job has reported."""
    failed = {stage: {"status": "failed", "error": error}}
    with pytest.raises(AirflowException) as caught:
        JobResult({"status": "failed", "stages": failed}).require(stage)
    return caught.value


GAP = SlotGap("slot 's' stands too far: find out who")
SYNC = SyncFailed({"a.b": PrivilegeMissing("no select"), "a.c": SnapshotLost("gone")})
TOLD = {
    "the class itself": ("[SlotGap]", lambda: fail(GAP), True),
    "a class above it": ("[SlotError]", lambda: fail(GAP), True),
    "the base of all": ("[WaldeltaError]", lambda: fail(GAP), True),
    "one of several": ("[QualityFailed, SourceError]", lambda: fail(GAP), True),
    "another class": ("[QualityFailed, LakeError]", lambda: fail(GAP), False),
    "a class below it": ("[SlotLost]", lambda: fail(GAP), False),
    "what a job reported": ("[ApplyError]",
     lambda: fail_job({"class": "NeedsSync", "message": "no"}), True),
    "what another job reported": ("[SlotError]",
     lambda: fail_job({"class": "NeedsSync", "message": "no"}), False),
    "a cause": ("[PrivilegeMissing]", lambda: fail(SYNC), True),
    "a cause that a job reported": (
        "[SlotError]",
        lambda: fail_job(
            {"class": "ApplyError", "message": "two", "causes": ["LateWriter", "SlotStuck"]}
        ),
        True,
    ),
    "no cause": ("[SlotError]", lambda: fail(SYNC), False),
    "no named error": ("[WaldeltaError]", lambda: AirflowException("the job was ended by signal 9"),
     False),
    "no named error, any": ("[any]", lambda: AirflowException("the job was ended by signal 9"),
     True),
    "killed from outside": ("[any]", lambda: None, True),
    "killed, no class": ("[WaldeltaError]", lambda: "heartbeat lost", False),
}  # fmt: skip


@pytest.mark.parametrize("errors, error, told", TOLD.values(), ids=TOLD)
def test_who_is_told(dags_with, errors, error, told):
    dag = dags_with(errors)["shop_cdc"]
    (callback,) = dag.get_task("apply").on_failure_callback
    callback({"dag": dag, "exception": error()})
    assert len(Noted.sent) == told


def test_what_templates_see(dags_with):
    """Pipeline, class, whole message and remedy; also for two failures in one process."""
    dag = dags_with("[any]")["shop_cdc"]
    (callback,) = dag.get_task("land").on_failure_callback
    for error in (
        fail(GAP),
        fail_job({"class": "ApplyError", "message": "t: no"}),
        AirflowException("killed"),
        None,
    ):
        callback({"dag": dag, "exception": error})
    assert Noted.sent == [
        f"shop SlotGap: {GAP} | {REMEDIES['SlotGap']}",
        f"shop ApplyError: t: no | {REMEDIES['ApplyError']}",
        (
            "shop AirflowException: the error is not one of waldelta's own; the log has its message"
            " | look at the task's log"
        ),
        "shop Killed: the task was killed | look at the task's log",
    ]


class Task:
    """A task instance's XComs, of all runs: the newest is what counts."""

    def __init__(self, task_id: str, kept: dict) -> None:
        self.task_id, self.kept, self.dag_id, self.try_number = task_id, kept, "shop_cdc", 1

    def xcom_push(self, key, value):
        self.kept[self.task_id, key] = value

    def xcom_pull(self, *, task_ids, key, map_indexes, include_prior_dates):
        assert (map_indexes, include_prior_dates) == (-1, True)
        return self.kept.get((task_ids, key))


def test_a_critical_slot_is_told_though_nothing_fails(dags_with, make_context, job, monkeypatch):
    """Once an hour to those who are told of slots; no notifier fails the run."""
    dag, kept = dags_with("[SlotError]")["shop_cdc"], {}
    monkeypatch.setattr(
        "waldelta.stages.land.idle_check.check_idle",
        lambda _: IdleCheck(True, "changes", 0, critical=("it is lost soon",)),
    )
    job.does(
        result={
            "status": "succeeded",
            "stages": {"land": {"status": "succeeded"}},
            "slot_critical": ["lost soon"],
        }
    )

    def run(task_id: str) -> int:
        context, task, before = make_context(), dag.get_task(task_id), len(Noted.sent)
        context |= {"dag": dag, "ti": Task(task_id, kept)}
        if task_id == "land":
            assert task.execute(context) is not None
        else:
            assert task.python_callable(**context)
        return len(Noted.sent) - before

    assert [run("slot_has_changes"), run("land"), run("slot_has_changes")] == [1, 0, 0]
    assert Noted.sent == [f"shop SlotCritical: it is lost soon | {REMEDIES['SlotCritical']}"]
    kept.clear()
    assert [run("land"), run("slot_has_changes")] == [1, 0]
    monkeypatch.setattr("waldelta_airflow.settings.NOTIFY_CRITICAL_AGAIN", timedelta(0))
    assert [run("slot_has_changes"), run("land")] == [1, 1]
    monkeypatch.setattr(Noted, "notify", lambda *_: 1 / 0)
    assert [run("slot_has_changes"), run("land")] == [0, 0]


def test_every_task_tells_but_the_one_that_repeats(dags_with):
    """Also in serialized DAGs: fail_the_run only repeats another task's failure."""
    for dag in dags_with("[SlotError, any]").values():
        for task in dag.tasks:
            assert len(task.on_failure_callback) == (task.task_id != "fail_the_run"), task.task_id
        assert dag.get_task(dag.task_ids[0]).has_on_failure_callback


def test_a_class_is_kept_by_retried_and_final_failures():
    final, again = fail(GAP), fail(SnapshotLost("gone"))
    assert isinstance(final, AirflowFailException)
    assert type(again) is TaskFailed
    assert (str(final), final.kinds) == (f"SlotGap: {GAP}", ("SlotGap",))
    assert (str(again), again.kinds) == ("SnapshotLost: gone", ("SnapshotLost",))


def test_the_example_of_the_page(write_pipeline):
    """docs/how-to/run-in-airflow.md: a real notifier renders the templates that the page uses."""
    page = (Path(__file__).parents[4] / "docs/how-to/run-in-airflow.md").read_text()
    write_pipeline("shop", more=re.search(r"```yaml\n(notify:.*?)```", page, re.DOTALL)[1])
    dag = create_dags()["shop_cdc"]
    (dba,) = dag.get_task("land").on_failure_callback
    assert dba.notifier().to == "dba@example.org"
    failure, kinds = describe_failure("shop", {"exception": fail(GAP)})
    mail = dba.notifier()
    mail.render_template_fields({"dag": dag, "failure": failure})
    assert (mail.subject, kinds) == ("shop: SlotGap", ["SlotGap"])
    assert mail.html_content.startswith("slot &#39;s&#39; stands too far")


REFUSED = {
    "misspelt class": ({"errors": "[SlotErorr]"},
     "there is no class of errors 'SlotErorr': write SlotError"),
    "no such class": ({"errors": "[Nonsense]"}, "the documentation lists them, under Errors"),
    "no class": ({"errors": "[]"}, "notify[0].errors"),
    "no such module": ({"notifier": "nowhere.at.all.Pager"},
     "notifier nowhere.at.all.Pager can't be imported"),
    "no such notifier": ({"notifier": f"{__name__}.Pager"}, "can't be imported"),
    "not a notifier": ({"notifier": "pathlib.Path"}, "is not an Airflow notifier"),
    "not a dotted name": ({"notifier": "Pager"}, "notify[0].notifier"),
    "arguments": ({"arguments": "{txt: x}"}, "refuses its arguments"),
}  # fmt: skip


@pytest.mark.parametrize("entry, says", REFUSED.values(), ids=REFUSED)
def test_a_wrong_entry_refuses_the_file(dags_with, entry, says):
    (refused,) = dags_with(**{"errors": "[any]", **entry}).values()
    assert says in str(refused.error)
    assert "notify[0]" in str(refused.error)


def test_causes_of_several_tables_reach_the_result():
    from waldelta.pipeline import describe_error

    several = ApplyError("several tables failed")
    assert "causes" not in describe_error(several)
    several.causes = (GAP, PrivilegeMissing("x"), PrivilegeMissing("y"))
    assert describe_error(several)["causes"] == ["PrivilegeMissing", "SlotGap"]
    assert describe_error(SYNC)["causes"] == ["PrivilegeMissing", "SnapshotLost"]
    assert WaldeltaError("x").causes == ()


@pytest.mark.parametrize(
    "errors, reason, count",
    [("[any]", "timed_out", 1), ("[any]", "task_failure", 0), ("[WaldeltaError]", "timed_out", 0)],
)
def test_a_run_that_did_not_end_in_time_is_reported(write_pipeline, errors, reason, count):
    """By the DAG, since none of its tasks failed; a task's failure was reported by the task."""
    write_pipeline("shop", more=NOTIFY.format(errors=errors, notifier=HERE, arguments=TEXT))
    dag = create_dags()["shop_cdc"]
    assert dag.has_on_failure_callback == ("any" in errors)
    for callback in dag.on_failure_callback or ():
        callback({"run_id": "r1", "reason": reason})
    assert len(Noted.sent) == count
    for text in Noted.sent:
        assert text.startswith("shop TimedOut: the run r1 did not end within")
        assert text.endswith("run `waldelta airflow setup`, which creates missing pools")
