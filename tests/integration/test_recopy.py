"""Tables that need a new copy: marked, left out, copied by the run or by a sync that follows, and tried until it succeeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import spark_jobs.sync as sync_module
from spark_jobs.flow import consume, run_sync
from spark_jobs.result import RunFailed
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from waldelta.errors import ApplyError
from waldelta.idle import look
from waldelta.ledger import TableState, now
from waldelta.locks import target_lock
from waldelta.recopy import PendingCopy, pending_copies, read_table_bytes
from waldelta.watermark import uri_of

pytestmark = pytest.mark.pg

RETYPE = "alter table t alter v type text using upper(v)"
REASON = "public.t: an ALTER TABLE wrote its rows anew without sending them, perhaps with other values (v)"


@pytest.fixture
def job(database, lake):
    """Two tables with rows; every copy is left to a sync."""
    for table in "tu":
        database.execute(f"create table {table}(id int primary key, v text)")
        database.execute(f"insert into {table} values (1, 'a')")
    target = {"root": lake, "copy_within_run_mb": 0}
    made = bare_slot(database, pipeline_file(lake, f"s_{database.name}", ["public.t", "public.u"], target=target))
    return replace(made, hand_over=True)


def rows(spark, job, table):
    frame = spark.read.format("delta").load(uri_of(job, f"public.{table}"))
    return sorted((row["id"], row["v"]) for row in frame.collect())


def source(database, table):
    return sorted(database.execute(f"select id, v from {table}"))


def insert(database, number):
    for table in "tu":
        database.execute(f"insert into {table} values ({number}, 'n')")


def status(job):
    state = job.table_states()["public.t"]
    return state.status, state.generation


@pytest.mark.spark
def test_a_large_table_is_left_to_a_sync(spark, database, job):
    """Others go on, landing goes on, and after the copy the table gets what came meanwhile, from its snapshot on."""
    sync(spark, job)
    insert(database, 2)
    database.execute(RETYPE)
    for number in (3, 4):
        assert look(job).has_work
        result = consume(spark, job)
        assert (result.needs_sync, result.not_applied) == (["public.t"], ["public.t"])
        assert result.warnings == [
            f"{REASON}: {job.pipeline.pipeline}_initial_sync is to copy it again, and its changes wait until then"
        ]
        assert status(job) == ("needs_sync", 1)
        insert(database, number)
    assert rows(spark, job, "t") == [(1, "a")]
    assert rows(spark, job, "u") == [(1, "a"), (2, "n"), (3, "n")]
    assert job.ledger.last_cut().targets[0].table_name == "public.u"
    (copied,) = run_sync(spark, job, ["public.t"]).tables
    assert (copied, status(job)) == ("public.t", ("synced", 2))
    assert job.table_states()["public.t"].reason == REASON
    insert(database, 5)
    result = consume(spark, job)
    assert (result.needs_sync, result.not_applied, result.warnings) == ([], [], [])
    for table in "tu":
        assert rows(spark, job, table) == source(database, table)
    assert len(job.ledger.last_cut().targets) == 2


def failing(monkeypatch):
    """Copies that end with an error which doesn't go away by itself."""

    def fail(*_):
        raise ApplyError("no space left")

    monkeypatch.setattr(sync_module, "sync_table", fail)


