"""Rows that arrive without all values are completed from the source, or quarantined."""

import json
from dataclasses import replace
from functools import partial

import pytest
from deltalake import DeltaTable

from tests.oracles.target_rows import read_target
from tests.support.bookkeeping import read_expectation_results
from tests.support.concurrent_work import killed_at, killed_in
from tests.support.pipelines import bare_job
from tests.support.waiting import wait_until
from waldelta.changes.merge.file_merge import merge_files
from waldelta.errors import ConfigError, LockHeld, TransactionsStillOpen
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.lake import DeltaTarget
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    RESOLVED,
    WAITING,
    Decision,
    Decisions,
    Ledger,
    now,
)
from waldelta.lake.ledger.decisions import COMPLETED
from waldelta.monitoring.status import read_status
from waldelta.monitoring.table_list import read_changed
from waldelta.pipeline import TableResult
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets import RequiredAction, read_published
from waldelta.pipeline.targets.quarantined_rows import discard_quarantined, list_quarantined
from waldelta.stages.apply.apply import apply
from waldelta.stages.land.drain import drain
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs
from waldelta.stages.sync.sync import sync

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
# The filter's column is in the identity: an UPDATE that moves a row in sends no other columns.
IDENTITIES = {
    "default": "create table {t}(id int, a text, big text, m numeric(10,2), primary key (id, a))",
    "index": (
        """
        create table {t}(id int primary key, a text not null, big text, m numeric(10,2));
        create unique index {t}_a on {t}(id, a);
        alter table {t} replica identity using index {t}_a"""
    ),
    "full": (
        """
        create table {t}(id int, a text, big text, m numeric(10,2), primary key (id, a));
        alter table {t} replica identity full"""
    ),
    "partitioned": (
        """
        create table {t}(id int, a text, big text, m numeric(10,2), primary key (id,
          a)) partition by range (id);
        create table {t}_1 partition of {t} default;
        alter table {t}_1 alter big set storage external"""
    ),
}


def made(database, lake, tables=None):
    """A pipeline over these tables (by default ``t``), by their kinds of replica identity."""
    tables = tables or {"t": "default"}
    for table, identity in tables.items():
        ddl = IDENTITIES[identity].format(t=table)
        database.execute(f"{ddl}; alter table {table} alter big set storage external")
    job = bare_job(database, lake, [f"public.{table}" for table in tables])
    listed = ", ".join(f"{table} where (a > 'm')" for table in tables)
    database.execute(
        f"drop publication s_{database.name}_pub; create publication s_{database.name}_pub for"
        f" table {listed} with (publish_via_partition_root = true)"
    )
    return job


@pytest.fixture
def job(database, lake):
    return made(database, lake)


def target_rows(job, table="t"):
    return sorted(
        map(tuple, read_target(job.lake.target(f"public.{table}").uri, "id", "a", "big", "m"))
    )


def source_rows(database, table="t"):
    return sorted(database.execute(f"select id, a, big, m from {table} where a > 'm'"))


def quarantine_rows(runner, database, job, count):
    """So many rows that no source could complete when they were applied; by now it could."""
    database.execute(
        f"insert into t select g, 'a', g || {BIG}, g from generate_series(1, {count}) g"
    )
    sync(runner, job)
    database.execute("update t set a = 'x'")
    drain(runner, job)
    database.execute("alter table t rename column big to hidden")
    assert apply(runner, replace(job, run_id="first")).failures == {}
    database.execute("alter table t rename column hidden to big")


def run(runner, job, run_id="test") -> TableResult:
    return consume(runner, replace(job, run_id=run_id)).tables.get("public.t", TableResult())


def told(job, table="t"):
    rows = Decisions(job.lake).rows(f"public.{table}", 1)
    return [(row.status, json.loads(row.key)["id"], row.columns) for row in rows]


