"""PostgreSQL 18's Stream Abort of what was never streamed stops and counts nothing."""

import pytest

from tests.oracles.compare import differing
from tests.support.landing import land_only, told
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.lake.ledger import now
from waldelta.postgres.server_position import read_position
from waldelta.slot.health import oldest_unread
from waldelta.slot.read.peek import call, without_streaming
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

OPTIONS = {
    "protocol 1": {},
    "protocol 1, acknowledged by peek": {"acknowledge": "peek"},
    "messages, binary": {"messages": True, "binary": True},
    "streaming": {"streaming": "on"},
    "streaming and messages": {"streaming": "on", "messages": True},
    "parallel, two_phase": {"streaming": "parallel", "two_phase": True},
}
# Of so few changes a call is cut off before the aborts have ended.
MOST_CHANGES = 4
ABORTS = 12


def fail_to_load(database) -> None:
    """A load of more than logical_decoding_work_mem, rolled back after savepoints."""
    with database.connection.transaction(force_rollback=True):
        for number in range(ABORTS):
            with database.connection.transaction():
                database.execute(
                    "insert into t values (%s, 'in a subtransaction')", (100 + number,)
                )
        database.execute(
            "insert into t select g, repeat('y', 1000) from generate_series(1000, 2000) g"
        )


def kinds(database, source) -> bytes:
    """First bytes of what waits in the slot."""
    upto = read_position(database.connection).flush_lsn
    rows = database.execute(call("peek", source, upto, None, "substr(data, 1, 1)"))
    return b"".join(kind for (kind,) in rows)


ALWAYS = ("streaming and messages",)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ALWAYS
        else pytest.param(name, marks=pytest.mark.soak("another option of the same slot"))
        for name in OPTIONS
    ],
)
def test_an_abort_of_what_was_never_streamed(runner, database, lake, name):
    """Looks, peeks, counts, comparisons and the applied rows are as if it hadn't come."""
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    database.connection.close()
    database.connection = database.connect(autocommit=True)
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, lake, options=OPTIONS[name], batch={"max_changes": MOST_CHANGES})
    source = job.pipeline.source
    sync(runner, job)
    told(job)

    fail_to_load(database)
    database.execute("create table other(id int)")  # commits, and so the abort is flushed
    assert kinds(database, without_streaming(source)) == b"A" * ABORTS
    seen = check_idle(job)
    assert (seen.has_work, seen.reason) == (False, "no changes")

    began = now()
    database.execute("insert into t values (1, 'behind the aborts')")
    assert kinds(database, without_streaming(source)) == b"A" * ABORTS + b"BRIC"
    assert check_idle(job).has_work
    upto = read_position(database.connection).flush_lsn
    with job.source.connect("test") as connection:
        assert oldest_unread(connection, job, upto) > began

    drained = drain(runner, job)
    assert drained.changes == 1
    log = job.change_log(job.read_identity())
    assert [row["kind"] for row in log.dataset().to_table(columns=["kind"]).to_pylist()] == [
        "B",
        "R",
        "I",
        "C",
    ]

    fail_to_load(database)
    database.execute("update t set v = 'landed by a run that died'")
    land_only(runner, job, log.last_batch() + 1)
    fail_to_load(database)
    database.execute("insert into t select g, 'more' from generate_series(2, 20) g")
    result = consume(runner, job)
    assert result.status == "succeeded"
    assert differing(runner, job) == {}
    assert not check_idle(job).has_work
