"""Maintenance: old rows of the ledger go, nothing that is needed; tables in use are left."""

import os
import shutil
import time
from datetime import timedelta
from threading import Barrier

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.oracles.compare import compare_target
from tests.support.concurrent_work import before_rows
from tests.support.pipelines import pipeline_file
from tests.support.waiting import wait_until
from waldelta.errors import LateWriter
from waldelta.jobs import Pipeline
from waldelta.lake import Lake, bookkeeping_uri, local_path
from waldelta.lake.delta_statements import set_deletion_vectors, set_retention
from waldelta.lake.ledger import BatchCut, SlotMove, TableState, now
from waldelta.lake.ledger import prune_ledger as ledger_upkeep
from waldelta.pipeline import target_lock
from waldelta.pipeline.run_result import RunFailed
from waldelta.spark import InProcess
from waldelta.stages.maintain import maintain

pytestmark = pytest.mark.pg


@pytest.fixture
def pipeline(runner, database, lake):
    database.execute(
        "create table a(id int primary key, v text); create table b(id int primary key)"
    )
    made = Pipeline(pipeline_file(lake, f"s_{database.name}", ["public.a", "public.b"]))
    made.setup()
    made.sync(runner)
    return made


def consume(runner, database, pipeline, *numbers):
    for number in numbers:
        database.execute(f"insert into a values ({number}, 'x')")
        pipeline.consume(runner)


@pytest.mark.soak("a ledger that is pruned to its end")
def test_a_run_goes_on_after_everything_old_was_pruned(runner, database, pipeline, monkeypatch):
    """Pruned as if all rows were past their time: lives, furthest intent, states and newest cut are
    still there.

    The files that each batch left of a target are one afterwards.
    """
    consume(runner, database, pipeline, 1, 2, 3)
    ledger = pipeline.job().ledger
    files = DeltaTable(target := pipeline.job().lake.target("public.a").uri).file_uris()
    before = (
        ledger.table_states(),
        pipeline.job().read_identity(),
        ledger.last_cut(),
        ledger.last_run(),
    )
    real = ledger_upkeep.prune_ledger
    monkeypatch.setattr(
        "waldelta.stages.maintain.maintain.prune_ledger",
        lambda of, oldest, _: real(of, oldest + timedelta(days=10_000), None),
    )
    # Two tables at once.
    meeting, compact = Barrier(2, timeout=30), maintain._compact
    monkeypatch.setattr(
        "waldelta.stages.maintain.maintain._compact",
        lambda *given: (meeting.wait(), compact(*given)),
    )
    assert pipeline.maintain(runner).status == "succeeded"
    assert (len(files) > 2, len(DeltaTable(target).file_uris())) == (True, 1), files
    assert (ledger.table_states(), pipeline.job().read_identity()) == before[:2]
    cut = ledger.last_cut()  # renewed: the compaction made later versions of the same rows
    assert (cut.batch, cut.end_lsn, cut.targets[0].version > before[2].targets[0].version) == (
        3,
        before[2].end_lsn,
        True,
    )
    for kind in (SlotMove, TableState, BatchCut):
        assert len(DeltaTable(bookkeeping_uri(ledger.lake.root, kind.table)).file_uris()) == 1
    # What came after the pruning is the run of maintenance itself.
    assert [run.run_id for run in ledger.runs()][:-1] == [before[3].run_id]
    consume(runner, database, pipeline, 4)
    job = pipeline.job()
    for state in job.read_states().values():
        assert compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0


@pytest.mark.nightly("months of a change log")
def test_what_the_slot_may_hold_again_is_not_forgotten(runner, database, pipeline, monkeypatch):
    """However old: a server that stops at once has its slot back, and the next run compares."""
    monkeypatch.setattr("waldelta.stages.maintain.maintain.now", lambda: now() + timedelta(days=90))
    monkeypatch.setattr(
        "waldelta.slot.recovery.MOVING", timedelta(seconds=-1)
    )  # a checkpoint is told in whole seconds
    log = pipeline.job().change_log(pipeline.job().read_identity())
    for number, written_down, left in ((1, True, []), (2, False, [2])):
        consume(runner, database, pipeline, number)
        if written_down:
            database.execute("checkpoint")
        pipeline.maintain(runner)
        assert sorted(log.sizes(0, 100)) == left
        # Else what is moved next would count as moved before the checkpoint.
        wait_until(
            lambda: database.execute(
                "select checkpoint_time + interval '2 s' < clock_timestamp()"
                " from pg_control_checkpoint()"
            )[0][0]
        )
    database.restart()
    consume(runner, database, pipeline, 3)


