"""A copy that was killed continues: what its tasks have written stays valid."""

import random
import shutil
from collections import Counter

import pytest

from tests.oracles.compare import compare_target
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.snapshot import chunks
from waldelta.spark import InProcess
from waldelta.spark import runner as runners
from waldelta.stages.repair.mend import mend
from waldelta.stages.sync.sync import sync

MODULES = (
    "stages.sync.sync",
    "stages.sync.copy_table",
    "stages.sync._staged_chunks",
    "stages.sync._write",
    "snapshot.read_table",
)
POINTS = ("sync.begun", "sync.planned", "sync.reading", "sync.staged", "sync.touched",
          "resync.compared", "sync.committed")  # fmt: skip


class Killed(BaseException):
    pass


class Kills:
    """Kills the copy when it has passed a point so many times, and writes at other points."""

    def __init__(self, write):
        self.write, self.at, self.passed = write, None, Counter()

    def __call__(self, point):
        self.passed[point] += 1
        if point == "sync.reading":
            self.write(2)
        if self.at is not None and (point, self.passed[point]) == self.at:
            self.at = None
            raise Killed(point)

    def kill(self, point, count):
        self.at, self.passed = (point, count), Counter()


@pytest.fixture
def runner(spark_jvm):
    """This process, also where tests run on Spark: a kill in a worker's process ends no copy."""
    return InProcess(spark_jvm)


