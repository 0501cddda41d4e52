"""Messages that can't be read, sent by a real server: what each stops, and the way past it."""

import pytest

from tests.oracles.compare import differing
from tests.support.pipelines import bare_job
from tests.support.servers.tampering import send_right, send_wrong, tamper_with
from waldelta.errors import ConfigError, DecodeError
from waldelta.jobs.consume import consume
from waldelta.jobs.reconcile import run_reconcile
from waldelta.monitoring.decisions import read_waiting
from waldelta.monitoring.status import read_status
from waldelta.pipeline.job import load_job
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets.quarantined_rows import discard_quarantined
from waldelta.pipeline.targets.unreadable_messages import ANY_TABLE, notices, skip_messages
from waldelta.stages.sync.sync import sync

# The message that is changed, and how; which tables may lack what it said; which really do.
LANDING = {
    "a row of an unknown kind": ("I", "unknown kind", ANY_TABLE, ["public.t"]),
    "a row without its tuple": ("I", "cut to 6 bytes", "public.t", ["public.t"]),
    "a Relation without its name": ("R", "cut to 6 bytes", "public.t", ["public.t"]),
    "a Begin that is too long": ("B", "a byte too long", ANY_TABLE, ["public.t", "public.u"]),
    "a Begin of an unknown kind": ("B", "unknown kind", ANY_TABLE, ["public.t", "public.u"]),
    "a Commit that is too long": ("C", "a byte too long", ANY_TABLE, []),
    "a Commit of an unknown kind": ("C", "unknown kind", ANY_TABLE, []),
    "a Commit that came as a Stream Stop": ("C", "kind of a Stream Stop", ANY_TABLE, []),
    "a Begin that came empty": ("B", "empty", ANY_TABLE, ["public.t", "public.u"]),
}
APPLY = {
    "a row of too many columns": ("I", "another count of columns", "public.t", ["public.t"]),
    "a value that isn't UTF-8": ("I", "not UTF-8", "public.t", ["public.t"]),
    "a Relation without its end": ("R", "without its last byte", "public.t", ["public.t"]),
    "a Relation that never came": ("R", "lost", "public.t", ["public.t"]),
    "a Truncate with unknown flags": ("T", "unknown flags", ANY_TABLE, ["public.t"]),
}
ALWAYS = ("a row without its tuple", "a Begin that is too long")
SOAK = pytest.mark.soak("another unreadable message of the same stage")
CASES = [
    pytest.param(*case, stage, id=name, marks=() if name in ALWAYS else SOAK)
    for stage, cases in (("land", LANDING), ("apply", APPLY))
    for name, case in cases.items()
]


@pytest.fixture
def job(runner, database, lake):
    tamper_with(database)
    database.execute(
        "create table t(id int primary key, v text); create table u(id int primary key, v text)"
    )
    job = bare_job(database, lake, ["public.t", "public.u"])
    database.execute(
        "insert into t select g, 'before' from generate_series(1, 5) g; insert into u values (1,"
        " 'before')"
    )
    sync(runner, job)
    consume(runner, job)
    return job


def again(job):
    """The same pipeline by another run."""
    return load_job(job.pipeline)


def lacking(runner, job):
    """Tables that don't hold what their source does."""
    return sorted(differing(runner, job))


@pytest.mark.parametrize("kind, change, named, really, stage", CASES)
def test_the_way_past_a_message_that_cant_be_read(
    runner, database, job, kind, change, named, really, stage
):
    """Skipped, it is reported until its tables were compared or it was acknowledged."""
    database.execute(
        "begin; insert into u values (2, 'beside'); insert into t values (10, 'wrong one'); commit"
    )
    if kind == "T":
        database.execute("truncate t")
    ((xid,),) = database.execute("select xmin::text::bigint from u where id = 2")
    # A Begin has nothing but its transaction of its own; no other Commit waits.
    part = {"I": b"wrong one", "R": b"public\0t\0", "B": xid.to_bytes(4, "big")}.get(kind, b"")
    send_wrong(database, kind, part, change)
    with pytest.raises(RunFailed) as failed:
        consume(runner, again(job))
    error = failed.value.__cause__
    assert all(isinstance(one, DecodeError) for one in error.causes or [error])
    (listed,) = read_waiting(job.pipeline, job.ledger).as_listed()
    assert (listed["status"], listed["table"]) == ("waiting", named)
    assert listed["messages"][0]["raw"] is not None
    told = "any table" if named == ANY_TABLE else f"table {named}"
    for part in (
        f"transaction {listed['messages'][0]['xid']}",
        told,
        f"waldelta decide FILE skip --ids {listed['id']}",
    ):
        assert part in str(error), error
    # They may be values of rows: more people see the error than the quarantine's bytes.
    assert not any(" bytes: " in text for text in (str(error), listed["error"]))
    assert any(listed["id"] in warning for warning in failed.value.result.warnings)
    # Of what fails in one table alone the others get their changes.
    assert ("public.u" in lacking(runner, job)) == (stage == "land" or kind == "T")

    with pytest.raises(ConfigError, match="no message waits to be skipped: 0123"):
        skip_messages(job, ["0123"], by="Ann", reason="a try")
    skip_messages(job, [listed["id"]], by="Ann", reason="the vendor knows")
    (skipped,) = read_waiting(job.pipeline, job.ledger).as_listed()
    assert (skipped["status"], skipped["applied"]) == ("skipped", False)
    result = consume(runner, again(job))
    (message,) = read_waiting(job.pipeline, job.ledger).of("skipped")
    # A Commit whose kind can't be read may be the next transaction's, until that is applied.
    assert message.is_applied == (kind != "C" or change == "a byte too long")
    (notice,) = [warning for warning in result.warnings if listed["id"] in warning]
    assert "was skipped by Ann: the vendor knows" in notice
    assert lacking(runner, job) == really
    (shown,) = read_status(job)["waiting"]
    assert (shown["status"], shown["by"], shown["why"]) == ("skipped", "Ann", "the vendor knows")

    send_right(database)
    database.execute("insert into t values (20, 'behind'); insert into u values (20, 'behind')")
    assert consume(runner, again(job)).status == "succeeded"
    assert notices(job) == [notice]
    run_reconcile(runner, again(job), repair=True, by="Ann")
    assert lacking(runner, job) == []
    if named == ANY_TABLE:
        assert notices(job) == [notice]
        discard_quarantined(job, [listed["id"]], by="Ann", reason="all tables are equal")
    assert (notices(job), read_waiting(job.pipeline, job.ledger).items) == ([], [])
    assert listed["id"] not in str(consume(runner, again(job)).warnings)