def test_a_row_that_moves_into_the_filter(runner, database, lake, decoded_by_tasks):
    """It arrives as INSERT without its large value, which is read from the source."""
    tables = {f"by_{identity}": identity for identity in IDENTITIES}
    job = made(database, lake, tables)
    for table in tables:
        database.execute(
            f"insert into {table} values (1, 'a', {BIG}, 1.5), (2, 'a', {BIG}, null), (3, 'z',"
            f" {BIG}, 3)"
        )
    sync(runner, job)
    for table in tables:
        database.execute(
            f"update {table} set a = 'n' where id = 1; insert into {table} values (4, 'x', 'small')"
        )
    done = consume(runner, replace(job, run_id="one")).tables
    for table, identity in tables.items():
        assert target_rows(job, table) == source_rows(database, table)
        counts = done[f"public.{table}"]
        if identity == "full":
            assert (counts.completed, told(job, table)) == (0, [])  # the old row came too
        else:
            assert (counts.inserted, counts.completed, counts.quarantined) == (2, 1, 0)
            assert told(job, table) == [(COMPLETED, "1", ["big"])]
    # Moved in, moved its key and changed, all in one batch.
    for table in tables:
        database.execute(
            f"update {table} set a = 'n' where id = 2; update {table} set id = 20, m = 7 where"
            " id = 2"
        )
    consume(runner, replace(job, run_id="two"))
    for table in tables:
        assert target_rows(job, table) == source_rows(database, table)


def test_many_rows_are_read_in_pieces(runner, database, job, decoded_by_tasks, monkeypatch):
    """One statement for a bounded number of keys."""
    monkeypatch.setattr("waldelta.stages.apply.complete_rows.SOURCE_ROWS_PER_READ", 10)
    database.execute(f"insert into t select g, 'a', g || {BIG}, g from generate_series(1, 35) g")
    sync(runner, job)
    database.execute(
        "update t set a = 'x'; delete from t where id = 7; insert into t values (7, 'x', 'new')"
    )
    done = run(runner, job)
    assert (done.inserted, done.completed) == (35, 34)
    assert target_rows(job) == source_rows(database)


def test_a_row_that_the_source_no_longer_has(runner, database, job, decoded_by_tasks):
    """It isn't written, nor lost: quarantine holds what came, and the run says so."""
    database.execute(
        f"insert into t values (1, 'a', {BIG}, 'NaN'), (2, 'a', {BIG}, 2), (3, 'a', {BIG}, 3)"
    )
    sync(runner, job)
    database.execute("update t set a = 'x'")
    drain(runner, job)
    database.execute("delete from t where id = 1; update t set id = 5, m = 5 where id = 3")
    drained = replace(job, run_id="first")
    cut = apply(runner, drained).steps[0].targets[0]
    assert target_rows(job) == [row for row in source_rows(database) if row[0] == 2]
    assert (cut.inserted, cut.completed, cut.quarantined) == (1, 1, 2)
    assert [row[:2] for row in sorted(told(job), key=lambda row: row[1])] == [
        (WAITING, "1"), (COMPLETED, "2"), (WAITING, "3"),
    ]  # fmt: skip
    row = next(
        row for row in Decisions(job.lake).rows("public.t", 1) if json.loads(row.key)["id"] == "1"
    )
    assert (row.status, row.columns) == (WAITING, ["big"])
    assert json.loads(row.values) == {"id": "1", "a": "x", "m": "NaN"}
    assert row.lsn is not None
    assert row.commit_ts is not None
    assert "no row with this key" in row.reason
    assert read_status(job)["targets"]["public.t"]["quarantined"] == 2
    # The update that moved row 3 brings it, read by its new key; only row 1's DELETE is skipped.
    assert run(runner, job, "second").skipped == 1
    assert {row[:2] for row in told(job)[3:]} == {
        (RESOLVED, "1"), (RESOLVED, "3"), (COMPLETED, "5"),
    }  # fmt: skip
    assert read_status(job)["targets"]["public.t"]["quarantined"] == 0
    assert target_rows(job) == source_rows(database)


def retry_until(moment, runner, job, monkeypatch):
    """A retry that is killed at a fault point, and leaves what it has staged."""
    with monkeypatch.context() as patched, killed_at(moment, "waldelta.stages.repair.repair"):
        patched.setattr("waldelta.changes.stage.folders.remove_folder", lambda _: None)
        run_decide(runner, job, "retry", by="Ann")