@pytest.fixture
def job(database, lake, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BYTES_PER_TASK", 1 << 16)
    monkeypatch.setattr(runners, "LOCAL_TASKS", 99)
    database.execute("create table t (id int primary key, v text, w int default 0)")
    database.execute(
        "insert into t select g, repeat('x', 20 + g % 300), 1 from generate_series(1, 3000) g"
    )
    database.execute("analyze t")
    return bare_job(database, lake)


@pytest.fixture
def write(database, seed_of_test):
    """The random workload: rows that come, go, move and get another key."""
    dice = random.Random(seed_of_test)
    ids = iter(range(10_000, 10_000_000))

    def write(count):
        for _ in range(count):
            some = dice.randrange(1, 3000)
            match dice.randrange(6):
                case 0:
                    database.execute(f"delete from t where id between {some} and {some + 2}")
                case 1:
                    database.execute(f"update t set id = {next(ids)} where id = {some}")
                case 2:
                    database.execute(f"insert into t values ({next(ids)}, 'new', {some})")
                case 3:
                    database.execute(
                        f"insert into t values ({some}, 'back') on conflict do nothing"
                    )
                case 4:
                    database.execute("vacuum t")
                case _:
                    database.execute(
                        f"update t set v = repeat('y', {some % 500}), w = w + 1"
                        f" where id between {some} and {some + 5}"
                    )

    return write


@pytest.fixture
def seed_of_test():
    return random.randrange(1 << 30)


@pytest.fixture
def kills(write, monkeypatch):
    kills = Kills(write)
    for module in MODULES:
        monkeypatch.setattr(f"waldelta.{module}.fault_point", kills)
    return kills


def is_equal(runner, job) -> bool:
    state = job.read_states()["public.t"]
    return compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0


def copy_killed(runner, job, kills, point, count, tables=None, **options) -> bool:
    """Returns whether it was killed: a copy may have fewer chunks than it takes."""
    kills.kill(point, count)
    try:
        sync(runner, job, tables, **options)
    except Killed:
        return True
    return False


def run_rounds(runner, job, kills, write, rounds, seed) -> list[int]:
    """Copy or resync repeatedly, each time with some kills; gives the tasks of the last ones."""
    print(f"seed {seed}")
    dice, tasks = random.Random(seed), []
    for number in range(rounds):
        names, by_diff = ["public.t"], dice.random() < 0.5
        for _ in range(dice.randrange(1, 4)):
            point = dice.choice(POINTS)
            count = dice.randrange(1, 9)
            if not copy_killed(runner, job, kills, point, count, names, by_diff=by_diff):
                break
            names = None if dice.random() < 0.5 else names
            by_diff = by_diff if dice.random() < 0.9 else not by_diff
            write(dice.randrange(40))
        kills.passed = Counter()
        kills.at = None
        sync(runner, job, ["public.t"], by_diff=by_diff)
        tasks.append(kills.passed["sync.staged"])
        kills.write = lambda _: None
        consume(runner, job)
        assert is_equal(runner, job), f"round {number}"
        kills.write = write
    return tasks


# A copy has ten parts, and the two kills leave at least four of them staged.
MISSING = 6


def test_a_killed_copy_reads_only_what_is_missing(runner, database, job, kills, write, caplog):
    """It reads the missing chunks and the rows that were touched, as of one new snapshot."""
    caplog.set_level("INFO")
    assert copy_killed(runner, job, kills, "sync.staged", 4)
    write(30)
    assert copy_killed(runner, job, kills, "sync.staged", 2)
    write(30)
    kills.passed = Counter()
    (copied,) = sync(runner, job)
    assert kills.passed["sync.touched"] == 1
    assert 0 < kills.passed["sync.staged"] <= MISSING
    assert "its copy continues" in caplog.text
    ((rows,),) = database.execute("select count(*) from t")
    kills.write = lambda _: None
    consume(runner, job)
    assert is_equal(runner, job)
    assert copied.rows > 2000
    assert rows > 2000


@pytest.mark.parametrize(
    "rows_at_once",
    [
        pytest.param(10_000, id="one bucket", marks=pytest.mark.nightly("a smaller mend alike")),
        pytest.param(1_000, id="buckets"),
    ],
)
def test_a_killed_resync_reads_only_what_is_missing(
    runner, database, job, kills, write, caplog, monkeypatch, rows_at_once
):
    """What it has staged to compare stays valid, too, but for rows that were touched since."""
    monkeypatch.setattr(mend, "BUCKET_ROWS", rows_at_once)
    caplog.set_level("INFO")
    sync(runner, job)
    write(30)
    assert copy_killed(runner, job, kills, "sync.staged", 4, ["public.t"], by_diff=True)
    write(30)
    assert copy_killed(runner, job, kills, "sync.staged", 2, ["public.t"], by_diff=True)
    write(30)
    kills.passed = Counter()
    (copied,) = sync(runner, job, ["public.t"], by_diff=True)
    assert kills.passed["sync.touched"] == 1
    assert 0 < kills.passed["sync.staged"] <= MISSING
    assert copied.copy.diff is not None
    assert copied.rows > 2000
    assert caplog.text.count("its copy continues") == 2
    kills.write = lambda _: None
    consume(runner, job)
    assert is_equal(runner, job)


def test_a_killed_resync_becomes_a_whole_copy(runner, database, job, kills):
    """Rows that were staged to compare are no files of a target."""
    kills.write = lambda _: None
    sync(runner, job)
    assert copy_killed(runner, job, kills, "sync.staged", 3, ["public.t"], by_diff=True)
    shutil.rmtree(job.lake.target("public.t").uri.removeprefix("file://"))
    (copied,) = sync(runner, job, ["public.t"], by_diff=True)
    assert copied.copy.diff is None
    assert is_equal(runner, job)


def test_kills_at_every_step_lose_and_double_nothing(runner, job, kills, write, seed_of_test):
    run_rounds(runner, job, kills, write, 3, seed_of_test)


@pytest.mark.nightly("more kills of the same copy")
@pytest.mark.long("thirty rounds of a copy that is killed")
def test_many_kills(runner, job, kills, write, seed_of_test):
    read = run_rounds(runner, job, kills, write, 30, seed_of_test)
    assert min(read) < max(read)


CAUSES = {
    "truncated": (["truncate t", "insert into t values (1, 'a')"], "its file changed"),
    "rewritten": (["vacuum full t"], "its file changed"),
    "added column": (["alter table t add column x int"], "its columns"),
    "other filter": (["alter publication {} set table t where (w < 5)"], "its filter"),
    "not every change": (["alter publication {} set (publish = 'insert')"],
                         "not every change of its rows is published"),
    "no key": (["alter table t drop constraint t_pkey"], "it has no key"),
    "replica identity nothing":
     (["alter table t replica identity nothing"], "its replica identity is nothing"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("truncated", "no key") else pytest.param(
            name, marks=pytest.mark.nightly("another reason to start again")
        )
        for name in CAUSES
    ],
)  # fmt: skip
def test_a_copy_starts_again(runner, database, job, kills, caplog, name):
    statements, why = CAUSES[name]
    kills.write = lambda _: None
    assert copy_killed(runner, job, kills, "sync.staged", 3)
    for statement in statements:
        database.execute(statement.format(job.pipeline.source.publication_names[0]))
    kills.passed = Counter()
    sync(runner, job)
    assert kills.passed["sync.touched"] == 0
    (line,) = (r.getMessage() for r in caplog.records if "its copy starts again" in r.getMessage())
    assert why in line
    assert is_equal(runner, job)
