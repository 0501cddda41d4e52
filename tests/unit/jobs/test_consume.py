"""Which stages run after a failure, in one process and in several, and how a run ends."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import job_of, whole_database
from waldelta.changes.merge.target_table import CopyCommit
from waldelta.errors import ApplyError, LateWriter, LockHeld, StateError, SyncFailed
from waldelta.jobs._stages import check_stage, resume_result, run_stages
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_sync
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    SYNCED,
    ExpectationResult,
    Ledger,
    TableState,
    now,
)
from waldelta.pipeline import RunResult, StageResult, TableResult
from waldelta.pipeline.run_result import RunFailed
from waldelta.spark import InProcess
from waldelta.stages.sync._write_files import WrittenCopy
from waldelta.stages.sync.copy_table import SyncResult

NAMES = ("land", "apply", "check", "report")


def no_session():
    raise AssertionError("no stage needs Spark")


RUNNER = InProcess(no_session)


@pytest.fixture
def job(lake):
    return job_of(whole_database(lake))


def run(job, failing=(), only=None):
    """Run stages of which some fail; the stages that ran, and how the run stands in the ledger."""
    ran = []

    def stage_of(name):
        def stage(*_):
            ran.append(name)
            if name in failing:
                raise ApplyError(f"{name} went wrong")

        return stage

    known = job.ledger.run_result("run")
    result = RunResult.from_json(known.result) if known else RunResult("consume", "run")
    stages = {name: stage_of(name) for name in NAMES}
    with pytest.raises(RunFailed) if failing else nullcontext() as caught:
        run_stages(RUNNER, job, result, stages, only)
    if failing:
        expected = f"{next(name for name in ran if name in failing)} went wrong"
        assert str(caught.value.__cause__) == expected
    return ran, job.ledger.run_result("run").status


@pytest.mark.parametrize(
    "failing, expected",
    [
        ((), NAMES),
        (("land",), ("land", "report")),
        (("apply",), NAMES),
        (("check",), NAMES),
        (("apply", "check"), NAMES),
    ],
)
def test_stages_that_dont_build_on_what_failed_still_run(job, failing, expected):
    """Once changes have landed, a table that can't be applied doesn't keep others unchecked."""
    ran, status = run(job, failing)
    assert tuple(ran) == expected
    assert status == ("failed" if failing else "succeeded")


def test_what_several_stages_fail_by_is_told_once(job, caplog):
    """The process ends by the first stage's error; later ones name theirs if it differs."""
    away = ApplyError("the server is away")

    def fail(*_):
        raise away

    def fail_otherwise(*_):
        raise ApplyError("the disk is full")

    stages = {
        "targets": fail,
        "change_log": fail,
        "ledger": fail_otherwise,
        "check": fail_otherwise,
    }
    with pytest.raises(RunFailed):
        run_stages(RUNNER, job, RunResult("maintain", "run"), stages, None)
    assert [told.getMessage() for told in caplog.records if told.levelname == "ERROR"] == [
        "stage targets failed",
        "stage change_log failed as targets did",
        "stage ledger failed: ApplyError: the disk is full",
        "stage check failed as ledger did",
    ]


def test_a_run_in_several_processes_stays_failed(job):
    """What succeeds after a failed stage doesn't make the run good; the stage's retry does."""
    assert run(job, only=["land"])[1] == "running"
    assert run(job, ["apply"], only=["apply"])[1] == "failed"
    assert run(job, only=["check", "report"]) == (["check", "report"], "failed")
    assert run(job, only=["apply"])[1] == "running"
    assert run(job, only=["check", "report"])[1] == "succeeded"


def test_a_run_isnt_good_when_an_early_stage_left_no_result(job):
    """Its process was killed before it recorded anything; later stages found nothing wrong."""
    assert run(job, only=["land"])[1] == "running"
    assert run(job, only=["check", "report"])[1] == "failed"
    assert run(job, only=["apply", "check", "report"])[1] == "succeeded"


def test_a_stage_that_is_run_again_makes_later_results_void(job):
    """A retried apply may have changed other tables, which are then checked and reported too."""
    run(job, ["apply"])
    run(job, only=["apply"])
    assert set(json.loads(job.ledger.run_result("run").result)["stages"]) == {"land", "apply"}


def test_an_attempt_that_slept_while_the_next_one_did_the_work_says_nothing_of_the_run(job):
    """It lost its locks and fails; tasks, pages and a cleared run would go by that."""

    def sleep(*_):
        assert run(job, only=["apply", "check", "report"])[1] == "succeeded"
        raise LockHeld("lost")

    run(job, only=["land"])
    with pytest.raises(RunFailed):
        run_stages(
            RUNNER,
            job,
            resume_result(job, "consume", fresh=False),
            dict.fromkeys(NAMES, sleep),
            ["apply"],
        )
    assert [told.status for told in job.ledger.runs()] == ["running", "succeeded"]
    assert resume_result(job, "consume", fresh=False).status == "succeeded"