@pytest.mark.soak("a copy that takes long")
def test_what_a_copy_under_way_will_need_is_not_forgotten(runner, database, pipeline, monkeypatch):
    """However old: a copy may take longer than changes are kept."""
    told = []

    def long_copy():
        database.execute("insert into b values (1)")
        consume(runner, database, pipeline, 1)
        database.execute("checkpoint")
        with monkeypatch.context() as later:
            later.setattr(
                "waldelta.stages.maintain.maintain.now", lambda: now() + timedelta(days=90)
            )
            later.setattr("waldelta.slot.recovery.MOVING", timedelta(seconds=-1))
            told.append(pipeline.maintain(runner).stages["change_log"].detail)

    before_rows(monkeypatch, long_copy)
    pipeline.sync(runner, ["public.b"])
    consume(runner, database, pipeline, 2)
    job = pipeline.job()
    for state in job.read_states().values():
        assert compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0
    assert told[0].startswith("nothing removed: copies in progress (public.b)")


class Statements:
    """A session that notes the statements it is given."""

    def __init__(self, runner):
        self._runner, self.told = runner, []

    def __getattr__(self, name):
        return getattr(self._runner.spark(), name)

    def sql(self, statement):
        self.told.append(statement.partition(" delta.")[0])
        return self._runner.spark().sql(statement)


class Overtaken(Statements):
    """A session whose OPTIMIZE another writer overtakes so many times."""

    def __init__(self, runner, times):
        super().__init__(runner)
        self._times = times

    def sql(self, statement):
        if statement.startswith("optimize") and self.told.count("optimize") < self._times:
            self.told.append("optimize")
            raise RuntimeError("[DELTA_CONCURRENT_DELETE_READ] a concurrent OPTIMIZE deleted data")
        return super().sql(statement)


@pytest.mark.parametrize(
    "times", [1, pytest.param(3, marks=pytest.mark.nightly("a race that is lost each time"))]
)
def test_a_target_that_others_write_is_compacted_again_and_vacuumed(
    runner, database, pipeline, times, monkeypatch
):
    """Old files go all the same, and a target that isn't compacted is an error with a name."""
    monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 0)
    consume(runner, database, pipeline, 1, 2)
    job = pipeline.job()
    uri = job.lake.target("public.a").uri
    folder, old = local_path(uri), time.time() - 8 * 24 * 3600
    (folder / "part-killed.parquet").write_text("x")
    os.utime(folder / "part-killed.parquet", (old, old))
    asked = Overtaken(runner, times)
    if times < maintain._ATTEMPTS:
        maintain.maintain_target(InProcess(lambda: asked), job, "public.a")
    else:
        with pytest.raises(LateWriter, match=r"^public\.a: another writer committed"):
            maintain.maintain_target(InProcess(lambda: asked), job, "public.a")
    assert asked.told == ["optimize"] * min(times + 1, 3)
    assert len(DeltaTable(uri).file_uris()) == (1 if times < 3 else 2)
    assert not (folder / "part-killed.parquet").exists()


def test_a_small_target_is_maintained_without_spark(runner, database, pipeline):
    """Files of nobody go by their age; two small files become one, by a commit without changes."""
    consume(runner, database, pipeline, 1, 2)
    job = pipeline.job()
    target = job.lake.target("public.a")
    uri = target.uri
    folder, old = local_path(uri), time.time() - 8 * 24 * 3600
    for name, at in (("part-killed.parquet", old), ("part-being-written.parquet", time.time())):
        (folder / name).write_text("x")
        os.utime(folder / name, (at, at))
    asked, version = Statements(runner), target.open().version
    maintain.maintain_target(InProcess(lambda: asked), job, "public.a")
    compacted = target.open()
    assert (asked.told, len(compacted.files)) == ([], 1)
    assert sorted(compacted.dataset().to_table()["id"].to_pylist()) == [1, 2]
    assert target.log.newest_with_rows_of(version) == compacted.version > version
    maintain.maintain_target(InProcess(lambda: asked), job, "public.a")
    assert (asked.told, target.open().version) == ([], compacted.version)
    assert [
        (folder / name).exists() for name in ("part-killed.parquet", "part-being-written.parquet")
    ] == [False, True]


