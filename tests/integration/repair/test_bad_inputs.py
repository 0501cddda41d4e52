"""What may go wrong while a target is mended: it is named, and the next run continues."""

import itertools
import resource
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pytest
from deltalake import DeltaTable
from pyspark import SparkContext

from tests.oracles.compare import compare_target
from tests.support.pipelines import bare_job
from waldelta.errors import (
    ConfigError,
    LockHeld,
    SnapshotLost,
    StateError,
    SyncFailed,
    TargetNotWritable,
)
from waldelta.jobs.consume import consume
from waldelta.jobs.reconcile import run_reconcile
from waldelta.pipeline.run_result import RunFailed
from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.spark import InProcess
from waldelta.stages.repair import repair as repair_module
from waldelta.stages.sync.sync import sync

RUNS = itertools.count()
MONTHS = datetime(2025, 1, 1, tzinfo=UTC), datetime(2025, 2, 1, tzinfo=UTC)


@contextmanager
def away(database, _):
    """The server ends all sessions and lets nobody in."""
    statement = f"alter database {database.name} allow_connections"
    with psycopg.connect(database.server.conninfo(), autocommit=True) as other:
        other.execute(f"{statement} false".encode())
        other.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = %s"
            " and pid <> %s",
            (database.name, database.connection.info.backend_pid),
        )
        try:
            yield
        finally:
            other.execute(f"{statement} true".encode())


@contextmanager
def renamed(database, _):
    """The table has another name for a while."""
    database.execute("alter table t rename to other")
    try:
        yield
    finally:
        database.execute("alter table other rename to t")


@contextmanager
def dropped(database, job):
    """The table is gone, and a new one has its name."""
    database.execute("drop table t")
    yield
    database.execute(f"{TABLE}; insert into t select g, 'new' from generate_series(1, 5) g")
    name = job.pipeline.source.publications[0].name
    database.execute(f"alter publication {name} add table t")