@pytest.mark.nightly("a kill of each step of a retry")
def test_a_retry_that_is_killed_or_fails(runner, database, job, monkeypatch):
    """The target says whether it committed. Discarded rows stay discarded in its generation."""
    quarantine_rows(runner, database, job, 5)
    (fifth,) = (row["id"] for row in list_quarantined(job) if row["key"]["id"] == "5")
    discard_quarantined(replace(job, run_id="away"), [fifth], by="Ann", reason="noise")
    before = job.read_states()["public.t"]
    late = []

    def retry(run_id, moment):
        retry_until(moment, runner, replace(job, run_id=run_id), monkeypatch)

    def is_as_before():
        state = job.read_states()["public.t"]
        # A look at the source may have recorded how it stores the table now.
        assert state == replace(before, at=state.at, run_id=state.run_id, storage=state.storage)
        assert (target_rows(job), len(list_quarantined(job))) == ([], 4)
        assert (lacking(1), lacking(2), lacking(3)) == (["1", "2", "3", "4", "5"], [], [])

    def lacking(generation):
        found = Decisions(job.lake).lacking("public.t", generation)
        return sorted(json.loads(key)["id"] for key in found)

    def fails(*given, **tagged):
        late.append(partial(merge_files, *given, **tagged))
        raise RuntimeError("no space left")

    # The MERGE fails: at once all is as it was.
    with monkeypatch.context() as patched:
        patched.setattr("waldelta.stages.repair.mend.mend.merge_files", fails)
        with pytest.raises(RunFailed, match="no space left"):
            run_decide(runner, replace(job, run_id="failed"), "retry", by="Ann")
    is_as_before()
    # Killed before it: the next run has it so, and the merge finds nothing when it comes after all.
    retry("killed before", "repair.begun")
    assert (job.read_states()["public.t"].status, lacking(3)) == ("copying", ["5"])
    assert not run(runner, job, "next").rows
    is_as_before()
    late[0]()
    is_as_before()
    # Killed after it: the next run enters that it is done, tells what it did, and goes on.
    database.execute("update t set m = 7 where id = 4; delete from t where id = 1")
    retry("killed after", "repair.merged")
    database.execute("update t set m = 8 where id = 3")
    done = run(runner, job, "takes it up")
    state = job.read_states()["public.t"]
    assert (state.generation, state.status, state.reason) == (4, "synced", "retry by Ann")
    assert (done.inserted, done.updated, done.rows) == (3, 1, None)
    shown = read_changed(Ledger(job.lake), None)["public.t"].operations
    assert (shown.inserted, shown.updated) == (3, 1)
    assert target_rows(job) == [row for row in source_rows(database) if row[0] != 5]
    assert lacking(4) == ["5"]
    last = Decisions(job.lake).rows("public.t", 1)[-1]
    assert (last.status, last.run_id) == (RESOLVED, "killed after")
    assert last.why.endswith("retry by Ann")
    assert list_quarantined(job) == []


def test_a_retry_that_is_killed_before_a_failover(runner, database, job, monkeypatch):
    """A repair from before the failover may be ahead of the new primary; a copy isn't."""
    quarantine_rows(runner, database, job, 1)
    retry_until("repair.merged", runner, job, monkeypatch)
    move = job.ledger.slot_moves()[-1]
    job.ledger.append(replace(move, at=now(), event="promoted", timeline=move.timeline + 1))
    with job.source.connect("test") as connection:
        (found,), cuts = end_killed_repairs(runner, job, read_published(connection, job))
    assert (found.action, found.state.status, cuts) == (RequiredAction.COPY, "copying", {})


