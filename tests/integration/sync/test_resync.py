"""A table copied again reads the change log from where its snapshot needs it."""

import pytest
from deltalake import DeltaTable

from tests.oracles.compare import compare_target
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.pipeline.targets import Watermarks
from waldelta.stages.land.drain import drain
from waldelta.stages.sync.sync import sync


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    return bare_job(database, lake)


def watermark(job):
    return Watermarks(job, job.read_identity()).of(job.read_states()["public.t"])


def is_equal(runner, job):
    return (
        compare_target(
            runner, job.source.conninfo, job.pipeline, job.read_states()["public.t"]
        ).rows
        == 0
    )


@pytest.mark.nightly("how little a copy reads")
def test_batches_that_the_copy_holds_are_not_read_for_it(runner, database, job):
    """All five landed before its snapshot was taken; nothing is left to read until more comes."""
    sync(runner, job)
    for number in range(1, 6):
        database.execute(f"insert into t values ({number}, 'a')")
        drain(runner, job)
    consume(runner, job)
    assert watermark(job) == 5
    sync(runner, job, ["public.t"])
    assert watermark(job) == 5
    database.execute("update t set v = 'b' where id < 3")
    drain(runner, job)
    assert watermark(job) == 5
    consume(runner, job)
    assert watermark(job) >= 6  # WAL that somebody else wrote meanwhile may be a batch of its own
    assert is_equal(runner, job)


def test_batches_with_a_transaction_that_the_snapshot_does_not_see_are_read(
    runner, database, job, monkeypatch
):
    """It began before the snapshot and commits after it, behind batches that the copy holds."""
    writer = database.connect()

    def wait(connection, timeout_s):
        writer.execute("insert into t values (100, 'open while the snapshot is taken')")

    for number in range(1, 3):
        database.execute(f"insert into t values ({number}, 'a')")
        drain(runner, job)
    monkeypatch.setattr("waldelta.snapshot.exported_snapshot.wait_for_old_transactions", wait)
    sync(runner, job)
    assert watermark(job) == 2
    database.execute("insert into t values (3, 'later, but committed first')")
    drain(runner, job)
    writer.commit()
    writer.close()
    assert watermark(job) == 2
    consume(runner, job)
    assert is_equal(runner, job)


@pytest.mark.soak("a race with a target's writer")
def test_a_target_that_changes_while_it_is_compared_is_compared_again(
    runner, database, job, monkeypatch
):
    """A copy thought dead commits between: what differed before says nothing of the target."""
    database.execute("insert into t select g, 'a' from generate_series(1, 9) g")
    sync(runner, job)
    database.execute("update t set v = 'b' where id < 3")

    def late(point):
        if point == "resync.compared":
            monkeypatch.undo()
            DeltaTable(job.lake.target("public.t").uri).update(
                updates={"v": "'of another time'"}, predicate="id > 4"
            )

    monkeypatch.setattr("waldelta.stages.sync._write.fault_point", late)
    (copied,) = sync(runner, job, ["public.t"], by_diff=True)
    assert (copied.copy.diff.cut.updated, copied.copy.diff.unchanged) == (5, 4)
    # One that finds nothing is committed too: else such a copy would come, and nobody hear of it.
    (copied,) = sync(runner, job, ["public.t"], by_diff=True)
    committed = DeltaTable(job.lake.target("public.t").uri).transaction_version(
        f"{job.read_identity().app_id}:sync:public.t"
    )
    assert (copied.written, committed // 1000) == (0, copied.state.generation)
    assert is_equal(runner, job)


# The server may lack the extension: a type that prints its text is to us what hstore is.
HSTORE = """
create type hstore;
create function hstore_in(cstring) returns hstore as 'textin' language internal immutable strict;
create function hstore_out(hstore) returns cstring as 'textout' language internal immutable strict;
create type hstore (input = hstore_in, output = hstore_out, like = text)
"""


@pytest.mark.nightly("one type's values")
def test_an_empty_hstore_is_another_value_than_null(runner, database, job):
    """Both ways; neither is found equal to the other."""
    for statement in HSTORE.split(";\n"):
        database.execute(statement)
    database.execute("alter table t add h hstore")
    database.execute(
        "insert into t values (1, 'a', null), (2, 'a', ''), (3, 'a', ''), (4, 'a', null)"
    )
    sync(runner, job)
    database.execute("update t set h = case id when 1 then ''::hstore end where id < 3")
    (copied,) = sync(runner, job, ["public.t"], by_diff=True)
    assert (copied.copy.diff.cut.updated, copied.copy.diff.unchanged) == (2, 2)
    rows = read_target(job.lake.target("public.t").uri)
    assert {row["id"]: row["h"] for row in rows} == {1: {}, 2: None, 3: {}, 4: None}
    assert is_equal(runner, job)