@pytest.mark.soak("deletion vectors, which Spark alone writes")
def test_spark_is_asked_only_for_what_it_alone_does(runner, database, pipeline):
    """Marked rows are Spark's to clean up."""
    consume(runner, database, pipeline, 1, 2)
    job = pipeline.job()
    target = job.lake.target("public.a")
    uri = target.uri
    maintain.maintain_target(runner, job, "public.a")
    set_deletion_vectors(runner.spark(), target, wanted=True)
    runner.spark().sql(f"delete from delta.`{uri}` where id = 1").collect()
    asked = Statements(runner)
    maintain.maintain_target(InProcess(lambda: asked), job, "public.a")
    assert [statement.split()[0] for statement in asked.told] == [
        "reorg",
        "alter",
        "optimize",
        "vacuum",
    ]
    assert [row.id for row in runner.spark().read.format("delta").load(uri).collect()] == [2]


def test_a_table_in_use_is_left_and_named(runner, database, pipeline, monkeypatch):
    """The others are done, and so are change log and ledger, which keep all that is not old."""
    # PostgreSQL gives a checkpoint's time in whole seconds.
    monkeypatch.setattr("waldelta.slot.recovery.MOVING", timedelta(seconds=-1))
    consume(runner, database, pipeline, 1, 2)
    database.execute("checkpoint")
    ledger = pipeline.job().ledger
    before = (ledger.slot_moves(), ledger.batches())
    with target_lock(pipeline.job(), "public.a"):
        done = pipeline.maintain(runner)
    assert list(done.tables) == ["public.b"]
    assert done.stages["targets"].detail.endswith("in use by other runs and left: public.a")
    assert done.warnings == ["maintenance left out public.a: in use by another run"]
    kept = [done.stages[name].detail for name in ("change_log", "ledger")]
    assert kept == ["batches up to 0 removed", "0 rows removed, 0 cuts expired"]
    assert (ledger.slot_moves(), ledger.batches()) == before
    assert {stage.status for stage in done.stages.values()} == {"succeeded"}


@pytest.mark.nightly("a damaged target among others")
def test_a_damaged_target_is_named_once_all_others_are_done(
    runner, database, pipeline, monkeypatch
):
    """Nothing is forgotten that it may need, should it be brought back from before."""
    consume(runner, database, pipeline, 1)
    job = pipeline.job()
    target = local_path(job.lake.target("public.a").uri)
    consume(runner, database, pipeline, 2)
    database.execute("checkpoint")
    shutil.rmtree(target)
    with monkeypatch.context() as later:
        later.setattr("waldelta.stages.maintain.maintain.now", lambda: now() + timedelta(days=90))
        later.setattr(
            "waldelta.slot.recovery.MOVING", timedelta(seconds=-1)
        )  # a checkpoint is told in whole seconds
        with pytest.raises(RunFailed, match=r"public\.a") as failed:
            pipeline.maintain(runner)
    done = failed.value.result
    assert list(done.tables) == ["public.b"]
    assert [name for name, stage in done.stages.items() if stage.status == "failed"] == ["targets"]
    assert done.warnings == [
        "the change log keeps all batches, since the batches that public.a has can't be determined"
    ]
    assert sorted(job.change_log(job.read_identity()).sizes(0, 100)) == [1, 2]


def test_when_every_table_is_in_use_the_run_fails(runner, database, pipeline):
    """Nothing was done: that is worth a retry."""
    job = pipeline.job()
    with (
        target_lock(job, "public.a"),
        target_lock(job, "public.b"),
        pytest.raises(RunFailed) as failed,
    ):
        pipeline.maintain(runner)
    assert failed.value.result.error["class"] == "LockHeld"
    assert failed.value.result.error["retryable"]


def test_delta_keeps_logs_and_files_as_long_as_promised(runner, lake):
    """By properties that are only set where Delta keeps less, or something else, by itself."""
    target, told = Lake(lake).target("public.t"), []
    write_deltalake(target.uri, pa.table({"id": [1]}))
    for hours in (168, 500, 500, 1000, 168):
        set_retention(runner.spark, target.open(), hours)
        seen = target.open()
        told.append((seen.version, *sorted(seen.properties.values())))
    by_hour = "interval {} hours".format
    assert told == [
        (0,),
        (1, by_hour(500), by_hour(720)),
        (1, by_hour(500), by_hour(720)),
        (2, by_hour(1000), by_hour(1000)),
        (3, by_hour(168), by_hour(720)),
    ]