def test_quarantined_rows_are_listed_and_read_again(runner, database, job):
    """Also those that were changed, deleted or inserted again since; then the stream goes on."""
    quarantine_rows(runner, database, job, 4)
    database.execute(
        "delete from t where id in (1, 2); insert into t values (2, 'z', 'new'); update t set m = 7"
        " where id = 4"
    )
    listed = list_quarantined(job)
    assert [(row["table"], row["key"], row["lacking"]) for row in listed] == [
        ("public.t", {"id": str(n), "a": "x"}, ["big"]) for n in range(1, 5)
    ]
    assert {row["reason"] for row in listed} == {"column big was dropped or changed on the source"}
    assert [row["values"]["m"] for row in listed] == ["1.00", "2.00", "3.00", "4.00"]
    with pytest.raises(ConfigError, match=r"the pipeline has no table public\.other"):
        list_quarantined(job, ["public.other"])
    checked = job.pipeline.model_copy(
        update={"quality": job.pipeline.quality.model_copy(update={"enabled": True})}
    )
    done = run_decide(
        runner,
        replace(job, run_id="retry", pipeline=checked),
        "retry",
        tables=["public.t"],
        reason="back",
        by="Ann",
    )
    assert done.checked.passed == ["public.t"]
    known = {
        row.expectation: row.success for row in read_expectation_results(job.pipeline.target.root)
    }
    assert (known[ALL_VALUES_KNOWN], len(known) > 1) == (True, True)
    last = Decisions(job.lake).rows("public.t", 1)[-1]
    assert (last.status, last.by, last.run_id) == (RESOLVED, "Ann", "retry")
    assert last.why.endswith("retry by Ann: back")
    assert (done.tables["public.t"].inserted, done.tables["public.t"].deleted) == (3, 0)
    assert target_rows(job) == source_rows(database)
    assert len(target_rows(job)) == 3
    assert (list_quarantined(job), read_status(job)["targets"]["public.t"]["quarantined"]) == (
        [],
        0,
    )
    # A second attempt at the run, whose first may have ended before it had checked what it did.
    assert run_decide(
        runner, replace(job, run_id="retry", pipeline=checked), "retry"
    ).checked.passed == ["public.t"]
    assert run_decide(runner, replace(job, run_id="again"), "retry").tables == {}
    database.execute(
        "update t set m = 9 where id = 3; delete from t where id = 4; update t set id = 20 where"
        " id = 2"
    )
    run(runner, job, "later")
    assert target_rows(job) == source_rows(database)
    # Where only a copy would be exact, the table stays as it is, and it is said why.
    before = job.read_states()["public.t"]
    held = Decision(
        now(), "x", WAITING, "public.t", before.generation, 9, '{"id": "50", "a": "x"}', ["big"]
    )
    Decisions(job.lake).add([held])
    database.execute(f"alter publication s_{database.name}_pub set (publish = 'insert, update')")
    with pytest.raises(
        RunFailed,
        match=r"public\.t drifted .*: let a run, or sync --tables public\.t, repair that first",
    ):
        run_decide(runner, replace(job, run_id="refused"), "retry")
    assert job.read_states()["public.t"] == before
    assert [row["key"]["id"] for row in list_quarantined(job)] == ["50"]


def test_a_discarded_row_stays_so_under_another_key(runner, database, job):
    """Behind a retry of others, too; its changes find no row, and a new row at its key is new."""
    quarantine_rows(runner, database, job, 3)
    ids = {row["key"]["id"]: row["id"] for row in list_quarantined(job)}
    discard_quarantined(job, [ids["1"], ids["2"]], by="Ann", reason="tests")
    run_decide(runner, replace(job, run_id="retry"), "retry", tables=["public.t"])
    assert {row[0] for row in target_rows(job)} == {3}
    generation = job.read_states()["public.t"].generation
    database.execute(
        "update t set m = 7; delete from t where id = 2; insert into t values (2, 'z', 'new')"
    )
    database.execute("update t set id = 21 where id = 1")
    counts = run(runner, job, "second")
    assert (counts.skipped, counts.inserted, counts.updated) == (2, 1, 1)
    assert target_rows(job) == [row for row in source_rows(database) if row[0] != 21]
    decisions = Decisions(job.lake)
    (key,) = decisions.lacking("public.t", generation)
    assert json.loads(key) == {"id": "21", "a": "x"}
    moved = decisions.rows("public.t", generation)[-1]
    assert (moved.run_id, moved.by) == ("second", None)
    assert moved.why == 'discarded at {"id": "1", "a": "x"} by Ann: tests'
    database.execute("delete from t where id = 21")
    run(runner, job, "third")
    assert decisions.lacking("public.t", generation) == {}


def test_a_row_that_stays_in_quarantine_keeps_its_messages(runner, database, job):
    """Those of earlier batches too, which the change log may lose."""
    quarantine_rows(runner, database, job, 1)
    database.execute("update t set m = 9")
    drain(runner, job)
    database.execute("delete from t")
    assert apply(runner, replace(job, run_id="second")).failures == {}
    row = Decisions(job.lake).rows("public.t", 1)[-1]
    assert (row.status, row.run_id) == (WAITING, "second")
    assert "".join(chr(message.raw[0]) for message in row.messages) == "IU"


def test_a_column_that_was_dropped_meanwhile(runner, database, job):
    """Its value can't be read any more."""
    database.execute(f"insert into t values (1, 'a', {BIG}, 1)")
    sync(runner, job)
    database.execute("update t set a = 'x'")
    drain(runner, job)
    database.execute("alter table t drop column big")
    run(runner, job)
    assert told(job) == [(WAITING, "1", ["big"])]
    (row,) = Decisions(job.lake).rows("public.t", 1)
    assert row.reason == "column big was dropped or changed on the source"