@contextmanager
def full_disk(*_):
    """No file of the lake may grow any more, which fails as a full disk does.

    A JVM that starts meanwhile would keep the limit for the tests that follow.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if SparkContext._gateway is not None:
            resource.prlimit(SparkContext._gateway.proc.pid, resource.RLIMIT_FSIZE, before)


TABLE = "create table t (id int primary key, v text)"


@pytest.fixture
def job(runner, database, lake):
    """Copied, with a run whose rows are damaged in the lake."""
    database.execute(TABLE)
    database.execute("insert into t select g, 'v' from generate_series(1, 20) g")
    job = bare_job(database, lake)
    sync(runner, job)
    database.execute("update t set v = 'w' where id < 9")
    consume(runner, replace(job, run_id="first", interval_start=MONTHS[0], interval_end=MONTHS[1]))
    table = DeltaTable(job.lake.target("public.t").uri)
    table.update(updates={"v": "'damaged'"}, predicate="id < 4")
    return job


def resync(runner, job):
    return sync(runner, job, ["public.t"], by_diff=True)


def backfill(runner, job):
    start, end = MONTHS
    run = replace(job, run_id=f"backfill {next(RUNS)}", run_type="backfill",
                  interval_start=start, interval_end=end)  # fmt: skip
    return consume(runner, run)


def copy(runner, job):
    return sync(runner, job, ["public.t"])


def reconcile(runner, job):
    run = replace(job, run_id=f"reconcile {next(RUNS)}")
    return run_reconcile(runner, run, repair=True, by="a test")


def rows(job):
    table = DeltaTable(job.lake.target("public.t").uri)
    return sorted(map(str, table.to_pyarrow_table().to_pylist()))


# What happens once the snapshot is taken, and how each mend names it.
BAD = {
    ("source away", resync): (away, LockHeld, "was lost with its connection: run again"),
    ("source away", backfill): (away, SnapshotLost, "terminating connection"),
    ("renamed", resync): (renamed, StateError, "isn't published any more"),
    ("renamed", backfill): (renamed, SnapshotLost, "was altered, renamed or dropped"),
    ("dropped", resync): (dropped, StateError, "isn't published any more"),
    ("dropped", backfill): (dropped, SnapshotLost, "was altered, renamed or dropped"),
    ("source away", copy): (away, LockHeld, "was lost with its connection: run again"),
    ("source away", reconcile): (away, SnapshotLost, "terminating connection"),
    ("renamed", copy): (renamed, StateError, "isn't published any more"),
    ("renamed", reconcile): (renamed, SnapshotLost, "was altered, renamed or dropped"),
    ("dropped", copy): (dropped, StateError, "isn't published any more"),
    ("dropped", reconcile): (dropped, SnapshotLost, "was altered, renamed or dropped"),
    ("full disk", copy): (full_disk, TargetNotWritable, "raise the limit on the size of files"),
    ("full disk", reconcile): (
        full_disk,
        TargetNotWritable,
        "raise the limit on the size of files",
    ),
    ("full disk", resync): (full_disk, TargetNotWritable, "raise the limit on the size of files"),
    ("full disk", backfill): (full_disk, TargetNotWritable, "raise the limit on the size of files"),
}


def refused(mend, runner, job):
    """The error that a mend ends with."""
    with pytest.raises((SyncFailed, RunFailed)) as failed:
        mend(runner, job)
    err = failed.value if isinstance(failed.value, SyncFailed) else failed.value.__cause__
    return next(iter(err.causes), err)


def continues(mend, runner, job):
    """The next run mends the target, or copies one that was left to be copied."""
    mend(runner, job)
    consume(runner, replace(job, run_id="last"))
    state = job.read_states()["public.t"]
    return compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0


NIGHTLY = pytest.mark.nightly("another way to lose the table, or another mend")
# One case of each fault.
ALWAYS = {
    ("source away", backfill), ("renamed", backfill), ("full disk", resync), ("dropped", resync),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        pytest.param(
            name,
            mend,
            id=f"{name}, {mend.__name__}",
            marks=() if (name, mend) in ALWAYS else NIGHTLY,
        )
        for name, mend in BAD
    ],
)
def test_what_goes_wrong_during_a_mend(runner, database, job, monkeypatch, name, mend):
    happens, error, told = BAD[name, mend]
    before, opened = rows(job), SnapshotHolder.__enter__
    with ExitStack() as happening, monkeypatch.context() as patched:

        def enter(holder):
            entered = opened(holder)
            if holder._application_name.startswith("waldelta reconcile"):
                return entered  # The comparison's, before the mend.
            patched.undo()
            happening.enter_context(happens(database, job))
            return entered

        patched.setattr(SnapshotHolder, "__enter__", enter)
        err = refused(mend, runner, job)
        assert (type(err), rows(job)) == (error, before)
        assert told in str(err)
    if name == "dropped":
        consume(runner, replace(job, run_id="gone"))
        sync(runner, job)
    assert continues(mend, runner, job)


@pytest.mark.parametrize("text", ["absent > 3", "id >"], ids=["a column is gone", "no filter"])
def test_a_filter_that_is_none_any_more(runner, job, text):
    """Each mend fails by it, and leaves the target as it is."""
    before, target = rows(job), job.pipeline.target
    document = target.model_dump(exclude_unset=True) | {"tables": {"public.t": {"where": text}}}
    own = job.pipeline.model_copy(update={"target": type(target).model_validate(document)})
    for mend in (backfill, reconcile, resync, copy):
        err = refused(mend, runner, replace(job, pipeline=own))
        assert isinstance(err, ConfigError)
        assert text in str(err)
        assert rows(job) == before
    assert continues(resync, runner, job)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["repair.begun", "repair.merged"])
def test_a_killed_mend_ends_without_spark(job, monkeypatch, point):
    """What tells whether it was committed, or that it never will be, is a commit of delta-rs."""
    here = InProcess(lambda: pytest.fail("Spark was started"))

    def killed(passed):
        if passed == point:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(repair_module, "fault_point", killed)
        with pytest.raises(Killed):
            backfill(here, job)
    assert continues(backfill, here, job)