@pytest.mark.parametrize("again", [False, True], ids=["its result", "whether it is a replay"])
def test_an_attempt_begins_before_it_asks_what_an_earlier_one_left(job, monkeypatch, again):
    """One that slept right behind that would hide what the next attempt meets."""
    run(job, only=["land"])
    real, slept = Ledger.run_result, []

    def sleep(ledger, *asked):
        found = real(ledger, *asked)
        if not slept:
            slept.append(True)
            assert run(job, only=["apply", "check", "report"])[1] == "succeeded"
        return found

    monkeypatch.setattr(Ledger, "run_result", sleep)
    monkeypatch.setattr(
        "waldelta.jobs.consume.CONSUME_STAGES", dict.fromkeys(NAMES, lambda *_: None)
    )
    with pytest.raises(LateWriter, match=r"a later attempt .*succeeded.* log"):
        consume(RUNNER, replace(job, again=again), ["apply"])
    assert [told.status for told in job.ledger.runs()] == ["running", "succeeded"]


def test_tables_copied_beside_a_failing_one_are_kept_and_checked(job, monkeypatch):
    """Also those of an attempt before, since a retry copies only what that left."""
    copied = iter(["public.a", "public.b"])

    def sync(*_, results, **__):
        state = TableState(now(), "r", next(copied), 1, SYNCED, rows=1)
        results.append(SyncResult(state, WrittenCopy(CopyCommit(3, 1, 0)), attempts=1))
        raise SyncFailed({"public.x": ApplyError("x went wrong")}, len(results))

    monkeypatch.setattr("waldelta.jobs.sync.sync", sync)
    monkeypatch.setattr("waldelta.jobs.sync.count_raw_rows", lambda *_: 0)
    for expected in (["public.a"], ["public.a", "public.b"]):
        with pytest.raises(RunFailed) as caught:
            run_sync(RUNNER, job, stages=["sync", "check"])
        result = caught.value.result
        assert sorted(result.tables) == result.checked.passed == expected
        assert (result.targets.not_applied, result.stages["check"].status) == (
            ["public.x"],
            "succeeded",
        )


def test_a_stage_that_isnt_there_is_refused(job):
    """The message lists the stages there are."""
    with pytest.raises(
        StateError, match="consume has no stage 'aply': its stages are land, apply, check, report"
    ):
        consume(RUNNER, job, ["aply"])


CHANGED = TableResult(deleted=1, skipped=1)
# What runs did, whether they check what they changed, and whether it is told without a check.
UNCHECKED = {
    "a replay": ("replay", TableResult(version=3), False, True),
    "a resync that found it equal": ("resync", TableResult(unchanged=5, version=3), False, True),
    "a run with a change of a row that isn't there": ("consume", TableResult(skipped=1), False,
     True),
    "a run with a row that is set aside": ("consume", TableResult(quarantined=1), False, True),
    "a run without a change of it": ("consume", TableResult(version=3), False, False),
    "a run that changed it, and checks nothing": ("consume", CHANGED, False, True),
    "a run that changed it, and checks it": ("consume", CHANGED, True, False),
}  # fmt: skip


@pytest.mark.parametrize("verb, done, checks, is_told", UNCHECKED.values(), ids=UNCHECKED)
def test_rows_that_lack_values_are_told_anew_of_a_target_that_is_not_checked(
    job, monkeypatch, verb, done, checks, is_told
):
    """What an earlier check has told of rows that have left quarantine since would stay."""
    root, kind = job.pipeline.target.root, ALL_VALUES_KNOWN
    job.ledger.append(TableState(now(), "s", "public.a", 2, "synced"))
    before = ExpectationResult(
        now(), "c", "public.a", kind, "m", "warning", "pipeline", False, None, None, 1
    )
    Ledger(Lake(root)).append_all([before])
    quality = job.pipeline.quality.model_copy(update={"enabled": checks})
    job = replace(job, pipeline=job.pipeline.model_copy(update={"quality": quality}))
    if checks:
        monkeypatch.setattr("waldelta.jobs._stages.check_tables", lambda *_: None)
    check_stage(
        None, job, RunResult(verb, "run", tables={"public.a": done}), StageResult("running", 0.0)
    )
    told = [(row.run_id, row.success) for row in read_expectation_results(root)]
    assert told == [("c", False), *([("run", True)] if is_told else [])]