def test_a_stale_row_at_the_key_goes(runner, database, job):
    """What the source deleted before the incomplete row came doesn't stay in its place."""
    database.execute(
        f"insert into t values (1, 'x', 'old', 1); insert into t values (2, 'a', {BIG}, 2)"
    )
    sync(runner, job)
    database.execute("delete from t where id = 1; update t set id = 1, a = 'x' where id = 2")
    drain(runner, job)
    database.execute("delete from t")
    assert apply(runner, job).failures == {}
    assert target_rows(job) == []
    assert told(job) == [(WAITING, "1", ["big"])]


def test_a_run_that_is_done_again_tells_each_row_once(runner, database, job):
    """Killed between quarantine and merge, the next run starts from the same watermark."""
    database.execute(f"insert into t values (1, 'a', {BIG}, 1), (2, 'a', {BIG}, 1)")
    sync(runner, job)
    database.execute("update t set a = 'x'")
    drain(runner, job)
    database.execute("delete from t where id = 1")
    with killed_in("waldelta.changes.merge.merge.merge_files"):
        apply(runner, job)
    assert len(told(job)) == 2
    assert apply(runner, job).failures == {}
    assert sorted(told(job)) == [(COMPLETED, "2", ["big"]), (WAITING, "1", ["big"])]


@pytest.mark.parametrize("fate", ["killed", "slept"])
def test_a_run_that_broke_off_whose_rows_the_next_one_finds_whole(
    runner, database, job, monkeypatch, fate
):
    """With later batches nothing is incomplete any more, so the quarantine is withdrawn."""
    database.execute(f"insert into t values (1, 'a', {BIG}, 1)")
    sync(runner, job)
    database.execute("update t set a = 'x'")
    drain(runner, job)
    database.execute("delete from t")

    def slept(*args, real=DeltaTarget.create_with):
        monkeypatch.undo()
        database.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name ="
            " 'waldelta lock public.t'"
        )
        run(runner, job, "the next")
        real(*args)

    if fate == "killed":
        with killed_in("waldelta.changes.merge.merge.merge_files"):
            apply(runner, job)
        run(runner, job)
    else:
        monkeypatch.setattr(DeltaTarget, "create_with", slept)
        assert isinstance(apply(runner, job).failures["public.t"], LockHeld)
    assert (told(job), target_rows(job)) == ([], [])


def test_a_key_change_whose_base_row_is_missing_is_skipped(runner, database, job):
    """As PostgreSQL's subscriber does; the value that wasn't sent is never made up."""
    database.execute(f"insert into t values (1, 'x', {BIG}, 1), (2, 'x', {BIG}, 2)")
    sync(runner, job)
    DeltaTable(job.lake.target("public.t").uri).delete("id = 1")
    database.execute("update t set id = id + 10")
    done = run(runner, job)
    assert (done.updated, done.skipped) == (1, 1)
    assert target_rows(job) == source_rows(database)[1:]


def test_a_change_that_nobody_sees_yet_is_no_row_that_is_gone(
    runner, database, job, postgres, monkeypatch
):
    """A commit that waits for a synchronous standby is decoded before it is visible."""
    database.execute(f"insert into t values (1, 'a', {BIG}, 1)")
    sync(runner, job)
    database.execute("alter system set synchronous_standby_names = 'absent'")
    database.execute("select pg_reload_conf()")
    waiting = database.connect(autocommit=True)
    try:
        asked = f"select 1 from pg_stat_activity where pid = {waiting.info.backend_pid}"
        waiting.pgconn.send_query(b"update t set a = 'x'")
        wait_until(lambda: database.execute(f"{asked} and wait_event = 'SyncRep'"))
        drain(runner, job)
        monkeypatch.setattr("waldelta.stages.apply._source_values.VISIBLE_TIMEOUT_S", 0.1)
        assert isinstance(apply(runner, job).failures["public.t"], TransactionsStillOpen)
        assert told(job) == []
    finally:
        database.execute("alter system reset synchronous_standby_names")
        database.execute("select pg_reload_conf()")
    wait_until(lambda: database.execute(f"{asked} and state = 'idle'"))
    waiting.close()
    assert apply(runner, job).failures == {}
    assert target_rows(job) == source_rows(database)
    assert told(job) == [(COMPLETED, "1", ["big"])]
