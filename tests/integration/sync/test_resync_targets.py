"""Tables that need a new copy: marked, left out, and copied by a run or a sync."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
from deltalake import DeltaTable

import waldelta.stages.sync.sync as sync_module
from tests.oracles.target_rows import source_rows, target_rows
from tests.support.pipelines import bare_job
from waldelta.errors import ApplyError
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_sync
from waldelta.lake.ledger import Ledger, RowCounts, TableState, now
from waldelta.monitoring.status import read_status
from waldelta.monitoring.table_list import read_changed
from waldelta.pipeline import target_lock
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets import RequiredAction, read_lifecycles, read_published
from waldelta.pipeline.targets.lifecycle import read_table_bytes, record_killed
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

RETYPE = "alter table t alter v type text using upper(v)"
REASON = "public.t: ALTER TABLE rewrote column v, and PostgreSQL doesn't replicate rewrites"


@pytest.fixture
def job(database, lake):
    """Two tables with rows; every copy is left to a sync."""
    for table in "tu":
        database.execute(f"create table {table}(id int primary key, v text)")
        database.execute(f"insert into {table} values (1, 'a')")
    target = {"root": lake, "copy_within_run_mb": 0}
    made = bare_job(database, lake, ["public.t", "public.u"], target=target)
    return replace(made, hand_over=True)


def rows(job, table):
    return target_rows(job, table, "id", "v")


def insert(database, number):
    for table in "tu":
        database.execute(f"insert into {table} values ({number}, 'n')")


def status(job):
    state = job.read_states()["public.t"]
    return state.status, state.generation


@pytest.mark.nightly("a table's size decides; unit tests have the rule")
def test_a_large_table_is_left_to_a_sync(runner, database, job, monkeypatch):
    """Others go on, landing goes on, and after the copy the table gets what came meanwhile."""
    sync(runner, job)
    insert(database, 2)
    database.execute(RETYPE)
    for number in (3, 4):
        assert check_idle(job).has_work
        result = consume(runner, job)
        assert (result.targets.needs_sync, result.targets.not_applied) == (
            ["public.t"],
            ["public.t"],
        )
        assert result.warnings == [
            (
                f"{REASON}: {job.pipeline.pipeline}_initial_sync must copy it again, and its"
                " changes wait until then"
            )
        ]
        assert status(job) == ("needs_sync", 1)
        insert(database, number)
    assert rows(job, "t") == [(1, "a")]
    assert rows(job, "u") == [(1, "a"), (2, "n"), (3, "n")]
    assert job.ledger.last_cut().targets[0].table_name == "public.u"
    real, copied = sync_module.wait_for_version, []

    def copied_meanwhile(*args):
        monkeypatch.undo()
        copied.extend(run_sync(runner, job, ["public.t"]).tables)
        return real(*args)

    # Asked for, but late: it has chosen, or begins, when somebody else has made the copy.
    monkeypatch.setattr(sync_module, "wait_for_version", copied_meanwhile)
    for late in ("late", "later"):
        assert (
            run_sync(
                runner, replace(job, run_id=late), ["public.t", "public.u"], only_waiting=True
            ).tables
            == {}
        )
        assert (copied, status(job)) == (["public.t"], ("synced", 2))
    assert job.read_states()["public.t"].reason == REASON
    insert(database, 5)
    result = consume(runner, job)
    assert (result.targets.needs_sync, result.targets.not_applied, result.warnings) == ([], [], [])
    for table in "tu":
        assert rows(job, table) == source_rows(database, table)
    assert len(job.ledger.last_cut().targets) == 2


def test_a_copy_that_fails_is_tried_again_by_each_run(runner, database, job, monkeypatch):
    """Every run is red and names the table and why, and a good copy ends it."""
    job = replace(job, hand_over=False)
    sync(runner, job)
    database.execute(RETYPE)

    def fail(*_):
        raise ApplyError("no space left")

    monkeypatch.setattr(sync_module, "sync_table", fail)
    version = DeltaTable(job.lake.target("public.t").uri).version()
    for attempt in (2, 3):
        insert(database, attempt)
        with pytest.raises(RunFailed, match=r"public\.t[^\n]*no space left") as failed:
            consume(runner, job)
        result = failed.value.result
        assert result.targets.not_applied == ["public.t"]
        assert result.targets.needs_sync == []
        assert status(job) == ("failed", attempt)
        assert rows(job, "u") == source_rows(database, "u")
        assert check_idle(job).reason == "a new copy is needed: public.t"
    # However often: nothing is committed to a target that no copy comes to write.
    assert DeltaTable(job.lake.target("public.t").uri).version() == version
    monkeypatch.undo()
    assert consume(runner, job).warnings == [
        "public.t: its last copy failed (ApplyError: no space left): it was copied again, 3 rows"
    ]
    for table in "tu":
        assert rows(job, table) == source_rows(database, table)


def test_a_small_table_is_copied_by_the_run(runner, database, job):
    """Though a sync would follow: it would cost more than the copy."""
    target = job.pipeline.target.model_copy(update={"copy_within_run_mb": 64})
    job = replace(job, pipeline=job.pipeline.model_copy(update={"target": target}))
    sync(runner, job)
    database.execute(f"{RETYPE}; insert into u values (2, 'b')")
    result = consume(runner, job)
    assert (result.targets.needs_sync, result.warnings) == (
        [],
        [f"{REASON}: it was copied again, 1 row"],
    )
    assert rows(job, "t") == source_rows(database, "t")
    # Without a cut, the pages show what the run did to the other table.
    shown = read_changed(Ledger(job.lake), None)
    assert {name: of.operations for name, of in shown.items()} == {
        "public.u": RowCounts(inserted=1)
    }


def test_a_table_that_left_the_publication_is_named(runner, database, job, caplog):
    """Nobody can copy it; the others go on, and each run tells while the file lists it."""
    sync(runner, job)
    database.execute(RETYPE)
    consume(runner, job)
    database.execute(f"alter publication s_{database.name}_pub drop table t")
    result = consume(runner, job)
    assert (result.targets.needs_sync, result.targets.never_copied) == ([], [])
    (told,) = result.warnings
    assert told.startswith(
        "in the pipeline file, but not published: public.t; the source has the table, but its"
        " publication doesn't name it, so PostgreSQL sends none of its changes"
    )
    assert status(job) == ("removed", 1)
    assert read_status(job)["unpublished"] == ["public.t"]
    caplog.clear()
    check_idle(job)
    assert told in caplog.text
    insert(database, 2)
    assert consume(runner, job).warnings == [told]
    assert rows(job, "u") == source_rows(database, "u")


def test_a_table_that_somebody_took_out_and_put_back_is_copied_again(runner, database, job, caplog):
    """Without setup: whoever looks meanwhile remembers it, as its changes were sent to nobody."""
    sync(runner, job)
    database.execute(f"alter publication s_{database.name}_pub drop table t")
    check_idle(job)
    insert(database, 2)
    database.execute(f"alter publication s_{database.name}_pub add table t")
    insert(database, 3)
    result = consume(runner, job)
    assert result.targets.never_copied == ["public.t"]
    assert (
        "public.t (it left the publications and returned, and PostgreSQL did not send"
        in result.warnings[-1]
    )
    assert read_status(job)["targets"]["public.t"]["action"] == "first copy"
    caplog.clear()
    check_idle(job)
    assert result.warnings[-1] in caplog.text
    assert list(run_sync(runner, job).tables) == ["public.t"]
    insert(database, 4)
    assert consume(runner, job).warnings == []
    for table in "tu":
        assert rows(job, table) == source_rows(database, table)


@pytest.mark.parametrize("ended", ["failed", "killed"])
def test_a_first_copy_that_did_not_end_is_taken_up(runner, database, job, ended):
    """By the next run, or a sync behind it; not what nobody asked for, nor would fail again."""
    incarnation = job.read_identity().incarnation
    begun = TableState(now(), "r", "public.t", 1, "copying", incarnation=incarnation)
    job.ledger.append(begun)
    if ended == "failed":
        job.ledger.append(replace(begun, status="failed", reason="TableBusy: locked"))
    assert check_idle(job).reason == "a new copy is needed: public.t"
    with pytest.raises(
        RunFailed, match=rf"public\.t gets no changes because its last copy .*{ended}"
    ) as red:
        consume(runner, job)
    assert (red.value.result.targets.needs_sync, red.value.result.targets.never_copied) == (
        ["public.t"],
        ["public.u"],
    )
    result = consume(runner, replace(job, hand_over=False))
    assert result.targets.never_copied == ["public.u"]
    assert rows(job, "t") == source_rows(database, "t")


def test_a_table_that_left_while_it_was_copied_is_no_copy(runner, database, job, monkeypatch):
    """It is back when the copy ends, and nothing but the ledger tells that it was away."""
    real = sync_module.sync_table

    def left_and_returned(*args):
        copied = real(*args)
        if str(args[2]) == "public.t":
            database.execute(f"alter publication s_{database.name}_pub drop table t")
            check_idle(job)
            database.execute(f"alter publication s_{database.name}_pub add table t")
        return copied

    monkeypatch.setattr(sync_module, "sync_table", left_and_returned)
    with pytest.raises(RunFailed, match=r"public\.t left the publications while it was copied"):
        run_sync(runner, job)
    monkeypatch.undo()
    assert consume(runner, job).targets.never_copied == ["public.t"]


@pytest.mark.parametrize("locked", [True, False])
def test_whether_a_copy_is_under_way(database, job, locked):
    """By the lock of whoever makes it."""
    incarnation = job.read_identity().incarnation
    job.ledger.append(TableState(now(), "r", "public.t", 1, "copying", incarnation=incarnation))
    published = read_published(database.connection, job)
    with target_lock(job, "public.t") if locked else nullcontext():
        found = read_lifecycles(job, published)
    assert [standing.action for standing in found] == [
        RequiredAction.WAIT if locked else RequiredAction.COPY,
        RequiredAction.FIRST,
    ]


# How copies ended, the last of them more than a day after it began, whether a run is at work on it,
# and what its table is due then.
DEAD = {
    "killed": ([], False, (RequiredAction.COPY, "failed (it was killed)")),
    "killed again": (["copying", "failed"], False,
                     (RequiredAction.BROKEN, "failed (it was killed), to be tried again after")),
    "under way": (["copying", "failed"], True, (RequiredAction.WAIT, "")),
    "copied, then killed": (["synced"], False, (RequiredAction.COPY, "was killed")),
}  # fmt: skip


@pytest.mark.parametrize(("before", "is_running", "expected"), DEAD.values(), ids=DEAD)
def test_pauses_count_from_when_a_first_copy_was_seen_dead(
    database, job, before, is_running, expected
):
    """Counted from its begin, one that took longer than any pause would begin again each run."""
    incarnation = job.read_identity().incarnation
    oids = [database.execute("select 't'::regclass::oid")[0][0]]
    last = None
    for generation, status in enumerate([*before, "copying"], 1):
        at = now() - timedelta(hours=30 - generation)
        row = TableState(at, "r", "public.t", generation, status, relation_ids=oids)
        last = job.ledger.append_state(replace(row, incarnation=incarnation), last)
    published = read_published(database.connection, job)
    with target_lock(job, "public.t") if is_running else nullcontext():
        for _ in range(2):
            record_killed(job, read_lifecycles(job, published))
        found, _ = read_lifecycles(job, published)
    due, failed = expected
    assert (found.action, (found.failed or "")[: len(failed) or None]) == (due, failed)
    assert len(job.ledger.table_rows("public.t")) == len(before) + 1 + ("it was killed" in failed)


def test_sizes_count_what_is_toasted_and_all_leaves(database, job):
    """The main storage alone can be a small part of a table."""
    big = "(select string_agg(md5(i::text || g), '') from generate_series(1, 30000) i)"
    database.execute("alter table t alter v set storage external")
    database.execute(f"insert into t select g, {big} from generate_series(2, 4) g")
    database.execute("create table p(id int primary key) partition by range (id)")
    for low in (0, 10000):
        database.execute(
            f"create table p_{low} partition of p for values from ({low}) to ({low + 10000})"
        )
    database.execute("insert into p select generate_series(0, 19999)")
    publication = f"s_{database.name}_pub"
    database.execute(f"alter publication {publication} add table p")
    database.execute(f"alter publication {publication} set (publish_via_partition_root = true)")
    sizes, _ = read_table_bytes(job)
    assert set(sizes) == {"public.t", "public.u", "public.p"}
    assert sizes["public.t"] > 2_500_000
    assert 600_000 < sizes["public.p"] < 2_500_000
