"""A run that a process left where it needed Spark, and that another process continues."""

from dataclasses import replace
from datetime import timedelta

import pytest
from deltalake import DeltaTable

from tests.oracles.target_rows import read_target
from tests.support.concurrent_work import killed_at
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.jobs.maintain import run_maintain
from waldelta.jobs.reconcile import run_reconcile
from waldelta.jobs.replay import replay
from waldelta.jobs.sync import run_resync, run_sync
from waldelta.lake.ledger import Ledger
from waldelta.pipeline.targets.quarantined_rows import list_quarantined
from waldelta.spark.settings import NEEDS_SPARK

NAMES = ["public.a", "public.b"]
RULE = "{type: expect_column_values_to_be_between, kwargs: {column: v, min_value: 0}, gate: %s}"


def damage(scene) -> None:
    for name in "ab":
        DeltaTable(f"{scene.lake}/public/{name}").delete("id = 1")


def change(scene) -> None:
    for name in "ab":
        scene.database.execute(f"update {name} set v = v + 1 where id < 3")
    consume(scene.runner, replace(scene.job, run_id="changes"))
    damage(scene)


def quarantine(scene) -> None:
    scene.own("quarantine")
    for name in "ab":
        scene.database.execute(f"insert into {name} values (4, -1)")
    consume(scene.runner, replace(scene.job, run_id="changes"))
    scene.ids = {row["id"] for row in list_quarantined(scene.job, NAMES)}


def cure(scene) -> None:
    quarantine(scene)
    for name in "ab":
        scene.database.execute(f"update {name} set v = 4 where id = 4")


def decide(scene, job, action: str):
    ids = scene.ids if action == "accept" else ()
    return run_decide(scene.runner, job, action, ids=ids, reason="known", by="ann")


def compare(scene, job):
    return run_reconcile(scene.runner, job, repair=True, by="ann")


# What comes before the run, the run, and the point, and pass of it, at which its process leaves.
CASES = {
    "sync": (None, lambda s, job: run_sync(s.runner, job), "sync.begun", 2),
    "sync, by name": (
        damage,
        lambda s, job: run_sync(s.runner, job, NAMES),
        "sync.begun", 2,
    ),
    "sync, checks": (None, lambda s, job: run_sync(s.runner, job), "check.begun", 1),
    "resync, by name": (change, lambda s, job: run_resync(s.runner, job, NAMES), "sync.begun", 2),
    "reconcile": (change, compare, "repair.begun", 2),
    "accept": (quarantine, lambda s, job: decide(s, job, "accept"), "repair.begun", 2),
    "accept, checks": (quarantine, lambda s, job: decide(s, job, "accept"), "check.begun", 1),
    "retry": (cure, lambda s, job: decide(s, job, "retry"), "repair.begun", 2),
    "replay": (
        change,
        lambda s, job: replay(
            s.runner, replace(job, run_type="backfill", **s.interval())
        ),
        "repair.begun", 2,
    ),
    "maintain": (change, lambda s, job: run_maintain(s.runner, job), "maintain.cleaned", 1),
}  # fmt: skip

# What continues them is the same as for sync, resync and accept.
ALIKE = {"sync, checks", "accept, checks", "retry", "reconcile", "replay", "maintain"}

MODULES = {
    "sync.begun": "stages.sync.sync",
    "repair.begun": "stages.repair.repair",
    "check.begun": "jobs._stages",
    "maintain.cleaned": "jobs.maintain",
}


class Scene:
    """Two small tables, and a pipeline with checks."""

    def __init__(self, runner, database, lake, folder) -> None:
        self.runner, self.database, self.lake, self.folder = runner, database, lake, folder
        self.ids: set[str] = set()
        for name in "ab":
            database.execute(f"create table {name}(id int primary key, v int)")
            database.execute(f"insert into {name} select i, i from generate_series(1, 3) i")
        quality = {"enabled": True, "suites": str(folder)}
        self.own("warn")
        self.job = bare_job(database, lake, NAMES, quality=quality)

    def own(self, gate: str) -> None:
        """Write each target's own expectation."""
        for name in NAMES:
            self.folder.joinpath(f"{name}.yml").write_text(f"expectations:\n  - {RULE % gate}\n")

    def interval(self) -> dict:
        """The interval in which the run of ``changes`` was."""
        (run,) = (run for run in Ledger(self.job.lake).runs() if run.run_id == "changes")
        day = timedelta(days=1)
        return {"interval_start": run.at - day, "interval_end": run.at + day}


class NeedsSpark(SystemExit):
    """What ends a process without Spark that needs it."""

    def __init__(self) -> None:
        super().__init__(NEEDS_SPARK)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=name,
            marks=pytest.mark.nightly("another verb or step") if name in ALIKE else (),
        )
        for name, case in CASES.items()
    ],
)
def test_a_run_continues_where_its_process_left(runner, database, lake, tmp_path, case):
    """Its result has what both did, each once; a stage that succeeded isn't run again."""
    before, run, point, passes = case
    (folder := tmp_path / "suites").mkdir()
    scene = Scene(runner, database, lake, folder)
    if before is not None:
        run_sync(runner, replace(scene.job, run_id="first"))
        before(scene)
    job = replace(scene.job, run_id="two processes")
    with killed_at(point, f"waldelta.{MODULES[point]}", passes, NeedsSpark):
        run(scene, job)
    left = Ledger(job.lake).runs()[-1]
    assert (left.run_id, left.status) == ("two processes", "running")
    result = run(scene, replace(job, again=True))
    assert (result.status, sorted(result.tables)) == ("succeeded", NAMES)
    if result.verb == "maintain":
        return
    assert result.checked.passed == NAMES
    for name in "ab":
        rows = sorted(map(tuple, read_target(f"{lake}/public/{name}", "id", "v")))
        assert rows == sorted(database.execute(f"select id, v from {name}"))