@pytest.mark.spark
@pytest.mark.parametrize("hand_over", [True, False], ids=["left to a sync", "by the run"])
def test_a_copy_that_fails_is_tried_again_by_each_run(spark, database, job, monkeypatch, hand_over):
    """Every run is red and names the table and why, tries or asks once, and a good copy ends it."""
    job = replace(job, hand_over=hand_over)
    sync(spark, job)
    database.execute(RETYPE)
    failing(monkeypatch)
    if hand_over:
        consume(spark, job)
        with pytest.raises(RunFailed, match="no space left"):
            run_sync(spark, job, ["public.t"])
    for attempt in (2, 3):
        insert(database, attempt)
        with pytest.raises(RunFailed, match=r"public\.t[^\n]*no space left") as failed:
            consume(spark, job)
        result = failed.value.result
        assert result.not_applied == ["public.t"]
        assert result.needs_sync == (["public.t"] if hand_over else [])
        assert status(job) == ("failed", 2 if hand_over else attempt)
        assert rows(spark, job, "u") == source(database, "u")
        assert look(job).reason == "to be copied again: public.t"
    monkeypatch.undo()
    if hand_over:
        run_sync(spark, job, ["public.t"])
        assert consume(spark, job).warnings == []
    else:
        assert consume(spark, job).warnings == [
            "public.t: its last copy failed (ApplyError: no space left): it was copied again, 3 rows"
        ]
    for table in "tu":
        assert rows(spark, job, table) == source(database, table)


@pytest.mark.spark
def test_a_small_table_is_copied_by_the_run(spark, database, job):
    """Though a sync would follow: it would cost more than the copy."""
    target = job.pipeline.target.model_copy(update={"copy_within_run_mb": 64})
    job = replace(job, pipeline=job.pipeline.model_copy(update={"target": target}))
    sync(spark, job)
    database.execute(RETYPE)
    result = consume(spark, job)
    assert (result.needs_sync, result.warnings) == ([], [f"{REASON}: it was copied again, 1 rows"])
    assert rows(spark, job, "t") == source(database, "t")


@pytest.mark.spark
def test_a_table_that_left_the_publication_is_named(spark, database, job):
    """Nobody can copy it; the others aren't kept from anything."""
    sync(spark, job)
    database.execute(RETYPE)
    consume(spark, job)
    database.execute(f"alter publication s_{database.name}_pub drop table t")
    with pytest.raises(RunFailed, match=r"public\.t waits to be copied again .* isn't published any more") as failed:
        consume(spark, job)
    assert failed.value.result.needs_sync == []


# The latest state of a table, whether a run is at work on it, what waits.
PENDING = {
    "synced": (1, "synced", None, False, None),
    "marked": (1, "needs_sync", "why", False, PendingCopy("public.t", "why")),
    "failed": (2, "failed", "disk full", False, PendingCopy("public.t", "disk full", "failed (disk full)")),
    "killed": (2, "copying", "why", False, PendingCopy("public.t", "why", "was killed")),
    "running": (2, "copying", "why", True, PendingCopy("public.t", "why", None, running=True)),
    "never copied": (1, "failed", "disk full", False, None),
    "being copied for the first time": (1, "copying", None, True, None),
}


@pytest.mark.parametrize("case", PENDING)
def test_what_waits_for_a_copy(job, case):
    generation, status, reason, locked, expected = PENDING[case]
    incarnation = job.slot_identity().incarnation
    job.ledger.append(TableState(now(), "r", "public.t", generation, status, reason=reason, incarnation=incarnation))
    if locked:
        with target_lock(job, "public.t"):
            found = pending_copies(job)
    else:
        found = pending_copies(job)
    assert found == ([expected] if expected else [])


def test_sizes_count_what_is_toasted_and_all_leaves(database, job):
    """The main storage alone can be a small part of a table."""
    big = "(select string_agg(md5(i::text || g), '') from generate_series(1, 30000) i)"
    database.execute("alter table t alter v set storage external")
    database.execute(f"insert into t select g, {big} from generate_series(2, 4) g")
    database.execute("create table p(id int primary key) partition by range (id)")
    for low in (0, 10000):
        database.execute(f"create table p_{low} partition of p for values from ({low}) to ({low + 10000})")
    database.execute("insert into p select generate_series(0, 19999)")
    publication = f"s_{database.name}_pub"
    database.execute(f"alter publication {publication} add table p")
    database.execute(f"alter publication {publication} set (publish_via_partition_root = true)")
    sizes = read_table_bytes(job)
    assert set(sizes) == {"public.t", "public.u", "public.p"}
    assert sizes["public.t"] > 2_500_000
    assert 600_000 < sizes["public.p"] < 2_500_000
